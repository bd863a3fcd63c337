# SPDX-License-Identifier: Apache-2.0
"""Wait for the clients that were just answered, and only while waiting pays.

Theory of operation. Clients that call in a closed loop come back a moment after their answer. Sending the first of them
alone splits the others into cohorts (batches of 1, 63, 1, 63, ...); a fixed wait taxes every lone client. So after
answering a batch, the slot waits for the share `rho` of its clients that usually returns, in slices of 0.3 a, where the
time of a batch of n rows is T = a + b n and both are learned. Waiting ends when the expected rows are there, or when a
slice brought too few of them.

`rho` follows the returning clients quickly downwards and slowly upwards: a plain average of what came back is censored
by leaving early and locks itself at small batches. Where `rho` says that waiting does not pay, one batch in 64 waits
all the same: nothing else would raise `rho` again after many clients went away. Only clients that the last release
answered count as returning; counting any arrival makes open-loop traffic wait for nothing. All this is about one slot;
for several see `shares.py`.

Sans-I/O: no clock, no loop. `queue.py` calls it, every step takes `now` in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from forebay.batching.lines import NEVER
from forebay.batching.policies import Policy
from forebay.types.call import ALONE, Origin

if TYPE_CHECKING:
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Entry, EntryBatch

SLICE = 0.3
"""Length of one wait as a share of a batch's fixed cost a; 0.2 to 0.45 measure alike, 0.12 misses the target."""

FORGET = 0.97
"""Weight that older batches keep each time a new one is learned."""

MIN_FIXED_S = 0.0002
"""A fixed cost below this is not worth waiting for: the turns of the loop that a wait takes cost as much."""

MIN_SPREAD = 0.05
"""Squared relative spread of the sizes from which on a slope is learned: about 22 % around their mean."""

PROBE = 64
"""Of so many batches that were not waited for, one is: else nothing would show that clients return again."""

CLOSED: Final = 0.5
"""Share of the answered clients that come back at once from which on arrivals are theirs, and nobody else is due."""

releases: Final = itertools.count(1)
"""Numbers of the releases of all queues: an origin remembers the last that answered it."""


class Curve:
    """The time of a batch as a + b n seconds, learned by least squares with forgetting."""

    def __init__(self) -> None:
        self.a = 0.0
        self.b = 0.0
        self._sizes: set[float] = set()
        self._w = self._n = self._nn = self._t = self._nt = 0.0

    @property
    def usual_rows(self) -> float:
        """Rows of the batch in which a row was lately, on average; at least 1."""
        return self._nn / self._n if self._n else 1.0

    def learn(self, rows: float, seconds: float) -> None:
        """Take one executed batch into account."""
        if len(self._sizes) < 2:
            self._sizes.add(rows)
        self._w = self._w * FORGET + 1.0
        self._n = self._n * FORGET + rows
        self._nn = self._nn * FORGET + rows * rows
        self._t = self._t * FORGET + seconds
        self._nt = self._nt * FORGET + rows * seconds
        mean_n, mean_t = self._n / self._w, self._t / self._w
        if len(self._sizes) < 2:
            self.a = mean_t / 2
            self.b = mean_t / 2 / rows
            return
        spread = self._nn / self._w - mean_n * mean_n
        if spread < MIN_SPREAD * mean_n * mean_n:
            # Recent batches are too much of one size: noise would pass for a slope, so the known shape is only scaled.
            predicted = self.a + self.b * mean_n
            if predicted > 0.0:
                scale = mean_t / predicted
                self.a *= scale
                self.b *= scale
            return
        slope = (self._nt / self._w - mean_n * mean_t) / spread
        self.b = min(max(slope, 0.0), mean_t / mean_n)
        self.a = mean_t - self.b * mean_n


class UnknownClients:
    """Stands for all clients that cannot be told apart."""

    def __init__(self) -> None:
        self.release = 0


class GatherRule(Policy):
    """Wait for clients that were just answered."""

    has_plans: ClassVar[bool] = False
    """Whether it is asked although it does not wait at the moment."""
    closed_from: ClassVar[float]
    """Share of the answered clients that come back from which on arrivals are theirs, and nobody else is due."""

    def __init__(self, max_size: int, curve: Curve, patience_s: float = NEVER) -> None:
        """Begin without having seen a client.

        Args:
            max_size: Rows at which nothing more is waited for.
            curve: What a batch costs by its size.
            patience_s: Longest wait of a row for others; where there is one, it need not be certain who comes back.
        """
        self.max_size = max_size
        self.curve = curve
        self.patience_s = patience_s
        self.rho: float = 1.0
        """Share of the answered clients that come back in time."""
        self.until: float | None = None
        """When those who wait are to be asked again; None while nothing is waited for."""
        self.nobody: Origin | None = UnknownClients() if patience_s < NEVER else None
        """None if clients that cannot be told apart are not waited for."""

    @property
    def is_closed(self) -> bool:
        """Whether arrivals are clients that come back, and nobody else is due."""
        return self.rho >= self.closed_from

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Learn what a batch took: the whole way there and back, for that is what one more would cost."""
        if batch.key is not ALONE and not batch.has_streamed:
            self.curve.learn(batch.rows, now - batch.entries[0].taken)
            self.released(batch.entries, queue, now)

    def released(self, entries: Sequence[Entry], queue: BatchQueue, now: float) -> None:
        """Mark the origins of a batch whose answers were written."""
        raise NotImplementedError

    def holds(self, queue: BatchQueue, now: float) -> bool:
        """Tell, at the end of a turn, whether a slot that is free waits for clients to return."""
        if self.patience_s < NEVER and queue.oldest() + self.patience_s <= now:
            self.until = None
            return False
        return self.pays(queue, now)

    @property
    def held_since(self) -> float | None:
        """Since when it waits; None if it does not."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Wait no longer: what has come belongs to clients for which nothing was held back."""
        self.until = None

    def pays(self, queue: BatchQueue, now: float) -> bool:
        """Tell whether waiting for clients to return pays."""
        raise NotImplementedError

    def next_due(self, queue: BatchQueue) -> float | None:
        """Return when it is to be asked again, or what waits has waited for long enough."""
        if self.until is None or self.patience_s == NEVER:
            return self.until
        return min(self.until, queue.oldest() + self.patience_s)


class Gather(GatherRule):
    """Decide how long a slot that has just answered waits for its clients to return."""

    closed_from = CLOSED

    def __init__(self, max_size: int, curve: Curve, patience_s: float = NEVER) -> None:
        """Begin without having seen a client."""
        super().__init__(max_size, curve, patience_s)
        self._unwaited = 0
        self._release = 0
        self._target = 0.0
        self._answered = 0
        self._started = 0.0
        self._slice_started = 0.0
        self._slice_queued = 0

    @property
    def held_since(self) -> float | None:
        """Since when it waits; None if it does not."""
        return None if self.until is None else self._started

    def released(self, entries: Sequence[Entry], queue: BatchQueue, now: float) -> None:
        """Mark the origins of a batch whose answers were written and start to wait if that pays."""
        queued = queue.waiting
        self.until = None
        if queued >= self.max_size or self.curve.a < MIN_FIXED_S:
            return
        release = self._release = next(releases)
        nobody = self.nobody
        rows = 0
        for entry in entries:
            origin = entry.origin or nobody
            if origin is not None:
                origin.release = release
                rows += entry.size
        expected = self.rho * rows
        if expected < 0.5 or expected / SLICE < queued / 2:
            self._unwaited += 1
            if self._unwaited < PROBE or not rows or rows + queued < 2 or rows / SLICE < queued / 2:
                return
            expected = rows
        self._unwaited = 0
        self._target = min(self.max_size, queued + expected) - 0.5
        self._answered = rows
        self._slice_queued = queued
        self._started = self._slice_started = now
        self.until = now + 2 * SLICE * self.curve.a

    def pays(self, queue: BatchQueue, now: float) -> bool:
        """Tell whether the slot should go on waiting."""
        if self.until is None:
            return False
        queued = queue.waiting
        if queued >= self._target:
            share = self._share_back(queue)
            if share and share >= self.rho - 0.5 / self._answered:
                self.rho += 0.1 * (1.0 - self.rho)
            else:
                self.rho += 0.3 * (share - self.rho)
            self.until = None
            return False
        if now < self.until:
            return True
        a = self.curve.a
        slice_s = SLICE * a
        elapsed = now - self._slice_started
        rate = (queued - self._slice_queued) / elapsed if elapsed > 0.0 else 0.0
        if rate * a > queued and now + slice_s - self._started < a:
            self._slice_started = now
            self._slice_queued = queued
            self.until = now + slice_s
            return True
        self.rho += 0.3 * (self._share_back(queue) - self.rho)
        self.until = None
        return False

    def _share_back(self, queue: BatchQueue) -> float:
        """Return the share of the answered rows whose clients have come back."""
        release, since = self._release, self._started  # an origin with several requests may have had one waiting before
        nobody = self.nobody
        back = 0
        for entry in queue.entries():  # at most as many as a batch takes waited when the wait began
            origin = entry.origin or nobody
            if origin is not None and origin.release == release and entry.arrived >= since:
                back += entry.size
        return min(back / self._answered, 1.0)
