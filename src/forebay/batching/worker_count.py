# SPDX-License-Identifier: Apache-2.0
"""How many workers a model needs, so that requests wait in its queue for no longer than a target.

Theory of operation. A worker has one or more slots, each of which runs a batch at a time. Three things ask for slots:

* The backlog: rows that would still wait when a further worker could be up, given what those that run or start get
  done until then. A start takes time, so whatever is gone before is no reason for one.
* The queue time, where it is above the target at three looks in a row and the queue does not shrink: rows that wait on
  average, divided by those that arrive in a second (Little's law). Then there is at least one slot more than run, and
  as many as `slots_for` says. Clients that wait for an answer before they ask again arrive more often once they wait
  less: by the same law as often as all rows that are here, divided by the time that each may take.
* The arrivals: `slots_for` is the smallest number at which the predicted queue time meets the target. Alone it adds no
  worker, for a client that sends one request after the other keeps any worker busy and never waits; but no worker stops
  below it.

The number grows at once. It shrinks by one when nothing has asked for the last worker for `quiet_s` and none is
starting, and then again.

Sans-I/O: no clock, no loop. `WorkerCount.look` is given what is seen, and `now` in seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.batching.auto import SPAN_BATCHES, Rate
from forebay.batching.cost import steps

if TYPE_CHECKING:
    from forebay.types.worker_range import WorkerRange

BUSY: Final = 0.85
"""Share of the time that slots are planned to be busy at most; above it small bursts make long queues."""

SPAN_S: Final = 1.0
"""Shortest time over which arrivals and waiting rows are averaged."""


STUCK_START_S: Final = 60.0
"""A start that takes so long, and twice as long as others, does not keep the number from shrinking."""

LATE_LOOKS: Final = 3
"""Looks in a row at which the queue time must be above the target; a burst that is gone by then is no reason."""


class BatchTime(msgspec.Struct, frozen=True):
    """What a batch takes: a straight line over its rows, which are at most `max_rows`; nothing is known if it is 0."""

    fixed_s: float
    per_row_s: float
    max_rows: int

    def of(self, rows: int) -> float:
        """Return the seconds of a batch of so many rows."""
        return self.fixed_s + self.per_row_s * rows


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a look sees.

    Attributes:
        waiting: Rows in the queue.
        busy: Slots that run something.
        running: Rows in them.
        up: Workers that are up.
        starting: Workers that start.
        starting_s: How long ago the first of these was started.
        start_s: How long a start takes.
        arrived: Rows that arrived since the last look.
        batch: What a batch takes.
    """

    waiting: int
    busy: int
    running: int
    up: int
    starting: int = 0
    starting_s: float = 0.0
    start_s: float = 0.0
    arrived: float = 0.0
    batch: BatchTime


def queue_s(slots: int, rate: float, batch: BatchTime) -> float:
    """Return the mean queue time that is predicted for rows that arrive at random, in batches of the best size.

    An approximation for several servers of equal and constant times; infinite where the slots would be too busy.
    """
    best = math.inf
    for size in steps(batch.max_rows):
        seconds = batch.of(size)
        busy = rate * seconds / (size * slots)
        if busy <= BUSY:
            best = min(best, seconds / 2 * busy ** (math.sqrt(2 * (slots + 1)) - 1) / (slots * (1 - busy)))
    return best


def slots_for(rate: float, batch: BatchTime, target_s: float, most: int) -> int:
    """Return the smallest number of slots at which the predicted queue time meets the target; `most` if none does."""
    least, enough = 1, most
    while least < enough:
        middle = (least + enough) // 2
        if queue_s(middle, rate, batch) <= target_s:
            enough = middle
        else:
            least = middle + 1
    return least


def slots_for_backlog(seen: Seen, slots_each: int, target_s: float) -> int:
    """Return the slots that are asked for by rows which those that run or start will not have taken in time."""
    batch_s = seen.batch.of(seen.batch.max_rows) or target_s
    rows = seen.batch.max_rows
    starting = seen.starting * slots_each
    # One that is up at last takes a batch at once.
    done = seen.busy * (seen.start_s + target_s) + starting * (seen.starting_s + target_s + batch_s)
    left = seen.waiting - done * rows / batch_s
    more = math.ceil(left / (rows * (1 + target_s / batch_s))) if left > 0 else 0
    return seen.busy + starting + more if more else 0


class WorkerCount:
    """The number of workers that one model should have.

    Attributes:
        wanted: That number, from the last look.
    """

    def __init__(self, bounds: WorkerRange, slots_each: int, target_s: float, quiet_s: float, wanted: int) -> None:
        """Begin with a number.

        Args:
            bounds: The fewest and the most.
            slots_each: Slots of a worker.
            target_s: Mean queue time that is aimed at.
            quiet_s: Time without need after which a worker stops.
            wanted: The number to begin with.
        """
        self.wanted = wanted
        self._bounds = bounds
        self._slots_each = slots_each
        self._target_s = target_s
        self._quiet_s = quiet_s
        self._arrivals = Rate()
        self._waiting = Rate()
        self._looked_at: float | None = None
        self._up = 0
        self._late_looks = 0
        self._waited = 0
        self._quiet_since = 0.0
        """Since when fewer would do."""

    def look(self, seen: Seen, now: float) -> int:
        """Return the number of workers that should be there."""
        self._average(seen, now)
        needed = min(max(self._needed(seen), self._bounds.min), self._bounds.max)
        # One that starts may be awaited by a client that was refused; one for which there is no place never comes.
        is_starting = seen.starting and seen.starting_s < max(STUCK_START_S, 2 * seen.start_s)
        if needed >= self.wanted or is_starting:
            self.wanted, self._quiet_since = max(needed, self.wanted), now
        elif now - self._quiet_since >= self._quiet_s:
            self.wanted, self._quiet_since = self.wanted - 1, now
        return self.wanted

    def wake(self, now: float) -> None:
        """Have one worker at least: a request has come."""
        if self.wanted == 0:
            self.wanted, self._quiet_since = 1, now

    def _average(self, seen: Seen, now: float) -> None:
        span_s = max(SPAN_S, SPAN_BATCHES * seen.batch.of(1))
        if seen.up > self._up:  # what waited for it says nothing of those that come
            self._arrivals, self._waiting = Rate(), Rate()
            self._arrivals.add(0.0, self._looked_at or now, span_s)
            self._waiting.add(0.0, self._looked_at or now, span_s)
        self._up = seen.up
        since = now if self._looked_at is None else self._looked_at
        self._arrivals.add(seen.arrived, now, span_s)
        self._waiting.add(seen.waiting * (now - since), now, span_s)
        self._looked_at = now

    def _needed(self, seen: Seen) -> int:
        if not (seen.waiting or seen.busy or seen.arrived):
            return 0
        each = self._slots_each
        rate = self._arrivals.value
        batch = seen.batch
        has_all_busy = 0 < seen.up * each <= seen.busy
        grows = seen.waiting > 0 and seen.waiting >= self._waited - max(1.0, 0.1 * self._waited)
        waits_long = has_all_busy and grows and self._waiting.value > self._target_s * rate
        self._waited = seen.waiting
        self._late_looks = self._late_looks + 1 if waits_long else 0
        is_late = self._late_looks >= LATE_LOOKS
        most = self._bounds.max if is_late else self.wanted
        if is_late and not seen.starting:
            rate = max(rate, (seen.waiting + seen.running) / (self._target_s + batch.of(batch.max_rows)))
        slots = slots_for(rate, batch, self._target_s, most * each)
        if is_late:
            slots = max(slots, seen.busy + 1)
        return math.ceil(max(slots, slots_for_backlog(seen, each, self._target_s)) / each)
