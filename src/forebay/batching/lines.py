# SPDX-License-Identifier: Apache-2.0
"""Lines of entries that wait, and their order by a moment of theirs.

Whose entry of a line leaves first is up to the kind of line. Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forebay.types.batch import Entry

NEVER: Final = float("inf")


class Line:
    """The entries that wait under one key, first come, first served.

    Attributes:
        key: What its entries have in common.
        entries: Those that wait, and cancelled ones among them.
        rows: Samples of those that wait; a line without any has left its queue for good.
        dead: Entries that were cancelled.
        full_since: When it became as long as a batch; `NEVER` while it is shorter.
    """

    __slots__ = ("dead", "entries", "full_since", "key", "rows")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.entries: deque[Entry] = deque()
        self.rows: int = 0
        self.dead = 0
        self.full_since = NEVER

    def waiting(self) -> Iterator[Entry]:
        """Go through what waits."""
        return (entry for entry in self.entries if not entry.taken)

    def sort_out(self) -> None:
        """Sort what has come since the last time, if that is up to the kind of line."""

    def head(self) -> Entry:
        """Return the entry that leaves first; there must be one."""
        entries = self.entries
        while entries[0].taken:
            entries.popleft()
            self.dead -= 1
        return entries[0]

    def oldest(self) -> float:
        """Return when the entry that waits for longest arrived; there must be one."""
        return self.head().arrived

    def cancel(self, entry: Entry) -> None:
        """Forget an entry, which is marked as `taken`."""
        self.rows -= entry.size
        self.dead += 1
        if self.dead > 32 and self.dead * 2 > len(self.entries):
            self.entries = type(self.entries)(entry for entry in self.entries if not entry.taken)
            self.dead = 0

    def cut(
        self, room: int, now: float, divide: Callable[[Entry, int], Entry | None] | None
    ) -> tuple[list[Entry], int, bool]:
        """Take as many entries off the front as fit; return them, the room that is left, and whether one is late.

        The caller counts the rows that are gone.
        """
        taken: list[Entry] = []
        left = room
        is_late = False
        queued = self.entries
        while left and queued:
            entry = queued.popleft()
            if entry.taken:
                self.dead -= 1
                continue
            if entry.size > left:
                queued.appendleft(entry)
                part = divide(entry, left) if divide is not None else None
                if part is None:
                    break
                entry = part
            left -= entry.size
            entry.taken = now
            if entry.deadline <= now:
                is_late = True
            taken.append(entry)
        return taken, left, is_late

    def check(self) -> None:
        """Assert what holds between any two steps; tests ask after each."""
        assert self.dead == sum(bool(entry.taken) for entry in self.entries)


class RankedEntries(deque["Entry"]):
    """Entries in the order of their ranks."""

    def append(self, entry: Entry, /) -> None:
        """Put an entry behind those of its rank and below; it belongs near the end, as late ranks come late."""
        if not self or self[-1].rank <= entry.rank:
            super().append(entry)
        else:
            put_by_rank(self, entry)


def put_by_rank(entries: deque[Entry], entry: Entry) -> None:
    """Put an entry behind those of its rank and below."""
    place = len(entries)
    while place and entries[place - 1].rank > entry.rank:
        place -= 1
    entries.insert(place, entry)


class RankedLine(Line):
    """The entries that wait under one key, lower ranks first."""

    __slots__ = ()

    def __init__(self, key: Hashable) -> None:
        super().__init__(key)
        self.entries = RankedEntries()

    def oldest(self) -> float:
        """Return when the entry that waits for longest arrived, whatever its rank."""
        return min(entry.arrived for entry in self.entries if not entry.taken)


class LineOrder:
    """Finds the line whose moment comes first; however many there are, a step costs no more than their logarithm.

    Theory of operation. A heap holds notes: a line, and a moment that is too early at most. That is corrected when the
    note reaches the top. If there are several notes about a line, only the last one counts. A single line needs none.
    """

    def __init__(self, lines: Mapping[Hashable, Line], moment: Callable[[Line], float]) -> None:
        """Begin without notes.

        Args:
            lines: All lines by their keys.
            moment: Gives the moment of a line; `NEVER` leaves it out until it is noted again.
        """
        self._lines = lines
        self._moment = moment
        self._heap: list[tuple[float, int, Line]] = []
        self._noted: dict[Line, float] = {}
        """The moment of the note that counts."""
        self._numbers = itertools.count()

    def note(self, line: Line) -> None:
        """Note a line that is new, or whose moment may have moved forward."""
        count = len(self._lines)
        if count < 2:
            return
        for one in self._lines.values() if count == 2 else (line,):
            moment = self._moment(one)
            if moment < self._noted.get(one, NEVER):
                self._noted[one] = moment
                heapq.heappush(self._heap, (moment, next(self._numbers), one))
        if len(self._heap) > 2 * count + 64:  # most notes do not count any more
            self._noted = {one: self._noted[one] for one in self._lines.values() if one in self._noted}
            self._heap = [(moment, next(self._numbers), one) for one, moment in self._noted.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, Line | None]:
        """Return the earliest moment and its line; `NEVER` and None if there is none."""
        lines, heap = self._lines, self._heap
        if len(lines) == 1:
            heap.clear()
            self._noted.clear()
            line = next(iter(lines.values()))
            moment = self._moment(line)
            return moment, (line if moment < NEVER else None)
        while heap:
            noted, number, line = heap[0]
            if noted != self._noted.get(line):
                heapq.heappop(heap)
                continue
            moment = self._moment(line) if lines.get(line.key) is line else NEVER
            if moment <= noted:
                return moment, line
            if moment < NEVER:
                self._noted[line] = moment
                heapq.heapreplace(heap, (moment, number, line))
            else:
                del self._noted[line]
                heapq.heappop(heap)
        return NEVER, None

    def check(self) -> None:
        """Assert that no line is noted too late; tests ask after each step."""
        notes = {(moment, line) for moment, _, line in self._heap}
        for line in self._lines.values() if len(self._lines) > 1 else ():
            noted = self._noted.get(line, NEVER)
            assert noted <= self._moment(line)
            assert noted == NEVER or (noted, line) in notes
