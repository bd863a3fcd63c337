# SPDX-License-Identifier: Apache-2.0
"""The owners of a front: which there are, which of them serves what, and what becomes of that in the app.

Theory of operation. A server starts without an owner that does not answer, and serves its models once it does. Each
version of a model that an owner describes becomes an endpoint with an `OwnerPool` behind it. Another description of the
same version makes a new endpoint, which takes the place of the one before, as in a reload. When the link ends, the
endpoints stay, and requests wait for the next link, which may lead to another process at the same address.

A name is served by one owner, its holder, or by this server. An owner that is wanted for that name comes before all
others, also before a model of the project, once it has said that it has the model. Else a name belongs to whoever was
first. Whenever an owner says something else than before, or others are wanted, the names that it is about are settled
anew, each by a task of its own: its holder is looked for, and endpoints and pools follow. If the holder is another one
than before and describes the model alike, the endpoint stays, and only where its requests go changes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ConfigError, ForebayError
from forebay.owners.owned_model import OwnedModel, owned_model
from forebay.owners.owner import OwnedVersion, Owner
from forebay.owners.owner_pool import AWAY, MISSING, OwnerSlot
from forebay.owners.shard import LinkOptions
from forebay.owners.shards import agreed
from forebay.server.links import Links
from forebay.types.did_you_mean import meant
from forebay.workers.memory.freed_memory import keep_freed_memory

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.workers.wire.address import Address
    from forebay.workers.wire.tls_files import TlsFiles

log = logging.getLogger("forebay.owners")

START_S: Final = 10.0
"""How long the start of the server waits for its owners."""
SLOW_S: Final = 1.0
"""How long other names wait for one to be settled: a model of the project that is loaded may take minutes."""


class WantedOwner(msgspec.Struct, frozen=True):
    """An owner whose models are served.

    Attributes:
        address: Where it is.
        name: The only model of it that is served; None for all of them. It is served by this owner even if the project
            of this server, or an owner without a name, has one of that name.
    """

    address: Address
    name: str | None = None


class _OwnedName(msgspec.Struct, eq=False):
    """A name that another server serves.

    Attributes:
        holder: The owner; None before any has been reached.
        models: The versions that are served, by their names.
    """

    holder: Owner | None = None
    models: dict[str, OwnedModel] = {}


class Owners(Links):
    """The owners of a server."""

    def __init__(
        self,
        app: App,
        secret: bytes | None,
        tls: TlsFiles | None,
        grace_s: float,
        take_back: Callable[[str], Awaitable[None]],
    ) -> None:
        """Begin without any; see `want`.

        Args:
            grace_s: How long requests wait for an owner that is gone.
            take_back: Loads what the project has by a name that no owner serves any more.
        """
        self._app = app
        self._options = LinkOptions(secrets.token_hex(16), secret, tls)
        self._grace_s = grace_s
        self._take_back = take_back
        self._owners: dict[Address, Owner] = {}
        self._former: set[Owner] = set()
        self._names: dict[str, _OwnedName] = {}
        self._unsettled: dict[str, None] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._is_settling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_up = False

    def want(self, wanted: Sequence[WantedOwner]) -> None:
        """Serve the models of these owners from now on, and of no others; called on the loop, or before the start.

        Returns at once. Owners that were wanted before keep their links, others are dialled. Models of an owner that is
        not wanted any more leave once their requests are done; one that another owner is wanted for by name stays until
        that one has it, and what was not answered by then is handed on to it. A model that the project defines is then
        served by the project again. To move a model from one owner to another, name it: `WantedOwner(address, name)`.

        Raises:
            ConfigError: An owner is named twice; nothing has changed.
        """
        names = names_of(wanted)
        before, self._owners = self._owners, {}
        for address, only in names.items():
            owner = before.pop(address, None)
            if owner is None:
                owner = Owner(address, self._options, self._changed)
                if self._is_up:
                    owner.start()
            owner.only = only
            self._owners[address] = owner
        for owner in before.values():
            self._former.add(owner)
            owner.leave()
        if self._is_up:
            self._settle_soon(self._names)
            for owner in self._owners.values():
                self._settle_soon(filter(owner.may_serve, owner.names))
            self._note_begun()

    def prove(self, secret: bytes) -> None:
        """Prove this secret to owners that are dialled from now on."""
        self._options.secret = secret

    def expect(self, models: Sequence[OwnedModel]) -> None:
        """Take these for what the owners have that are wanted for them by name, until they say otherwise."""
        for model in models:
            config = model.description.config
            holder = next(one for one in self._owners.values() if config.name in one.only)
            self._names.setdefault(config.name, _OwnedName(holder, {})).models[config.version] = model
            self._app.owned[config.name] = str(holder.address)

    def wants(self, name: str) -> bool:
        """Tell whether an owner is wanted for a model by its name."""
        return any(name in owner.only for owner in self._owners.values())

    async def start(self) -> None:
        """Dial, and wait for a while until their models are served."""
        self._is_up = True
        keep_freed_memory()  # each long answer is copied into new memory
        firsts = [owner.start() for owner in self._owners.values()]
        if firsts:
            await asyncio.wait(firsts, timeout=START_S)

    def stop(self) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()
        for owner in (*self._owners.values(), *self._former):
            owner.stop()

    def problems(self) -> list[str]:
        """Return which owners have nothing served yet, and why; for the others their models say it."""
        holders = {found.holder for found in self._names.values()}
        return [one.problem for one in self._owners.values() if one.problem and one not in holders]

    def _changed(self, owner: Owner, names: Iterable[str]) -> None:
        self._settle_soon(filter(owner.may_serve, names))
        self._note_begun()

    def _settle_soon(self, names: Iterable[str]) -> None:
        self._unsettled.update(dict.fromkeys(names))
        if self._unsettled and not self._is_settling:
            self._is_settling = True
            self._run(self._settle_all())

    async def _settle_all(self) -> None:
        """Settle name after name, so that models are listed as their owner lists them; a slow one holds up none."""
        while (name := next((one for one in self._unsettled if one not in self._settling), None)) is not None:
            task = self._settling[name] = self._run(self._settle(name))
            await asyncio.wait((task,), timeout=SLOW_S)
        self._is_settling = False

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _settle(self, name: str) -> None:
        """Have the right server serve a name, until nothing has changed meanwhile."""
        try:
            while name in self._unsettled:
                del self._unsettled[name]
                if (holder := self._holder(name)) is None:
                    await self._let_go(name)
                else:
                    await self._serve(name, holder)
        except Exception:
            log.exception("failed to choose the owner that serves the model '%s'", name)
        finally:
            del self._settling[name]
            self._former = {one for one in self._former if one.is_here}
            self._note_begun()

    def _note_begun(self) -> None:
        """Say what owners lack, once all that they have is served."""
        for owner in self._owners.values():
            if owner.is_here and owner.names.keys().isdisjoint(self._settling.keys() | self._unsettled.keys()):
                owner.problem = ""
                self._say_missing(owner)
                owner.begun()

    def _say_missing(self, owner: Owner) -> None:
        """Say which of the models that are wanted of an owner it has not, or only hands on."""
        names, elsewhere = owner.names, owner.elsewhere
        unserved = [name for name in elsewhere if self._app.versions_of(name) is None]
        missing = sorted((owner.only or {*unserved}) - names.keys())
        if missing and missing[0] in elsewhere:
            other = elsewhere[missing[0]][:200]
            owner.say(
                f"forwards the model '{missing[0]}' to its owner {other} and accepts no requests for it; dial that"
            )
        elif missing:
            owner.say(f"has no model '{missing[0]}'{meant(missing[0], sorted(names))}")

    def _holder(self, name: str) -> Owner | None:
        """Return the owner that is to serve a name; None if it is none."""
        found = self._names.get(name)
        current = None if found is None else found.holder
        having = [owner for owner in self._owners.values() if owner.has(name)]
        stock = self._app.stock
        if having and stock is not None and stock.offer.has(name):
            self._tell_others(name, having, None)
            return None
        named = [owner for owner in having if name in owner.only]
        others = next(iter(having), None)
        if named:
            chosen = current if current in named else named[0]
        elif found is None and self._is_own(name):
            chosen = None
        elif current is not None and current in self._owners.values() and current.may_serve(name):
            waits = not current.is_here or self.wants(name)
            chosen = current if current.has(name) or waits else others
        else:
            chosen = (current if self.wants(name) else None) or others
        self._tell_others(name, having, chosen)
        return chosen

    def _tell_others(self, name: str, having: Sequence[Owner], chosen: Owner | None) -> None:
        """Say of owners whose model is not served that another one has the name."""
        other = "this server" if chosen is None else f"the owner {chosen.address}"
        for owner in having:
            if owner is not chosen:
                owner.say_once(
                    f"the owner {owner.address} has a model '{name}', and so has {other}, which serves it: give one of "
                    "them another `name`, or say which owner serves it: {owner: ADDRESS, name: NAME}"
                )

    def _is_own(self, name: str) -> bool:
        versions = self._app.versions_of(name)
        return versions is not None and not all(one.is_elsewhere for one in versions.ready.values())

    async def _serve(self, name: str, holder: Owner) -> None:
        """Have a name served by an owner."""
        found = self._names.setdefault(name, _OwnedName(None, {}))
        found.holder = holder
        self._app.owned[name] = str(holder.address)
        told: dict[str, list[OwnedVersion]] = {}
        for one in holder.versions(name):
            told.setdefault(one.weighed.model.config.version, []).append(one)
        for version, its in told.items():
            await self._serve_version(found, version, its)
        if told:
            self._share(name, {version: its[0].weighed.weight for version, its in told.items()})
            found.models = {version: model for version, model in found.models.items() if version in told}
            kept = {model.served for model in found.models.values()}
            await self._unload_others(name, lambda served: served in kept)
        else:  # it is away, or another one is awaited
            for model in found.models.values():
                model.pool.problem = MISSING if holder.is_here else AWAY
                model.pool.ask(str(holder.address), ())

    async def _serve_version(self, found: _OwnedName, version: str, told: Sequence[OwnedVersion]) -> None:
        """Have a version served as its owner describes it."""
        assert found.holder is not None
        model = found.models.get(version)
        owner = str(found.holder.address)
        description = agreed(None if model is None else model.description, [one.weighed.model for one in told])
        is_new = model is None or model.description != description
        if model is None or is_new:
            model = owned_model(description, owner, self._grace_s)
        slots: list[OwnerSlot] = []
        for one in told:
            if one.weighed.model == description:
                slots.append(one.link.slot(one.number, model.pool, description.capacity))
            else:
                found.holder.say_once(
                    f"the owner {owner}{one.link.place} describes version '{version}' of '{model.pool.model}' "
                    "otherwise than its other shards; it gets no requests for it until all describe it alike"
                )
        model.pool.problem = AWAY
        model.pool.ask(owner, slots)
        problems = [one.weighed.problem for one in told]
        model.pool.owners_problem = problems[0] if all(problems) else ""
        if is_new:
            await self._load(found, model)

    async def _load(self, found: _OwnedName, model: OwnedModel) -> None:
        """Let an endpoint take its place."""
        config = model.description.config
        try:
            await self._app.load(config.name, config.version, lambda: model.served)
        except ForebayError as error:
            owner = str(None if found.holder is None else found.holder.address)
            log.warning("cannot serve model '%s' of the owner %s: %s", config.name, owner, error.message)
        else:
            found.models[config.version] = model

    def _share(self, name: str, weights: dict[str, int]) -> None:
        """Give the versions of a model the weights that they have at the owner."""
        served = self._names[name].models
        shares = {version: weight for version, weight in weights.items() if weight and version in served}
        try:
            if shares:
                self._app.share(name, shares)
        except ForebayError as error:
            log.warning("the weights of the versions of '%s' differ from the owner's: %s", name, error.message)

    async def _let_go(self, name: str) -> None:
        """Serve a name no longer, or as the project has it."""
        found = self._names.pop(name, None)
        if found is not None:
            del self._app.owned[name]
            await self._take_back(name)
            left = {model.served for model in found.models.values()}
            await self._unload_others(name, lambda served: served not in left)

    async def _unload_others(self, name: str, is_kept: Callable[[Served], bool]) -> None:
        """Let the versions of a model leave that are not kept; those last that answer what names no version."""
        versions = self._app.versions_of(name)
        if versions is None:
            return
        leaving = [(version, served) for version, served in versions.ready.items() if not is_kept(served)]
        for version, served in sorted(leaving, key=lambda one: one[0] in versions.weights):
            try:
                await self._app.unload(name, version, served)
            except ForebayError as error:
                log.warning("cannot unload version '%s' of the model '%s': %s", version, name, error.message)


def names_of(wanted: Sequence[WantedOwner]) -> dict[Address, frozenset[str]]:
    """Return what is wanted of each owner: names, or none for all; raises a `ConfigError` if one is named twice."""
    names: dict[Address, list[str | None]] = {}
    for one in wanted:
        names.setdefault(one.address, []).append(one.name)
    for address, its in names.items():
        if len(its) > 1 and (None in its or len(set(its)) < len(its)):
            which = "" if None in its else f", with the model '{max(its, key=its.count)}'"
            raise ConfigError(f"the owner {address} is named twice{which}; leave one of them out")
    return {address: frozenset(filter(None, its)) for address, its in names.items()}
