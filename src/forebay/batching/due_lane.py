# SPDX-License-Identifier: Apache-2.0
"""The entries of a flow in a line where deadlines are stated: what is due first leaves first.

Entries of like times stand in one bucket, first come, first served: two buckets to a doubling. Of the first in each
bucket the one with the earliest deadline leaves. So order costs little, and of those that have equal times none
overtakes another. (With one bucket to a doubling, times of 20 stood behind times of 30 in one bucket, and were late.)

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from forebay.batching.lines import put_by_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forebay.types.batch import Entry

LONGEST_MS: Final = 4e6
"""Longer times are not told apart."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of what is due in so many seconds: twice the logarithm of the milliseconds to the base of 2.

    Example:
        >>> [bucket_of(seconds) for seconds in (-1.0, 0.003, 0.004, 1.0, float("inf"))]
        [0, 3, 4, 19, 43]
    """
    ms = min(max(seconds * 1000.0, 1.0), LONGEST_MS)
    return math.frexp(ms * ms)[1] - 1


class DueLane:
    """The entries of a flow in a line, by their deadlines, and cancelled ones among them.

    Attributes:
        flow: Whose they are, a `Flow`.
        number: That of its note that counts; 0 once it has left its line.
    """

    __slots__ = ("_buckets", "_is_ranked", "_rows", "flow", "number")

    flow: Any
    number: int

    def __init__(self, entries: Iterable[Entry], rows: dict[int, int], *, is_ranked: bool) -> None:
        """Begin with some entries.

        Args:
            rows: Counts those that wait in a queue, by bucket; kept up to date.
            is_ranked: Whether those in a bucket leave by their ranks.
        """
        self._buckets: dict[int, deque[Entry]] = {}
        self._rows = rows
        self._is_ranked = is_ranked
        self.extend(entries)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add entries."""
        for entry in entries:
            if not entry.taken:
                bucket = self._count(entry, entry.size)
                found = self._buckets.get(bucket)
                if found is None:
                    found = self._buckets[bucket] = deque()
                if self._is_ranked:
                    put_by_rank(found, entry)
                else:
                    found.append(entry)

    def popleft(self) -> Entry:
        """Take the entry that leaves first; there must be one."""
        first = self._first()
        assert first is not None
        entry = first.popleft()
        self._count(entry, -entry.size)
        return entry

    def appendleft(self, entry: Entry) -> None:
        """Put back what was taken just now."""
        self._buckets[self._count(entry, entry.size)].appendleft(entry)

    def cancel(self, entry: Entry) -> None:
        """Count an entry no more that was cancelled."""
        self._count(entry, -entry.size)

    def purge(self) -> None:
        """Drop what was cancelled."""
        for bucket, entries in self._buckets.items():
            self._buckets[bucket] = deque(entry for entry in entries if not entry.taken)

    def heads(self) -> Iterator[Entry]:
        """Go through the entries that are first in their buckets: the oldest of all is one of them."""
        self._first()  # drops what was cancelled before them
        return (entries[0] for entries in self._buckets.values() if entries)

    def latest(self) -> Iterator[Entry]:
        """Go through what waits, the latest deadlines first."""
        found = heapq.merge(*(reversed(one) for one in self._buckets.values()), key=latest_first)
        return (entry for entry in found if not entry.taken)

    def before(self, bucket: int, due: float) -> tuple[float, int]:
        """Return about how many entries leave before one in this bucket, and how many there are."""
        before, count = 0.0, 0
        for number, entries in self._buckets.items():
            count += len(entries)
            if number <= bucket:
                before += len(entries)
            elif entries:  # as if their deadlines were spread evenly
                first, last = entries[0].deadline, entries[-1].deadline
                share = (due - first) / (last - first) if last > first else float(first <= due)
                before += len(entries) * min(max(share, 0.0), 1.0)
        return before, count

    def __getitem__(self, place: int) -> Entry:
        """Return the entry that leaves first, which is the only one that is asked for."""
        first = self._first()
        assert first is not None
        return first[0]

    def __bool__(self) -> bool:
        return self._first() is not None

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __iter__(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(self._buckets.values())

    def _count(self, entry: Entry, rows: int) -> int:
        """Count rows more or less in the bucket of an entry, and return that."""
        bucket = bucket_of(entry.deadline - entry.arrived)
        self._rows[bucket] = self._rows.get(bucket, 0) + rows
        return bucket

    def _first(self) -> deque[Entry] | None:
        """Return the bucket whose first entry leaves first; None if nothing waits."""
        found: deque[Entry] | None = None
        for entries in self._buckets.values():
            while entries and entries[0].taken:
                entries.popleft()
            if entries and (found is None or entries[0].deadline < found[0].deadline):
                found = entries
        return found


def latest_first(entry: Entry) -> tuple[float, float]:
    """Sort by deadline and arrival, the latest first."""
    return -entry.due, -entry.arrived
