# SPDX-License-Identifier: Apache-2.0
"""Refuse at once what could not be answered in time, so that no worker computes what nobody waits for any more.

Theory of operation. When a request comes that states a deadline, its end is predicted: the rows of its flow that are
due before it, spread over the workers as the shares of the flows say, in full batches, each of which takes what was
learned. What would be later is refused. That alone would let a queue grow to just what can be answered in time, in
which nobody with a shorter deadline ever finds room; so where some were refused while a queue stood, those that could
not outlast it wait for two rounds of batches at most. When a batch is taken, what cannot be in time any more stays out.

Where entries go on into a graph, that says when they will have passed it, and a slot is free while others are inside.

A prediction is as good as what was learned, and where all are refused nothing is learned: so a request that finds a
free slot, and nothing before it, is let in now and then all the same.

Sans-I/O: no clock, no loop. `queue.py` calls it, every step takes `now` in seconds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from forebay.batching.due_lane import DueLane, bucket_of
from forebay.batching.lines import NEVER
from forebay.batching.policies import Policy
from forebay.errors import TooLate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forebay.batching.fair import FairShares
    from forebay.batching.fair_lines import Flow
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Entry, EntryBatch, Inside

OVERDUE: Final = 0.3
"""A batch that should have ended is expected to take so much of its time until now beyond it."""

SQUEEZE: Final = 2
"""Rounds of batches that may wait of those that cannot outlast a queue that stands."""

TRY_S: Final = 0.25
"""Shortest time between two requests that are let in against the prediction."""

ENDLESS_S: Final = 3600.0
"""A batch that may wait for longer leaves when it is full, and nobody knows when that is."""

LINES: Final = 64
"""Lines of a flow of which the deadlines are looked at."""

WHY: Final = "the answer would come after the deadline of the request; try again later, or give it more time"


class Deadlines(Policy):
    """Refuses what would be late.

    Attributes:
        rows: Samples that wait and are sorted, by the bucket of their times.
        inside: What entries go through once they have left; None where a batch runs in one worker.
        awaited: Tells in how many seconds a worker is up, and the slots that come then; None if one is, or nobody
            knows.
    """

    def __init__(self, queue: BatchQueue, fair: FairShares) -> None:
        """Begin without having seen a batch."""
        self.rows: dict[int, int] = {}
        self.inside: Inside | None = None
        self.awaited: Callable[[float], tuple[float, int] | None] = lambda _: None
        self._queue = queue
        self._fair = fair
        self._runs: dict[EntryBatch, tuple[float, float]] = {}
        """When each batch is expected to end, and when it was taken."""
        self._way_s = 0.0
        """What the way to the worker and back takes."""
        self._calm_at = NEVER
        """When a batch left with room in it, or something came to a free slot, last."""
        self._tried_at = -NEVER

    def lasts_s(self, rows: int) -> float:
        """Return the seconds after which a batch of so many rows is expected to be answered; 0 if that is unknown."""
        lasts_s = self._fair.lasts_s(rows)
        return lasts_s + self._way_s if lasts_s else 0.0

    def usual_s(self, rows: int) -> float:
        """Return the same of a batch in which so many rows find themselves among as many others as lately."""
        return self.lasts_s(max(rows, round(self._fair.curve.usual_rows)))

    @property
    def row_s(self) -> float:
        """Seconds in which the workers answer a row, where batches are full; 0 if that is unknown."""
        most = self._queue.most_rows
        return self.lasts_s(most) / (most * self._queue.slots) if self.inside is None else self.inside.row_s

    def lane(self, entries: Iterable[Entry]) -> DueLane:
        """Return a lane for entries of a flow."""
        return DueLane(entries, self.rows, is_ranked=self._fair.is_ranked)

    def arrived(self, entry: Entry) -> None:
        """Refuse an entry that would be late."""
        self.admit(entry, entry.arrived)

    def admit(self, entry: Entry, now: float) -> None:
        """Refuse an entry that would be late, by a `TooLate`."""
        queue = self._queue
        is_free = not queue.waiting and queue.running < (queue.slots if self.inside is None else 1)
        if is_free:
            self._calm_at = now
        due = entry.due
        if not now < due < NEVER or not self.lasts_s(1):
            return
        self._fair.sort_out()
        flow = self._fair.flow_of(entry.tenant)
        bucket = bucket_of(entry.deadline - now)
        ahead, total = self._ahead(flow, entry, entry.size, bucket)
        start, lasts_s = self._turn(ahead, total, now)
        inside = self.inside
        finish = start + lasts_s if inside is None else inside.end(entry, start, ahead - entry.size, now)
        if finish > due:
            if is_free and now - self._tried_at >= TRY_S:
                self._tried_at = now
                entry.due = NEVER
                return
            flow.missed[bucket] = now
            raise TooLate(WHY, after_s=finish - due)
        if flow.missed and (over := self._over(flow, entry, bucket, now)) > 0:
            raise TooLate(WHY, after_s=over * self.row_s / self._fair.share_of(flow))

    def expect(self, entry: Entry, size: int, before: int, first: float, now: float) -> tuple[float, int, float]:
        """Return when rows for an entry would be answered that came now, and how many others leave before them.

        Args:
            entry: Whose tenant and deadline they have.
            before: Rows that have yet to come, and leave before them.
            first: When the first of all these comes.

        Returns:
            Also, when the next batch is answered.
        """
        queue, runs = self._queue, self._runs
        self._fair.sort_out()
        ahead, total = self._ahead(self._fair.flow_of(entry.tenant), entry, size, bucket_of(entry.deadline - now))
        begin = now if runs or queue.waiting else first
        start, lasts_s = self._turn(ahead + before, total + before, begin)
        following = max(min((end for end, _ in runs.values()), default=begin + lasts_s), now)
        return start + lasts_s, ahead - size + queue.running_rows, following

    def missed(self, entry: Entry, now: float) -> None:
        """Note an entry that was too late while it waited."""
        self._fair.flow_of(entry.tenant).missed[bucket_of(entry.deadline - entry.arrived)] = now

    def last_due(self, now: float) -> float:
        """Return the deadline up to which nothing can be in time that would leave now."""
        return now + (self.lasts_s(1) if self.inside is None else self.inside.least_s())

    def took(self, batch: EntryBatch, left: int, now: float) -> None:
        """Note a batch that leaves."""
        self._runs[batch] = now + self.lasts_s(batch.rows), now
        if batch.rows < self._queue.most_rows and not self._queue.waiting:
            self._calm_at = now

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Learn what the way of a batch took."""
        _, taken = self._runs.pop(batch, (0.0, NEVER))
        if batch.model_s and not batch.has_streamed and taken < NEVER:
            self._way_s += 0.1 * (max(now - taken - batch.model_s, 0.0) - self._way_s)

    def check(self) -> None:
        """Assert what holds between any two steps; tests ask after each."""
        queue = self._queue
        rows: dict[int, int] = {}
        for entry in itertools.chain(queue.entries(), queue.alone):
            if entry.payer is not None:
                bucket = bucket_of(entry.deadline - entry.arrived)
                rows[bucket] = rows.get(bucket, 0) + entry.size
        assert rows == {bucket: count for bucket, count in self.rows.items() if count}
        assert len(self._runs) <= queue.running

    def _ahead(self, flow: Flow, entry: Entry, size: int, bucket: int) -> tuple[int, int]:
        """Return how many rows leave up to and with those of an entry of a flow, and how many wait then."""
        fair, tenant, key = self._fair, flow.tenant, flow.key
        before, count = 0.0, 0
        for line in itertools.islice(flow.lines, LINES):
            lane = line.lanes.get(flow)
            if isinstance(lane, DueLane):
                some, all_of_it = lane.before(bucket, entry.deadline)
                before += some
                count += all_of_it
        own = int(flow.rows * before / count) + size if count else flow.rows + size
        if key is not flow:
            own = min(own * (key.children + (not flow.rows)), key.rows + size)
        higher = sum(fair.rows_of[: tenant.tier])
        total = higher + fair.rows_of[tenant.tier] + size
        return min(total, int(higher + own / fair.share_of(key))), total

    def _turn(self, ahead: int, total: int, now: float) -> tuple[float, float]:
        """Return when the last of so many rows would leave, of all that wait then, and how long its batch takes."""
        queue, slots = self._queue, self._queue.slots
        most = queue.most_rows
        if not self._runs and (awaited := self.awaited(now)) is not None:
            up_s, slots = awaited
            now += up_s
        ends = sorted(end if end > now else now + OVERDUE * (now - taken) for end, taken in self._runs.values())
        free = [now] * (slots - len(ends)) + ends[-slots:]
        rounds, slot = divmod(-(-ahead // most) - 1, slots)
        wait_s = queue.longest_wait_s if total < most and queue.longest_wait_s < ENDLESS_S else 0.0
        return free[slot] + rounds * self.lasts_s(most) + wait_s, self.lasts_s(min(total, most))

    def _over(self, flow: Flow, entry: Entry, bucket: int, now: float) -> int:
        """Return how many rows too many would wait of those that cannot outlast the queue, if some were refused."""
        queue, calm_at = self._queue, self._calm_at
        age = now - calm_at
        if entry.due - now > age or not any(at > calm_at for number, at in flow.missed.items() if number <= bucket):
            return 0
        over = sum(rows for number, rows in self.rows.items() if 2.0 ** (number / 2) <= age * 1000.0)
        most, key = SQUEEZE * queue.slots * queue.most_rows, flow.key
        mine = most * self._fair.share_of(key)
        return over + entry.size - most if key.rows and key.rows + entry.size > mine else 0
