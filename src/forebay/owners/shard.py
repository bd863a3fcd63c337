# SPDX-License-Identifier: Apache-2.0
"""One address of an owner: it is dialled, and dialled again when its link ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Protocol

import msgspec

from forebay.owners.owner_link import FLAG, OwnerLink, dialled
from forebay.workers.wire.address import Address, UnixAddress
from forebay.workers.wire.redialling import MAX_PAUSE_S, REFUSED_PAUSE_S, Pauses
from forebay.workers.wire.tls_files import TlsFiles, why_no_tls


class LinkOptions(msgspec.Struct):
    """What all links of a front have in common.

    Attributes:
        name: What the front calls itself.
        secret: What both sides must know; links that are made later prove another one.
        tls: How connections to other machines are encrypted; None if they are not.
    """

    name: str
    secret: bytes | None
    tls: TlsFiles | None


class ShardedOwner(Protocol):
    """The owner, as a shard sees it."""

    address: Address

    def make_link(self, place: str) -> OwnerLink:
        """Return the front's end of a link."""
        ...

    async def look_up(self) -> Sequence[str]:
        """Return the addresses that its name stands for."""
        ...

    def opened(self, link: OwnerLink) -> None:
        """Note a connection."""
        ...

    def forget(self, link: OwnerLink) -> None:
        """Have nothing served by a link any more."""
        ...

    def away(self, why: str, place: str) -> None:
        """Note that an attempt to dial has failed, or that a link has ended."""
        ...


class Shard:
    """One address of an owner.

    Attributes:
        host: The address; empty while it is the only one, and looked up for each attempt.
    """

    def __init__(self, owner: ShardedOwner, host: str, tls: TlsFiles | None) -> None:
        """Describe it."""
        self.host = host
        self._owner = owner
        self._tls = tls
        self._link: OwnerLink | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def peer(self) -> str:
        """The address that it is connected with; empty if it is not."""
        peer = None if self._link is None or self._link.ended.done() else self._link.peer
        return "" if peer is None else peer[0]

    @property
    def place(self) -> str:
        """Which of several it is, as the end of a name."""
        return f" at {self.host}" if self.host else ""

    def start(self) -> None:
        """Begin to dial."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def stop(self) -> None:
        """Dial no more."""
        if self._keeping is not None:
            self._keeping.cancel()

    def leave(self) -> None:
        """Dial no more; the link ends once all that was handed on is answered."""
        self.stop()
        if self._link is not None:
            self._owner.forget(self._link)
            self._link.leave()

    async def _keep(self) -> None:
        """Keep a link to the owner, as long as it is wanted."""
        pauses = Pauses()
        while True:
            most_s = MAX_PAUSE_S
            try:
                link = await self._dial()
                reason = await asyncio.shield(link.greeted)
                if reason:
                    most_s = REFUSED_PAUSE_S if link.problem else MAX_PAUSE_S
                else:
                    pauses.begin_again()
                    reason = await asyncio.shield(link.ended)
            except ssl.SSLError as error:
                most_s = REFUSED_PAUSE_S
                reason = f"it {why_no_tls(error, FLAG)}"
            except OSError as error:
                reason = f"it cannot be reached: {error.strerror or error or 'it does not answer'}"
            self._owner.away(reason, self.place)
            await asyncio.sleep(pauses.next_s(most_s))

    async def _dial(self) -> OwnerLink:
        """Connect; raises an `OSError` if nobody is there."""
        address = self._owner.address
        if isinstance(address, UnixAddress):
            hosts: Sequence[str | None] = (None,)
        else:
            hosts = [self.host] if self.host else await self._owner.look_up()
        link = await self._reach(hosts)
        self._link = link
        self._owner.opened(link)
        return link

    async def _reach(self, hosts: Sequence[str | None]) -> OwnerLink:
        """Connect with the first of these addresses that answers; raises the last `OSError` if none does."""
        problem = OSError("its name has no address")
        for host in hosts:
            try:
                return await dialled(self._owner.address, self._tls, self._make_link, host)
            except OSError as error:
                problem = error
        raise problem

    def _make_link(self) -> OwnerLink:
        return self._owner.make_link(self.place)
