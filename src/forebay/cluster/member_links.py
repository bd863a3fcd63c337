# SPDX-License-Identifier: Apache-2.0
"""The links from this program to members whose servings it calls: each is dialled for the first call, and kept."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.cluster.call_params import NOT_TAKEN
from forebay.cluster.directory import Directory, Member, Name
from forebay.errors import ConfigError, InvalidRequest, ServingNotFound
from forebay.owners.owner_link import GREET_S, OwnerLink, dialled
from forebay.types.call import Failure
from forebay.types.first_use import known
from forebay.workers.memory.landing import Places
from forebay.workers.wire.address import parse_address
from forebay.workers.wire.tls_files import TlsFiles, why_no_tls

if TYPE_CHECKING:
    from forebay.owners.owner_pool import OwnerSlot
    from forebay.types.batch import Done, EntryBatch

AVOID_S: Final = 1.0
"""How long a member that could not be reached comes after all others."""
MAX_AVOIDED: Final = 1024


class DescribedServing(msgspec.Struct, frozen=True):
    """What a member tells of a serving."""

    serving: Name


class MemberLinks:
    """The links of one program; lives on its loop, and is the pool of their slots.

    Attributes:
        bodies: Where inputs lie that a member on this machine reads.
    """

    def __init__(self, name: str, secret: bytes | None, tls: TlsFiles | None) -> None:
        """Begin without a link."""
        self.bodies = Places()
        self.row_s = 0.0
        self._name = name
        self._secret = secret
        self._tls = tls
        self._links: dict[str, asyncio.Task[OwnerLink]] = {}
        self._numbers: dict[OwnerLink, dict[str, int]] = {}
        self._all: set[OwnerLink] = set()
        self._avoided: dict[str, float] = {}

    @property
    def avoided(self) -> set[str]:
        """Ids of members that could not be reached a moment ago."""
        now = time.monotonic()
        self._avoided = {one: until for one, until in self._avoided.items() if until > now}
        return {*self._avoided}

    @property
    def is_connected(self) -> bool:
        """Whether a connection is there, be it that it is being closed."""
        return bool(self._all)

    async def reach(self, member: Member, serving: str) -> OwnerSlot | str:
        """Return where calls of a serving of a member go, or why there is no way, as a sentence about the member."""
        opening = self._links.get(member.id)
        if opening is None:
            opening = self._links[member.id] = asyncio.get_running_loop().create_task(self._open(member))
        try:
            link = await asyncio.shield(opening)
        except ssl.SSLError as error:
            return self._lost(member, why_no_tls(error, ""))
        except (OSError, ConfigError) as error:
            return self._lost(member, f"cannot be reached: {getattr(error, 'strerror', None) or error}")
        number = self._numbers.get(link, {}).get(serving)
        if number is None:
            return f"{member.address} does not run it any more"
        return link.slots.get(number) or f"{member.address} is being stopped"

    def keep(self, directory: Directory) -> None:
        """Hang up on those that are not members any more, once their calls are over."""
        listed = {member.id for members in directory.members.values() for member in members}
        for name, opening in [*self._links.items()]:
            if name not in listed and opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().leave()

    def close(self) -> None:
        """Hang up on all."""
        for opening in [*self._links.values()]:
            opening.cancel()
        for link in [*self._all]:
            link.give_up("this program leaves the cluster")
        self.bodies.close()

    def freed(self, slot: OwnerSlot, rows: int) -> None:
        """Nothing waits for room here: the member says if it has none."""

    def uses(self, slot: OwnerSlot) -> bool:
        """Tell that links are kept for the calls that are under way, and not for slots."""
        return False

    def retire(self, slot: OwnerSlot) -> None:
        """Nothing is handed on by a link that has ended: it is not found any more."""

    def hand_back(self, slot: OwnerSlot, batch: EntryBatch, done: Done) -> None:
        """Have a call that a member has not taken sent to another one."""
        done(batch, [_not_taken("is being stopped")])

    def gone(self, slot: OwnerSlot) -> None:
        """Have calls sent to another member if nothing of their answers has come; their callers know that."""
        for sitting in slot.seating.clear():
            sitting.done(sitting.batch, [_not_taken("was lost")])

    def _lost(self, member: Member, why: str) -> str:
        if len(self._avoided) < MAX_AVOIDED:
            self._avoided[member.id] = time.monotonic() + AVOID_S
        return f"{member.address} {why}"

    async def _open(self, member: Member) -> OwnerLink:
        """Connect to a member.

        Raises:
            OSError: It cannot be reached, or is not a member that this program may call.
            ConfigError: Its address is none.
        """
        link: OwnerLink | None = None
        try:
            address = parse_address(member.address)
            link = await dialled(address, self._tls, lambda: self._made(member.id))
            self._all.add(link)
            async with asyncio.timeout(GREET_S):
                problem = await asyncio.shield(link.greeted)
            if problem:
                raise ConnectionError(problem)
        except BaseException as error:
            self._forget(member.id)
            if link is not None:
                link.give_up(f"it cannot be called: {error}")
            raise
        return link

    def _made(self, id: str) -> OwnerLink:
        def end(link: OwnerLink) -> None:
            self._numbers.pop(link, None)
            opening = self._links.get(id)
            if opening is not None and opening.done() and not opening.cancelled() and not opening.exception():
                self._forget(id)

        return OwnerLink(self._name, self._secret, self._described, end, self._all.discard, read=_read)

    def _forget(self, id: str) -> None:
        self._links.pop(id, None)

    def _described(self, link: OwnerLink, told: Sequence[tuple[int, DescribedServing]]) -> None:
        """Note which servings a member has; raises an `InvalidRequest` if it tells of one twice."""
        numbers = {described.serving: number for number, described in told}
        if len(set(numbers.values())) < len(told):
            raise InvalidRequest("it tells of a serving twice")
        self._numbers[link] = numbers
        wanted = set(numbers.values())
        for number in [one for one, slot in link.slots.items() if one not in wanted and not slot.seating.open]:
            del link.slots[number]
        for number in wanted:
            link.slot(number, self, 0)


def _read(told: Any) -> DescribedServing:
    """Read what a member tells of a serving; raises an `InvalidRequest` if it is something else."""
    try:
        return msgspec.convert(told, known(DescribedServing))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"what it tells of a serving cannot be used: {error}") from error


def _not_taken(why: str) -> Failure:
    return Failure(ServingNotFound(why, detail=NOT_TAKEN))
