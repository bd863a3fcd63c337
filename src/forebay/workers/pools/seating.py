# SPDX-License-Identifier: Apache-2.0
"""The server's side of one worker: which batches sit in it. No loop here, no thread, no socket.

Theory of operation. A batch joins, and sits until the worker says that it has ended; its rows' seats are free from then
on. A worker without seats has one batch at a time, which sits there all the same. A batch that nobody waits for is
asked to leave, which frees its seats only when the worker says so: what is in the middle of a step is not over. What
the worker makes before its clients have taken it is bounded: it begins with `CREDIT` steps of each batch, and gets more
in portions.

When a round is heard, the batches that have ended come first. If others take their seats, these are on their way to
the worker before the parts of all the rest are handed out. Otherwise it hears last that it may go on: it may begin at
once, and would take the processor, or the interpreter, from the loop while clients wait for their parts.

What a worker is busy with is divided as it becomes known: the time since the last round among the batches that this one
made parts of, by their rows. Nobody pays while none of them has room. If the worker is lost, those pay that sit there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import InvalidRequest
from forebay.workers.pool import CREDIT

if TYPE_CHECKING:
    from forebay.observe.metrics.tenant_accounts import Accounts
    from forebay.types.batch import Done, EntryBatch
    from forebay.types.call import Outcome

PORTION: Final = 8
"""Steps for which there is room again, after which the worker is told."""

names: Final = itertools.count(1)
"""What batches are called in workers."""


class Sitting:
    """A batch in its seats.

    Attributes:
        name: What the worker calls it.
        is_leaving: Whether nobody waits for it.
        room: Steps that the worker may still make of it.
    """

    __slots__ = ("_grants", "_seating", "batch", "done", "is_leaving", "name", "room")

    def __init__(self, batch: EntryBatch, done: Done, seating: Seating, name: int) -> None:
        self.batch = batch
        self.done = done
        self.name = name
        self.room = CREDIT
        self.is_leaving = False
        self._grants = 0
        self._seating = seating

    def release(self, steps: int) -> None:
        """Note that the clients have room for more steps."""
        self._grants += steps
        seating = self._seating
        if self._grants >= PORTION and self.name in seating.open:
            grants, self._grants = self._grants, 0
            if self.room <= 0 and not seating.is_stepping:
                seating.paid_at = seating.clock()
            self.room += grants
            seating.allow(self, grants)


class Seating:
    """The streams that have a seat in one worker.

    Attributes:
        accounts: Those of its server; None where none are kept.
        clock: Gives the time.
        paid_at: Until when what the worker was busy with is divided among those who sat there.
    """

    def __init__(
        self,
        seats: int,
        allow: Callable[[Sitting, int], object],
        leave: Callable[[Sitting], object],
        clock: Callable[[], float] = lambda: 0.0,
        accounts: Accounts | None = None,
    ) -> None:
        """Begin with all seats free.

        Args:
            seats: Rows that may be open at a time; 0 where one batch runs alone, whatever its rows.
            allow: Tells the worker that it may make so many more steps of a batch.
            leave: Tells it to end one.
            clock: Gives the time; one that stands still bills nothing.
        """
        self.seats = self.free = seats
        self.open: dict[int, Sitting] = {}
        self.allow = allow
        self.paid_at = 0.0
        self.clock = clock
        self.accounts = accounts
        self._leave = leave

    @property
    def is_billed(self) -> bool:
        """Whether anything asks what batches cost; else time is not divided."""
        return self.accounts is not None and self.accounts.are_kept

    @property
    def is_stepping(self) -> bool:
        """Whether the clients of any batch have room, so that the worker goes on."""
        return any(one.room > 0 for one in self.open.values())

    def join(self, batch: EntryBatch, done: Done, name: int | None = None) -> Sitting:
        """Seat a batch, by the next name if it has none; the caller tells the worker."""
        if self.is_billed and not self.is_stepping:
            self.paid_at = self.clock()
        sitting = Sitting(batch, done, self, next(names) if name is None else name)
        self.open[sitting.name] = sitting
        self.free -= batch.rows
        batch.attempts += 1
        batch.on_cancel = functools.partial(self._call_off, sitting)
        return sitting

    def end(self, name: int, seconds: float | None = None) -> Sitting:
        """Take out a batch that has ended, and note how long it took; the caller tells its waiters."""
        sitting = self.open.pop(name)
        self.free += sitting.batch.rows
        sitting.batch.on_cancel = None
        if seconds is not None:
            sitting.batch.model_s = seconds
        if self.is_billed and not self.seats:
            sitting.batch.busy_s += sitting.batch.model_s
        return sitting

    def _pay(self, sitters: Sequence[Sitting]) -> None:
        """Divide the time since the last round among these, if there are any."""
        if not sitters:
            return
        now = self.clock()
        row_s = (now - self.paid_at) / sum(one.batch.rows for one in sitters)
        for one in sitters:
            one.batch.busy_s += row_s * one.batch.rows
        self.paid_at = now

    def hear(
        self,
        parts: Sequence[tuple[int | list[int], Sequence[Any]]],
        ended: Sequence[tuple[int, Sequence[Outcome], float]],
        freed: Callable[[int], object],
        go_on: Callable[[], object],
    ) -> None:
        """Act on what a round has made.

        Args:
            parts: Names and parts, in order.
            ended: Names, outcomes, and how long they sat.
            freed: Called with the rows of the batches that have ended, before anybody is answered.
            go_on: Called once all that the worker is to hear before its next round was said.
        """
        over: dict[int, Sitting] = {}
        rows = 0
        made: dict[int, list[Sequence[Any]]] = {}
        for name, part in parts:
            if isinstance(name, list):
                for one, its in zip(name, part, strict=True):
                    made.setdefault(one, []).append([its])
            else:
                made.setdefault(name, []).append(part)
        for name, _, seconds in ended:
            sitting = over[name] = self.end(name, seconds)
            rows += sitting.batch.rows
        if self.is_billed and self.seats:
            self._pay([*(one for name in made if (one := self.open.get(name)) is not None), *over.values()])
        is_awaited = False
        if over:
            free = self.free
            freed(rows)
            for name, steps in made.items():
                if name in over:
                    self._hand(over[name], steps)
            for name, outcomes, _ in ended:
                sitting = over[name]
                sitting.done(sitting.batch, outcomes)
            is_awaited = self.free < free
        if is_awaited:
            go_on()
        others: list[tuple[Sitting, list[Sequence[Any]]]] = []
        for name, steps in made.items():
            sitting = self.open.get(name)
            if sitting is None:
                continue
            if sitting.batch.has_streamed:
                others.append((sitting, steps))
            else:  # nobody waits for a first part longer than need be
                self._hand(sitting, steps)
        for sitting, steps in others:
            self._hand(sitting, steps)
        if not is_awaited:
            go_on()

    def check(self, name: Any) -> Sitting:
        """Return the batch of a name; raises an `InvalidRequest` if none of that name sits."""
        sitting = self.open.get(name) if type(name) is int else None
        if sitting is None:
            raise InvalidRequest(f"it speaks of the stream {str(name)[:40]}, which it was not given")
        return sitting

    def clear(self, spared: Container[int] = ()) -> list[Sitting]:
        """Take everybody out but those of these names: the worker is gone, or given up."""
        left = [sitting for name, sitting in self.open.items() if name not in spared]
        if self.is_billed:
            self._pay([one for one in left if one.room > 0])
        for sitting in left:
            del self.open[sitting.name]
            self.free += sitting.batch.rows
            sitting.batch.on_cancel = None
        return left

    @staticmethod
    def _hand(sitting: Sitting, steps: list[Sequence[Any]]) -> None:
        sitting.room -= len(steps)
        batch = sitting.batch
        batch.has_streamed = True
        assert batch.on_steps is not None
        batch.on_steps(steps, functools.partial(sitting.release, len(steps)))

    def _call_off(self, sitting: Sitting) -> None:
        if not sitting.is_leaving:
            sitting.is_leaving = True
            self._leave(sitting)
