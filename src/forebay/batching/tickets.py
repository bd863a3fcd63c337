# SPDX-License-Identifier: Apache-2.0
"""When clients that a queue has refused are to come back: each has its moment, see `types/retry_tickets.py`.

A unit is a row, and the capacity is that of the queue. Each flow has its own ticket; a row comes back as fast as the
workers answer it at the share of the flow. Sans-I/O: no clock, no loop. `queue.py` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.batching.gather import Curve
from forebay.batching.policies import Policy
from forebay.batching.row_costs import UNKNOWN_ROW_S
from forebay.types.retry_tickets import RetryTickets

if TYPE_CHECKING:
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import EntryBatch
    from forebay.types.tenant import Tenant


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
        self._curve = Curve()
        self._tickets = RetryTickets(capacity)

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
        fair = self._queue.fair
        holder = self if fair is None else fair.flow_of(tenant)
        share = 1.0 if isinstance(holder, Tickets) or fair is None else fair.share_of(holder)
        holder.ticket, told = self._tickets.next(holder.ticket, size, self.row_s, now, after_s=after_s, share=share)
        return told

    @property
    def row_s(self) -> float:
        """Seconds in which the workers answer a row, where batches are full."""
        if self.told_row_s:
            return self.told_row_s
        queue = self._queue
        if queue.deadlines is not None:
            return queue.deadlines.row_s or UNKNOWN_ROW_S
        most = queue.most_rows
        rule = queue.gather or queue.fair
        curve = self._curve if rule is None else rule.curve
        return (curve.a + curve.b * most) / (most * queue.slots) or UNKNOWN_ROW_S
