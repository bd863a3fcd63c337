# SPDX-License-Identifier: Apache-2.0
"""Choose the size of batches and how long they wait, given nothing but a latency objective.

Theory of operation. For each key two things are learned: what a batch of n rows takes (`cost.py`), and how many rows
arrive in a second. A slot that runs batches of n serves n / T(n) rows a second, so the arrivals ask for a size:

* `goal`: the smallest size at which they keep the slots busy for at most 0.9 of the time. A free slot waits until so
  many rows are there, or for as long as so many take to arrive. While single rows are quick enough the goal is 1
  and nothing waits.
* How long anything may wait is what the objective leaves: a share of it, less the time of the batch itself. The share
  follows the measured latencies: it shrinks while more than 3 of 100 answers are late and grows while fewer are.
* Arrivals that cannot come are not waited for. Clients in a closed loop send nothing before they are answered: while
  `gather.py` finds that those answered come back at once, it alone decides about waiting, up to the objective. For
  other clients, each wait is compared with what it was expected to bring, and after waits that brought little there are
  none for a while.
* When more is queued than one batch can answer in time, the batch takes the largest size that still is in time for
  its first row. If the slots would not keep up at that size, everybody would be late soon: then only throughput
  counts, and the size is the smallest that has nearly the best.
* Sizes that were not measured lately are tried now and then while the slots are saturated, and only then: a better
  size would go unnoticed if all traffic came in batches of another.

Whether 95 of 100 answers are within the objective is measured, never predicted.

Sans-I/O: no clock, no loop. `queue.py` calls it, every step takes `now` in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.batching.cost import Cost, steps
from forebay.batching.policies import Policy
from forebay.types.call import ALONE

if TYPE_CHECKING:
    from forebay.batching.lines import Line
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import EntryBatch

BUSY: Final = 0.9
"""Share of the time that the slots should be busy at most; at 0.8 clients that pause between calls lose a tenth."""

WORTH: Final = 0.95
"""Share of the best throughput from which on no larger size is worth waiting for."""

NEARLY: Final = 0.99
"""Share of the best throughput that will do when the slots have fallen behind."""

WORSE: Final = 0.95
"""A larger size with less than this share of the best throughput is past a cliff and is not used."""

IN_TIME: Final = 0.95
"""Share of the objective that is planned with; the rest is for what no plan knows, such as the way to the client."""

LATE: Final = 0.05
"""Share of late answers at which the objective is missed: it is one for 95 of 100."""

AIM: Final = 0.03
"""Share of late answers that the waits are steered to."""

STEER: Final = 0.004
"""What one late answer takes from the share of the objective that waits may use."""

LEAST_SHARE: Final = 0.2
"""Smallest share of the objective that waits may use; below it they are too short to matter."""

SPAN_S: Final = 0.5
"""Time over which rates are averaged, unless batches take so long that it would hold only a few of them."""

SPAN_BATCHES: Final = 8
"""Batches that the time over which rates are averaged holds at least."""

FRUITLESS: Final = 0.5
"""Share of the expected arrivals below which waiting is given up."""

RETRY: Final = 1 / 1024
"""What each batch restores of the trust in waiting; it comes back to be tried again after about 150 batches."""

SATURATED: Final = 0.9
"""Share of the time from which on the slots are busy enough for better sizes to be looked for."""

TRIED: Final = 3.0
"""Measurements of a size that will do."""

REPLAN_S: Final = 0.005
"""Shortest time between two plans of a key."""

ANSWERS: Final = 256
"""Answers over which the share of late ones is averaged."""

MAX_KEYS: Final = 256
"""Keys that are remembered; the one that was quiet for longest makes room."""

ARRIVED: Final = attrgetter("arrived")


class AutoState(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned and chosen, for the key that keeps the slots busiest.

    Attributes:
        objective_s: The latency that 95 of 100 answers are to hold.
        objective_held: Whether they do.
        late: Share of the recent answers that were later.
        because: Why the objective is not held, as a sentence; empty while it is.
        size: Largest batch in time, or the one with the best throughput when none is.
        goal: Rows that a free slot waits for.
        wait_s: Longest wait for them, from the arrival of the first.
        fixed_s: Learned cost of a batch, whatever its size.
        per_row_s: Learned cost of each row.
        rows_per_s: Arrivals.
    """

    objective_s: float
    objective_held: bool
    late: float
    because: str
    size: int
    goal: int
    wait_s: float
    fixed_s: float
    per_row_s: float
    rows_per_s: float


class Rate:
    """Amount per second: an average that weighs each stretch of time by its length, so a burst counts little."""

    __slots__ = ("_amount", "_since", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._amount = 0.0
        self._since: float | None = None

    def add(self, amount: float, now: float, span_s: float) -> None:
        """Count an amount that came about since the last call."""
        if self._since is None:
            self._since = now
            return
        self._amount += amount
        elapsed = now - self._since
        if elapsed > 0.0:
            self.value += -math.expm1(-elapsed / span_s) * (self._amount / elapsed - self.value)
            self._amount = 0.0
            self._since = now


class Pace:
    """One key: what is known of it and what follows."""

    __slots__ = (
        "arrivals",
        "cost",
        "floor",
        "goal",
        "held_rows",
        "held_since",
        "least",
        "left",
        "planned_at",
        "size",
        "times",
        "trust",
        "untried",
        "wait_s",
        "work",
    )

    def __init__(self, sizes: list[int]) -> None:
        self.cost = Cost(sizes)
        self.arrivals = Rate()
        """Of rows."""
        self.work = Rate()
        """Of seconds in which slots ran them."""
        self.left = 0
        """Rows that stayed behind when the last batch left."""
        self.trust = 1.0
        """How much of the expected arrivals waiting brings."""
        self.held_since: float | None = None
        self.held_rows = 0
        self.planned_at = -math.inf
        # The plan. Nothing is known yet: everything leaves at once, whatever its size.
        self.times = [0.0] * len(sizes)
        """Seconds for each size; infinite for those past a cliff."""
        self.goal = 1
        """Rows that a free slot waits for."""
        self.floor = 1
        """Smallest size at which the slots keep up with the arrivals; with nearly the best throughput if none does."""
        self.least = sizes[-1]
        """Smallest size that has nearly the best throughput, and no less than the floor."""
        self.size = sizes[-1]
        self.untried: Sequence[int] = ()
        """Sizes to learn about, largest first, while the slots have no time to spare."""
        self.wait_s = 0.0


class Auto(Policy):
    """Sizes and waits for every key of one queue."""

    def __init__(self, objective_s: float, max_size: int) -> None:
        """Begin without having seen a batch."""
        self.objective_s = objective_s
        self.patience_s = IN_TIME * objective_s
        """How long any row may wait for others while a slot is free, for whatever reason."""
        self.held = True
        """Whether 95 of 100 answers are within the objective."""
        self.late = 0.0
        """Share of the recent answers that were not."""
        self._sizes = steps(max_size)
        self._paces: OrderedDict[Hashable, Pace] = OrderedDict()
        self._unknown = Pace(self._sizes)
        self._work = Rate()
        self._slots = 1
        self._span_s = SPAN_S
        self._share = IN_TIME

    def room(self, line: Line, most: int, queue: BatchQueue, now: float) -> int:
        """Return how many rows the next batch takes of those that wait."""
        pace = self._known(line.key)
        rows = min(line.rows, most, self._sizes[-1])
        for size in pace.untried:
            if rows / 2 <= size < rows:
                pace.untried = ()
                return size
        return min(most, self._fitting(pace, bisect_left(self._sizes, rows), now - line.oldest()))

    def due(self, line: Line, due: float) -> float:
        """Return the time from which the rows of a key may leave."""
        pace = self._known(line.key)
        return due if line.rows >= pace.goal else due + pace.wait_s

    def size(self, key: Hashable) -> int:
        """Return the size at which nothing is gained by waiting any longer."""
        return self._known(key).size

    def waits(self, line: Line, now: float) -> None:
        """Note that a slot is free while rows of this key wait for more."""
        pace = self._known(line.key)
        if pace is not self._unknown and pace.held_since is None:
            pace.held_since = now
            pace.held_rows = line.rows

    def took(self, batch: EntryBatch, left: int, now: float) -> None:
        """Note a batch that leaves: how much has arrived, and what waiting has brought."""
        if batch.key is ALONE:
            return
        rows = batch.rows
        pace = self._pace(batch.key)
        if pace.held_since is None:
            pace.trust += RETRY * (1.0 - pace.trust)
        else:
            expected = pace.arrivals.value * (now - pace.held_since)
            if expected > 0.0:
                brought = min((rows + left - pace.held_rows) / expected, 1.0)
                pace.trust += 0.3 * (brought - pace.trust)
            pace.held_since = None
        pace.arrivals.add(max(rows + left - pace.left, 0), now, self._span_s)
        pace.left = left

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Learn from a batch whose answers were written."""
        if batch.key is ALONE:
            return
        entries = batch.entries
        seconds = now - entries[0].taken
        late = bisect_left(entries, now - self.objective_s, key=ARRIVED)
        count = len(entries)
        self.late += (late / count - self.late) * count / (count + ANSWERS)
        # Not at one bound only: at the edge the verdict would change with every answer.
        self.held = self.late <= (LATE if self.held else LATE - 0.01)
        self._share = min(max(self._share + STEER * (AIM * count - late), LEAST_SHARE), IN_TIME)
        self._slots = queue.slots
        self._span_s = max(SPAN_S, SPAN_BATCHES * seconds)
        self._work.add(seconds, now, self._span_s)
        pace = self._pace(batch.key)
        pace.work.add(seconds, now, self._span_s)
        pace.cost.learn(batch.rows, seconds)
        if now - pace.planned_at >= REPLAN_S:
            pace.planned_at = now
            self._plan(pace, is_closed=queue.gather is not None and queue.gather.is_closed)
        if queue.gather is not None:
            queue.gather.max_size = pace.size

    def state(self) -> AutoState:
        """Return what was learned and chosen."""
        pace = max(self._paces.values(), key=lambda pace: pace.work.value, default=None)
        if pace is None:
            pace = self._unknown
        return AutoState(
            objective_s=self.objective_s,
            objective_held=self.held,
            late=self.late,
            because="" if self.held else self._reason(pace),
            size=pace.size,
            goal=pace.goal,
            wait_s=pace.wait_s,
            fixed_s=pace.cost.curve.a,
            per_row_s=pace.cost.curve.b,
            rows_per_s=pace.arrivals.value,
        )

    def _known(self, key: Hashable) -> Pace:
        """Return what is known of a key; asking neither adds the key nor keeps it from being forgotten."""
        return self._paces.get(key, self._unknown)

    def _pace(self, key: Hashable) -> Pace:
        pace = self._paces.get(key)
        if pace is None:
            if len(self._paces) >= MAX_KEYS:
                self._paces.popitem(last=False)
            pace = self._paces[key] = Pace(self._sizes)
        elif len(self._paces) > 1:
            self._paces.move_to_end(key)
        return pace

    def _slots_for(self, pace: Pace) -> float:
        """Return the slots a key may count on, in proportion to its part of the work."""
        everything = self._work.value
        if len(self._paces) == 1 or everything <= 0.0:
            return self._slots
        return self._slots * min(max(pace.work.value / everything, 0.01), 1.0)

    def _plan(self, pace: Pace, *, is_closed: bool) -> None:
        sizes = self._sizes
        times = pace.times = pace.cost.times()
        throughputs = [size / max(time, 1e-9) for size, time in zip(sizes, times, strict=True)]
        best = max(throughputs)
        for place in range(throughputs.index(best), len(sizes)):
            if throughputs[place] < WORSE * best:
                times[place] = math.inf

        def smallest(throughput: float) -> int:
            return next(size for size, found in zip(sizes, throughputs, strict=True) if found >= throughput)

        rate = pace.arrivals.value
        asked = rate / (BUSY * self._slots_for(pace))
        enough = smallest(NEARLY * best)
        pace.floor = smallest(asked) if asked <= best else enough
        pace.least = max(pace.floor, enough)
        pace.untried = ()
        if self._work.value >= SATURATED * self._slots:
            weights = map(pace.cost.weight, range(len(sizes)))
            untried = [size for size, weight in zip(sizes, weights, strict=True) if weight < TRIED]
            pace.untried = untried[::-1]
        pace.size = self._fitting(pace, len(sizes) - 1, 0.0)
        pace.goal = min(pace.floor, smallest(WORTH * best))
        pace.wait_s = 0.0
        if pace.goal > 1 and not is_closed and pace.trust >= FRUITLESS:
            left_s = self._share * self.objective_s - times[bisect_left(sizes, pace.goal)]
            pace.wait_s = min(pace.goal / rate, max(left_s, 0.0)) if rate > 0.0 else 0.0

    def _fitting(self, pace: Pace, place: int, age_s: float) -> int:
        """Return the largest size up to this place that answers its first row in time, if the slots keep up with it."""
        left_s = self.patience_s - age_s
        while place >= 0 and pace.times[place] > left_s:
            place -= 1
        fits = self._sizes[place] if place >= 0 else 0
        return fits if fits >= pace.floor else pace.least

    def _reason(self, pace: Pace) -> str:
        if pace.times[0] > self.objective_s:
            return f"one row alone takes {pace.times[0] * 1000:.1f} ms"
        best = max(size / max(time, 1e-9) for size, time in zip(self._sizes, pace.times, strict=True))
        most = best * self._slots_for(pace)
        if pace.arrivals.value > IN_TIME * most:
            return f"{pace.arrivals.value:.0f} rows/s arrive, and {most:.0f} rows/s are the most that can be served"
        return "rows arrive in bursts larger than the slots can answer in time"
