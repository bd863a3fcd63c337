# SPDX-License-Identifier: Apache-2.0
"""The rules of a queue, each by itself; those that wait for clients, or learn sizes, have modules of their own.

Sans-I/O: no clock, no loop; every step takes `now` in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from forebay.batching.lines import NEVER, Line

if TYPE_CHECKING:
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Entry, EntryBatch

MIN_ROW_S: Final = 1e-6
"""No row is taken to be quicker."""


class Policy:
    """One rule of a queue. A rule is asked only for what its class defines: what it has from here costs nothing."""

    def arrived(self, entry: Entry) -> None:
        """Note an entry that begins to wait, or refuse it by raising."""

    def due(self, line: Line, due: float) -> float:
        """Return when a line may leave that may for the rules before at `due`.

        Only further rows, or the answer to a batch of its key, may move that moment forward; `NEVER` waits for these.
        """
        return due

    def waits(self, line: Line, now: float) -> None:
        """Note that a line waits beside a free slot."""

    def room(self, line: Line, most: int, queue: BatchQueue, now: float) -> int:
        """Return how many rows of a line leave together of the `most` that the rules before allow.

        The first entry leaves in any case.
        """
        return most

    def took(self, batch: EntryBatch, left: int, now: float) -> None:
        """Note a batch that leaves, and how many rows of its key wait on."""

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Note a batch that has run, and whose answers are written."""


class LongestWait(Policy):
    """Let a line leave when it is full, or when an entry of it has waited for so long."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s

    def due(self, line: Line, due: float) -> float:
        """Return what comes first."""
        return min(line.full_since, due + self.max_wait_s)


class MostRunning(Policy):
    """Let at most so many batches of one key run at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: dict[Hashable, int] = {}

    def due(self, line: Line, due: float) -> float:
        """Hold the key back until one of its batches is answered."""
        return due if self._running.get(line.key, 0) < self._limit else NEVER

    def took(self, batch: EntryBatch, left: int, now: float) -> None:
        """Count a batch that runs."""
        self._running[batch.key] = self._running.get(batch.key, 0) + 1

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Count it no more."""
        left = self._running.pop(batch.key) - 1
        if left:
            self._running[batch.key] = left


class SizeOfKey(Policy):
    """Let batches be of a size that their key says."""

    def __init__(self, size_of: Callable[[Hashable], int]) -> None:
        self._size_of = size_of

    def room(self, line: Line, most: int, queue: BatchQueue, now: float) -> int:
        """Return the size for the key."""
        return min(most, self._size_of(line.key))


class Bundles(Policy):
    """Let as many rows leave together as their runner, which takes them one by one, is expected to need so long for."""

    def __init__(self, bundle_s: float) -> None:
        self._bundle_s = bundle_s
        self._row_s = NEVER

    @property
    def rows(self) -> int:
        """How many rows the time is enough for, one at least."""
        return max(int(self._bundle_s / self._row_s), 1)

    @property
    def is_open(self) -> bool:
        """Whether more than one row would leave."""
        return self._bundle_s > self._row_s

    def room(self, line: Line, most: int, queue: BatchQueue, now: float) -> int:
        """Return how many rows the time is enough for."""
        return min(most, int(self._bundle_s / self._row_s))

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Learn what a row takes: at once from a slow one, for which others have to wait, else little by little."""
        row_s = batch.model_s / batch.rows
        self._row_s = max(row_s, 0.8 * self._row_s + 0.2 * row_s if self._row_s < NEVER else row_s, MIN_ROW_S)
