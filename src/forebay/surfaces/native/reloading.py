# SPDX-License-Identifier: Apache-2.0
"""Reading a project anew while it is served: on SIGHUP, when files change, when one version is asked for.

Theory of operation. A reload reads the configuration again and builds every target in a thread, its modules imported
anew; each model that comes of it is loaded beside the one in use and takes its place. What fails is told in the log and
at `/models`, and the model in use goes on; other models are not held up by it. Then versions that are not wanted any
more leave. One reload runs at a time, and what asks for another one meanwhile is one more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.cluster.peer_servers import PeerServers, read_peers
from forebay.errors import ConfigError, ForebayError, NotFound
from forebay.repository.local_source import files_of_model
from forebay.repository.look_thread import Looking, pause_after
from forebay.repository.settling import Settling
from forebay.server.config import AttachConfig, GrpcConfig, HttpConfig, ProcessConfig
from forebay.server.version_loading import beside
from forebay.surfaces.native.forwarded_models import wanted_owners
from forebay.surfaces.native.fresh_modules import fresh_modules, python_files
from forebay.surfaces.native.model_files import is_model_file
from forebay.surfaces.native.repositories import is_repository
from forebay.types.did_you_mean import meant
from forebay.types.settings import declared
from forebay.types.tenant import Tenants
from forebay.workers.processes import working_folder

if TYPE_CHECKING:
    from forebay.owners.owners import Owners
    from forebay.repository.listing import StoredFile
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.surfaces.contract import Options, TargetEntry

log = logging.getLogger("forebay")

CODE_LOOK_S: Final = 0.15
"""Pause between two looks at code; an edit counts once two looks in a row have found the same."""
FILE_LOOK_S: Final = 1.0
"""Pause between two looks at model files."""


class Reloading:
    """Keeps an app as its project says."""

    def __init__(
        self,
        app: App,
        options: Options,
        entries: Sequence[TargetEntry],
        entries_of: Callable[[Options], list[TargetEntry]],
        build: Callable[[TargetEntry], Sequence[Served]],
    ) -> None:
        self.owners: Owners | None = None
        """The other servers whose models are served; a reload follows what the configuration says of them."""
        self.peers: PeerServers | None = None
        """The servers whose members are known here as well; a reload follows what the configuration says of them."""
        self._app = app
        self._options = options
        self._entries = list(entries)
        self._entries_of = entries_of
        self._build = build
        self._elsewhere: set[str | None] = {name for _, name in options.owned}
        """Names of models for which the configuration names an owner; None among them says nothing."""
        self._own = {(one.endpoint.name, one.endpoint.config.version) for one in app.every}
        self._made: dict[str, set[tuple[str, str]]] = {}
        self._files = {entry.target: _files(entry) for entry in self._entries}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked: list[bool] = []
        self._is_over = False
        look_s = CODE_LOOK_S if options.reload else FILE_LOOK_S
        self._settling: Settling[str, Any] | None = None
        self._looking = Looking("forebay-reload-watch", self._look, lambda took_s: pause_after(took_s, look_s))
        working_folder.successor()  # notes its name
        if options.reload:  # an edit within a second that keeps the length of a file would look like none
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def made(self, entry: TargetEntry, served: Sequence[Served]) -> None:
        """Note what came of an entry."""
        self._made[_key(entry)] = {(one.endpoint.name, one.endpoint.config.version) for one in served}

    def watch(self) -> None:
        """Begin to look at files, if there are any; called on the loop once all is ready."""
        self._loop = asyncio.get_running_loop()
        if self._asked:
            self._begin()
        if self._options.reload or any(is_model_file(entry.target) for entry in self._entries):
            self._looking.start()
            self._looking.soon()

    def end(self) -> None:
        """Reload no more."""
        self._is_over = True
        self._looking.stop()
        if self._task is not None:
            self._task.cancel()

    def ask(self, *, only_files: bool = False) -> None:
        """Reload soon; called on the loop.

        Args:
            only_files: Whether it is only about model files that have changed.
        """
        self._asked.append(only_files)
        if self._loop is not None:
            self._begin()

    def find(self, name: str, version: str) -> Served:
        """Build a version that the project names, as it is now; called in a thread.

        Raises:
            NotFound: If it names no such version.
            ForebayError: If it cannot be built.
        """
        for entry in self._entries_of(self._again()):
            said = entry.overrides
            if said.name in {None, name} and said.version in {None, version}:
                with fresh_modules([_folder(entry)], self._options.load_timeout_s):
                    served = self._build(entry)
                for one in served:
                    if (one.endpoint.name, one.endpoint.config.version) == (name, version):
                        self._own.add((name, version))
                        return one
        there = sorted(known for own, known in self._own if own == name)
        told = (
            f"; there is {', '.join(map(repr, there))}" if there else meant(name, sorted({own for own, _ in self._own}))
        )
        nobody = "the project names no" if self._app.stock is None else "neither the project nor a repository has a"
        raise NotFound(f"{nobody} version '{version[:100]}' of a model '{name[:100]}'{told}")

    async def take_back(self, name: str) -> None:
        """Load the versions that the project has of a model which another server has served so far."""
        weights: dict[str, int | None] = {}

        def make(version: str) -> Served:
            served = self.find(name, version)
            weights[version] = served.weight
            return served

        limit_s = self._options.load_timeout_s
        for version in sorted(version for made in self._made.values() for own, version in made if own == name):
            try:
                await self._app.load(name, version, functools.partial(make, version), timeout_s=limit_s)
            except ForebayError as error:
                self._tell(f"model '{name}' version '{version}'", error)
                weights.pop(version, None)
        if weights:
            self._app.share(
                name, {version: weight for version, weight in weights.items() if weight} or {min(weights): 1}
            )

    def _again(self) -> Options:
        if (folder := working_folder.successor()) is not None:
            os.chdir(folder)
        return self._options if self._options.again is None else self._options.again()

    def _begin(self) -> None:
        if self._task is None and not self._is_over:
            assert self._loop is not None
            self._task = self._loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._asked:
                only_files, self._asked = all(self._asked), []
                try:
                    await (self._reload_files() if only_files else self._reload())
                except Exception:
                    log.exception("failed to reload the project; the served models stay")
        finally:
            self._task = None

    async def _reload_files(self) -> None:
        """Reload the model files that have changed."""
        for entry in self._entries:
            if is_model_file(entry.target) and await asyncio.to_thread(_files, entry) != self._files[entry.target]:
                await self._renew(entry)

    async def _reload(self) -> None:
        """Reload all; one of several fronts of a server has only the limits of tenants."""
        if self._options.part is not None and not self._options.part.is_owner:
            with contextlib.suppress(ConfigError):  # the owner says so
                self._app.state.of(Tenants).configure(self._again().tenants)
            return
        log.info("reloading")
        if self._app.stock is not None:
            self._app.stock.look_soon()
        started = time.monotonic()
        try:
            options = self._again()
            entries = self._entries_of(options)
            owners = wanted_owners(options)
            read_peers(options.attach.peers)
        except ConfigError as error:
            self._app.problem = error.message
            self._tell("the configuration", error)
            return
        self._app.problem = ""
        self._app.state.of(Tenants).configure(options.tenants)
        self._tell_what_stays(options)
        self._renew_secret(options.attach.secret)
        self._files = {entry.target: self._files.get(entry.target, ()) for entry in entries}
        before, self._entries = self._entries, entries
        self._elsewhere = {one.name for one in owners}
        wanted: dict[str, dict[str, int | None]] = {}
        broken: set[str] = set()
        for entry in entries:
            if (
                is_model_file(entry.target)
                and entry[:3] in [one[:3] for one in before]
                and await asyncio.to_thread(_files, entry) == self._files[entry.target]
            ):
                for name, version in self._made.get(_key(entry), ()):
                    wanted.setdefault(name, {})[version] = entry.overrides.weight
                continue
            for name, version, is_up in await self._renew(entry):
                wanted.setdefault(name, {})[version] = entry.overrides.weight
                if not is_up:
                    broken.add(name)
        await self._settle(wanted, broken)
        assert self.owners is not None
        self.owners.want(owners)
        if self.peers is not None:
            self.peers.want(options.attach.peers)
        self._made = {key: made for key, made in self._made.items() if key in {_key(entry) for entry in entries}}
        if not broken and not self._app.problem:
            log.info("reloaded in %.2f s", time.monotonic() - started)

    async def _renew(self, entry: TargetEntry) -> list[tuple[str, str, bool]]:
        """Build an entry anew and load what comes of it; returns names and versions, and whether they are up."""
        limit_s = self._options.load_timeout_s
        found = await asyncio.to_thread(_files, entry)

        def make() -> Sequence[Served]:
            with fresh_modules([_folder(entry)], limit_s) if _is_code(entry) else contextlib.nullcontext():
                return self._build(entry)

        self._files[entry.target] = found
        try:
            built = await beside(make, time.monotonic() + limit_s, f"'{entry.target}'")
        except ForebayError as error:
            self._tell(entry.target, error)
            made = self._made.get(_key(entry), set())
            if not made:
                self._app.problem = error.message
            reason = error.message
            if made and entry.overrides.worker_kind == "process":  # a new one would read what cannot be read
                log.warning("worker processes that exit are not replaced until %s is readable again", entry.target)
                first, *rest = reason.split("\n")  # a syntax error has a caret below
                reason = "\n".join([f"{first}; worker processes that exit are not replaced until this is fixed", *rest])
            for name, version in made:
                self._app.failed(name, version, reason)
            return [(name, version, False) for name, version in made]
        renewed: list[tuple[str, str, bool]] = []
        for one in built:
            name, version = one.endpoint.name, one.endpoint.config.version
            if name in self._elsewhere or (self.owners is not None and self.owners.wants(name)):
                renewed.append((name, version, True))
                continue
            try:
                taken = self._app.served.keys() - self._app.owned.keys()
                if name in taken and name not in {own for own, _ in self._own}:
                    raise ConfigError(f"the name '{name}' is taken by workers that attached")
                await self._app.load(name, version, lambda one=one: one, timeout_s=limit_s)
            except ForebayError as error:
                self._tell(f"model '{name}' version '{version}'", error)
                self._app.problem = self._app.clash(name) or self._app.problem  # what it clashes with stays
                renewed.append((name, version, False))
            else:
                self._own.add((name, version))
                renewed.append((name, version, True))
        self.made(entry, built)
        return renewed

    async def _settle(self, wanted: Mapping[str, Mapping[str, int | None]], broken: set[str]) -> None:
        """Give versions the weights that the project names, and let those leave that it does not want any more."""
        for name in list(self._app.served):
            ready = self._app.versions(name).ready
            own = [version for version in ready if (name, version) in self._own]
            if name in self._app.owned or (self._app.stock is not None and self._app.stock.offer.has(name)):
                continue
            if name in broken or not own:
                continue
            versions = wanted.get(name, {})
            if versions:
                weights = {version: weight for version, weight in versions.items() if weight}
                kept = self._app.versions(name).weights
                if not weights:
                    weights = kept if kept.keys() <= versions.keys() else {next(iter(versions)): 1}
                self._app.share(name, weights)
            if self._app.problem:  # what could not be built may be what was to take their place
                continue
            # Who answers for the others is the last to leave.
            leaving = [version for version in own if version not in versions]
            for version in sorted(leaving, key=lambda one: one in self._app.versions(name).weights):
                await self._app.unload(name, version)
                self._own.discard((name, version))
        self._app.forget_failed(lambda name: wanted.get(name, ()))

    def _tell(self, what: str, error: ForebayError) -> None:
        extra = {"trace": error.trace}
        log.error("cannot reload %s, the served version stays: %s", what, error.message, extra=extra)

    def _renew_secret(self, secret: bytes | None) -> None:
        """Require another secret at the door, and show it where this server dials; links that are there stay."""
        if secret is None or self._options.attach.secret is None:  # whether there is one holds from the next start on
            return
        if self._app.door is not None:
            self._app.door.secret = secret
        for dialling in (self.owners, self.peers):
            if dialling is not None:
                dialling.prove(secret)

    def _tell_what_stays(self, options: Options) -> None:
        """Name the settings that have changed and hold from the next start on."""
        before = self._options
        pairs: list[tuple[type, Any, Any]] = [
            (HttpConfig, before.http, options.http),
            (GrpcConfig, before.grpc, options.grpc),
            (AttachConfig, before.attach, options.attach),
            (ProcessConfig, before, options),
        ]
        applied = {"owners", "peers", "tenants"}
        if before.attach.secret is not None and options.attach.secret is not None:
            applied.add("secret")
        changed = [
            one.written.flag or name
            for struct, old, new in pairs
            for name, one in declared(struct).items()
            if name not in applied and getattr(old, name) != getattr(new, name)
        ]
        if changed:
            log.warning("changed settings that need a restart: %s", ", ".join(changed))

    def _look(self) -> None:
        """Look at the files, in a thread."""
        found = self._seen()
        if self._settling is None:
            self._settling = Settling(found)
        if changed := self._settling.look(found):
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                self._loop.call_soon_threadsafe(lambda: self.ask(only_files="code" not in changed))

    def _seen(self) -> dict[str, Any]:
        """Return what can be seen of code and configuration, and of model files."""
        entries = self._entries
        code: list[tuple[str, int, int, int]] = []
        if self._options.reload:
            for folder in sorted({_folder(entry) for entry in entries if _is_code(entry)}):
                code += [_seen(Path(entry.path)) for entry in python_files(folder)]
            if self._options.source is not None:
                code.append(_seen(self._options.source))
        return {"code": sorted(code), "files": [_files(entry) for entry in entries if is_model_file(entry.target)]}


def _key(entry: TargetEntry) -> str:
    """Return what makes an entry that of before, though other settings of it may have changed."""
    return msgspec.json.encode([entry.target, entry.overrides.name, entry.overrides.version]).decode()


def _folder(entry: TargetEntry) -> Path:
    file, colon, _ = entry.target.rpartition(":")
    return Path(file if colon and file.endswith(".py") else entry.target).resolve().parent


def _is_code(entry: TargetEntry) -> bool:
    return not is_model_file(entry.target) and not is_repository(entry.target)


def _files(entry: TargetEntry) -> Sequence[StoredFile]:
    return files_of_model(Path(entry.target)) if is_model_file(entry.target) else ()


def _seen(path: Path) -> tuple[str, int, int, int]:
    try:
        about = path.stat()
    except OSError:
        return str(path), 0, 0, 0
    return str(path), about.st_size, about.st_mtime_ns, about.st_ctime_ns
