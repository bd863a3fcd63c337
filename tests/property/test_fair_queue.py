# SPDX-License-Identifier: Apache-2.0
"""A queue that tenants share, stepped by hand with a clock of numbers, whatever arrives and whatever becomes of it."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checked_queue import CheckedQueue

from forebay.batching.fair import MAX_FLOWS
from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull, ShareUsed, TooLarge
from forebay.testing import MemoryOrigin
from forebay.types.call import ALONE, Request
from forebay.types.tenant import Tenant

ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.02]),  # seconds since the one before
        st.integers(1, 6),  # samples
        st.sampled_from([None, None, None, "a", "b", ALONE]),
        st.integers(0, 4),  # tenant, or client
        st.sampled_from(["", "", "", "cancel", "expire"]),
    ),
    min_size=1,
    max_size=150,
)
CONFIGS = st.fixed_dictionaries(
    {
        "max_size": st.integers(6, 20),
        "capacity": st.integers(20, 60),
        "idle": st.sampled_from(["go", "gather", "wait"]),
        "max_wait_s": st.sampled_from([0.0, 0.003]),
        "max_running": st.sampled_from([None, None, 1]),
        "objective_s": st.sampled_from([None, None, 0.02]),
        "ranked": st.sampled_from([False, False, True]),
    }
)
SECONDS = st.lists(st.floats(0.0005, 0.03), min_size=1, max_size=7)


class Run:
    """A queue, slots that are busy for given times, and what became of each request."""

    def __init__(self, config, slots, seconds, tenants):
        self.queue = CheckedQueue(BatchConfig(**config))
        self.queue.slots = slots
        self.fair = None if tenants is None else self.queue.share()
        if self.fair is not None:
            self.fair.eviction.evict = self.evict
        self.tenants = tenants
        self.slots, self.seconds = slots, itertools.cycle(seconds)
        self.origins = [MemoryOrigin() for _ in range(5)]
        self.batches, self.gone, self.refused, self.paid = [], [], [], {}
        self.running = 0
        self.seen = {}
        self.busy_s = 0.0

    def evict(self, entry, why):
        assert not entry.taken
        self.queue.cancel(entry)
        self.gone.append(entry.body)

    def go(self, arrivals):
        events, now = [], 1.0
        for number, (gap, size, key, who, fate) in enumerate(arrivals):
            now += gap
            request = Request(body=number, reply=print, size=size, key=key, origin=self.origins[who])
            request.rank = (number * 7 + who) // 20
            if self.tenants:
                request.tenant = self.tenants[who % len(self.tenants)]
            if fate == "expire":
                request.deadline = now + 0.006
            heapq.heappush(events, (now, number, "arrival", request))
            if fate == "cancel":
                heapq.heappush(events, (now + 0.005, number, "cancel", request))
        self.count = len(arrivals)
        while events:
            now, _, kind, what = heapq.heappop(events)
            getattr(self, kind)(what, now)
            self.unchanged()
            if events and events[0][0] == now:
                continue
            while self.running < self.slots and (batch := self.queue.take(now)) is not None:
                self.left(batch, now, events)
            if self.running < self.slots and self.queue.waiting:
                due = self.queue.next_due()
                if due is not None:
                    self.push(events, max(due, now + 1e-9), "look", None)
        return self

    def push(self, events, at, kind, what):
        self.count += 1
        heapq.heappush(events, (at, self.count, kind, what))

    def left(self, batch, now, events):
        self.unchanged()
        assert batch.rows == sum(one.size for one in batch.entries)
        assert {one.key for one in batch.entries} == {batch.key}
        assert all(one.deadline > now for one in batch.entries)
        self.batches.append((now, [one.body for one in batch.entries]))
        self.running += 1
        seconds = next(self.seconds)
        self.busy_s += seconds
        self.push(events, now + seconds, "done", batch)

    def arrival(self, request, now):
        try:
            self.queue.offer(request, now)
        except (QueueFull, TooLarge) as error:
            self.refused.append((request.body, type(error)))

    def cancel(self, request, now):
        if request.arrived and not request.taken and request.body not in {body for body, _ in self.refused}:
            self.gone.append(request.body)
            self.queue.cancel(request)

    def done(self, batch, now):
        self.running -= 1
        self.queue.answered(batch, now)

    def look(self, _, now):
        pass

    def unchanged(self):
        """Assert that no virtual time has fallen but by what was expected of a batch, and was too much."""
        if self.fair is not None:
            expected = defaultdict(float)
            for flow, charge in itertools.chain(*(one.items() for one in self.fair._running.values())):
                for one in {flow, flow.key}:
                    expected[one] += charge.seconds / one.tenant.weight
            for flow in {*self.fair.flows.values(), *self.fair.everybody()}:
                paid = flow.time - expected[flow]
                assert paid >= self.seen.get(flow, 0.0) - 1e-9
                self.seen[flow] = paid
            for tier, v in enumerate(self.fair.served):
                assert v >= self.seen.get(tier, 0.0)
                self.seen[tier] = v


@settings(max_examples=150, deadline=None)
@given(
    arrivals=ARRIVALS,
    config=CONFIGS,
    slots=st.integers(1, 3),
    seconds=SECONDS,
    weights=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, 1.0, 3.0])), min_size=2, max_size=5),
    parents=st.lists(st.sampled_from([None, None, 0, 1]), min_size=5, max_size=5),
)
def test_whatever_comes_of_several_tenants_is_refused_or_leaves_or_ends_once(
    arrivals, config, slots, seconds, weights, parents
):
    tenants = [Tenant(str(number), *one) for number, one in enumerate(weights)]
    for number, parent in zip(range(1, len(tenants)), parents, strict=False):
        if parent is not None and parent < number and tenants[parent].parent is None:
            tenants[number] = tenants[parent].have_child(str(number))
    run = Run(config, slots, seconds, tenants).go(arrivals)
    left = [body for _, bodies in run.batches for body in bodies]
    assert len(left) == len(set(left))
    expired = {number for number, one in enumerate(arrivals) if one[4] == "expire"}
    told = set(left) | set(run.gone) | {body for body, _ in run.refused}
    assert set(range(len(arrivals))) - told <= expired
    assert not set(left) & set(run.gone)
    assert run.queue.waiting == run.queue.running == 0


@settings(max_examples=150, deadline=None)
@given(
    arrivals=ARRIVALS,
    config=CONFIGS,
    slots=st.integers(1, 3),
    seconds=SECONDS,
    tenant=st.sampled_from([None, Tenant("only", 1, 2.0), Tenant("only", 3, 0.5)]),
)
def test_one_tenant_forms_the_batches_of_a_queue_without_tenants(arrivals, config, slots, seconds, tenant):
    bare = Run(config, slots, seconds, None).go(arrivals)
    shared = Run(config, slots, seconds, [tenant]).go(arrivals)
    assert shared.batches == bare.batches
    assert [body for body, _ in shared.refused] == [body for body, _ in bare.refused]


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.floats(0.001, 0.05)), min_size=1, max_size=60),
    cost=st.sampled_from([1.0, 8.0]),
)
def test_the_parts_of_all_batches_are_what_the_worker_was_busy(steps, cost):
    """Nobody is ever away here, so that virtual times are what was paid."""
    queue = CheckedQueue(BatchConfig(max_size=8, idle="go"))
    fair = queue.share()
    tenants = [Tenant(str(number), 1, weight) for number, weight in enumerate((1.0, 2.0, 5.0, 0.5))]
    now, busy_s = 1.0, 0.0
    for tenant in tenants:
        for _ in range(8 * len(steps)):
            queue.offer(Request(body=0, reply=print, tenant=tenant), now)
    for who, rows, seconds in steps:
        queue.offer(Request(body=1, reply=print, tenant=tenants[who], size=rows), now)
        batch = taken(queue, now)
        batch.model_s = seconds * cost
        busy_s += batch.model_s
        now += seconds
        queue.answered(batch, now)
    paid = sum(flow.time * flow.tenant.weight for flow in fair.flows.values())
    assert paid == pytest.approx(busy_s, rel=1e-9)


def taken(queue, now):
    """The next batch; there must be one."""
    batch = queue.take(now)
    assert batch is not None
    return batch


def saturated(weights, costs=None, batches=2000, size=8, keys=(None,)):
    """Keep all tenants backlogged; return the worker seconds that each has had."""
    queue = CheckedQueue(BatchConfig(max_size=size, idle="go", capacity=10_000))
    queue.share()
    tenants = [Tenant(str(number), 1, weight) for number, weight in enumerate(weights)]
    costs = costs or [1.0] * len(weights)
    had = [0.0] * len(weights)
    now = 1.0

    def add(who, number):
        queue.offer(Request(body=who, reply=print, tenant=tenants[who], key=keys[number % len(keys)]), now)

    for who in range(len(weights)):
        for number in range(3 * size * len(keys)):
            add(who, number)
    queue.check = lambda: None
    for number in range(batches):
        batch = taken(queue, now)
        units = [costs[entry.body] for entry in batch.entries]
        seconds = 0.01 + 0.0005 * sum(units)
        batch.model_s = seconds
        now += seconds
        for entry, unit in zip(batch.entries, units, strict=True):
            if number > batches / 4:  # what rows cost is learned by then
                had[entry.body] += 0.01 / len(units) + 0.0005 * unit
        queue.answered(batch, now)
        for place, entry in enumerate(batch.entries):
            add(entry.body, number + place if len(keys) > 1 else 0)
    return had


@pytest.mark.parametrize("keys", [(None,), ("a", "b", "c"), (ALONE,), (None, ALONE)])
def test_saturated_tenants_get_worker_seconds_by_their_weights(keys):
    had = saturated([1.0, 2.0, 5.0], keys=keys)
    assert [part / sum(had) for part in had] == pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=0.03)


def test_rows_that_cost_more_are_paid_for():
    had = saturated([1.0, 1.0], costs=[1.0, 8.0], batches=4000)
    assert [part / sum(had) for part in had] == pytest.approx([0.5, 0.5], rel=0.03)


def test_a_class_is_served_when_those_above_it_wait_for_nothing():
    queue = CheckedQueue(BatchConfig(max_size=4, idle="go"))
    queue.share()
    later, urgent = Tenant("later", 2, 1000.0), Tenant("urgent", 0)
    for number in range(12):
        queue.offer(Request(body=number, reply=print, tenant=(later, urgent)[number % 2]), 1.0)
    orders = []
    while (batch := queue.take(1.0)) is not None:
        orders.append({entry.tenant.name for entry in batch.entries})
        queue.answered(batch, 1.0)
    assert orders == [{"urgent"}, {"urgent", "later"}, {"later"}]


class Full:
    """A queue that is full, and who was evicted from it."""

    def __init__(self, capacity=40, **rows_of):
        self.queue = CheckedQueue(BatchConfig(max_size=8, idle="go", capacity=capacity))
        self.fair = self.queue.share()
        self.evicted = []
        self.fair.eviction.evict = self.evict
        self.tenants = {}
        for name, rows in rows_of.items():
            for number in range(rows):
                self.offer(name, f"{name}{number}")

    def evict(self, entry, why):
        self.evicted.append(entry.body)
        self.queue.cancel(entry)

    def refuses(self, tenant):
        return self.fair.eviction.refuses(self.fair.flow_of(tenant))

    def offer(self, name, body: Any = "new", **more):
        tenant = self.tenants.setdefault(name, Tenant(name, int(name[-1]) if name[-1].isdigit() else 1))
        self.queue.offer(Request(body=body, reply=print, tenant=tenant, **more), 1.0)


def test_a_full_queue_evicts_the_latest_of_whoever_holds_most():
    full = Full(flood=30, some=10)
    full.offer("light")
    full.offer("light", size=3)
    assert full.evicted == ["flood29", "flood28", "flood27", "flood26"]


def test_who_holds_most_itself_is_refused_and_nothing_is_evicted():
    full = Full(flood=28, some=12)
    with pytest.raises(ShareUsed, match="28 samples of 'flood' wait"):
        full.offer("flood")
    assert full.refuses(full.tenants["flood"])
    assert not full.refuses(full.tenants["some"])
    assert not full.refuses(Tenant("new"))
    full.offer("other", size=8)
    with pytest.raises(ShareUsed):
        full.offer("other", size=8)  # with half of that evicted, it would hold more than what is left of the flood
    assert full.evicted == [f"flood{number}" for number in range(27, 19, -1)]


def test_who_was_refused_finds_room_once_something_left():
    full = Full(flood=20, some=20)
    for _ in range(2):
        with pytest.raises(ShareUsed, match="20 samples of 'flood' wait"):
            full.offer("flood")
    for entry in [*full.queue.entries()][-2:]:
        full.queue.cancel(entry)
    full.offer("light")
    full.offer("flood")
    with pytest.raises(ShareUsed, match="21 samples of 'flood' wait"):
        full.offer("flood")


def test_what_was_cancelled_does_not_pile_up():
    full = Full(capacity=200, first=1, some=50)
    full.fair.sort_out()
    line: Any = full.queue.lines[None]
    lane = line.lanes[full.fair.flow_of(full.tenants["first"])]
    for number in range(500):
        full.offer("first", number)
        full.fair.sort_out()
        full.queue.cancel(lane[-1])
    assert len(lane) < 100


def test_what_was_noted_of_tenants_that_left_does_not_pile_up():
    full = Full(capacity=200, flood=120, some=80)
    full.offer("light")
    eviction: Any = full.fair.eviction
    for number in range(300):
        full.offer(f"guest{number}x", "guest")
        full.fair.sort_out()
        full.queue.cancel(next(entry for entry in full.queue.entries() if entry.body == "guest"))
        assert len(eviction._fullest._notes) < 80
        assert full.fair.flow_of(full.tenants["flood"]).bound  # a note that counts stays, and is not made anew
    full.offer("light", size=2)
    assert full.evicted[-1].startswith("flood")
    assert eviction._fullest.first() is full.fair.flow_of(full.tenants["flood"])


def test_the_least_urgent_class_leaves_first_however_little_it_holds():
    full = Full(flood=38, later3=2)
    full.offer("flood")
    full.offer("light")
    assert full.evicted == ["later31", "later30"]


def test_weights_say_how_much_of_a_full_queue_is_too_much():
    full = Full()
    full.tenants = {"heavy": Tenant("heavy", 1, 3.0), "light": Tenant("light", 1, 1.0)}
    for number in range(40):
        full.offer("heavy", number)
    for _ in range(60):
        try:
            full.offer("light")
        except ShareUsed:
            break
    full.fair.sort_out()
    rows = {flow.tenant.name: flow.rows for flow in full.fair.flows.values()}
    assert rows == {"heavy": 30, "light": 10}


def test_what_may_not_be_evicted_is_set_aside():
    full = Full(flood=30, some=10)
    full.fair.eviction.together = lambda entry: [] if entry.tenant is full.tenants["flood"] else [entry]
    full.offer("light")
    assert full.evicted == ["some9"]


def test_what_belongs_together_is_evicted_together():
    full = Full(flood=40)
    entries = [*full.queue.entries()]
    full.fair.eviction.together = lambda entry: entries[36:]

    def evict(entry, why):
        for one in entries[36:]:
            full.queue.cancel(one)

    full.fair.eviction.evict = evict
    full.offer("light", size=3)
    assert full.queue.waiting == 39


def test_what_is_too_large_evicts_nothing():
    full = Full(flood=40)
    with pytest.raises(TooLarge):
        full.offer("light", size=9)
    assert full.evicted == []


def test_a_flow_that_was_away_has_no_credit_for_that():
    queue = CheckedQueue(BatchConfig(max_size=4, idle="go"))
    fair = queue.share()
    busy, away = Tenant("busy"), Tenant("away")
    now = 1.0
    for turn in range(50):
        for _ in range(4):
            queue.offer(Request(body=0, reply=print, tenant=away if turn < 4 else busy), now)
        batch = taken(queue, now)
        now += 0.01
        queue.answered(batch, now)
    for _ in range(8):
        queue.offer(Request(body=0, reply=print, tenant=away), now)
        queue.offer(Request(body=0, reply=print, tenant=busy), now)
    first, second = taken(queue, now), taken(queue, now)
    assert [entry.tenant.name for entry in first.entries] == ["away"] * 4  # the batch that the others had last
    assert sorted(entry.tenant.name for entry in second.entries) == ["away", "away", "busy", "busy"]
    assert fair.flows[away].time > 0.0


def test_the_number_of_flows_is_bounded_and_those_that_are_idle_leave_first():
    queue = CheckedQueue(BatchConfig(max_size=8, idle="go", capacity=MAX_FLOWS + 10))
    fair = queue.share()
    check, queue.check = queue.check, lambda: None
    for number in range(MAX_FLOWS + 10):
        queue.offer(Request(body=0, reply=print, tenant=Tenant(str(number))), 1.0)
    fair.sort_out()
    assert len(fair.flows) == MAX_FLOWS
    check()
    assert fair._others[1].rows == 10  # nobody was idle
    queue.answered(taken(queue, 1.0), 2.0)
    queue.offer(Request(body=0, reply=print, tenant=Tenant("one more")), 2.0)
    fair.sort_out()
    check()
    assert len(fair.flows) <= MAX_FLOWS
    assert "one more" in {tenant.name for tenant in fair.flows}
    while (batch := queue.take(2.0)) is not None:
        queue.answered(batch, 2.0)
    check()


def test_a_hold_for_clients_ends_when_a_tenant_comes_that_was_away():
    """Those that were just answered are waited for by `gather`, but not at the cost of others."""
    queue = CheckedQueue(BatchConfig(max_size=8))
    queue.share()
    origins = [MemoryOrigin() for _ in range(4)]
    here, away = Tenant("here"), Tenant("away")
    now = 1.0
    queue.offer(Request(body=0, reply=print, tenant=away), now)
    batch = taken(queue, now)
    now += 0.01
    queue.answered(batch, now)
    for _ in range(3):
        for origin in origins:
            queue.offer(Request(body=0, reply=print, tenant=here, origin=origin), now)
        batch = taken(queue, now)
        now += 0.01
        queue.answered(batch, now)
    queue.offer(Request(body=0, reply=print, tenant=here, origin=origins[0]), now)
    assert queue.take(now) is None
    queue.offer(Request(body=1, reply=print, tenant=away), now)
    assert taken(queue, now).rows == 2
