# SPDX-License-Identifier: Apache-2.0
"""The pool of a model that another server owns: what runs its batches is a link to that server.

Theory of operation. What came in a turn of the loop is a batch here, so that its requests share the cost of the way;
each of them is answered by itself, since the batches that run are formed in the owner's queue. A link is a slot with
any number of seats. How many samples may be under way is the room in the owner's queue, as it was told with the last
answers: without room a request is refused as by a full queue here, unless less than one batch is under way, so that a
front which hears of no answers still finds out.

A link that is gone has its requests handed on to the next one, once. If none comes within `grace_s`, the pool answers
everything with the reason, until there is one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec

from forebay.errors import InvalidRequest, QueueFull, Unavailable
from forebay.owners.request_seats import SEATS, RequestSeats
from forebay.owners.shards import roomiest
from forebay.owners.wire import MAX_CHARGED, EndedSeat, ModelAnswers
from forebay.types.call import Failure
from forebay.types.tenant import OTHER, Tenant
from forebay.workers.memory.landing import Places
from forebay.workers.pool import PoolStatistics
from forebay.workers.pools.slot_pool import SlotPool

if TYPE_CHECKING:
    from forebay.owners.owner_link import OwnerLink
    from forebay.types.batch import Done, Entry, EntryBatch
    from forebay.workers.pools.seating import Sitting

AWAY: Final = "is unreachable"
MISSING: Final = "has no such model now"


class LinkPool(Protocol):
    """What hands requests on by slots of links, and what becomes of them when a link ends.

    Attributes:
        bodies: Where they land; an owner on this machine may read them there.
        row_s: Seconds in which a row of this server is answered where the queue is full, as its owner said last.
    """

    bodies: Places
    row_s: float

    def uses(self, slot: OwnerSlot) -> bool:
        """Tell whether requests are handed on by a slot."""
        ...

    def freed(self, slot: OwnerSlot, rows: int) -> None:
        """So many samples are under way no longer."""
        ...

    def hand_back(self, slot: OwnerSlot, batch: EntryBatch, done: Done) -> None:
        """Requests were not taken."""
        ...

    def retire(self, slot: OwnerSlot) -> None:
        """Hand nothing more on by a slot."""
        ...

    def gone(self, slot: OwnerSlot) -> None:
        """The link of a slot has ended, with what was handed on by it."""
        ...


class OwnerSlot:
    """One model, as a link to its owner sees it.

    Attributes:
        number: What the owner calls it.
        worker: The link.
        seating: The requests that were handed on.
        kept: Of each, what lies in memory for the owner to read.
    """

    owes_since: float | None = None
    untaken_bytes: int = 0

    def __init__(self, link: OwnerLink, number: int, pool: LinkPool, room: int) -> None:
        """Begin with nothing under way, and so much room at the owner."""
        self.number = number
        self.worker = link
        self.pool = pool
        self.seating = RequestSeats(self._allow, self._leave)
        self._link = link
        self._room = room
        self._sent = 0
        self._heard = 0
        self.joins: list[Any] = []
        self.bodies: list[Any] = []
        self.following: list[Any] = []
        self.kept: dict[int, list[memoryview]] = {}
        self.leaves: list[int] = []
        self.allows: list[tuple[int, int]] = []
        self.tokens: dict[str, tuple[int, int]] = {}

    @property
    def credit(self) -> int:
        """Samples for which the owner has room, less those that it has not counted."""
        return self._room - (self._sent - self._heard)

    @property
    def is_in_use(self) -> bool:
        """Whether the pool hands requests on by it, or waits for answers."""
        return bool(self.seating.open) or self.pool.uses(self)

    @property
    def under_way(self) -> int:
        """Samples that were handed on and not answered."""
        return SEATS - self.seating.free

    def run(self, batch: EntryBatch, done: Done) -> None:
        """Hand requests on."""
        self._sent += batch.rows
        sitting = self.seating.join(batch, done)
        self._link.hand_on(self, sitting.name, batch.entries)

    def hear(self, told: ModelAnswers, parts: list[list[Any]], outcomes: list[Any]) -> None:
        """Take what the owner says of its requests.

        Args:
            parts: Those of each seat in `told.parts`.
            outcomes: Those of `told.ended`.
        """
        self._room, self._heard = told.room, told.heard
        if told.row_s:
            self.pool.row_s = told.row_s
        seating = self.seating
        ended: list[Any] = told.ended
        special = [one for one in ended if isinstance(one, EndedSeat)] if EndedSeat in {*map(type, ended)} else ()
        if special:
            ended = [one.seat if isinstance(one, EndedSeat) else one for one in ended]
        over = {*ended, *told.returned}
        for name in over - seating.open.keys():
            seating.check(name)
        if len(over) < len(ended) + len(told.returned):
            raise InvalidRequest("it ends a request twice")
        if told.parts:
            if any(seating.check(seat).batch.on_steps is None for seat, _ in told.parts):
                raise InvalidRequest("it sends parts of an answer that is not streamed")
            made = zip(told.parts, parts, strict=True)
            seating.hear([(seat, [part]) for (seat, _), some in made for part in some], (), self._freed, lambda: None)
        for name in over if self.kept else ():
            self.kept.pop(name, None)
        if told.returned:
            for batch, done, _ in seating.end_all(told.returned, told.returned):
                self.pool.hand_back(self, batch, done)
        for one in special:
            if one.id or one.cost_s:
                seating.identify(one.seat, one.id, one.cost_s)
        self.end(ended, outcomes)

    def end(self, names: list[int], outcomes: list[Any]) -> None:
        """Answer requests that have ended."""
        groups = self.seating.end_all(names, outcomes)
        for batch, _, _ in groups:
            self._freed(batch.rows)
        for batch, done, its in groups:
            done(batch, its)

    def hand_on_tokens(self, tenant: str, prompt: int, completion: int) -> None:
        """Have the owner charge tokens to a tenant; those of too many tenants in one turn are charged together."""
        if len(self.tokens) >= MAX_CHARGED - 1 and tenant not in self.tokens:
            tenant = OTHER
        before = self.tokens.get(tenant, (0, 0))
        self.tokens[tenant] = before[0] + prompt, before[1] + completion
        self._link.speak(self)

    def stop(self) -> None:
        """Do nothing: the link may serve other models."""

    def drop(self, reason: str) -> None:
        """Give the link up."""
        self._link.give_up(reason)

    def _freed(self, rows: int) -> None:
        self.pool.freed(self, rows)

    def _allow(self, sitting: Sitting, steps: int) -> None:
        self.allows.append((sitting.name, steps))
        self._link.speak(self)

    def _leave(self, name: int) -> None:
        self.leaves.append(name)
        self._link.speak(self)

    def fitting(self, batch: EntryBatch, batch_size: int) -> int:
        """Return how many requests of a batch may be handed on; without credit those that make `batch_size` samples."""
        credit, under_way = self.credit, self.under_way
        if batch.rows <= credit:
            return len(batch.entries)
        for count, entry in enumerate(batch.entries):
            if credit < entry.size and under_way >= batch_size:
                return count
            credit -= entry.size
            under_way += entry.size
        return len(batch.entries)


class OwnerPool(SlotPool[OwnerSlot]):
    """Hands the requests to one model on to its owner.

    Attributes:
        bodies: Where they land; an owner on this machine may read them there.
        owners_problem: Why the owner could not answer, as it says; empty if it could.
    """

    answers_apart = True

    is_elsewhere: ClassVar[bool] = True

    def __init__(self, name: str, owner: str, batch_size: int, capacity: int, grace_s: float) -> None:
        """Describe it.

        Args:
            capacity: Samples that may wait at the owner.
            grace_s: How long requests wait for an owner that is gone.
        """
        super().__init__(seats=SEATS)
        self.model = name
        self.bodies = self.places = Places()
        self.holder = f"owner {owner}"
        self.problem = AWAY
        self.owners_problem = ""
        self._owner = owner
        self._batch_size = batch_size
        self._capacity = capacity
        self._grace_s = grace_s
        self._vacancy: asyncio.TimerHandle | None = None
        self._asked: dict[OwnerSlot, None] = {}

    @property
    def is_full(self) -> bool:
        """Whether the owner has no room, as far as that is known."""
        if self._refusal is not None or not self._seated:
            return False
        slot = self._roomiest()
        return slot.credit <= 0 and slot.under_way >= self._batch_size

    def _roomiest(self) -> OwnerSlot:
        slots = self._seated
        return next(iter(slots)) if len(slots) == 1 else roomiest(slots)

    async def start(self) -> None:
        """Wait for the owner, if it is gone already."""
        if not self._seated:
            self._begin_vacancy()

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Hand requests on to the owners with most room; those for whom there is none are refused."""
        if self._refusal is not None:
            super().submit(batch, done)
            return
        left: EntryBatch | None = batch
        while left is not None:
            slot = self._roomiest()
            count = slot.fitting(left, self._batch_size)
            taken, left = (left, None) if count == len(left.entries) else _cut(left, count)
            if taken is not None:
                self.idle -= taken.rows
                self._asked[slot] = None
                slot.run(taken, done)
            elif left is not None:
                waiting = self._capacity - max(slot.credit, 0)
                refused = [Failure(self._full(entry, waiting)) for entry in left.entries]  # each says when to try again
                asyncio.get_running_loop().call_soon(done, left, refused)
                return

    def _full(self, entry: Entry, waiting: int) -> QueueFull:
        error = QueueFull(f"{waiting} samples wait already, the queue takes {self._capacity}; try again later")
        name, tier = ("", None) if entry.tenant is None else (entry.tenant.name, entry.tenant.tier)
        reason = "share" if name else "full"
        called, never = (self.model, ""), float("inf")
        error.decision = time.time(), called, name, tier, reason, waiting, self._capacity, None, never, 0.0
        return error

    def abandon(self, entry: Entry) -> None:
        """Have the owner told that nobody waits for a request."""
        any(slot.seating.abandon(entry) for slot in self._asked)

    def hand_on_tokens(self, tenant: Tenant | None, prompt: int, completion: int) -> None:
        """Have an owner charge tokens to a tenant; nothing is charged while there is none."""
        if self._seated:
            self._roomiest().hand_on_tokens("" if tenant is None else tenant.name, prompt, completion)

    def uses(self, slot: OwnerSlot) -> bool:
        """Tell whether requests are handed on by a slot."""
        return slot in self._seated

    def ask(self, owner: str, slots: Collection[OwnerSlot]) -> None:
        """Hand requests on by these slots, and by no others; what was handed on is answered all the same."""
        self._owner, self.holder = owner, f"owner {owner}"
        for slot in slots:
            if slot not in self._seated and not slot.worker.ended.done():
                self._join(slot)
        for slot in [*self._seated]:
            if slot not in slots:
                self.retire(slot)
                slot.worker.close_if_done()

    def _join(self, slot: OwnerSlot) -> None:
        if self._stopping:
            return
        if self._vacancy is not None:
            self._vacancy.cancel()
            self._vacancy = None
        self._admit_again()
        self.ready(slot)

    def retire(self, slot: OwnerSlot) -> None:
        """Hand nothing more on by a link."""
        super().retire(slot)
        if not self._seated and not self._stopping:
            self._begin_vacancy()

    def hand_back(self, slot: OwnerSlot, batch: EntryBatch, done: Done) -> None:
        """Keep requests that the owner has not taken for the next one."""
        self.freed(slot, batch.rows)
        batch.attempts -= 1
        self._lost(batch, done, "")

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        links = len(self._seated)
        problem = "" if links else f"its owner {self._owner} {self.problem}"
        if links and self.owners_problem:
            problem = f"its owner {self._owner} says: {self.owners_problem}"
        return PoolStatistics(slots=max(links, 1), idle=links, alive=0 if problem else links, problem=problem)

    async def stop(self, grace_s: float) -> None:
        """Answer what is left: those who waited for it are gone, or it is too late."""
        slots = [*self._seated]
        self._stop_slots()
        if self._vacancy is not None:
            self._vacancy.cancel()
        for slot in slots:
            slot.worker.forget(slot)
            self._drop(slot, "the server stops")
        self._fail_orphans()
        self.bodies.close()

    def _drop(self, slot: OwnerSlot, how: str) -> None:
        self._asked.pop(slot, None)
        super()._drop(slot, how)

    def _begin_vacancy(self) -> None:
        if self._vacancy is None and self._refusal is None:
            self._vacancy = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        self._vacancy = None
        if not self._seated and not self._stopping:
            self._refuse(Unavailable(f"the owner {self._owner} of '{self.model}' {self.problem}; try again later"))


def _cut(batch: EntryBatch, count: int) -> tuple[EntryBatch | None, EntryBatch]:
    """Return a batch of the first entries, None where there are none, and one of the others."""
    if not count:
        return None, batch
    first, others = batch.entries[:count], batch.entries[count:]
    rows = sum(entry.size for entry in first)
    others_rows = batch.rows - rows
    return (
        msgspec.structs.replace(batch, entries=first, rows=rows),
        msgspec.structs.replace(batch, entries=others, rows=others_rows),
    )
