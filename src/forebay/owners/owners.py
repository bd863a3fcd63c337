# SPDX-License-Identifier: Apache-2.0
"""The owners of a front: it dials each, serves what it describes, and dials again when it goes away.

Theory of operation. A server starts without an owner that does not answer, and serves its models once it does. Each
version of a model that an owner describes becomes an endpoint with an `OwnerPool` behind it. Another description of the
same version makes a new endpoint, which takes the place of the one before, as in a reload. When the link ends, the
endpoints stay, and requests wait for the next link, which may lead to another process at the same address.

A name belongs to whoever was first: a model of this server's own, or of another owner.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, ForebayError
from forebay.owners.model_description import read_description
from forebay.owners.owner_link import FLAG, OwnerLink
from forebay.owners.owner_pool import OwnerPool, OwnerSlot
from forebay.serving.endpoint import Endpoint
from forebay.types.call import ALONE
from forebay.types.did_you_mean import meant
from forebay.workers.address import CONNECT_S, UnixAddress, tune
from forebay.workers.redialling import Pauses
from forebay.workers.tls_files import why_no_tls

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from forebay.owners.model_description import ModelDescription, WeighedModel
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.types.call import Request
    from forebay.workers.address import Address

log = logging.getLogger("forebay.owners")

START_S: Final = 10.0
"""How long the start of the server waits for its owners."""


class WantedOwner(msgspec.Struct, frozen=True):
    """An owner whose models are served.

    Attributes:
        address: Where it is.
        name: The only model of it that is served; None for all of them.
    """

    address: Address
    name: str | None = None


class _LinkOptions(msgspec.Struct, frozen=True):
    """What all owners have in common: what this server calls itself, and what `Owners` is told."""

    name: str
    secret: bytes | None
    tls: ssl.SSLContext | None
    grace_s: float


class _OwnedModel(msgspec.Struct, eq=False):
    """A version of a model of an owner."""

    description: ModelDescription
    pool: OwnerPool
    served: Served


class Owners:
    """The owners of a server."""

    def __init__(
        self,
        app: App,
        wanted: Sequence[WantedOwner],
        secret: bytes | None,
        tls: ssl.SSLContext | None,
        grace_s: float,
    ) -> None:
        """Describe them.

        Args:
            app: What their models join.
            wanted: Where they are, and what of them is served.
            secret: What both sides must know.
            tls: How connections to other machines are encrypted; None if they are not.
            grace_s: How long requests wait for an owner that is gone.

        Raises:
            ConfigError: One is named twice.
        """
        names: dict[Address, list[str | None]] = {}
        for one in wanted:
            names.setdefault(one.address, []).append(one.name)
        for address, its in names.items():
            if len(its) > 1 and (None in its or len(set(its)) < len(its)):
                which = "" if None in its else f", with the model '{max(its, key=its.count)}'"
                raise ConfigError(f"the owner {address} is named twice{which}; leave one of them out")
        self._claims: dict[tuple[str, str], _Owner] = {}
        made = _LinkOptions(secrets.token_hex(16), secret, tls, grace_s)
        self._owners = [
            _Owner(app, address, frozenset(filter(None, its)), made, self._claims) for address, its in names.items()
        ]

    async def start(self) -> None:
        """Dial, and wait for a while until their models are served."""
        firsts = [one.start() for one in self._owners]
        await asyncio.wait(firsts, timeout=START_S)

    def leave(self) -> None:
        """Go on: what was accepted is still handed on."""

    def stop(self) -> None:
        """Hang up."""
        for one in self._owners:
            one.stop()

    def problems(self) -> list[str]:
        """Return which owners have nothing served yet, and why; for the others their models say it."""
        return [one.problem for one in self._owners if one.problem and not one.models]


class _Owner:
    """One owner."""

    def __init__(
        self,
        app: App,
        address: Address,
        only: frozenset[str],
        options: _LinkOptions,
        claims: dict[tuple[str, str], _Owner],
    ) -> None:
        self.models: dict[tuple[str, str], _OwnedModel] = {}
        self.problem = f"the owner {address} has not answered yet"
        self._app = app
        self.address = address
        self._only = only
        self._options = options
        self._claims = claims
        self._links: set[OwnerLink] = set()
        self._first: asyncio.Future[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._said: set[str] = set()
        self._names: set[str] = set()

    def start(self) -> asyncio.Future[None]:
        """Begin to dial; returns what is done once the first attempt is over."""
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        self._keeping = loop.create_task(self._keep())
        return self._first

    def stop(self) -> None:
        """Dial no more, and hang up."""
        for task in (self._keeping, self._serving):
            if task is not None:
                task.cancel()
        for link in [*self._links]:
            link.close()

    async def _keep(self) -> None:
        """Keep a link to the owner, as long as the server lives."""
        pauses = Pauses()
        while True:
            try:
                link = await self._dial()
                reason = await asyncio.shield(link.greeted)
                if not reason:
                    pauses.begin_again()
                    reason = await asyncio.shield(link.ended)
            except ssl.SSLError as error:
                reason = f"it {why_no_tls(error, FLAG)}"
            except OSError as error:
                reason = f"it cannot be reached: {error.strerror or error or 'it does not answer'}"
            self._say(f"is away: {reason}")
            await asyncio.sleep(pauses.next_s())

    async def _dial(self) -> OwnerLink:
        """Connect.

        Raises:
            OSError: Nobody is there.
        """
        loop = asyncio.get_running_loop()

        def make() -> OwnerLink:
            return OwnerLink(self._options.name, self._options.secret, self._told, self._links.discard)

        address = self.address
        async with asyncio.timeout(CONNECT_S):
            if isinstance(address, UnixAddress):
                _, link = await loop.create_unix_connection(make, address.path)
            else:
                transport, link = await loop.create_connection(make, address.host, address.port, ssl=self._options.tls)
                tune(transport.get_extra_info("socket"))
        self._links.add(link)
        return link

    def _reached(self) -> None:
        if self.problem:
            log.info("the owner %s is here", self.address)
        self.problem = ""
        self._said.clear()

    def _say(self, problem: str) -> None:
        """Log a problem of the owner, if it is not known."""
        self.problem = f"the owner {self.address} {problem}"
        if problem not in self._said:
            self._said.add(problem)
            log.warning("%s", self.problem)
        self._settle_first()

    def _settle_first(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _told(self, link: OwnerLink, models: Sequence[tuple[int, Any]]) -> None:
        """Serve what an owner describes from now on.

        Raises:
            ConfigError: A description cannot be used.
        """
        told = [(number, read_description(one)) for number, one in models]
        self._reached()
        self._names = {one.model.config.name for _, one in told}
        told = [(number, one) for number, one in told if not self._only or one.model.config.name in self._only]
        coming: dict[tuple[str, str], _OwnedModel] = {}
        for number, weighed in told:
            key = weighed.model.config.name, weighed.model.config.version
            if number in link.slots:
                continue
            found = self.models.get(key)
            if found is None or found.description != weighed.model:
                if self._is_taken(key):
                    continue
                found = self._made(weighed.model)
            coming[key] = found
            slot = link.slots[number] = OwnerSlot(link, number, found.pool, weighed.model.capacity)
            found.pool.join(slot)
        wanted = {(one.model.config.name, one.model.config.version): one for _, one in told}
        before_it = self._serving
        self._serving = asyncio.get_running_loop().create_task(self._serve(before_it, coming, wanted))

    def _made(self, description: ModelDescription) -> _OwnedModel:
        """Make an endpoint for a version of a model."""
        name, capacity = description.config.name, description.capacity
        pool = OwnerPool(name, str(self.address), description.max_size, capacity, self._options.grace_s)
        config = msgspec.structs.replace(description.config, split=False)  # its owner cuts it
        queue = BatchConfig(max_size=capacity, capacity=capacity, idle="go")
        endpoint = Endpoint(config, queue, pool, keys_of=_alone)
        endpoint.batching = description.batching  # as it is told to clients
        return _OwnedModel(description, pool, description.served_by(endpoint))

    def _is_taken(self, key: tuple[str, str]) -> bool:
        """Tell whether somebody else serves this version of a model, and log that; else it belongs to this owner."""
        name, version = key
        versions = self._app.versions_of(name)
        served = None if versions is None else versions.ready.get(version)
        if served is not None and not isinstance(served.endpoint.pool, OwnerPool):
            other = "this server"
        elif (first := self._claims.setdefault(key, self)) is not self:
            other = f"the owner {first.address}"
        else:
            return False
        text = (
            "the owner %s has a model '%s', version '%s', and so has %s, which was first: "
            "give one of them another `name` or `version`"
        )
        log.warning(text, self.address, name, version, other)
        return True

    async def _serve(
        self,
        before: asyncio.Task[None] | None,
        coming: dict[tuple[str, str], _OwnedModel],
        wanted: dict[tuple[str, str], WeighedModel],
    ) -> None:
        """Let endpoints come and go as the owner says."""
        if before is not None:
            await asyncio.wait((before,))
        for key, model in coming.items():
            if self.models.get(key) is not model:
                await self._load(key, model)
        self._share(wanted)
        for key in [key for key in self.models if key not in wanted]:
            model = self.models.pop(key)
            self._claims.pop(key, None)
            try:
                await self._app.unload(*key, model.served)
            except ForebayError as error:
                log.warning("model '%s' of the owner %s cannot leave: %s", key[0], self.address, error.message)
        missing = sorted(self._only - {name for name, _ in self.models})
        if missing:
            self._say(f"has no model '{missing[0]}'{meant(missing[0], sorted(self._names))}")
        self._settle_first()

    async def _load(self, key: tuple[str, str], model: _OwnedModel) -> None:
        """Let an endpoint take its place."""
        before = self.models.get(key)
        self.models[key] = model
        try:
            await self._app.load(*key, lambda: model.served)
        except ForebayError as error:
            log.warning("model '%s' of the owner %s cannot be served: %s", key[0], self.address, error.message)
            del self.models[key]
            if before is not None:
                self.models[key] = before

    def _share(self, wanted: dict[tuple[str, str], WeighedModel]) -> None:
        """Give the versions of each model the weights that they have at the owner."""
        weights: dict[str, dict[str, int]] = {}
        for (name, version), weighed in wanted.items():
            if (name, version) in self.models and weighed.weight:
                weights.setdefault(name, {})[version] = weighed.weight
        for name, shares in weights.items():
            try:
                self._app.share(name, shares)
            except ForebayError as error:
                log.warning("the versions of '%s' are not shared as the owner has it: %s", name, error.message)


def _alone(_request: Request) -> Sequence[Hashable]:
    """Have each request leave as a batch of its own: its owner forms batches."""
    return _ALONE


_ALONE: Final = (ALONE,)
