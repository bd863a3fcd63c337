# SPDX-License-Identifier: Apache-2.0
"""Whose entries leave a queue that is full, so that a tenant that has less in it finds room.

The one that leaves is the latest of the tenant that holds most: of those in the least urgent class the one with the
most rows for its weight, and of its children the one with the most rows. It leaves only if that tenant has more than
the one of the newcomer would hold then. Else a child of the same tenant may have to, if it has more than that of the
newcomer. All that has to leave is found before anything does.

A heap has a note for each flow with what it holds, or more; it is there while the queue is full, or was lately.

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from forebay.batching.due_lane import latest_first
from forebay.batching.lines import NEVER
from forebay.errors import QueueFull, ShareUsed
from forebay.types.tenant import NOBODY

if TYPE_CHECKING:
    from forebay.batching.fair import FairShares
    from forebay.batching.fair_lines import Flow
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Entry

Note = tuple[int, float, int, "Flow"]
"""Class and rows for the weight of a flow, both negative, the number of the note, and the flow."""

LINES: Final = 64
"""Lines of a flow in which its latest entry is looked for."""

WHY: Final = "had to leave the full queue for a request of a tenant that has less in it; try again later"


class Fullest:
    """Finds which of several flows holds most: all tenants of a queue, or all children of a tenant."""

    def __init__(self, flows: Iterable[Flow], fair: FairShares) -> None:
        """Begin with flows; others are noted once they are given a bound."""
        self._fair = fair
        self._notes: list[Note] = []
        for flow in flows:
            flow.bound = 0
            if flow.rows:
                self.note(flow)

    def note(self, flow: Flow) -> None:
        """Note what a flow holds, which has become more than its note says, and some more."""
        notes = self._notes
        if len(notes) > 2 * self._fair.active + 64:  # most notes do not count any more
            for _, _, number, one in notes:
                if number == one.number and not one.rows:
                    one.bound = 0
            notes[:] = [note for note in notes if note[2] == note[3].number and note[3].rows]
            heapq.heapify(notes)
        flow.bound = flow.rows + (flow.rows >> 3)
        flow.number = next(self._fair.numbers)
        heapq.heappush(notes, (-flow.tier, -flow.bound / flow.weight, flow.number, flow))

    def first(self) -> Flow | None:
        """Return the flow that holds most; None if nothing waits."""
        notes = self._notes
        while notes:
            tier, noted, number, flow = notes[0]
            rows = -flow.rows / flow.weight
            if number != flow.number:
                heapq.heappop(notes)
            elif not flow.rows:
                heapq.heappop(notes)
                flow.bound = 0
            elif noted != rows:
                flow.bound = flow.rows
                heapq.heapreplace(notes, (tier, rows, number, flow))
            else:
                return flow
        return None

    def check(self, flows: Iterable[Flow]) -> None:
        """Assert that no flow is noted with less than it holds; tests ask after each step."""
        notes = {(number, flow): -most for _, most, number, flow in self._notes}
        for flow in flows:
            assert not flow.rows or notes[flow.number, flow] >= flow.rows / flow.weight


class Eviction:
    """Finds room in a full queue.

    Attributes:
        evict: Has an entry that waits end, for the given reason, and all that belongs to it; must cancel them.
        together: Gives the entries that end with one that is evicted, itself among them; none if it may not be.
        reserved: Rows for which others are being evicted; they count as waiting.
    """

    def __init__(self, fair: FairShares, queue: BatchQueue, capacity: int) -> None:
        """Begin with a queue that has room."""
        self.evict: Callable[[Entry, str], object] = lambda entry, _: queue.cancel(entry)
        self.together: Callable[[Entry], Sequence[Entry]] = lambda entry: [entry]
        self.reserved = 0
        self._fair = fair
        self._queue = queue
        self._capacity = capacity
        self._fullest: Fullest | None = None
        self._refused: dict[Flow, tuple[float, str]] = {}
        """Rows of flows that were refused, and what was said of it, since anything in the queue has changed."""

    def refuses(self, flow: Flow) -> bool:
        """Tell whether the queue is full, and nobody would be evicted for one more row of a flow."""
        if self._queue.waiting < self._capacity:
            return False
        self._fair.sort_out()
        worst, key = self._worst(), flow.key
        if worst is not None and _is_over(worst, worst.rows, key, 1):
            return False
        return key is flow or self._worst_child(key).rows <= flow.rows + 1

    def make_room(self, flow: Flow, rows: int) -> None:
        """Evict what has to leave so that so many rows of a flow can wait.

        Raises:
            ShareUsed: Nobody holds more for its weight than the flow would; nothing was evicted.
            QueueFull: There are no tenants.
        """
        least, message = self._refused.get(flow, (NEVER, ""))
        if rows >= least:
            raise ShareUsed(message)
        queue = self._queue
        self._fair.sort_out()
        if flow.tenant is NOBODY and len(self._fair.flows) == 1:
            raise QueueFull(f"{queue.waiting} samples wait already, the queue takes {self._capacity}; try again later")
        victims = self._plan(flow, rows, queue.waiting + rows - self._capacity)
        if victims is None:
            whose = f" of '{flow.tenant.name}'" if flow.tenant.name else ""
            message = f"{flow.key.rows} samples{whose} wait already, its share of a queue that takes {self._capacity}"
            message += "; try again later"
            if queue.waiting >= self._capacity:  # else something may come that has room
                self._refused[flow] = rows, message
            raise ShareUsed(message)
        queue.waiting += rows  # nobody else takes the room that they leave
        self.reserved += rows
        try:
            for entry in victims:
                if not entry.taken:
                    self.evict(entry, WHY)
        finally:
            queue.waiting -= rows
            self.reserved -= rows
            self._refused.clear()

    def note(self, flow: Flow) -> None:
        """Note what a flow holds, which has become more than its note says."""
        fullest = self._fullest if flow.key is flow else flow.key.family
        if fullest is not None:
            fullest.note(flow)

    def has_begun(self, flow: Flow) -> None:
        """Have a new flow noted from its first row on, if any is."""
        fullest = self._fullest if flow.key is flow else flow.key.family
        flow.bound = NEVER if fullest is None else 0

    def changed(self) -> None:
        """Note that something waits no more: who was refused may find room."""
        self._refused.clear()

    def rest(self) -> None:
        """Note that a batch has left; note nothing more, if the queue has room again."""
        self._refused.clear()
        if self._fullest is not None and 2 * self._queue.waiting < self._capacity:
            self.renew()

    def renew(self) -> None:
        """Forget all notes; where they are needed, they are made anew."""
        self._refused.clear()
        self._fullest = None
        for flow in self._fair.everybody():
            flow.bound = NEVER
            if flow.family is not None:
                flow.family = None
                for child in self._fair.children_of(flow):
                    child.bound = NEVER

    def check(self) -> None:
        """Assert that who was refused still is, and no flow is noted with less than it holds; tests ask each time."""
        for flow, (rows, _) in self._refused.items():
            assert self._plan(flow, int(rows), self._queue.waiting + int(rows) - self._capacity) is None
        everybody = self._fair.everybody()
        if self._fullest is not None:
            self._fullest.check(everybody)
        for flow in everybody:
            if flow.family is not None:
                flow.family.check(self._fair.children_of(flow))

    def _worst(self) -> Flow | None:
        """Return the flow of the tenant that holds most."""
        if self._fullest is None:
            self._fullest = Fullest(self._fair.everybody(), self._fair)
        return self._fullest.first()

    def _worst_child(self, key: Flow) -> Flow:
        """Return the child of a tenant that holds most; the flow of the tenant if it has none."""
        if key.family is None and key.children:
            key.family = Fullest(self._fair.children_of(key), self._fair)
        return (key.family.first() if key.family is not None else None) or key

    def _plan(self, flow: Flow, rows: int, lacking: int) -> list[Entry] | None:
        """Return what to evict for rows of a flow of which `lacking` have no room; None if they are refused."""
        key, worst = flow.key, self._worst()
        if worst is not None and not _is_over(worst, worst.rows, key, rows):
            worst = None
        if worst is None and key is flow:
            return None
        victims: list[Entry] = []
        planned: set[int] = set()
        left: dict[Flow, int] = {}
        latest: dict[Flow, Iterator[Entry]] = {}
        others: list[Note] = []
        while worst is not None:
            if worst not in latest:
                latest[worst] = self._latest(worst)
            freed = self._add_to(victims, planned, latest[worst])
            lacking -= freed
            if lacking <= 0:
                return victims
            left[worst] = left.get(worst, worst.rows) - freed if freed else 0  # nothing else of it may be evicted
            if others:
                heapq.heapreplace(others, _note(worst, left[worst], others[0][2]))
            else:
                others = [_note(one, left.get(one, one.rows), n) for n, one in enumerate(self._fair.everybody())]
                heapq.heapify(others)
            worst = others[0][3]
            if not _is_over(worst, left.get(worst, worst.rows), key, rows):
                worst = None
        siblings = self._latest(key, flow.rows + rows) if key is not flow else iter(())
        while lacking > 0:
            freed = self._add_to(victims, planned, siblings)
            if not freed:
                return None
            lacking -= freed
        return victims

    def _add_to(self, victims: list[Entry], planned: set[int], latest: Iterator[Entry]) -> int:
        """Add the next entry that may be evicted to what has to leave, and return how many rows leave with it."""
        for entry in latest:
            if id(entry) not in planned and (ended := self.together(entry)):
                victims.append(entry)
                freed = 0
                for one in ended:
                    planned.add(id(one))
                    freed += 0 if one.taken else one.size
                return freed
        return 0

    def _latest(self, key: Flow, most: int = 0) -> Iterator[Entry]:
        """Go through what waits of a tenant, the latest first of the child that holds most.

        Args:
            key: The flow of the tenant.
            most: How many rows each child keeps, more or less.
        """
        child = self._worst_child(key)
        return _latest(key) if child is key else self._latest_of_children(key, child, most)

    def _latest_of_children(self, key: Flow, child: Flow, most: int) -> Iterator[Entry]:
        if child.rows <= most:
            return
        yield from itertools.islice(_latest(child), 1)  # most often that is enough
        children = enumerate(self._fair.children_of(key))
        left = [(-one.rows, number, _latest(one)) for number, one in children if one.rows > most]
        heapq.heapify(left)
        while left:
            rows, number, latest = left[0]
            entry = next(latest, None)
            if entry is not None:
                yield entry
            if entry is None or -rows - entry.size <= most:
                heapq.heappop(left)
            else:
                heapq.heapreplace(left, (rows + entry.size, number, latest))


def _note(flow: Flow, rows: int, number: int) -> Note:
    return (-flow.tier if rows else 0, -rows / flow.weight, number, flow)


def _is_over(worst: Flow, rows: int, flow: Flow, more: int) -> bool:
    """Tell whether a flow with so many rows holds more for its weight than another one with some more."""
    if worst is flow or not rows:
        return False
    return (worst.tier, rows / worst.weight) > (flow.tier, (flow.rows + more) / flow.weight)


def _latest(flow: Flow) -> Iterator[Entry]:
    """Go through what waits of a flow, the latest first."""
    lines = [line.latest(flow) for line in itertools.islice(flow.lines, LINES)]
    return lines[0] if len(lines) == 1 else heapq.merge(*lines, key=latest_first)
