# SPDX-License-Identifier: Apache-2.0
"""One owner of a front: it is dialled, and dialled again when its link ends. What it says it serves is kept by link.

Theory of operation. The name of an owner may have several addresses. Then each of them is a shard, with a link of its
own. The name is looked up whenever a link has ended, and now and then; shards come and go as it says. While it has one
address, that is looked up for each attempt to dial, since another process at another address may be its successor.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.owners.owner_link import OwnerLink
from forebay.owners.shard import LinkOptions, Shard
from forebay.owners.shards import MAX_SHARDS, shard_hosts
from forebay.workers.user_calls.hanging_calls import Late, LoopThreads
from forebay.workers.wire.address import Address, TcpAddress

if TYPE_CHECKING:
    from forebay.owners.model_description import WeighedModel

log = logging.getLogger("forebay.owners")

LOOK_UP_S: Final = 30.0
"""Time between two looks at the addresses of a name."""
PAUSE_S: Final = 1.0
"""Shortest time between them: links may end one after the other."""
LOOK_UP_WITHIN_S: Final = 4.0
"""Time in which a name must be resolved; after that the addresses known before hold."""


class OwnedVersion(msgspec.Struct, frozen=True):
    """A version of a model, as one link to its owner tells of it.

    Attributes:
        link: The link.
        number: What the owner calls it.
        weighed: Its description.
    """

    link: OwnerLink
    number: int
    weighed: WeighedModel


class Owner:
    """A server whose models are served here as well, or several of one name.

    Attributes:
        address: Where it is.
        only: The names of the models that are wanted of it; empty for all.
        problem: Why it serves nothing here; empty if it does.
    """

    def __init__(
        self, address: Address, options: LinkOptions, on_change: Callable[[Owner, Iterable[str]], object]
    ) -> None:
        """Describe it; `on_change` is given the names of models of which it says something else than before."""
        self.address = address
        self.only: frozenset[str] = frozenset()
        self.problem = f"the owner {address} has not answered yet"
        self._options = options
        self._on_change = on_change
        self._shards: dict[str, Shard] = {}
        self._links: dict[OwnerLink, dict[str, list[OwnedVersion]]] = {}
        self._open: set[OwnerLink] = set()
        self._first: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lookup: asyncio.Task[list[tuple[int, str]]] | None = None
        self._threads = LoopThreads(1)
        self._has_news = asyncio.Event()
        self._said: set[str] = set()

    @property
    def is_here(self) -> bool:
        """Whether it has said what it serves, and takes requests."""
        return bool(self._links)

    @property
    def names(self) -> dict[str, None]:
        """The names of the models that it has, in its order."""
        return dict.fromkeys(name for told in self._links.values() for name in told)

    @property
    def elsewhere(self) -> dict[str, str]:
        """The names of models that it hands on itself, each with the address of their owner."""
        return {name: owner for link in self._links for name, owner in link.elsewhere.items()}

    def has(self, name: str) -> bool:
        """Tell whether it has a model of that name which is wanted."""
        return self.may_serve(name) and name in self.names

    def may_serve(self, name: str) -> bool:
        """Tell whether a model of that name is wanted of it."""
        return not self.only or name in self.only

    def versions(self, name: str) -> list[OwnedVersion]:
        """Return what its links tell of a model."""
        return [one for told in self._links.values() for one in told.get(name, ())]

    def start(self) -> asyncio.Future[None]:
        """Begin to dial; returns what is done once the first attempt is over."""
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        is_name = isinstance(self.address, TcpAddress) and not _is_literal(self.address.host)
        self._dial([""])
        if is_name:
            self._watching = loop.create_task(self._watch())
        return self._first

    def begun(self) -> None:
        """Note that the first attempt is over."""
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def leave(self) -> None:
        """Dial no more; links end once all that was handed on is answered."""
        self._hang_up(OwnerLink.leave)

    def stop(self) -> None:
        """Dial no more, and hang up."""
        self._hang_up(OwnerLink.close)

    def _hang_up(self, how: Callable[[OwnerLink], object]) -> None:
        self.begun()
        if self._watching is not None:
            self._watching.cancel()
        if self._lookup is not None:
            self._lookup.cancel()
        self._threads.close()
        for shard in self._shards.values():
            shard.stop()
        for link in [*self._open]:
            how(link)

    def say(self, problem: str) -> None:
        """Log a problem of the owner, if it is not known."""
        self.problem = f"the owner {self.address} {problem}"
        self.say_once(self.problem)

    def say_once(self, text: str) -> None:
        """Log a sentence about the owner, if that was not done since it last said what it has."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

    async def look_up(self) -> list[str]:
        """Return the addresses of the owner, one after the other; shards come and go with them.

        Raises:
            OSError: It has none, or they are not known in time.
        """
        if self._lookup is None:
            self._lookup = asyncio.get_running_loop().create_task(self._resolve())
            self._lookup.add_done_callback(self._looked_up)
        found = await asyncio.shield(self._lookup)
        if found:
            self._follow(shard_hosts(found))
        return list(dict.fromkeys(host for _, host in found))

    async def _resolve(self) -> list[tuple[int, str]]:
        """Return families and addresses."""
        address = self.address
        assert isinstance(address, TcpAddress)
        made: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

        def done(found: Any, error: BaseException | None) -> None:
            if error is None:
                made.set_result(found)
            else:
                made.set_exception(TimeoutError("its name is not resolved in time") if type(error) is Late else error)

        call = self._threads.call(
            lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM),
            time.monotonic() + LOOK_UP_WITHIN_S,
            done,
        )
        try:
            return [(int(family), str(place[0])) for family, *_, place in await made]
        finally:
            call.drop()

    def _looked_up(self, lookup: asyncio.Future[Any]) -> None:
        self._lookup = None
        if not lookup.cancelled():
            lookup.exception()  # whoever waited has it

    async def _watch(self) -> None:
        """Look up the name whenever a link has ended, and now and then."""
        while True:
            self._has_news.clear()
            try:
                await self.look_up()
            except OSError as error:
                log.debug("the addresses of the owner %s are not known: %s", self.address, error)
            await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(LOOK_UP_S):
                    await self._has_news.wait()
            except TimeoutError:
                continue

    def _follow(self, hosts: Sequence[str]) -> None:
        """Dial these addresses and no others; a single one that is new is dialled by its name."""
        if len(hosts) > MAX_SHARDS:
            self.say_once(f"the owner {self.address} has {len(hosts)} addresses; {MAX_SHARDS} of them are dialled")
            hosts = hosts[:MAX_SHARDS]
        if len(hosts) == 1:
            hosts = [host for host in hosts if host in self._shards] or [""]
        elif (one := self._shards.get("")) is not None and one.peer in hosts:
            one.host = one.peer
            self._shards[one.host] = self._shards.pop("")
        self._dial(hosts)

    def _dial(self, hosts: Sequence[str]) -> None:
        for host in [host for host in self._shards if host not in hosts]:
            self._shards.pop(host).leave()
        for host in hosts:
            if host not in self._shards:
                shard = self._shards[host] = Shard(self, host, self._options.tls)
                shard.start()

    def make_link(self, place: str) -> OwnerLink:
        """Return the front's end of a link, to the shard that is called so."""
        options = self._options
        link = OwnerLink(options.name, options.secret, self._told, self._ended, self._open.discard)
        link.place = place
        return link

    def opened(self, link: OwnerLink) -> None:
        """Note a connection."""
        if link.is_connected:
            self._open.add(link)

    def forget(self, link: OwnerLink) -> None:
        """Have nothing served by a link any more."""
        told = self._links.pop(link, None)
        if told is not None:
            self._on_change(self, told.keys())

    def away(self, why: str, place: str) -> None:
        """Note that an attempt to dial has failed, or that a link has ended."""
        text = f"the owner {self.address}{place} is unreachable: {why}"
        if not self._links:
            self.problem = text
        self.say_once(text)
        self.begun()

    def _told(self, link: OwnerLink, models: Sequence[tuple[int, WeighedModel]]) -> None:
        """Note what an owner describes from now on."""
        told: dict[str, list[OwnedVersion]] = {}
        for number, weighed in models:
            told.setdefault(weighed.model.config.name, []).append(OwnedVersion(link, number, weighed))
        if link.ended.done() or (link.is_leaving and link not in self._links):
            return
        if link not in self._links:
            log.info("connected to the owner %s%s", self.address, link.place)
        self.problem = ""
        self._said.clear()
        before = self._links.get(link, {})
        self._links[link] = told
        self._on_change(self, {**told, **before})

    def _ended(self, link: OwnerLink) -> None:
        self._has_news.set()
        self.forget(link)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
