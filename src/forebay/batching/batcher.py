# SPDX-License-Identifier: Apache-2.0
"""Drive a batch queue with the loop's clock and one pool.

The queue decides, the pool runs; this module only brings them together at the right moments: at the end
of a loop turn in which something arrived, when a slot becomes idle, and when the queue's next moment is due.

Where there is one core for the loop and its workers, quick batches leave a little later: at the end of the first turn
in which nothing arrived. While the loop has something to read, no worker would get the core, so this delays nothing,
and more requests share the cost of a batch: 64 clients otherwise form two batches of 32 that alternate. A lone request
leaves at once where the last one has waited in vain. On several cores these two overlap, which is worth more. The same
is done with what is handed on to an owner by a server that has one core: the two may share it.

There, too, the loop rests while every slot is busy and a whole batch waits. Nothing it could read would run any
earlier, but each arriving request would take the core from a worker: in a flood that happens 5,000 times a second, and
costs a tenth of the work. So it stands still until a worker has something to say, for two milliseconds at most, and
reads what has come meanwhile in one turn.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from forebay.errors import InternalError
from forebay.observe.traces.timeline import Timeline, begin, name
from forebay.types.call import Failure
from forebay.types.server_state import here

if TYPE_CHECKING:
    import asyncio

    from forebay.batching.auto import AutoState
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Done, Entry, EntryBatch

log = logging.getLogger("forebay.batching")

TELL_S: Final = 30.0
"""Shortest time between two lines of the log about the latency objective."""

READ_ON_S: Final = 0.001
"""Longest time for which a batch is put off while the loop reads on; where batches take as long, none is."""

REST_S: Final = 0.002
"""Longest rest of the loop."""

RESTS_FROM_S: Final = 0.001
"""How long batches must take for a rest to be worth it."""


class Slots(Protocol):
    """What the batcher needs of a pool.

    Attributes:
        can_rest: Whether its workers use the cores of this process, and `rest` hears them.
        answers_apart: Whether entries of a batch are answered as they end. It holds them itself: for queue and batcher
            such a batch is over once the pool has it.
        is_elsewhere: Whether another server batches what it is given, and tells of that.
    """

    can_rest: ClassVar[bool]
    is_elsewhere: ClassVar[bool]
    answers_apart: ClassVar[bool]

    @property
    def idle(self) -> int:
        """Slots that could take a batch now."""
        ...

    @property
    def room(self) -> int | None:
        """Rows that a batch may have to join streams that run; None if the next one begins where nothing runs."""
        ...

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Set what is called on the loop whenever a slot becomes idle by itself (a worker came back)."""
        ...

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Run a batch on an idle slot; `done` is called on the loop, exactly once for each entry."""
        ...

    def abandon(self, entry: Entry) -> None:
        """Note that nobody waits for an entry that is answered apart."""
        ...

    def rest(self, seconds: float) -> None:
        """Block until a worker has something to say, but no longer than this."""
        ...


class _Rest:
    """The right to let the loop rest, which one batcher of a server has, so that a turn holds at most one rest."""

    who: Batcher | None = None


class Batcher:
    """Feeds a pool from a queue. Lives on one event loop; nothing here is thread-safe."""

    def __init__(
        self,
        queue: BatchQueue,
        pool: Slots,
        answer: Callable[[EntryBatch, Sequence[Any], float], None],
        loop: asyncio.AbstractEventLoop,
        steps: Callable[[EntryBatch, Sequence[Sequence[Any]], Callable[[], object]], None] | None = None,
        name: str = "",
        cores: int = 2,
    ) -> None:
        """Connect queue and pool.

        Args:
            answer: Called with a batch, its outcomes and the time, before the queue learns that it was answered.
            steps: Called with steps of a streamed answer; None where answers are not streamed.
            cores: How many processors this process and its workers may use.
        """
        self.queue = queue
        self.pool = pool
        self._answer = answer
        self._loop = loop
        self._steps = steps
        self._name = name
        self._running: set[EntryBatch] = set()
        self._is_submitting = False
        self.is_awake = False
        self._bringers: list[Callable[[float], None]] = []
        self._expected_since = 0.0
        self._has_one_core = cores == 1
        self._answers_apart = pool.answers_apart
        self._may_rest = self._has_one_core and steps is None and pool.can_rest
        self._rests = False
        self._resting = here(_Rest)
        self._timeline = here(Timeline)
        self._last_s = 0.0
        self._seen = 0
        self._comes_alone = False
        self._seen_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._told_held = True
        self._told_at = 0.0
        pool.watch(self.wake)

    def submit(self, entry: Entry, now: float) -> None:
        """Queue an entry; it leaves at the end of this loop turn at the earliest.

        Raises:
            QueueFull, TooLarge: From the queue; nothing was queued.
        """
        self.queue.offer(entry, now)
        if not self.is_awake and (self.pool.idle or self._rests):
            self.wake()

    def expect(self, bring: Callable[[float], None]) -> None:
        """Have what arrives in this turn brought at its end: many at once cost less than each by itself.

        Args:
            bring: Submits it; given the time at which the first of it arrived.
        """
        if not self._bringers:
            self._expected_since = time.monotonic()
            if not self.is_awake:
                if self.pool.idle:
                    self.wake()
                else:
                    self._loop.call_soon(self.admit)
        self._bringers.append(bring)

    def admit(self) -> None:
        """Queue what has arrived so far."""
        if self._bringers:
            bringers, self._bringers = self._bringers, []
            for bring in bringers:
                try:
                    bring(self._expected_since)
                except Exception:  # a defect of one must not keep what the others bring
                    log.exception("failed to queue requests that arrived")

    def wake(self) -> None:
        """Look for work at the end of this turn."""
        if not self.is_awake:
            self.is_awake = True
            self._loop.call_soon(self._turn)

    def abandon(self, entry: Entry) -> None:
        """Drop an entry that nobody waits for: it leaves the queue, or its batch is called off if it was the last."""
        if not entry.taken:
            self.queue.cancel(entry)
            return
        if self._answers_apart:
            self.pool.abandon(entry)
            return
        for batch in list(self._running):  # a pool may answer a batch while it is called off
            if all(mate.done for mate in batch.entries) and not batch.cancelled:
                batch.cancelled = True
                if batch.on_cancel is not None:
                    batch.on_cancel()

    def close(self) -> None:
        """Disarm the timer, and rest no more."""
        self._may_rest = self._rests = False
        self._stir()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self.admit()
        self.is_awake = False
        pool = self.pool
        queue = self.queue
        if not pool.idle:
            if self._rests and queue.is_full() and self._has_rest():
                pool.rest(REST_S)
                self.wake()
            return
        now = time.monotonic()
        if self._has_one_core and self._reads_on(now):
            self.wake()
            return
        slots = pool.idle + len(self._running)
        if slots != queue.slots:
            queue.slots = slots
        while pool.idle:
            batch = queue.take(now, None if self._steps is None else pool.room)
            if batch is None:
                break
            self._run(batch, now)
            if self._answers_apart:
                if not queue.waiting:
                    return
            elif batch not in self._running:
                return  # it ran here: the loop reads what came meanwhile before the next; `_done` asks for another turn
        if pool.idle:
            self._arm(now)

    def _reads_on(self, now: float) -> bool:
        """Tell, at the end of a turn, whether the loop should read what else has come before a batch leaves."""
        waiting, seen = self.queue.waiting, self._seen
        if waiting > 1:
            self._comes_alone = False
        elif seen:
            self._comes_alone = True
        elif self._comes_alone:
            return False
        if not seen:
            self._seen_since = now
        lasts_s = max(now - self._seen_since, self._last_s)
        may_grow = (self._answers_apart and self._steps is None) or self.queue.may_grow()
        self._seen = waiting if waiting > seen and lasts_s < READ_ON_S and may_grow else 0
        return self._seen > 0

    def _has_rest(self) -> bool:
        """Tell whether nobody else has the loop rest."""
        if self._resting.who is None:
            self._resting.who = self
        return self._resting.who is self

    def _stir(self) -> None:
        """Let others have the loop rest."""
        if self._resting.who is self:
            self._resting.who = None

    def _run(self, batch: EntryBatch, now: float) -> None:
        if self._answers_apart:
            self.queue.answered(batch, now)
        else:
            self._running.add(batch)
        if self._steps is not None:
            batch.on_steps = functools.partial(self._steps, batch)
        if self._timeline.told:
            if self.pool.is_elsewhere:  # whoever batches them tells of that
                for entry in batch.entries:
                    name(entry)
            else:
                begin(batch, now)
        self._is_submitting = True  # a pool that runs it at once calls `_done` before it returns
        try:
            self.pool.submit(batch, self._done)
        except Exception as error:
            log.exception("a pool rejected a batch")
            failure = Failure(InternalError(f"the batch could not be given to a worker: {error}"))
            self._loop.call_soon(self._done, batch, [failure] * len(batch.entries))
        finally:
            self._is_submitting = False

    def _done(self, batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        self.admit()
        now = time.monotonic()
        self._last_s = batch.model_s
        self._rests = self._may_rest and batch.model_s >= RESTS_FROM_S
        self._stir()
        self._running.discard(batch)
        batch.on_steps = None  # it refers to the batch
        queue = self.queue
        streams = self._steps is not None
        if self.pool.idle and not self._is_submitting and (streams or queue.is_full()):
            # A whole batch waits, or a seat is free: the slot starts on it before the answers are written.
            following = queue.take(now, self.pool.room if streams else None)
            if following is not None:
                self._run(following, now)
        self._answer(batch, outcomes, now)
        if not self._answers_apart:
            queue.answered(batch, now)
        if queue.auto is not None and queue.auto.held is not self._told_held:
            self._tell(queue.auto.state(), now)
        if queue.waiting or queue.next_due() is not None:
            self.wake()

    def _tell(self, state: AutoState, now: float) -> None:
        """Log that the latency objective is missed, or held again, but not every time a wavering verdict changes."""
        if self._told_at and now - self._told_at < TELL_S:
            return
        self._told_at = now
        self._told_held = state.objective_held
        objective_ms = state.objective_s * 1000
        if state.objective_held:
            log.info("%s: 95 of 100 requests meet the objective of %.4g ms again", self._name, objective_ms)
        else:
            text = "%s: cannot meet the objective of %.4g ms for 95 of 100 requests, %.0f of 100 are late: %s"
            log.warning(text, self._name, objective_ms, state.late * 100, state.because)

    def _arm(self, now: float) -> None:
        due = self.queue.next_due()
        if due is None:
            return
        if self._timer is not None:
            if self._timer_due <= due and self._timer_due > now:
                return
            self._timer.cancel()
        # uvloop's timers count in milliseconds: a shorter wait ends with the next turn, and the queue is asked again.
        self._timer_due = due
        self._timer = self._loop.call_later(max(due - now, 0.0), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._turn()
