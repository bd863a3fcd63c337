# SPDX-License-Identifier: Apache-2.0
"""Models of repositories in an app: what is loaded, for whom, and what leaves for it. All of it happens on the loop.

Theory of operation. A repository says which versions there are, a policy which of them are served, and a `Shelf` how
many may be in memory. A version is loaded because somebody asks for it (`lend`), because all are to be there (not
lazy), or because it takes the place of one that is there. The version that answers what names none is the highest one
that is served and could be loaded. A successor is loaded beside the one in use, so that for a moment there is one more
than there is room for; only then do requests go to it, and the one before leaves with its last request.

What could not be loaded is tried again after a pause that doubles, or at once when its files are other ones; until
then the reason is the answer, or the next lower version answers, if there is one.

Who asks over the fast lane takes no lease. What was used since the last look is known by the counters of endpoints, and
what has open requests stays, which is looked at only when something has to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ConfigError, ForebayError, ModelError, NotFound, Unavailable
from forebay.repository.shelf import Full, Shelf
from forebay.repository.source import SourceChanged
from forebay.repository.tree_rules import number_of
from forebay.types.failures import failure_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from forebay.repository.listing import Revision
    from forebay.repository.repository import Repository
    from forebay.repository.version_policy import VersionPolicy
    from forebay.server.app import App
    from forebay.server.served import Served

log = logging.getLogger("forebay.repository")

LOADS: Final = 4
"""Versions that are loaded at a time."""
MAX_WAITING: Final = 4096
"""Requests that may wait for versions that are being loaded."""
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
"""Pauses before something that could not be loaded is tried again."""

Key = tuple[str, int]


class Stocked(msgspec.Struct, frozen=True, eq=False):
    """A repository and what becomes of its models.

    Attributes:
        repository: It.
        make: Builds the endpoint of a revision, given the folder with its files; called in a thread.
    """

    repository: Repository
    make: Callable[[Revision, Path], Served]


class _Failed(msgspec.Struct):
    revision: Revision
    error: ForebayError
    pause_s: float
    again_s: float


class StockStatistics(msgspec.Struct, frozen=True):
    """What a stock tells about its memory.

    Attributes:
        loaded: Versions in memory.
        bytes: Bytes of their files.
        hits: Requests that waited for no load, of those that asked here.
        loads: Versions that were loaded.
        failures: Versions that could not be.
        evictions: Versions that left to make room.
        waiting: Requests that wait for a load.
    """

    loaded: int
    bytes: int
    hits: int
    loads: int
    failures: int
    evictions: int
    waiting: int


class Stock:
    """Keeps in an app what repositories have."""

    def __init__(
        self,
        app: App,
        stocked: Sequence[Stocked],
        policy: VersionPolicy,
        *,
        is_lazy: bool = True,
        max_models: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Describe it; `App.start` starts it.

        Args:
            app: Where the models answer.
            stocked: The repositories; each has been looked at.
            policy: Which versions are served.
            is_lazy: Whether a version is loaded only when somebody asks for it.
            max_models: Versions in memory.
            max_bytes: Bytes of their files together.
        """
        self._app = app
        self._stocked = stocked
        self._policy = policy
        self.is_lazy = is_lazy
        self._shelf: Shelf[str] = Shelf(max_models, max_bytes)
        self._loaded: dict[Key, Revision] = {}
        self._by_id: dict[str, Key] = {}
        self._counts: dict[str, int] = {}
        self._loading: dict[Key, asyncio.Task[None]] = {}
        self._failed: dict[Key, _Failed] = {}
        self._dismissed: dict[Key, Revision] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._found: dict[Key, Revision] = {}
        self._tending: dict[str, asyncio.Task[None]] = {}
        self._tend_again: set[str] = set()
        self._waiting = 0
        self._failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(LOADS)
        self._is_over = False
        self._is_ready = False
        app.stock = self
        app.watch(self._look_at_app)

    # What is there

    @property
    def names(self) -> list[str]:
        """All models that the repositories have."""
        return list(dict.fromkeys(name for one in self._stocked for name in one.repository.catalog.models))

    def has(self, name: str) -> bool:
        """Tell whether a repository has a model."""
        return self._owner(name) is not None

    def has_others(self, name: str) -> bool:
        """Tell whether the repositories have a model beside this one; asked at each change, so no list is made."""
        return sum(len(one.repository.catalog.models) for one in self._stocked) > self.has(name)

    def problems(self) -> list[str]:
        """Return why the models are not there yet; empty if they are."""
        return [] if self._is_ready else ["the models of the repository are loading"]

    def statistics(self) -> StockStatistics:
        """Return a snapshot."""
        kept = self._shelf.statistics()
        return StockStatistics(
            kept.count, kept.bytes, kept.hits, kept.misses, self._failures, kept.evictions, self._waiting
        )

    def describe(self) -> dict[str, Any]:
        """Return what `/models` tells of the repositories themselves, and of the memory."""
        repositories = [
            {
                "place": one.repository.place,
                "problem": one.repository.problem,
                "problems": list(one.repository.catalog.problems),
                **msgspec.to_builtins(one.repository.statistics()),
            }
            for one in self._stocked
        ]
        return {"repositories": repositories, "memory": msgspec.to_builtins(self.statistics())}

    def summary(self) -> list[str]:
        """Return what is served of each repository: a line for a person."""
        lines: list[str] = []
        for one in self._stocked:
            catalog, told = one.repository.catalog, one.repository.statistics()
            shown = ", ".join([*catalog.models][:5]) + (", ..." if told.models > 5 else "")
            when = "loaded when they are asked for" if self.is_lazy else "loaded at the start"
            count = (
                f"{told.models} models with {told.versions} versions"
                if told.models != 1
                else f"{told.versions} versions"
            )
            lines.append(f"POST /models/NAME of {one.repository.place}: {count} ({shown or 'none yet'}), {when}")
        return lines

    def describe_versions(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a model that could be loaded, or are being copied, or failed."""
        owner = self._owner(name)
        if owner is None:
            return []
        found: list[dict[str, Any]] = []
        versions = owner.repository.catalog.models[name]
        served = set(self._policy.chosen(versions))
        for number, revision in versions.items():
            key = (name, number)
            failed = self._failed.get(key)
            progress = owner.repository.progress(revision)
            state = "loading" if key in self._loading else "available" if number in served else "not served"
            told: dict[str, Any] = {"version": str(number), "state": state, "bytes": revision.size}
            told["modified"] = int(revision.modified_s)
            if failed is not None and failed.revision == revision and key not in self._loading:
                told["state"], told["error"] = "failed", failed.error.message
            elif key in self._dismissed:
                told["state"] = "unloaded"
            elif progress is not None:
                told["progress"] = str(progress)
            found.append(told)
        return found

    # Loading

    @contextlib.asynccontextmanager
    async def lend(self, name: str, version: str | None) -> AsyncGenerator[Served]:
        """Have a version there, loaded if need be, as long as the block runs.

        Args:
            name: The model.
            version: Its version; None is the one that answers what names none.

        Raises:
            NotFound: If there is none.
            ForebayError: Why it cannot be loaded.
        """
        number = None if version is None else number_of(version)
        if version is not None and number is None:
            msg = f"the model '{name[:100]}' has no version '{version[:100]}': versions are whole numbers"
            raise NotFound(msg)
        if not self._app.is_stocked(name):
            msg = f"the model '{name}' of a repository has the name of another one that is served"
            raise ConfigError(msg)
        if self._waiting >= MAX_WAITING:
            msg = f"{MAX_WAITING} requests wait for models that are being loaded; try again later"
            raise Unavailable(msg)
        self._waiting += 1
        try:
            key = await self._bring(name, number)
        finally:
            self._waiting -= 1
        served, revision = self._ready(key), self._loaded.get(key)
        lent = "" if revision is None else revision.id
        if served is None or not self._shelf.take(lent):
            msg = f"the model '{name}' is just leaving; try again"
            raise Unavailable(msg)
        try:
            yield served
        finally:
            if lent in self._by_id:
                self._counts[lent] = _count(served)
            self._shelf.give_back(lent)

    def find(self, name: str, version: str) -> Served:
        """Build a version as it is in its repository now; called in a thread, by who loads it by hand.

        Raises:
            NotFound: If there is none.
            ForebayError: If it cannot be built.
        """
        owner = self._owner(name)
        number = number_of(version)
        if owner is None or number is None:
            msg = f"no repository has a version '{version[:100]}' of a model '{name[:100]}'"
            raise NotFound(msg)
        revision = owner.repository.find(name, number)
        self._found[name, number] = revision
        return self._made(owner, revision)

    async def start(self) -> None:
        """Begin to look, and load what is to be there from the start."""
        self._loop = asyncio.get_running_loop()
        for one in self._stocked:
            one.repository.watch(self._changed)
            one.repository.start()
        if not self.is_lazy:
            for name in self.names:
                self._tend_soon(name)
            while self._tending:
                await asyncio.wait(self._tending.values())
        self._is_ready = True

    def stop(self) -> None:
        """Load nothing more."""
        self._is_over = True
        for task in (*self._tending.values(), *self._loading.values()):
            task.cancel()
        for one in self._stocked:
            one.repository.stop()

    def look_soon(self) -> None:
        """Have the repositories looked at now."""
        for one in self._stocked:
            one.repository.look_soon()

    # Inside

    def _owner(self, name: str) -> Stocked | None:
        return next((one for one in self._stocked if name in one.repository.catalog.models), None)

    def _there(self, name: str) -> Mapping[int, Revision]:
        owner = self._owner(name)
        return {} if owner is None else owner.repository.catalog.models.get(name, {})

    def _served(self, name: str) -> list[Revision]:
        """Return which versions are served, the highest first: what failed is none, unless its time has come."""
        versions = self._there(name)
        there = [one for one in versions.values() if not self._has_failed(one)]
        return [versions[number] for number in self._policy.chosen([one.number for one in there])]

    def _has_failed(self, revision: Revision) -> _Failed | None:
        failed = self._failed.get((revision.model, revision.number))
        return failed if failed is not None and failed.revision == revision else None

    async def _bring(self, name: str, number: int | None) -> Key:
        """Load a version if it is not there; returns which one it is."""
        while True:
            answering = self._app.served.get(name) if number is None else None
            if answering is not None:  # a successor may be on its way, or have failed
                return name, int(answering.endpoint.config.version)
            revision = self._asked(name, number)
            key = (name, revision.number)
            if key in self._loaded:
                if number is None:
                    self._settle(name)
                return key
            failed = self._has_failed(revision)
            if failed is not None and time.monotonic() < failed.again_s:
                raise failed.error.with_traceback(None)
            try:
                await self._load(revision)
            except ForebayError:
                # The next lower version may answer; what was asked for by its number may not.
                if number is not None or self._has_failed(revision) is None or not self._served(name):
                    raise

    def _asked(self, name: str, number: int | None) -> Revision:
        owner = self._owner(name)
        if owner is None:
            return self._stocked[0].repository.find(name)  # says so
        there = owner.repository.catalog.models[name]
        chosen = self._policy.chosen(there)
        if number is None:
            served = self._served(name)
            if served:
                return served[0]
            if chosen:
                return there[chosen[0]]
            msg = f"no version of the model '{name}' is served; there is {', '.join(map(str, there))}"
            raise NotFound(msg)
        revision = owner.repository.find(name, number)
        if number not in chosen and (name, number) not in self._loaded:
            msg = f"version {number} of the model '{name}' is there and not served; see --versions"
            raise NotFound(msg)
        if self._dismissed.get((name, number)) == revision:
            msg = f"version {number} of the model '{name}' was unloaded by hand, and is loaded by hand again"
            raise NotFound(msg)
        return revision

    async def _load(self, revision: Revision) -> None:
        """Load a revision, once for all who want it."""
        key = (revision.model, revision.number)
        task = self._loading.get(key)
        if task is None:
            if self._is_over:
                msg = "the server is draining"
                raise Unavailable(msg)
            task = self._loading[key] = asyncio.get_running_loop().create_task(self._load_now(key, revision))
            task.add_done_callback(lambda task: self._ended(key, task))
        await asyncio.shield(task)

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        self._loading.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it

    async def _load_now(self, key: Key, revision: Revision) -> None:
        name, version = revision.model, str(revision.number)
        owner = self._owner(name)
        assert owner is not None
        async with self._turns:
            self._make_room(key, revision)
            try:
                limit_s = self._app.load_timeout_s
                await self._app.load(name, version, lambda: self._made(owner, revision), timeout_s=limit_s)
            except BaseException as error:
                self._shelf.retire(revision.id)
                self._shelf.give_back(revision.id)
                if not isinstance(error, ForebayError):
                    raise
                raise self._fail(key, revision, error) from error
            self._arrived(key, revision)
            self._shelf.give_back(revision.id)
            self._settle(name)

    def _made(self, owner: Stocked, revision: Revision) -> Served:
        """Copy a revision if need be and build its endpoint; called in a thread."""
        lease = owner.repository.fetch(revision)

        def check() -> None:
            if not owner.repository.is_current(revision):
                msg = f"version '{revision.version}' of '{revision.model}' has changed while it was loaded"
                raise SourceChanged(msg)

        try:
            served = owner.make(revision, lease.value)
        except BaseException:
            lease.release()
            raise
        served.check, served.gone = check, lease.release
        return served

    def _make_room(self, key: Key, revision: Revision) -> None:
        """Let leave what has to for a revision, and take a lease of it.

        Raises:
            Unavailable: If all that is there is in use.
        """
        self._shelf.revive(revision.id)  # somebody may still be using it, though it was to leave
        if self._shelf.take(revision.id):
            return
        name, served = revision.model, {one.number for one in self._served(revision.model)}
        will_leave = any(other == name and number not in served for other, number in self._loaded)
        may_exceed = key in self._loaded or (revision.number in served and will_leave)
        try:
            leaving = self._shelf.admit(revision.id, revision.size, busy=self._look_at_use(), may_exceed=may_exceed)
        except Full:
            kept = self._shelf.statistics()
            msg = f"there is no room for '{name}': all {kept.count} models in memory are in use; try again later"
            raise Unavailable(msg) from None
        for other in leaving:
            self._unload(self._by_id[other])

    def _look_at_use(self) -> set[str]:
        """Note what was used since the last look; returns what is in use now."""
        busy: set[str] = set()
        for key, revision in self._loaded.items():
            served = self._ready(key)
            if served is None:
                continue
            count = _count(served)
            if self._counts.get(revision.id) != count:
                self._counts[revision.id] = count
                self._shelf.touch(revision.id)
            if served.endpoint.in_flight:
                busy.add(revision.id)
        return busy

    def _ready(self, key: Key) -> Served | None:
        try:
            return self._app.versions(key[0]).ready.get(str(key[1]))
        except NotFound:
            return None

    def _arrived(self, key: Key, revision: Revision) -> None:
        before = self._loaded.get(key)
        if before is not None and before != revision:
            self._forget(before.id)
        self._loaded[key] = revision
        self._by_id[revision.id] = key
        self._failed.pop(key, None)
        self._dismissed.pop(key, None)

    def _fail(self, key: Key, revision: Revision, error: ForebayError) -> ForebayError:
        """Note why a revision could not be loaded; returns what is told to who has asked for it."""
        before = self._has_failed(revision)
        pause_s = FIRST_PAUSE_S if before is None else min(before.pause_s * 2, MAX_PAUSE_S)
        self._failures += 1
        told = f"version '{revision.number}' of '{revision.model}' cannot be loaded: {failure_of(error).error.message}"
        found = Unavailable(told) if isinstance(error, Unavailable) else ModelError(told)
        self._failed[key] = _Failed(revision, found, pause_s, time.monotonic() + pause_s)
        log.log(
            logging.WARNING if before is None else logging.DEBUG,
            "%s; what is served goes on",
            told,
        )
        is_wanted = not self.is_lazy or any(name == revision.model for name, _ in self._loaded)
        if self._loop is not None and is_wanted:
            self._loop.call_later(pause_s, self._tend_soon, revision.model)
        return found

    def _forget(self, id: str) -> None:
        """Count it no longer, or only as long as somebody has a lease of it."""
        self._shelf.retire(id)
        key = self._by_id.pop(id, None)
        self._counts.pop(id, None)
        if key is not None and (found := self._loaded.get(key)) is not None and found.id == id:
            del self._loaded[key]

    def _unload(self, key: Key) -> None:
        served = self._ready(key)
        self._forget(self._loaded[key].id)

        async def leave() -> None:
            with contextlib.suppress(NotFound, Unavailable):  # it has left already, or all of it ends
                await self._app.unload(key[0], str(key[1]), served)

        task = asyncio.get_running_loop().create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _settle(self, name: str) -> None:
        """Say which version answers what names none, and let those leave that are not served."""
        served = [one.number for one in self._served(name)]
        best = served[0] if served and (name, served[0]) in self._loaded else None
        if best is not None:
            self._app.share(name, {str(best): 1})
        there = self._there(name)
        for key in [key for key in self._loaded if key[0] == name]:
            number = key[1]
            if number in served or (number in there and self._has_failed(there[number]) is not None):
                continue
            # Who answers goes on until another one can, unless the model is gone.
            if best is not None or not there or not self._app.versions(name).weights.get(str(number)):
                self._unload(key)

    def _changed(self) -> None:
        """Hear of a look that has changed something, in the thread of a repository."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(self._tend_all)

    def _tend_all(self) -> None:
        names = self.names
        there = set(names)
        for key in [key for key in self._failed if key[0] not in there]:
            del self._failed[key]
        for name in dict.fromkeys([name for name, _ in self._loaded] if self.is_lazy else names):
            self._tend_soon(name)
        for name in {name for name, _ in self._loaded} - there:
            self._tend_soon(name)

    def _tend_soon(self, name: str) -> None:
        if self._is_over:
            return
        if name in self._tending:
            self._tend_again.add(name)
            return
        assert self._loop is not None
        task = self._tending[name] = self._loop.create_task(self._tend(name))
        task.add_done_callback(lambda task: self._tended(name, task))

    def _tended(self, name: str, task: asyncio.Task[None]) -> None:
        self._tending.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("model '%s' cannot be kept up to date", name, exc_info=error)
        if name in self._tend_again:
            self._tend_again.discard(name)
            self._tend_soon(name)

    async def _tend(self, name: str) -> None:
        """Bring what is loaded of a model to what is there."""
        for revision in self._missing(name):
            with contextlib.suppress(ForebayError):  # it is told where it happens
                await self._load(revision)
        self._settle(name)

    def _missing(self, name: str) -> Iterator[Revision]:
        """Return what is to be loaded of a model, one after the other, until nothing is."""
        tried: set[str] = set()
        while True:
            now = time.monotonic()
            versions = self._there(name)
            there = [
                one for one in versions.values() if (found := self._has_failed(one)) is None or found.again_s < now
            ]
            chosen = [versions[number] for number in self._policy.chosen([one.number for one in there])]
            is_there = any(other == name for other, _ in self._loaded)
            for revision in chosen:
                key = (name, revision.number)
                loaded = self._loaded.get(key)
                if revision.id in tried or loaded == revision or self._dismissed.get(key) == revision:
                    continue
                if not self.is_lazy or loaded is not None or (is_there and revision is chosen[0]):
                    tried.add(revision.id)
                    yield revision
                    break
            else:
                return

    def _look_at_app(self, _name: str) -> None:
        """See what somebody has loaded or unloaded by hand."""
        for key in [*self._loaded]:
            if self._ready(key) is None:
                self._dismissed[key] = revision = self._loaded[key]
                self._forget(revision.id)
        for key, revision in [*self._found.items()]:
            if self._ready(key) is None or key in self._loading:
                continue
            del self._found[key]
            if self._loaded.get(key) != revision:
                self._shelf.revive(revision.id)
                if not self._shelf.take(revision.id):
                    admitted = self._shelf.admit(revision.id, revision.size, busy=self._look_at_use(), may_exceed=True)
                    for other in admitted:
                        self._unload(self._by_id[other])
                self._shelf.give_back(revision.id)
                self._arrived(key, revision)
                asyncio.get_running_loop().call_soon(self._settle, key[0])


def _count(served: Served) -> int:
    """Return how many requests an endpoint has answered."""
    return sum(served.endpoint.metrics.codes.values())
