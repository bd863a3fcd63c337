# SPDX-License-Identifier: Apache-2.0
"""The writer of a directory: a server that members have joined, and that tells all of them what runs where.

Theory of operation. A member says what it runs, once it is let in and whenever that changes. Its entries leave with its
link. All members are sent the whole directory: a first change at once, those that follow within `PAUSE_S` together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.cluster.directory import MAX_PLACES, Directory, Member, Name
from forebay.errors import InvalidRequest, QueueFull
from forebay.types.first_use import known
from forebay.workers import frames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.owners.caller_link import CallerLink
    from forebay.owners.wire import MemberServings

log = logging.getLogger("forebay.cluster")

PAUSE_S: Final = 0.05
"""How often the directory may change."""
MAX_ENTRIES: Final = 4096
"""Servings of all members together; a directory of that many fits into what readers take."""
MAX_SERVINGS: Final = 256
"""Servings of one member."""


class DirectoryKeeper:
    """Keeps what its members say.

    Attributes:
        directory: What runs where.
    """

    def __init__(self) -> None:
        """Begin without members."""
        self.directory = Directory()
        self._entries: dict[KeptMember, None] = {}
        self._places: Counter[str] = Counter()
        self._is_paused = False
        self._has_news = False

    def receive(self, about: Mapping[str, Any]) -> KeptMember:
        """Make what keeps a member that dials in.

        Raises:
            InvalidRequest: Its hello does not say what it is called.
        """
        name = about.get("worker")
        if not isinstance(name, str) or not 16 <= len(name) <= 128:
            raise InvalidRequest("its hello does not say the name of the member, of 16 to 128 characters")
        return KeptMember(self, name)

    def begin(self, entry: KeptMember) -> None:
        """Note that a member is let in; one of the same name is a link of it that it has given up."""
        for other in [one for one in self._entries if one.id == entry.id]:
            other.forget()
        self._entries[entry] = None
        entry.tell(_frame(self.directory))

    def end(self, entry: KeptMember) -> None:
        """Note that a member is gone."""
        if entry in self._entries:
            del self._entries[entry]
            self.replace(entry, {})

    def replace(self, entry: KeptMember, servings: dict[str, Member]) -> None:
        """Note what a member runs from now on.

        Raises:
            QueueFull: There is no room for that.
        """
        places = self._places - Counter([*entry.servings]) + Counter([*servings])
        if len(servings) > len(entry.servings) and places.total() > MAX_ENTRIES:
            raise QueueFull(f"all members together may run {MAX_ENTRIES} servings")
        if crowded := [name for name in servings if places[name] > MAX_PLACES]:
            raise QueueFull(f"{MAX_PLACES} members run '{crowded[0]}' already")
        self._places = places
        if servings != entry.servings:
            entry.servings = servings
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
        self.directory = self.directory.changed(members={name: tuple(its) for name, its in members.items()})
        frame = _frame(self.directory)
        for entry in self._entries:
            entry.tell(frame)


class KeptMember:
    """One member, as the keeper of the directory sees it.

    Attributes:
        id: What it calls itself.
        servings: What it runs.
    """

    def __init__(self, keeper: DirectoryKeeper, id: str) -> None:
        self.id = id
        self.servings: dict[str, Member] = {}
        self._keeper = keeper
        self._link: CallerLink | None = None

    def begin(self, link: CallerLink) -> None:
        """Note that it is let in."""
        self._link = link
        self._keeper.begin(self)

    def heard(self, said: MemberServings) -> None:
        """Note what it runs.

        Raises:
            InvalidRequest: That cannot be.
        """
        if len(said.servings) > MAX_SERVINGS:
            raise InvalidRequest(f"it runs {len(said.servings)} servings, at most {MAX_SERVINGS} are possible")
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
