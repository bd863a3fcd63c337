# SPDX-License-Identifier: Apache-2.0
"""Share a queue's workers between tenants: whose entries fill a batch, and what each of them has had.

Theory of operation. Each flow, a tenant in a class, has a virtual time: the worker seconds it had, divided by its
weight. A batch is filled from the flow of the most urgent class whose time is least. What a batch is expected to cost
is charged when it is taken; once it is answered, each flow has paid its part of what the worker really needed. A flow
that was away begins where the others are (`served`), so that being away earns nothing. Who leaves a queue that is full,
so that others find room, `eviction.py` says.

A tenant may have children, which a header names. They share its part: it has a flow of its own, which is charged what
they are, and one of the children is chosen when it is its turn. So a tenant gains nothing by inventing some.

A part of a batch is by rows, weighted with what a row of the flow costs (`row_costs.py`).

Other rules say when a line leaves and how many rows of it; this one says which. Lines keep their entries in order of
arrival, as without tenants. They sort them by flow when a batch cannot take all (`fair_lines.py`), so that a queue that
keeps up pays little. Heaps hold virtual times as they were noted; one that has fallen is noted anew, so that a note is
too low at most, and is corrected when it reaches the top. Hence a step costs the logarithm of the number of flows.

Sans-I/O: no clock, no loop. `queue.py` calls it, every step takes `now` in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from forebay.batching.deadlines import Deadlines
from forebay.batching.eviction import Eviction
from forebay.batching.fair_lines import Charge, FairAlone, FairLine, Flow, Lane, RankedLane
from forebay.batching.gather import Curve
from forebay.batching.lines import NEVER, Line
from forebay.batching.policies import Policy
from forebay.batching.row_costs import SHOWN, RowCosts
from forebay.types.call import ALONE
from forebay.types.tenant import LEAST_URGENT, NOBODY, Tenant

if TYPE_CHECKING:
    from forebay.batching.due_lane import DueLane
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Entry, EntryBatch

MAX_FLOWS: Final = 4096
"""Flows that a queue tells apart; where none of them is idle, a newcomer shares the one of the others in its class."""

MOST_WITH_CHILDREN: Final = MAX_FLOWS - 256
"""Where a queue has so many flows, children get no more of their own: other tenants find room in any case."""

CLASSES: Final = LEAST_URGENT + 1

LOOKED_AT: Final = 64
"""Lines that are looked at to find one of the next flow that may leave."""


class Keys(Policy):
    """Note the keys of what comes, so that not all lines are looked at.

    Attributes:
        touched: Keys of lines in which something is not sorted.
    """

    def __init__(self) -> None:
        self.touched: dict[Hashable, None] = {}

    def arrived(self, entry: Entry) -> None:
        """Note an entry that begins to wait."""
        self.touched[entry.key] = None


class FairShares(Policy):
    """Share the workers behind one queue between tenants.

    Attributes:
        is_ranked: Whether entries of one flow leave by their ranks.
        flows: Those that pay for entries, by their tenants and children.
        active: How many of these have something that waits and is sorted.
        rows_of: Samples of these, by class.
        weights_of: The sum of their weights, by class.
        curve: What batches take by their size.
        costs: What they take by whose rows they have.
        deadlines: Refuses what would be late; None while nobody has stated a deadline.
        served: How far each class has come: the virtual time of the flow that was served last in it.
        charged: What the last cut has charged, until the batch of it is there.
        numbers: Numbers of notes, so that no two are equal.
        keys: Notes in which lines something comes; None until there are several.
        alone: What waits to run alone.
        eviction: Finds room in a full queue.
    """

    def __init__(self, queue: BatchQueue, capacity: int, *, is_ranked: bool = False) -> None:
        """Begin without having seen a tenant."""
        self.is_ranked = is_ranked
        self.flows: dict[Tenant, Flow] = {}
        self.active = 0
        self.rows_of = [0] * CLASSES
        self.weights_of = [0.0] * CLASSES
        self.curve = Curve()
        self.costs = RowCosts()
        self.deadlines: Deadlines | None = None
        self.served = [0.0] * CLASSES
        self.charged: dict[Flow, Charge] | None = None
        self.numbers = itertools.count(1)
        self.keys: Keys | None = None
        self.alone = FairAlone(self)
        self.eviction = Eviction(self, queue, capacity)
        self._queue = queue
        self._others: dict[int, Flow] = {}
        self._running: dict[EntryBatch, dict[Flow, Charge]] = {}
        self._scale = 1.0
        """What batches take now, beside what the curve expects: that is slow to forget a batch that took very long."""
        self._times: list[tuple[int, float, int, Flow]] = []
        """The heap of virtual times: class, time, number, flow; empty until there are several lines."""

    def flow_of(self, tenant: Tenant | None) -> Flow:
        """Return the flow of a tenant."""
        return self.flows.get(tenant or NOBODY) or self._new_flow(tenant or NOBODY)

    def share_of(self, flow: Flow) -> float:
        """Return the share of a flow among those of its class of which something waits."""
        key = flow.key
        weight = key.weight
        share = weight / (self.weights_of[key.tier] + (0.0 if key.rows else weight))
        return share if key is flow else share / (key.children + (not flow.rows))

    def everybody(self) -> list[Flow]:
        """Return the flows of all tenants, those of children not among them."""
        return [*dict.fromkeys(flow.key for flow in self.flows.values()), *self._others.values()]

    def children_of(self, key: Flow) -> list[Flow]:
        """Return the flows of the children of a tenant."""
        return [flow for flow in self.flows.values() if flow.key is key is not flow]

    def waiting(self) -> dict[str, int]:
        """Return the samples of each tenant that wait, by its name."""
        self.sort_out()
        rows: dict[str, int] = {}
        for flow in self.everybody():
            if flow.rows:
                rows[flow.tenant.name] = rows.get(flow.tenant.name, 0) + flow.rows
        return rows

    def waiting_of(self, tenants: Iterable[Tenant]) -> int:
        """Return the samples of some tenants that wait, those of their children among them."""
        self.sort_out()
        return sum(self.flows[tenant].key.rows for tenant in tenants if tenant in self.flows)

    # What comes, and what goes without having run

    def begins(self, flow: Flow) -> None:
        """Note a flow of which something waits again; its rows are not counted yet."""
        self.active += 1
        key = flow.key
        if key is not flow:
            key.children += 1
            flow.begin_at(key.served)
            if key.rows:
                return
        tier = key.tier
        self.weights_of[tier] += key.weight
        key.begin_at(self.served[tier])
        if self.keys is not None and not key.time_number:
            self._note_time(key)

    def left(self, flow: Flow, rows: int) -> None:
        """Note rows that wait no more."""
        flow.rows -= rows
        tier = flow.tier
        self.rows_of[tier] -= rows
        key = flow.key
        if key is not flow:
            key.rows -= rows
        if not flow.rows:
            self.active -= 1
            key.children -= key is not flow
        if not key.rows:
            self.weights_of[tier] = self.weights_of[tier] - key.weight if self.rows_of[tier] else 0.0

    def is_lighter(self, tenant: Tenant | None, other: Tenant | None) -> bool:
        """Tell whether a tenant is more urgent than another one, or has less waiting for its weight."""
        self.sort_out()
        mine, theirs = self.flow_of(tenant), self.flow_of(other)
        if mine.key is not theirs.key:
            mine, theirs = mine.key, theirs.key
        if mine.tier != theirs.tier:
            return mine.tier < theirs.tier
        return mine.rows / mine.weight < theirs.rows / theirs.weight

    def move(self, payer: Tenant | None, other: Tenant | None, seconds: float) -> None:
        """Have another tenant pay worker seconds that one is charged with."""
        mine, theirs = self.flow_of(payer), self.flow_of(other)
        theirs.charge(seconds)
        mine.charge(-seconds)
        self._note_fallen(mine)
        if mine.key is not mine:
            self._note_fallen(mine.key)

    def has_newcomers(self, since: float | None, now: float) -> bool:
        """Tell whether tenants have come since a moment that had nothing in the queue then, nor were just answered."""
        if since is None or len(self.flows) < 2:
            return False
        recent = now - self.curve.a
        for line in self._queue.lines.values():
            for entry in reversed(line.entries):
                if entry.arrived < since:
                    break
                flow = self.flows.get(entry.tenant or NOBODY)
                if flow is None or (not flow.rows and flow.answered_at < recent):
                    return True
        return False

    def lane(self, entries: Iterable[Entry]) -> Lane | DueLane:
        """Return a lane for entries of a flow."""
        if self.deadlines is not None:
            return self.deadlines.lane(entries)
        return RankedLane(entries) if self.is_ranked else Lane(entries)

    # Whose turn it is

    def lasts_s(self, rows: int) -> float:
        """Return the seconds that a batch of so many rows is expected to take a worker; 0 if that is unknown."""
        return (self.curve.a + self.curve.b * rows) * self._scale

    def serve(self, tier: int, time: float) -> None:
        """Note the class and the virtual time of the flow that is the first in a batch."""
        if time > self.served[tier]:  # noqa: PLR1730 - a call of `max` costs more
            self.served[tier] = time

    def has_alone(self, flow: Flow, rows: int) -> bool:
        """Tell whether a batch of so many rows is left to a flow, as too little is known of what they cost."""
        return flow.rows >= rows and self.active > 1 and flow.row.shown < SHOWN

    def choose(self, first: Line, since: Callable[[Line], float], now: float) -> Line:
        """Return the line that leaves, of several.

        Args:
            first: The one whose turn it would be without tenants.
            since: Gives from when on a line may leave.
        """
        if len(self._queue.lines) == 1:
            return first
        self.sort_out()
        if self.active < 2:
            return first
        heap = self._times
        looked_at = 0
        aside: list[tuple[int, float, int, Flow]] = []
        found = first
        while heap and looked_at < LOOKED_AT and found is first:
            tier, noted, number, flow = heap[0]
            if number != flow.time_number or not flow.rows:
                heapq.heappop(heap)
                if number == flow.time_number:
                    flow.time_number = 0
                continue
            if noted < flow.time:
                heapq.heapreplace(heap, (tier, flow.time, number, flow))
                continue
            for line in itertools.islice(flow.lines, LOOKED_AT):
                looked_at += 1
                if isinstance(line, FairLine) and line.key is not ALONE and line.has(flow) and since(line) <= now:
                    found = line
                    del flow.lines[line]
                    flow.lines[line] = None
                    break
            else:
                aside.append(heapq.heappop(heap))
                continue
            break
        for note in aside:
            heapq.heappush(heap, note)
        return found

    def goes_alone(self, alone: Entry, line: Line, since: float) -> bool:
        """Tell whether an entry that runs alone goes before a line that may leave since then."""
        mine: Flow = alone.payer.key
        other: Flow = line.head().payer.key
        if mine is other:
            return alone.arrived <= since
        return (mine.tier, mine.time, alone.arrived) <= (other.tier, other.time, since)

    # What is paid

    def took(self, batch: EntryBatch, left: int, now: float) -> None:
        """Charge what a batch is expected to cost."""
        charges, self.charged = self.charged, None
        if charges is None:
            charges = self._charge(batch)
        self._running[batch] = charges
        self.eviction.rest()

    def answered(self, batch: EntryBatch, queue: BatchQueue, now: float) -> None:
        """Charge what a batch has cost in place of that."""
        charges = self._running.pop(batch, None)
        if charges is None:  # it left before the queue was shared
            return
        seconds = batch.worker_s - batch.billed_s if batch.worker_s else now - batch.entries[0].taken
        rows = batch.rows
        if batch.own_s:
            self._charge_own(batch)
        for (flow, charge), part in zip(
            charges.items(), self._parts(charges, rows, seconds - sum(batch.own_s)), strict=True
        ):
            before = flow.time
            flow.charge(part - charge.seconds)
            flow.answered_at = now
            if flow.time < before:
                self._note_fallen(flow)
                if flow.key is not flow:
                    self._note_fallen(flow.key)
        if batch.has_streamed or batch.attempts > 1 or (batch.cancelled and not batch.model_s):
            return  # beside others, after a crash, or never to its end
        seconds = batch.model_s or seconds
        self.curve.learn(rows, seconds)
        expected = self.curve.a + self.curve.b * rows  # the curve as it is now: at first it changes with each batch
        if expected > 0.0 and seconds > 0.0:
            self._scale = math.sqrt(self._scale * min(seconds / expected, 2.0 * self._scale))
        self.costs.learn(charges.items(), rows, seconds)

    def stepped(self, batch: EntryBatch) -> None:
        """Charge what rounds of a batch that goes on have cost, once that is more than was expected of all of it."""
        charges = self._running.get(batch)
        if charges is None:
            return
        parts = self._parts(charges, batch.rows, batch.worker_s - batch.billed_s)
        for (flow, charge), part in zip(charges.items(), parts, strict=True):
            expected = min(part, charge.seconds)
            charge.seconds -= expected
            flow.charge(part - expected)

    def row_costs(self, batch: EntryBatch) -> list[float]:
        """Return what a row of each entry of a batch that is not answered yet costs, beside those of the others."""
        fixed_s = self.costs.fixed.seconds / batch.rows
        return [fixed_s + self.flow_of(entry.tenant).row.seconds for entry in batch.entries]

    # Inside

    def renew(self) -> None:
        """Take account of weights and classes that have changed."""
        for flow in {*self.everybody(), *self.flows.values()}:
            flow.tier, flow.weight = flow.tenant.tier, flow.tenant.weight
        self._renew_times()
        self.rows_of, self.weights_of = self._sums()
        for line in (*self._queue.lines.values(), self.alone):
            if isinstance(line, FairLine):
                line.renew()
        self.eviction.renew()

    def check(self, entries: Sequence[Entry]) -> None:
        """Assert what holds between any two steps, given all that waits; tests ask after each."""
        rows: dict[Flow, int] = {}
        for entry in entries:
            if entry.payer is not None:
                rows[entry.payer] = rows.get(entry.payer, 0) + entry.size
        everybody = self.everybody()
        paying = [*self.flows.values(), *self._others.values()]
        assert rows == {flow: flow.rows for flow in paying if flow.rows}
        assert self.active == len(rows)
        for key in everybody:
            children = [flow for flow in paying if flow.key is key is not flow]
            assert key.children == sum(flow.rows > 0 for flow in children)
            assert not children or key.rows == sum(flow.rows for flow in children)
        rows_of, weights_of = self._sums()
        assert self.rows_of == rows_of
        assert all(abs(one - other) < 1e-6 for one, other in zip(self.weights_of, weights_of, strict=True))
        assert len(self.flows) <= MAX_FLOWS
        noted = {(number, flow): time for _, time, number, flow in self._times}
        if self.keys is not None:
            assert all(noted[flow.time_number, flow] <= flow.time for flow in everybody if flow.rows)
        assert self.charged is None
        self.eviction.check()

    def _sums(self) -> tuple[list[int], list[float]]:
        """Return rows that wait, and the weights of their flows, by class."""
        rows_of, weights_of = [0] * CLASSES, [0.0] * CLASSES
        for flow in self.everybody():
            if flow.rows:
                rows_of[flow.tier] += flow.rows
                weights_of[flow.tier] += flow.weight
        return rows_of, weights_of

    def keep_deadlines(self) -> Deadlines:
        """Refuse what would be late from now on, and have what is due first leave first."""
        deadlines = self.deadlines = Deadlines(self._queue, self)
        for line in (*self._queue.lines.values(), self.alone):
            if isinstance(line, FairLine):
                line.keep(deadlines)
        return deadlines

    def _new_flow(self, tenant: Tenant) -> Flow:
        """Make the flow of a tenant or a child; where there is no room, return the one that it shares."""
        rest = None if tenant.parent is None else self._rest_of(tenant.parent)
        most = MAX_FLOWS if rest is None else MOST_WITH_CHILDREN
        if len(self.flows) >= most and (rest is None or len(self.flows) - self.active > MAX_FLOWS // 16):
            self._forget(are_children=rest is not None)  # for children not each time, as clients name them
        if len(self.flows) >= most:
            if rest is not None:
                return rest
            found = self._others.get(tenant.tier)
            if found is None:
                found = self._others[tenant.tier] = Flow(Tenant("other", tenant.tier), self.costs.mean)
                self.eviction.has_begun(found)
            return found
        flow = self.flows[tenant] = Flow(tenant, self.costs.mean, None if rest is None else rest.key)
        self.eviction.has_begun(flow)
        return flow

    def _rest_of(self, tenant: Tenant) -> Flow:
        """Return the flow of what a tenant has beside its named children, which have flows of their own from now on."""
        key = self.flow_of(tenant)
        if key.key is not key or key.tenant is not tenant:
            return key
        rest = self.flows[tenant] = Flow(tenant, key.row, key)
        rest.rows, rest.answered_at = key.rows, key.answered_at
        rest.missed = key.missed
        key.children = int(key.rows > 0)
        for line in key.lines:
            assert isinstance(line, FairLine)
            line.divide(key, rest)
        self.eviction.has_begun(rest)
        return rest

    def _forget(self, *, are_children: bool) -> None:
        """Let idle flows go: children first, then tenants that owe nothing, then the longest quiet.

        Args:
            are_children: Whether none but children may go.
        """
        flows = self.flows.values()
        idle = [flow for flow in flows if not flow.rows and flow.tenant.parent is not None]
        if not are_children:
            idle += [flow for flow in flows if not flow.key.rows and flow.tenant.parent is None]
        idle.sort(key=self._is_missed)
        for flow in idle[: MAX_FLOWS // 8]:  # many at once: to find them takes a look at all
            del self.flows[flow.tenant]
        self._renew_times()

    def _is_missed(self, flow: Flow) -> tuple[bool, bool, float]:
        """Sort idle flows by what is lost with them, the least first."""
        key = flow.key
        return flow.tenant.parent is None, key.time > self.served[key.tier], flow.answered_at

    def _note_fallen(self, flow: Flow) -> None:
        """Note that the virtual time of a flow is less than it was."""
        for line in flow.lines:
            line.note(flow)
        if flow.time_number:
            self._note_time(flow)

    def _note_time(self, flow: Flow) -> None:
        if len(self._times) > 2 * len(self.flows) + 64:  # most notes do not count any more
            self._renew_times()
        flow.time_number = next(self.numbers)
        heapq.heappush(self._times, (flow.tier, flow.time, flow.time_number, flow))

    def _renew_times(self) -> None:
        """Note the virtual times of all flows of which something waits, and of no others."""
        everybody = [] if self.keys is None else self.everybody()
        for flow in everybody:
            flow.time_number = (flow.time_number or next(self.numbers)) if flow.rows else 0
        self._times = [(one.tier, one.time, one.time_number, one) for one in everybody if one.rows]
        heapq.heapify(self._times)

    def _parts(self, charges: dict[Flow, Charge], rows: int, seconds: float) -> list[float]:
        """Divide seconds of a batch among the flows in it."""
        fixed_s = self.costs.fixed.seconds / rows
        parts = [charge.rows * (fixed_s + flow.row.seconds) for flow, charge in charges.items()]
        scale = seconds / sum(parts)
        return [part * scale for part in parts]

    def _charge_own(self, batch: EntryBatch) -> None:
        """Charge flows what runs of their entries alone have cost."""
        for entry, seconds in zip(batch.entries, batch.own_s, strict=False):  # of most batches there is none
            self.flow_of(entry.tenant).charge(seconds)

    def _charge(self, batch: EntryBatch) -> dict[Flow, Charge]:
        """Charge a batch that took all of a line, or a part of a queue with a single flow."""
        rows_of: defaultdict[Tenant | None, int] = defaultdict(int)
        for entry in batch.entries:
            rows_of[entry.tenant] += entry.size
        charges: dict[Flow, Charge] = {}
        children: dict[Flow, float] = {}
        first, least = CLASSES, NEVER
        is_sorted = batch.key is ALONE  # else it took all of a line
        fixed_s = self.costs.fixed.seconds / batch.rows
        for tenant, rows in rows_of.items():
            flow = self.flow_of(tenant)
            key = flow.key
            tier = key.tier
            if not key.rows and not is_sorted:
                key.begin_at(self.served[tier])
            time = key.time
            if tier < first or (tier == first and time < least):
                first, least = tier, time
            if key is not flow:
                if not flow.rows and not is_sorted:
                    flow.begin_at(key.served)
                children[key] = min(children.get(key, NEVER), flow.time)
            seconds = rows * (fixed_s + flow.row.seconds)
            flow.charge(seconds)
            if flow in charges:
                charges[flow].add(rows, seconds)
            else:
                charges[flow] = Charge(rows, seconds)
        self.serve(first, least)
        for key, time in children.items():
            key.served = max(key.served, time)
        return charges

    def sort_out(self) -> None:
        """Sort what has come in all lines."""
        lines = self._queue.lines
        if len(lines) > 1 and self.keys is None:
            self.keys = Keys()
            self.keys.touched.update(dict.fromkeys(lines))
            self._queue.compose()
            self._renew_times()
        if self.keys is None:
            for line in lines.values():
                line.sort_out()
        else:
            for key in self.keys.touched:
                if key in lines:
                    lines[key].sort_out()
            self.keys.touched.clear()
        self.alone.sort_out()
