# SPDX-License-Identifier: Apache-2.0
"""The peers of a server that keeps a directory: it dials each of them, and hears what runs on members of theirs.

A peer that cannot be reached is dialled again as an owner is. Members that are told of a peer on another machine could
not call what listens on that machine only, so such entries are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.cluster.directory import MAX_NAME, Member, read_directory
from forebay.errors import ConfigError
from forebay.owners.owner_link import OwnerLink
from forebay.owners.shard import LinkOptions, Shard
from forebay.server.links import Links
from forebay.workers.wire import frames
from forebay.workers.wire.address import Address, TcpAddress, UnixAddress, parse_address

if TYPE_CHECKING:
    from forebay.cluster.keeper import DirectoryKeeper

log = logging.getLogger("forebay.cluster")

MAX_PEERS: Final = 1024
_UNHEARD: Final = "it has not answered yet"


class PeerServers(Links):
    """All peers of a server."""

    def __init__(self, keeper: DirectoryKeeper, options: LinkOptions, own: Address) -> None:
        """Begin without any, see `want`; `own`, where this server is dialled, is not dialled if among them."""
        self._keeper = keeper
        self._options = options
        self._own = own
        self._peers: dict[Address, PeerServer] = {}
        self._wanted: list[Address] = []
        self._is_up = False

    def want(self, addresses: Sequence[str]) -> None:
        """Have these peers from now on, and no others; called on the loop, or before the start.

        Raises:
            ConfigError: One is not an address, or there are too many; nothing has changed.
        """
        self._wanted = read_peers(addresses)
        if self._is_up:
            self._dial()

    @property
    def problems_of(self) -> dict[str, str]:
        """Why peers are away, by their addresses; empty for those that are here."""
        return {str(address): peer.problem for address, peer in self._peers.items()}

    def prove(self, secret: bytes) -> None:
        """Prove this secret to peers that are dialled from now on."""
        self._options.secret = secret

    async def start(self) -> None:
        """Begin to dial."""
        self._is_up = True
        self._dial()

    def stop(self) -> None:
        """Hang up."""
        for peer in self._peers.values():
            peer.stop()

    def _dial(self) -> None:
        before, self._peers = self._peers, {}
        for address in self._wanted:
            if address != self._own:
                self._peers[address] = before.pop(address, None) or PeerServer(self._keeper, address, self._options)
        for peer in before.values():
            peer.stop()
        self._keeper.name_peers(map(str, self._wanted))


class PeerLink(OwnerLink):
    """The link to one of them."""

    told_as = frames.PEER


class PeerServer:
    """One of them.

    Attributes:
        address: Where it is.
        problem: Why it is away; empty if it is here.
    """

    def __init__(self, keeper: DirectoryKeeper, address: Address, options: LinkOptions) -> None:
        """Begin to dial it."""
        self.address = address
        self._keeper = keeper
        self._options = options
        self.problem = _UNHEARD
        self._has_warned = False
        self._links: set[OwnerLink] = set()
        self._shard = Shard(self, "", options.tls)
        self._shard.start()

    def stop(self) -> None:
        """Dial no more, and hang up."""
        self._shard.stop()
        for link in [*self._links]:
            link.close()

    def make_link(self, place: str) -> OwnerLink:
        """Return this side of a link."""
        options = self._options
        return PeerLink(options.name, options.secret, _ignore, self.forget, self._links.discard, self._hear, _ignore)

    async def look_up(self) -> Sequence[str]:
        """Return what is dialled: the first address of the name that answers."""
        return [self.address.host] if isinstance(self.address, TcpAddress) else []

    def opened(self, link: OwnerLink) -> None:
        """Note a connection."""
        self._links.add(link)

    def forget(self, link: OwnerLink) -> None:
        """Note that it says nothing more."""
        self._keeper.lose(str(self.address))

    def away(self, why: str, place: str) -> None:
        """Note that an attempt to dial has failed, or that a link has ended."""
        if self.problem in {"", _UNHEARD}:
            log.warning("the peer %s is unreachable: %s", self.address, why)
        self.problem = why

    def _hear(self, link: OwnerLink, data: bytes) -> None:
        """Take what its members run."""
        directory = read_directory(data)
        if link.ended.done():
            return  # its members go elsewhere, and are listed until they have arrived
        if self.problem:
            log.info("connected to the peer %s; both servers share their members", self.address)
        self.problem = ""
        self._keeper.hear(str(self.address), {name: self._callable(its) for name, its in directory.members.items()})

    def _callable(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Return those that can be called from here."""
        if isinstance(self.address, UnixAddress) or self.address.is_loopback:
            return members
        found = tuple(one for one in members if not _is_local(one.address))
        if len(found) < len(members) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a program at the peer %s listens on a local address, so other machines cannot call it: "
                "let it join by the address %s, or name where it listens: join(ADDRESS, listen='tcp:HOST:0')",
                self.address,
                self.address,
            )
        return found


def read_peers(addresses: Sequence[str]) -> list[Address]:
    """Return the addresses of peers, each once; raises a `ConfigError` if one is none, or there are too many."""
    if len(addresses) > MAX_PEERS:
        raise ConfigError(f"{len(addresses)} servers are to know of each other's members, at most {MAX_PEERS} may")
    if long := [one for one in addresses if len(one) > MAX_NAME]:
        raise ConfigError(f"expected an address of at most {MAX_NAME} characters, got {len(long[0])}: {long[0]}")
    try:
        return [*dict.fromkeys(map(parse_address, addresses))]
    except ConfigError as error:  # not one of a file, where it is looked at with its line
        raise ConfigError(f"--attach-peer: {error.message}") from error


def _is_local(address: str) -> bool:
    try:
        parsed = parse_address(address)
    except ConfigError:
        return True
    return isinstance(parsed, UnixAddress) or parsed.is_loopback


def _ignore(*_: Any) -> None:
    """The models of the server are not servings."""
