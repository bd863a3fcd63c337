# SPDX-License-Identifier: Apache-2.0
"""The writer of a directory: a server that members have joined, and that tells all of them what runs where.

Theory of operation. A member says what it runs, once it is let in and whenever that changes. Its entries leave with its
link. All members are sent the whole directory: a first change at once, those that follow within `PAUSE_S` together.

Servers that are peers hear from each other what their members run (see `peer_servers.py`), each only of its own: so
nothing goes in circles, and what a server says leaves with it. Its members have `LINGER_S` to join at another server
before their entries leave. A member is listed as the nearest source says: one that has joined here as it says itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.cluster.directory import MAX_PLACES, Directory, Member, Name
from forebay.errors import InvalidRequest, QueueFull
from forebay.types.first_use import known
from forebay.workers.wire import frames

if TYPE_CHECKING:
    from forebay.owners.caller_link import CallerLink
    from forebay.owners.wire import MemberServings

    Listing = Mapping[str, tuple[Member, ...]]

log = logging.getLogger("forebay.cluster")

PAUSE_S: Final = 0.05
"""How often the directory may change."""
MAX_ENTRIES: Final = 4096
"""Servings of all members together; a directory of that many fits into what readers take."""
MAX_SERVINGS: Final = 256
"""Servings of one member."""
LINGER_S: Final = 10.0
"""How long members of a peer that is gone stay listed: 5 s until they notice, and as long to join at another server."""


class DirectoryKeeper:
    """Keeps what its members say, and what its peers say of theirs.

    Attributes:
        id: What this server is called among its peers.
        directory: What runs where.
    """

    def __init__(self) -> None:
        """Begin without members."""
        self.id = secrets.token_hex(16)
        self.directory = Directory()
        self._own = Directory()
        self._told: dict[str, Listing] = {}
        self._lingering: dict[str, Listing] = {}
        self._nodes: dict[str, str] = {}
        self._is_crowded = False
        self._entries: dict[KeptMember, None] = {}
        self._places: Counter[str] = Counter()
        self._is_paused = False
        self._has_news = False

    def receive(self, about: Mapping[str, Any]) -> KeptMember:
        """Make what keeps a member that dials in, or a peer.

        Raises:
            InvalidRequest: Its hello does not say what it is called.
        """
        name = about.get("worker")
        if not isinstance(name, str) or not 16 <= len(name) <= 128:
            raise InvalidRequest("its hello does not say the name of the member, of 16 to 128 characters")
        return KeptMember(self, name, is_peer=about.get("role") == frames.PEER)

    def begin(self, entry: KeptMember) -> None:
        """Note that a member is let in; one of the same name is a link of it that it has given up."""
        for other in [one for one in self._entries if one.id == entry.id]:
            other.forget()
        self._entries[entry] = None
        entry.tell(_frame(self._own if entry.is_peer else self.directory))

    def end(self, entry: KeptMember) -> None:
        """Note that a member is gone."""
        if entry in self._entries:
            del self._entries[entry]
            self.replace(entry, {})

    def replace(self, entry: KeptMember, servings: dict[str, Member]) -> None:
        """Note what a member runs from now on; raises a `QueueFull` if there is no room for that."""
        places = self._places - Counter([*entry.servings]) + Counter([*servings])
        if len(servings) > len(entry.servings) and places.total() > MAX_ENTRIES:
            raise QueueFull(f"all members together may run {MAX_ENTRIES} servings")
        if crowded := [name for name in servings if places[name] > MAX_PLACES]:
            raise QueueFull(f"{MAX_PLACES} members run '{crowded[0]}' already")
        self._places = places
        if servings != entry.servings:
            entry.servings = servings
            self._change()

    def name_peers(self, addresses: Iterable[str]) -> None:
        """Tell members where else they may join."""
        self._nodes = {one: one for one in addresses}
        self._change()

    def hear(self, peer: str, listing: Listing) -> None:
        """Note what the members of a peer run from now on."""
        self._told[peer] = listing
        self._change()

    def lose(self, peer: str) -> None:
        """Note that a peer is gone; its members may join elsewhere."""
        listing = self._told.pop(peer, None)
        if listing:
            self._lingering[peer] = listing
            asyncio.get_running_loop().call_later(LINGER_S, self._drop, peer, listing)

    def _drop(self, peer: str, listing: Listing) -> None:
        if self._lingering.get(peer) is listing:
            del self._lingering[peer]
            self._change()

    def _change(self) -> None:
        self._has_news = True
        if not self._is_paused:
            self._publish()

    def _publish(self) -> None:
        self._is_paused = self._has_news
        if not self._has_news:
            return
        self._has_news = False
        asyncio.get_running_loop().call_later(PAUSE_S, self._publish)
        members: dict[str, list[Member]] = {}
        for entry in self._entries:
            for name, member in entry.servings.items():
                members.setdefault(name, []).append(member)
        own, whole = self._own, self.directory
        self._own = own.changed(members={name: tuple(its) for name, its in members.items()})
        self._add_others(members)
        its = {name: tuple(its) for name, its in members.items()}
        self.directory = whole.changed(members=its, nodes=self._nodes)
        frames_of = {
            True: (_frame(self._own), self._own is own),
            False: (_frame(self.directory), self.directory is whole),
        }
        for entry in self._entries:
            frame, is_known = frames_of[entry.is_peer]
            if not is_known:
                entry.tell(frame)

    def _add_others(self, members: dict[str, list[Member]]) -> None:
        """Add what peers say, each member as the first says that knows it; only so many as readers take."""
        source_of = {entry.id: -1 for entry in self._entries}
        count, left_out = sum(map(len, members.values())), 0
        for source, listing in enumerate([*self._told.values(), *self._lingering.values()]):
            for name, its in listing.items():
                for member in its:
                    if source_of.setdefault(member.id, source) != source:
                        continue
                    if count >= MAX_ENTRIES or len(members.get(name, ())) >= MAX_PLACES:
                        left_out += 1
                        continue
                    members.setdefault(name, []).append(member)
                    count += 1
        if left_out and not self._is_crowded:
            log.warning("too many servings of members of other servers; %d are not listed here", left_out)
        self._is_crowded = left_out > 0


class KeptMember:
    """One member, as the keeper of the directory sees it, or a peer, which runs no servings.

    Attributes:
        id: What it calls itself.
        is_peer: Whether it is a peer, which is told of the members of this server only.
        servings: What it runs.
    """

    def __init__(self, keeper: DirectoryKeeper, id: str, *, is_peer: bool = False) -> None:
        self.id = id
        self.is_peer = is_peer
        self.servings: dict[str, Member] = {}
        self._keeper = keeper
        self._link: CallerLink | None = None

    def begin(self, link: CallerLink) -> None:
        """Note that it is let in."""
        self._link = link
        self._keeper.begin(self)

    def heard(self, said: MemberServings) -> None:
        """Note what it runs; raises an `InvalidRequest` if that cannot be."""
        if self.is_peer:
            raise InvalidRequest("it says which servings it runs, and is a server")
        if len(said.servings) > MAX_SERVINGS:
            raise InvalidRequest(f"expected at most {MAX_SERVINGS} servings, got {len(said.servings)}")
        told = {
            name: {"id": self.id, "address": said.address, "weight": weight, "protocol": said.protocol}
            for name, weight in said.servings
        }
        if len(told) < len(said.servings):
            raise InvalidRequest("it says a serving twice")
        try:
            servings = msgspec.convert(told, known(dict[Name, Member]))
            self._keeper.replace(self, servings)
        except (msgspec.ValidationError, QueueFull) as error:
            raise InvalidRequest(f"what it runs cannot be listed: {error}") from error
        log.info("the member at %s runs %s", said.address, ", ".join(map(repr, servings)) or "no servings")

    def end(self) -> None:
        """Note that it is gone."""
        self._link = None
        self._keeper.end(self)

    def forget(self) -> None:
        """Hang up on it: it has come by another link."""
        if self._link is not None:
            self._link.stop()
        self.end()

    def tell(self, frame: bytes) -> None:
        """Send it the directory."""
        if self._link is not None:
            self._link.write(frame)


def _frame(directory: Directory) -> bytes:
    return frames.encode(["directory", directory.encode()])
