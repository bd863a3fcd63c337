# SPDX-License-Identifier: Apache-2.0
"""When clients that were refused are to come back: one after the other, at the rate at which rows are answered.

Theory of operation. Each flow has a ticket, the moment given to the client that was refused last. The next one is told
a moment later, by as much as its rows take of what the workers can carry, and of the share of its flow. So what is
refused in a burst does not return in one. A ticket never goes back, and is at most two full queues ahead. Clients that
get no further place in that time share the second half of it, by the golden ratio: such moments lie apart however many
there are.

More clients than that would return too early, and ask again and again. So the range doubles when more is refused than
is answered. If as much is refused after that, those are no clients that wait until they are told to: they would only
keep the others away for longer, and the range is two full queues again.

Sans-I/O: no clock, no loop. `queue.py` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.batching.gather import Curve
from forebay.batching.lines import NEVER
from forebay.batching.policies import Policy

if TYPE_CHECKING:
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import EntryBatch
    from forebay.types.tenant import Tenant

UNKNOWN_ROW_S: Final = 0.001
"""What a row takes while nothing is known of the model."""

MOST_S: Final = 30.0
"""No client is told to stay away for longer."""

QUEUES: Final = 2.0
"""A ticket is at most so many full queues ahead, as long as no further range has proved its worth."""

IDLE: Final = 0.1
"""It is halved where less is refused, beside what is answered."""

WORTH: Final = 0.8
"""A range does that where at most so much of what was refused before is refused."""

GOLDEN: Final = 0.6180339887498949


class Tickets(Policy):
    """Says when those that are refused should try again.

    Attributes:
        ticket: The last one, where nobody tells tenants apart.
        told_row_s: Seconds that a row takes, as the server says that has the workers; 0 if they are here.
    """

    def __init__(self, queue: BatchQueue, capacity: int) -> None:
        """Begin without having refused anything."""
        self.told_row_s = 0.0
        self.ticket = 0.0
        self._queue = queue
        self._capacity = capacity
        self._curve = Curve()
        self._beyond = 0.0
        self._queues = QUEUES
        self._rows = 0
        """What was refused since then."""
        self._since = 0.0
        self._before = NEVER
        """What was refused beside what was answered, before the range was doubled."""

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Learn what a batch took; asked only where no other rule of the queue learns that."""
        if not batch.has_streamed:
            self._curve.learn(batch.rows, now - batch.entries[0].taken)

    def next(self, tenant: Tenant | None, size: int, now: float, after_s: float = 0.0) -> float:
        """Return the moment at which a client that is refused now should try again.

        Args:
            tenant: Whose it is.
            size: Its samples.
            now: The time.
            after_s: How long it would be refused in any case.
        """
        row_s, fair = self.row_s, self._queue.fair
        range_s = self._range(size, now, row_s)
        holder = self if fair is None else fair.flow_of(tenant)
        share = 1.0 if isinstance(holder, Tickets) or fair is None else fair.share_of(holder)
        last = holder.ticket
        latest = now + range_s
        ticket = holder.ticket = max(last, min(max(last, now + after_s) + size * row_s / share, latest))
        if last < ticket < latest:
            return ticket
        self._beyond = (self._beyond + GOLDEN) % 1.0
        return latest - self._beyond * range_s / 2

    @property
    def row_s(self) -> float:
        """Seconds in which the workers answer a row, where batches are full."""
        if self.told_row_s:
            return self.told_row_s
        queue = self._queue
        most = queue.most_rows
        if queue.deadlines is not None:
            lasts_s = queue.deadlines.lasts_s(most)
        else:
            rule = queue.gather or queue.fair
            curve = self._curve if rule is None else rule.curve
            lasts_s = curve.a + curve.b * most
        return lasts_s / (most * queue.slots) or UNKNOWN_ROW_S

    def _range(self, size: int, now: float, row_s: float) -> float:
        """Return how many seconds ahead a ticket may be, now that so many rows more are refused."""
        range_s = min(self._queues * self._capacity * row_s, MOST_S)
        self._rows += size
        spent_s = now - self._since
        if spent_s < 2 * range_s:
            return range_s
        refused = self._rows * row_s / spent_s
        self._rows, self._since = 0, now
        before, self._before = self._before, NEVER
        if refused < IDLE or refused > WORTH * before:
            self._queues = max(self._queues / 2, QUEUES) if refused < IDLE else QUEUES
        elif refused > 1.0 and range_s < MOST_S:
            self._queues *= 2
            self._before = refused
        return min(self._queues * self._capacity * row_s, MOST_S)
