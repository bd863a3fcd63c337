# SPDX-License-Identifier: Apache-2.0
"""Lines whose entries belong to several tenants: who leaves first is up to what each of them has had (`fair.py`).

What comes stands in order of arrival, as in any line, and if a batch can take all of it that is all there is. Else it
is sorted into a lane for each flow. What was cancelled in a lane is dropped when it reaches an end of it.

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from forebay.batching.due_lane import DueLane
from forebay.batching.lines import NEVER, Line, RankedEntries, put_by_rank
from forebay.types.call import ALONE

if TYPE_CHECKING:
    from forebay.batching.deadlines import Deadlines
    from forebay.batching.eviction import Fullest
    from forebay.batching.fair import FairShares
    from forebay.batching.row_costs import Figure
    from forebay.types.batch import Entry
    from forebay.types.tenant import Tenant


TURNS: Final = 8
"""Flows take such a part of a batch at a time, or their share if that is more: each change to another has its cost."""


class Flow:
    """What a queue knows of one tenant in one class, or of a child of it.

    A tenant of which children are known has a flow that no entry has: `key` of those that its children have, and of one
    more for what names no child. What these are charged, it is charged as well. Lines and queues choose between such
    flows and those of other tenants, and then one of the children, which have equal parts.

    Attributes:
        tenant: Whose it is.
        tier: Its class.
        weight: That of the tenant, also for a child. Both are those of the tenant, as of the last `renew`.
        key: The flow of the tenant, if this is the flow of a child; else itself.
        children: How many children have something that waits and is sorted.
        served: How far the children have come: the virtual time of the one that was served last.
        family: Notes which of the children holds most (`eviction.py`); None while it is not asked.
        time: Its virtual time: the worker seconds that it was charged, divided by its weight. Of two flows the one
            whose time is less goes first.
        row: What one of its rows costs, beside its part of what a batch takes in any case (`row_costs.py`).
        rows: Samples that wait, as far as they are sorted.
        lines: The lines, or places of its key in lines, in which entries of it were sorted; the one whose turn is next
            is the first.
        answered_at: When a batch with rows of it was answered last.
        missed: When something of it was too late last, by the bucket of its time (`deadlines.py`).
        ticket: When the client of it that was refused last is to try again (`tickets.py`).
        time_number: That of the note of its virtual time that counts; 0 if there is none.
        number: That of the note of its rows that counts (`eviction.py`).
        bound: Up to how many rows that note is not too low; none is needed while it is `NEVER`.
    """

    __slots__ = (
        "answered_at",
        "bound",
        "children",
        "family",
        "key",
        "lines",
        "missed",
        "number",
        "row",
        "rows",
        "served",
        "tenant",
        "ticket",
        "tier",
        "time",
        "time_number",
        "weight",
    )

    def __init__(self, tenant: Tenant, row: Figure, key: Flow | None = None) -> None:
        self.tenant = tenant
        self.tier, self.weight = tenant.tier, tenant.weight
        self.key = self if key is None else key
        self.children = 0
        self.served = 0.0
        self.family: Fullest | None = None
        self.time = 0.0
        self.row = row
        self.rows = 0
        self.lines: dict[Lanes, None] = {}
        self.answered_at = -NEVER
        self.missed: dict[int, float] = {}
        self.ticket = 0.0
        self.time_number = 0
        self.number = 0
        self.bound: float = NEVER

    def charge(self, seconds: float) -> None:
        """Charge worker seconds, or give back some that were charged too much."""
        self.time += seconds / self.weight
        if self.key is not self:
            self.key.charge(seconds)

    def begin_at(self, time: float) -> None:
        """Let it have no advantage over others that have come as far as this."""
        if self.time < time:  # noqa: PLR1730 - a call of `max` costs more
            self.time = time


class Charge(Struct, eq=False):
    """What a flow has in a batch: rows, and the seconds that were charged for them when it was taken."""

    rows: int
    seconds: float

    def add(self, rows: int, seconds: float) -> None:
        """Add what comes in a further turn, or of another tenant that shares the flow."""
        self.rows += rows
        self.seconds += seconds


class Lane(deque["Entry"]):
    """The entries of a flow in a line, in order of arrival or by their ranks, and cancelled ones among them.

    Attributes:
        flow: Whose they are.
        number: That of its note that counts; 0 once it has left its line.
    """

    __slots__ = ("flow", "number")

    flow: Flow
    number: int

    def cancel(self, entry: Entry) -> None:
        """Let an entry stand that was cancelled; it is dropped later."""

    def purge(self) -> None:
        """Drop what was cancelled."""
        left = [one for one in self if not one.taken]
        self.clear()
        self.extend(left)

    def latest(self) -> Iterator[Entry]:
        """Go through what waits, the latest first."""
        while self and self[-1].taken:
            self.pop()
        return itertools.filterfalse(_taken, reversed(self))


class RankedLane(Lane):
    """A lane whose entries leave by their ranks."""

    __slots__ = ()

    def extend(self, entries: Iterable[Entry], /) -> None:
        """Put each behind those of its rank and below."""
        for entry in entries:
            put_by_rank(self, entry)


class Lanes:
    """Lanes of several flows, of which the one that had least is served first."""

    __slots__ = ()

    lanes: dict[Flow, Lane | DueLane | ChildLanes]
    _fair: FairShares
    _notes: list[tuple[int, float, int, Lane | DueLane | ChildLanes]]
    """A heap with a note for each lane: class and virtual time of its flow, or less, a number, the lane."""

    def keep(self, deadlines: Deadlines) -> None:
        """Have entries leave by their deadlines from now on."""
        for flow, lane in self.lanes.items():
            if isinstance(lane, ChildLanes):
                lane.keep(deadlines)
            else:
                lane.number = 0
                self.add(flow, deadlines.lane(lane))

    def add(self, flow: Flow, lane: Lane | DueLane | ChildLanes) -> None:
        """Add the lane of a flow, or put it in the place of the one that was there."""
        lane.flow = flow
        self.lanes[flow] = lane
        flow.lines[self] = None
        self.note(flow)

    def note(self, flow: Flow) -> None:
        """Note the virtual time of a flow with a lane, which is new, or whose time has fallen."""
        lane = self.lanes[flow]
        lane.number = next(self._fair.numbers)
        heapq.heappush(self._notes, (flow.tier, flow.time, lane.number, lane))
        if len(self._notes) > 2 * len(self.lanes) + 64:  # most notes do not count any more
            self.renew()

    def renew(self) -> None:
        """Note all flows anew: their classes may have changed."""
        self._notes = [(flow.tier, flow.time, lane.number, lane) for flow, lane in self.lanes.items()]
        heapq.heapify(self._notes)
        for lane in self.lanes.values():
            if isinstance(lane, ChildLanes):
                lane.renew()

    def least(self) -> Lane | DueLane | ChildLanes | None:
        """Return the lane of the flow with sorted entries here whose turn it is."""
        notes = self._notes
        while notes:
            tier, noted, number, lane = notes[0]
            flow = lane.flow
            if lane.number != number:
                heapq.heappop(notes)
            elif noted < flow.time:
                heapq.heapreplace(notes, (tier, flow.time, number, lane))
            else:
                while lane and lane[0].taken:
                    lane.popleft()
                if lane:
                    return lane
                heapq.heappop(notes)
                lane.number = 0
                del self.lanes[flow]
                del flow.lines[self]
        return None

    def lead(self) -> float:
        """Return how far the flow whose turn it is has come less than the next one of its class; `NEVER` if none is."""
        notes = self._notes
        if len(notes) < 2:
            return NEVER
        after = notes[1] if len(notes) == 2 or notes[1] < notes[2] else notes[2]
        return after[1] - notes[0][1] if after[0] == notes[0][0] else NEVER

    def latest(self, flow: Flow) -> Iterator[Entry]:
        """Go through what waits of a flow, the latest first."""
        lane = self.lanes.get(flow)
        return iter(()) if lane is None or isinstance(lane, ChildLanes) else lane.latest()

    def check_notes(self) -> None:
        """Assert that each lane is noted, with a virtual time that is not too high; tests ask after each step."""
        assert all(self in flow.lines for flow in self.lanes)
        notes = {(number, lane.flow): time for _, time, number, lane in self._notes if lane.number == number}
        assert all(notes[lane.number, flow] <= flow.time for flow, lane in self.lanes.items())
        for lane in self.lanes.values():
            if isinstance(lane, ChildLanes):
                assert all(flow.key is not flow for flow in lane.lanes)
                lane.check_notes()

    def clear(self) -> None:
        """Let go of the lanes; nothing waits in them any more."""
        for flow, lane in self.lanes.items():
            del flow.lines[self]
            if isinstance(lane, ChildLanes):
                lane.clear()
        self.lanes.clear()
        self._notes.clear()


class ChildLanes(Lanes):
    """The lanes of the children of a tenant, in the place of its own lane in a line.

    Attributes:
        flow: That of the tenant.
        number: That of its note that counts; 0 once it has left its line.
        lanes: By flow.
    """

    __slots__ = ("_fair", "_notes", "flow", "lanes", "number")

    flow: Flow
    number: int

    def __init__(self, fair: FairShares) -> None:
        self.lanes: dict[Flow, Lane | DueLane | ChildLanes] = {}
        self._fair = fair
        self._notes = []

    def popleft(self) -> Entry:
        """Take the entry that leaves first; there must be one."""
        lane = self.least()
        assert lane is not None
        return lane.popleft()

    def first(self, lead: float) -> tuple[float, Lane | DueLane]:
        """Return the lane of the child whose turn it is; there must be one.

        Args:
            lead: How far their tenant has come less than the next one; it is returned, or how far the child has.
        """
        lane = self.least()
        assert lane is not None
        assert not isinstance(lane, ChildLanes)
        return min(lead, self.lead()), lane

    def cancel(self, entry: Entry) -> None:
        """Let an entry stand that was cancelled; it is dropped later."""
        self.lanes[entry.payer].cancel(entry)

    def purge(self) -> None:
        """Drop what was cancelled."""
        for lane in self.lanes.values():
            lane.purge()

    def heads(self) -> Iterator[Entry]:
        """Go through the entries among which the oldest is."""
        return itertools.chain.from_iterable(_heads(lane) for lane in self.lanes.values() if lane)

    def appendleft(self, entry: Entry) -> None:
        """Put back what was taken just now."""
        self.lanes[entry.payer].appendleft(entry)

    def __getitem__(self, place: int) -> Entry:
        """Return the entry that leaves first, which is the only one that is asked for."""
        lane = self.least()
        assert lane is not None
        return lane[0]

    def __bool__(self) -> bool:
        return self.least() is not None

    def __len__(self) -> int:
        return sum(map(len, self.lanes.values()))

    def __iter__(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(self.lanes.values())


class FairLine(Lanes, Line):
    """The entries that wait under one key; those of the flow that had least leave first.

    Attributes:
        entries: What is not sorted yet.
        dead: How many of those were cancelled, and one more while there are lanes: it cannot be taken as it stands.
        lanes: Those that are, by the flow of their tenant.
    """

    __slots__ = ("_cancelled", "_fair", "_notes", "_oldest", "lanes")

    def __init__(self, key: Hashable, fair: FairShares) -> None:
        super().__init__(key)
        if fair.is_ranked:
            self.entries = RankedEntries()
        self.lanes: dict[Flow, Lane | DueLane | ChildLanes] = {}
        self._fair = fair
        self._cancelled = 0
        """Entries in lanes that were cancelled since these were made."""
        self._notes = []
        self._oldest: Entry | None = None
        """The one in a lane that came first; to be looked for if that has left."""

    def waiting(self) -> Iterator[Entry]:
        """Go through what waits, in any order."""
        found = itertools.chain(self.entries, *self.lanes.values())
        return (entry for entry in found if not entry.taken)

    def head(self) -> Entry:
        """Return the entry that leaves first; there must be one."""
        self.sort_out()
        lane = self.least()
        assert lane is not None
        return lane[0]

    def oldest(self) -> float:
        """Return when the entry that waits for longest arrived; there must be one."""
        if self._fair.is_ranked:
            return min(entry.arrived for entry in self.waiting())
        if not self.lanes:
            return super().head().arrived
        if self._oldest is None or self._oldest.taken:
            first = [entry for flow, lane in self.lanes.items() if self.has(flow) for entry in _heads(lane)]
            self._oldest = min(first, key=_arrived, default=None)
        return super().head().arrived if self._oldest is None else self._oldest.arrived

    def cancel(self, entry: Entry) -> None:
        """Forget an entry, which is marked as `taken`."""
        self._fair.eviction.changed()
        if entry.payer is None:
            super().cancel(entry)
            if self.lanes and not self.dead:
                self.dead = 1
        else:
            self.rows -= entry.size
            self._fair.left(entry.payer, entry.size)
            self.lanes[entry.payer.key].cancel(entry)
            self._cancelled += 1
            if self._cancelled > 32 + self.rows:
                for lane in self.lanes.values():
                    lane.purge()
                self._cancelled = 0
        if self.rows == 0:
            self._clear()

    def sort_out(self) -> None:
        """Put what has come since the last time into the lanes of its flows."""
        if not self.entries:
            return
        entries: Iterable[Entry] = self.entries
        if self.dead > bool(self.lanes):
            entries = [entry for entry in entries if not entry.taken]
        groups: defaultdict[Tenant | None, list[Entry]] = defaultdict(list)
        for entry in entries:
            groups[entry.tenant].append(entry)
        self._sort_in(groups)
        self.entries.clear()
        self.dead = 1 if self.lanes else 0

    def _sort_in(self, groups: Mapping[Tenant | None, list[Entry]]) -> None:
        """Put entries into the lanes of the flows that pay for them."""
        fair = self._fair
        rows_of, eviction = fair.rows_of, fair.eviction
        for tenant, group in groups.items():
            flow = fair.flow_of(tenant)
            key = flow.key
            lanes: Lanes = self
            if not flow.rows:
                fair.begins(flow)
            rows = 0
            for entry in group:
                entry.payer = flow
                rows += entry.size
            key.rows += rows
            rows_of[key.tier] += rows
            if key.rows > key.bound:
                eviction.note(key)
            if key is not flow:
                flow.rows += rows
                if flow.rows > flow.bound:
                    eviction.note(flow)
                lanes = self._children_of(key)
            lane = lanes.lanes.get(flow)
            if lane is None:
                lanes.add(flow, fair.lane(group))
            elif not isinstance(lane, ChildLanes):
                lane.extend(group)

    def _children_of(self, key: Flow) -> ChildLanes:
        """Return the lanes of the children of a tenant."""
        if key not in self.lanes:
            self.add(key, ChildLanes(self._fair))
        lanes = self.lanes[key]
        assert isinstance(lanes, ChildLanes)
        return lanes

    def divide(self, key: Flow, rest: Flow) -> None:
        """Give what waits of a tenant, of which children become known, to the one that has no name."""
        lane, children = self.lanes[key], ChildLanes(self._fair)
        for entry in lane:
            if not entry.taken:
                entry.payer = rest
        self.add(key, children)
        children.add(rest, lane)

    def begin(self, line: Line) -> None:
        """Take over what waits in a line of a queue that nobody shared until now."""
        self.entries, self.rows, self.dead, self.full_since = line.entries, line.rows, line.dead, line.full_since

    def has(self, flow: Flow) -> bool:
        """Tell whether something sorted of a flow waits here."""
        lane = self.lane_of(flow)
        while lane and lane[0].taken:
            lane.popleft()
        return bool(lane)

    def lane_of(self, flow: Flow) -> Lane | DueLane | ChildLanes | None:
        """Return the lane of the flow of a tenant or a child."""
        lane = self.lanes.get(flow.key)
        return lane.lanes.get(flow) if flow.key is not flow and isinstance(lane, ChildLanes) else lane

    def cut(
        self, room: int, now: float, divide: Callable[[Entry, int], Entry | None] | None
    ) -> tuple[list[Entry], int, bool]:
        """Take as many entries as fit, each of the tenant and the child whose turn it is; see `Line.cut`.

        Where deadlines are kept, what is late takes no room.
        """
        self.sort_out()
        fair, deadlines = self._fair, self._fair.deadlines
        last_due = now if deadlines is None else deadlines.last_due(now)
        fixed_s = fair.costs.fixed.seconds / min(room, self.rows)
        mean_s = fixed_s + fair.costs.mean.seconds
        turn = max(room // TURNS - 1, 0)
        taken: list[Entry] = []
        charges: dict[Flow, Charge] = {}
        alone: Flow | None = None
        left, gone = room, 0
        is_late, fits = False, True
        while fits and left and (lane := self.least()) is not None:
            flow = key = lane.flow
            lead = self.lead()
            if not taken:
                fair.serve(key.tier, key.time)
            if isinstance(lane, ChildLanes):
                lead, lane = lane.first(lead)
                flow = lane.flow
                key.served = max(key.served, flow.time)
            if not taken:
                alone = flow if fair.has_alone(flow, room) else None
            elif alone is not None and self.has(alone):
                flow, lane = alone, self.lane_of(alone)
            if flow is alone:
                key, lead = flow.key, NEVER
            row_s = fixed_s + flow.row.seconds
            stop = 0
            if lead < NEVER:  # on until another one has had less, and more: a turn, or its share of what is left
                behind = min(lead * key.weight / row_s, left)
                crowd = fair.weights_of[key.tier] * (key.children or 1) * row_s
                share = (left - behind) * key.weight * mean_s / crowd - 1.0
                stop = max(left - 1 - int(behind + max(share, turn)), 0)
            before, begun, late = left, len(taken), 0
            while left > stop and lane:
                entry = lane.popleft()
                if entry.taken:
                    continue
                size = entry.size
                if entry.deadline <= last_due:
                    if deadlines is None:
                        is_late = True
                    elif is_over(entry, now, last_due):  # it takes no room
                        is_late = True
                        entry.taken = now
                        taken.append(entry)
                        late += size
                        continue
                if size > left:
                    part = divide(entry, left) if divide is not None else None
                    lane.appendleft(entry)
                    if part is None:
                        fits = False
                        break
                    entry, size = part, part.size
                    entry.payer = flow
                left -= size
                entry.taken = now
                taken.append(entry)
            rows = before - left
            gone += rows + late
            fair.left(flow, rows + late)
            if is_late and deadlines is None:
                rows -= sum(entry.size for entry in taken[begun:] if entry.deadline <= now)
            seconds = rows * row_s
            flow.charge(seconds)
            if flow in charges:
                charges[flow].add(rows, seconds)
            else:
                charges[flow] = Charge(rows, seconds)
        fair.charged = charges
        if gone == self.rows:
            self._clear()
        return taken, room - gone, is_late

    def check(self) -> None:
        """Assert what holds between any two steps; tests ask after each."""
        assert self.dead == sum(bool(entry.taken) for entry in self.entries) + bool(self.lanes)
        assert all(entry.payer is None for entry in self.entries)
        assert self.oldest() == min(entry.arrived for entry in self.waiting())
        self.check_notes()

    def _clear(self) -> None:
        """Let go of the lanes of a line of which nothing waits."""
        self.clear()
        self.entries.clear()
        self.dead = self._cancelled = 0
        self._oldest = None


class FairAlone(FairLine):
    """The entries that run alone, in the place of the deque that has them where there are no tenants."""

    __slots__ = ()

    def __init__(self, fair: FairShares) -> None:
        super().__init__(ALONE, fair)

    def append(self, entry: Entry) -> None:
        """Add an entry."""
        self.entries.append(entry)
        self.rows += entry.size

    def popleft(self) -> Entry:
        """Take the entry that leaves first; the caller marks it."""
        entry = self.head()
        self.lanes[entry.payer.key].popleft()
        self._fair.left(entry.payer, entry.size)
        self.rows -= entry.size
        if self.rows == 0:
            self._clear()
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry, which is marked as `taken`."""
        self.cancel(entry)

    def __getitem__(self, place: int) -> Entry:
        """Return the entry that leaves first, which is the only one that is asked for."""
        return self.head()

    def __iter__(self) -> Iterator[Entry]:
        return self.waiting()

    def __bool__(self) -> bool:
        return self.rows > 0


def is_over(entry: Entry, now: float, last_due: float) -> bool:
    """Tell whether an entry is too late, or would be that states a deadline up to the last that cannot be held."""
    return entry.deadline <= now or entry.due <= last_due


def _heads(lane: Lane | DueLane | ChildLanes) -> Iterable[Entry]:
    return (lane[0],) if isinstance(lane, Lane) else lane.heads()


_arrived: Final = operator.attrgetter("arrived")
_taken: Final = operator.attrgetter("taken")
