# SPDX-License-Identifier: Apache-2.0
"""Children of a tenant: they share its part, and it gains nothing by having many."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checked_queue import CheckedQueue

from forebay.batching.fair import MAX_FLOWS, MOST_WITH_CHILDREN
from forebay.batching.queue import BatchConfig
from forebay.errors import ShareUsed
from forebay.types.call import ALONE, Request
from forebay.types.tenant import Tenant, TenantConfig, Tenants

BATCHES = 1500


class Load:
    """A queue that is kept full of rows of several clients, and the worker seconds that each has had."""

    def __init__(self, capacity=10_000, size=8):
        self.queue = CheckedQueue(BatchConfig(max_size=size, idle="go", capacity=capacity))
        self.fair = self.queue.share()
        self.fair.eviction.evict = self.evict
        self.evicted = []
        self.had = {}
        self.now = 1.0

    def evict(self, entry, why):
        self.evicted.append(entry.tenant)
        self.queue.cancel(entry)

    def offer(self, tenant, key=None, **more):
        self.queue.offer(Request(body=0, reply=print, tenant=tenant, key=key, **more), self.now)

    def take(self):
        batch = self.queue.take(self.now)
        assert batch is not None
        return batch

    def saturate(self, tenants, rows, keys=(None,), cost=lambda tenant: 1.0):
        """Have so many rows of each tenant wait all the time."""
        for tenant in tenants:
            for number in range(rows):
                self.offer(tenant, keys[number % len(keys)])
        self.queue.check()
        self.queue.check = lambda: None  # tens of thousands of steps
        for number in range(BATCHES):
            batch = self.take()
            units = [cost(entry.tenant) for entry in batch.entries]
            batch.model_s = 0.01 + 0.0005 * sum(units)
            self.now += batch.model_s
            for entry, unit in zip(batch.entries, units, strict=True):
                if number > BATCHES / 4:  # what rows cost is learned by then
                    had = self.had.get(entry.tenant, 0.0)
                    self.had[entry.tenant] = had + 0.01 / len(units) + 0.0005 * unit
            self.queue.answered(batch, self.now)
            for entry in batch.entries:
                self.offer(entry.tenant, entry.key)
        self.fair.sort_out()

    def part(self, tenant):
        """The part of the worker seconds that a tenant and its children have had."""
        return sum(had for one, had in self.had.items() if tenant in (one, one.parent)) / sum(self.had.values())


@pytest.mark.parametrize("keys", [(None,), ("a", "b"), (ALONE,)])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_tenant_with_fifty_children_gets_what_it_gets_with_one(keys, rows):
    flood, other = Tenant("flood", 1, 1.0), Tenant("other", 1, 2.0)
    load = Load()
    load.saturate([*(flood.have_child(str(number)) for number in range(50)), *([other] * 50)], rows, keys)
    assert load.part(flood) == pytest.approx(1 / 3, rel=0.03)


def test_children_share_equally_and_what_names_none_is_one_of_them():
    flood, other = Tenant("flood"), Tenant("other")
    children = [flood, flood.have_child("a"), flood.have_child("b")]
    load = Load()
    load.saturate([*children, other], 30)
    assert load.part(other) == pytest.approx(0.5, rel=0.03)
    total = sum(load.had.values())
    assert [load.had[child] / total for child in children] == pytest.approx([1 / 6] * 3, rel=0.03)


def test_children_pay_for_rows_that_cost_more():
    tenant = Tenant("one")
    cheap, dear = tenant.have_child("cheap"), tenant.have_child("dear")
    load = Load()
    load.saturate([cheap, dear], 30, cost=lambda one: 8.0 if one is dear else 1.0)
    assert load.had[cheap] == pytest.approx(load.had[dear], rel=0.05)


def test_the_next_batch_has_a_light_tenant_however_many_children_wait():
    load, flood = Load(), Tenant("flood")
    for number in range(1000):
        load.offer(flood.have_child(str(number)))
    load.queue.answered(load.take(), 1.1)
    load.offer(light := Tenant("light"))
    assert light in {entry.tenant for entry in load.take().entries}


def test_a_child_that_comes_goes_before_those_of_its_tenant_that_had_more():
    load, tenant = Load(), Tenant("one")
    busy = tenant.have_child("busy")
    for _ in range(64):
        load.offer(busy)
    for _ in range(3):  # after which it is known what they cost
        load.queue.answered(load.take(), load.now + 0.01)
    load.offer(quiet := tenant.have_child("quiet"))
    assert quiet in {entry.tenant for entry in load.take().entries}


def test_in_a_full_queue_the_child_that_holds_most_makes_room_for_another_one():
    load, tenant = Load(40), Tenant("one")
    heavy, some, light = (tenant.have_child(name) for name in ("heavy", "some", "light"))
    for child, rows in ((heavy, 25), (some, 15)):
        for _ in range(rows):
            load.offer(child)
    assert load.fair.eviction.refuses(load.fair.flow_of(heavy))
    assert not load.fair.eviction.refuses(load.fair.flow_of(light))
    for _ in range(2):
        load.offer(light, size=5)
    assert load.evicted == [heavy] * 10
    with pytest.raises(ShareUsed, match="40 samples of 'one' wait"):
        load.offer(heavy, size=4)


def test_of_a_full_queue_a_tenant_with_many_children_has_what_it_would_have_alone():
    load, flood, light = Load(40), Tenant("flood"), Tenant("light")
    for number in range(40):
        load.offer(flood.have_child(str(number)))
    for _ in range(20):
        load.offer(light)
    assert len(load.evicted) == 20
    with pytest.raises(ShareUsed):
        load.offer(light)
    with pytest.raises(ShareUsed):
        load.offer(flood.have_child("one more"))


def test_what_waits_when_the_first_child_comes_is_of_its_tenant_still():
    load, tenant = Load(40), Tenant("one")
    for _ in range(20):
        load.offer(tenant)
    load.queue.answered(load.take(), load.now)  # the rest is sorted
    for _ in range(8):
        load.offer(tenant.have_child("child"))
    left = [load.take() for _ in range(3)]
    assert sum(entry.tenant is tenant for batch in left for entry in batch.entries) == 12
    for batch in left:
        load.queue.answered(batch, load.now)


def test_more_children_than_are_told_apart_share_a_place_and_no_other_tenant_is_forgotten():
    load, flood, other = Load(2 * MAX_FLOWS), Tenant("flood"), Tenant("other")
    load.offer(other)
    debt = load.fair.flow_of(other)
    load.queue.answered(load.take(), load.now)
    check, load.queue.check = load.queue.check, lambda: None
    for number in range(MAX_FLOWS + 50):
        load.offer(flood.have_child(str(number)))
    load.fair.sort_out()
    check()
    assert len(load.fair.flows) == MOST_WITH_CHILDREN
    load.fair.flow_of(Tenant("new"))
    assert len(load.fair.flows) == MOST_WITH_CHILDREN + 1
    for number in range(3 * MAX_FLOWS):
        load.offer(flood.have_child(f"again {number}"))
        load.queue.answered(load.take(), load.now)
    check()
    assert len(load.fair.flows) <= MOST_WITH_CHILDREN + 1
    assert load.fair.flow_of(other) is debt


def test_children_that_no_queue_knows_any_more_are_forgotten():
    tenants = Tenants(are_named=True)
    kept = tenants.of("one", child="kept")
    for number in range(100):
        tenants.of("one", child=str(number))
    gc.collect()
    assert len(tenants._children) == 1
    assert tenants.of("one", child="kept") is kept
    assert (kept.name, kept.child, kept.parent) == ("one", "kept", tenants.of("one"))


def test_a_child_has_the_weight_and_the_class_of_its_tenant_and_wishes_like_it():
    tenants = Tenants({"one": TenantConfig(weight=2.0, tier=1)})
    child = tenants.of("one", child="a")
    assert (child.weight, child.tier, child.wishing(0), child.wishing(1)) == (2.0, 1, child, child)
    later = child.wishing(3)
    assert (later.child, later.tier, later.parent) == ("a", 3, tenants.of("one", 3))
    tenants.configure({"one": TenantConfig(weight=5.0, tier=2)})
    assert (child.weight, child.tier, later.tier, child.wishing(2)) == (5.0, 2, 3, child)


@settings(max_examples=60, deadline=None)
@given(wishes=st.lists(st.integers(0, 3), min_size=1, max_size=6), tier=st.integers(0, 3))
def test_no_wish_makes_a_tenant_more_urgent_or_another_one_in_its_class(wishes, tier):
    tenants = Tenants({"one": TenantConfig(tier=tier)})
    found = {tenants.of("one").wishing(wish) for wish in wishes}
    assert len({one.tier for one in found}) == len(found)
    assert all(one.tier >= tier for one in found)
