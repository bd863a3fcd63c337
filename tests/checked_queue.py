# SPDX-License-Identifier: Apache-2.0
"""A queue whose invariants are switched on."""

from __future__ import annotations

from forebay.batching.queue import BatchQueue


class CheckedQueue(BatchQueue):
    """Asserts after each step what holds between any two."""

    def offer(self, entry, now):
        super().offer(entry, now)
        self.check()

    def offer_all(self, entries, now):
        super().offer_all(entries, now)
        self.check()

    def cancel(self, entry):
        super().cancel(entry)
        self.check()

    def take(self, now, limit=None):
        batch = super().take(now, limit)
        self.check()
        return batch

    def answered(self, batch, now):
        super().answered(batch, now)
        self.check()
