# SPDX-License-Identifier: Apache-2.0
"""The pool of a model that another server owns: what runs its batches is a link to that server.

Theory of operation. Each request is a batch of its own, since batches are formed in the owner's queue. A link is a slot
with any number of seats. How many samples may be under way is the room in the owner's queue, as it was told with the
last answers: without room a request is refused as by a full queue here, unless less than one batch is under way, so
that a front which hears of no answers still finds out.

A link that is gone has its requests handed on to the next one, once. If none comes within `grace_s`, the pool answers
everything with the reason, until there is one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import InvalidRequest, QueueFull, Unavailable
from forebay.types.call import Failure
from forebay.workers.landing import Places
from forebay.workers.pool import PoolStatistics
from forebay.workers.seating import Seating
from forebay.workers.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Collection

    from forebay.owners.owner_link import OwnerLink
    from forebay.owners.wire import ModelAnswers
    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.seating import Sitting

SEATS: Final = 1 << 40
"""Seats of a link: what bounds them is the owner's room."""
AWAY: Final = "is away"
MISSING: Final = "has no such model now"


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

    def __init__(self, link: OwnerLink, number: int, pool: OwnerPool, room: int) -> None:
        """Begin with nothing under way, and so much room at the owner."""
        self.number = number
        self.worker = link
        self.pool = pool
        self.seating = Seating(SEATS, self._allow, self._leave)
        self._link = link
        self._room = room
        self._sent = 0
        self._heard = 0
        self.joins: list[tuple[Sitting, bytes, Any, list[Any]]] = []
        self.kept: dict[int, list[memoryview]] = {}
        self.leaves: list[int] = []
        self.allows: list[tuple[int, int]] = []

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
        """Hand a request on, at the end of this turn."""
        self._sent += batch.rows
        self._link.hand_on(self, self.seating.join(batch, done), batch.entries[0])

    def hear(self, told: ModelAnswers, parts: list[list[Any]], outcomes: list[Any]) -> None:
        """Take what the owner says of its requests.

        Args:
            told: What it says.
            parts: Those of each seat in `told.parts`.
            outcomes: Those of `told.ended`.
        """
        self._room, self._heard = told.room, told.heard
        seating = self.seating
        made: list[tuple[int | list[int], list[Any]]] = [
            (seat, [part]) for (seat, _), some in zip(told.parts, parts, strict=True) for part in some
        ]
        ended = [(one.seat, [outcome], 0.0) for one, outcome in zip(told.ended, outcomes, strict=True)]
        for name in (*(seat for seat, _ in told.parts), *(one.seat for one in told.ended), *told.returned):
            seating.check(name)
        over = [*(one.seat for one in told.ended), *told.returned]
        if len(set(over)) < len(over):
            raise InvalidRequest("it ends a request twice")
        if any(seating.open[seat].batch.on_steps is None for seat, _ in told.parts):
            raise InvalidRequest("it sends parts of an answer that is not streamed")
        for name in over if self.kept else ():
            self.kept.pop(name, None)
        for name in told.returned:
            self.pool.hand_back(self, seating.end(name))
        seating.hear(made, ended, self._freed, lambda: None)

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

    def _leave(self, sitting: Sitting) -> None:
        self.leaves.append(sitting.name)
        self._link.speak(self)


class OwnerPool(SlotPool[OwnerSlot]):
    """Hands the requests to one model on to its owner.

    Attributes:
        bodies: Where they land; an owner on this machine may read them there.
    """

    def __init__(self, name: str, owner: str, batch_size: int, capacity: int, grace_s: float) -> None:
        """Describe it.

        Args:
            name: The model.
            owner: Where its owner is.
            batch_size: Samples in a batch.
            capacity: Samples that may wait at the owner.
            grace_s: How long requests wait for an owner that is gone.
        """
        super().__init__(seats=SEATS)
        self.model = name
        self.bodies = self.places = Places()
        self.holder = f"owner {owner}"
        self.problem = AWAY
        self._owner = owner
        self._batch_size = batch_size
        self._capacity = capacity
        self._grace_s = grace_s
        self._vacancy: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether the owner has no room, as far as that is known."""
        if self._refusal is not None or not self._seated:
            return False
        slot = self._roomiest()
        return slot.credit <= 0 and slot.under_way >= self._batch_size

    def _roomiest(self) -> OwnerSlot:
        return max(self._seated, key=lambda slot: slot.credit)

    async def start(self) -> None:
        """Wait for the owner, if it is gone already."""
        if not self._seated:
            self._begin_vacancy()

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Hand a request on to the owner with most room, or answer that there is none."""
        if self._refusal is not None:
            super().submit(batch, done)
            return
        slot = self._roomiest()
        if slot.credit < batch.rows and slot.under_way >= self._batch_size:
            waiting = self._capacity - max(slot.credit, 0)
            text = f"{waiting} samples wait already, the queue takes {self._capacity}; try again later"
            asyncio.get_running_loop().call_soon(done, batch, [Failure(QueueFull(text))])
            return
        self.idle -= batch.rows
        slot.run(batch, done)

    def uses(self, slot: OwnerSlot) -> bool:
        """Tell whether requests are handed on by a slot."""
        return slot in self._seated

    def ask(self, owner: str, slots: Collection[OwnerSlot]) -> None:
        """Hand requests on by these slots, and by no others; what was handed on is answered all the same.

        Args:
            owner: What the owner is called.
            slots: The links to it.
        """
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

    def hand_back(self, slot: OwnerSlot, sitting: Sitting) -> None:
        """Keep a request that the owner has not taken for the next one."""
        self.freed(slot, sitting.batch.rows)
        sitting.batch.attempts -= 1
        self._lost(sitting.batch, sitting.done, "")

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        alive = len(self._seated)
        problem = "" if alive else f"its owner {self._owner} {self.problem}"
        return PoolStatistics(slots=max(alive, 1), idle=alive, alive=alive, problem=problem)

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

    def _begin_vacancy(self) -> None:
        if self._vacancy is None and self._refusal is None:
            self._vacancy = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        self._vacancy = None
        if not self._seated and not self._stopping:
            self._refuse(Unavailable(f"the owner of '{self.model}', {self._owner}, {self.problem}; try again later"))
