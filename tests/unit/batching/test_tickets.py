# SPDX-License-Identifier: Apache-2.0
"""When clients that were refused should try again."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.batching.queue import BatchConfig, BatchQueue, Idle
from forebay.errors import QueueFull, ShareUsed, TooLate
from forebay.types.call import Request
from forebay.types.retry_tickets import MOST_S
from forebay.types.tenant import Tenant

CAPACITY, MOST = 64, 8


def run(queue, now, seconds):
    batch = queue.take(now)
    batch.model_s = seconds
    queue.answered(batch, now + seconds)
    return now + seconds


def full(*, batch_s=0.0, slots=1, tenant=None, shared=False, idle: Idle = "gather"):
    """Returns a full queue that has learned what a batch takes, if it takes something, and the time."""
    queue = BatchQueue(BatchConfig(max_size=MOST, capacity=CAPACITY, idle=idle))
    if shared:
        queue.share()
    now = 100.0
    if batch_s:
        if idle != "gather":
            queue.next_ticket(None, 1, 0.0)  # it learns from the first refusal on
        for _ in range(20):
            for _ in range(MOST):
                queue.offer(Request(None, print, tenant=tenant), now)
            now = run(queue, now, batch_s)
    for _ in range(CAPACITY):
        queue.offer(Request(None, print, tenant=tenant), now)
    queue.slots = slots
    return queue, now


def refused(queue, now, *, tenant=None, size=1):
    with pytest.raises(QueueFull):
        queue.offer(Request(None, print, size=size, tenant=tenant), now)
    return queue.next_ticket(tenant, size, now)


def test_while_nothing_is_known_a_row_takes_a_millisecond():
    queue, now = full()
    assert [round(1000 * (refused(queue, now) - now), 6) for _ in range(3)] == [1, 2, 3]
    assert refused(queue, now, size=5) == pytest.approx(now + 0.008)
    assert refused(queue, now + 1.0) == pytest.approx(now + 1.001)


@pytest.mark.parametrize("idle", ["gather", "go", "wait"])
@pytest.mark.parametrize("slots", [1, 4])
def test_who_is_refused_in_a_burst_returns_at_the_rate_at_which_rows_are_answered(slots, idle):
    queue, now = full(batch_s=0.4, slots=slots, idle=idle)
    row_s = 0.4 / MOST / slots
    moments = [refused(queue, now) for _ in range(2 * CAPACITY - 1)]
    assert moments == pytest.approx([now + n * row_s for n in range(1, 2 * CAPACITY)])


def test_a_tenant_is_given_its_share_of_that_rate():
    light, heavy = Tenant("light"), Tenant("heavy", weight=3.0)
    queue, now = full(batch_s=0.08, tenant=heavy, shared=True)
    assert refused(queue, now, tenant=heavy) == pytest.approx(now + 0.01)
    assert queue.next_ticket(light, 1, now) == pytest.approx(now + 0.04)
    assert queue.next_ticket(light, 1, now) == pytest.approx(now + 0.08)
    assert refused(queue, now, tenant=heavy) == pytest.approx(now + 0.02)  # each flow has its own


def timed(now, seconds):
    request = Request(None, print, deadline=now + seconds)
    request.due = request.deadline
    return request


def test_what_would_be_late_is_told_by_how_much():
    queue, now = BatchQueue(BatchConfig(max_size=MOST, capacity=CAPACITY)), 100.0
    queue.keep_deadlines()
    for _ in range(20):
        for _ in range(MOST):
            queue.offer(Request(None, print), now)
        now = run(queue, now, 0.08)
    for _ in range(CAPACITY - 1):
        queue.offer(timed(now, 0.7), now)
    queue.offer(timed(now, 0.69), now)
    with pytest.raises(TooLate) as caught:
        queue.admit(timed(now, 0.69), now)  # the last of 65 rows, which take nine batches
    assert caught.value.after_s == pytest.approx(0.03)
    assert queue.next_ticket(None, 1, now, caught.value.after_s) == pytest.approx(now + 0.04)


def test_those_beyond_two_full_queues_are_told_moments_that_differ():
    queue, now = full()
    moments = [refused(queue, now) - now for _ in range(4 * CAPACITY)]
    assert len({round(moment * 1e6) for moment in moments}) == len(moments)
    furthest = 2 * CAPACITY / 1000
    beyond = moments[2 * CAPACITY :]
    assert all(furthest / 2 <= moment <= furthest for moment in beyond)
    tenths = [sum(n <= (moment / furthest - 0.5) * 20 < n + 1 for moment in beyond) for n in range(10)]
    assert max(tenths) - min(tenths) <= 3, tenths


def stampede(queue, now, seconds, *, obeys):
    """Has ten full queues of clients call for so long; returns how far ahead the last are told to come back."""
    calls = [now + n * 1e-6 for n in range(10 * CAPACITY)]
    heapq.heapify(calls)
    told = []
    while calls[0] < now + seconds:
        at = heapq.heappop(calls)
        moment = queue.next_ticket(None, 1, at)
        told.append(moment - at)
        heapq.heappush(calls, moment if obeys else at + 0.01)
    return max(told[-10 * CAPACITY :])


def test_clients_that_obey_are_given_the_time_that_they_need_and_others_are_not():
    queue, now = full()
    two_queues = 2 * CAPACITY / 1000
    assert stampede(queue, now, 20.0, obeys=True) == pytest.approx(10 * CAPACITY / 1000, rel=0.2)
    assert refused(queue, now + 60.0) == pytest.approx(now + 60.001)
    deaf, now = full()
    assert stampede(deaf, now, 20.0, obeys=False) <= 2 * two_queues


def test_the_share_of_a_tenant_that_is_refused_alone_is_all_of_it():
    tenant = Tenant("only")
    queue, now = full(tenant=tenant, shared=True)
    with pytest.raises(ShareUsed):
        queue.offer(Request(None, print, tenant=tenant), now)
    assert queue.next_ticket(tenant, 1, now) == pytest.approx(now + 0.001)


steps = st.tuples(
    st.sampled_from(["refuse", "run"]),
    st.sampled_from(["", "a", "b", "c"]),
    st.integers(1, 40),
    st.floats(0.0, 3.0),
    st.floats(0.0, 100.0),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60), st.booleans(), st.integers(1, 5))
def test_a_ticket_never_goes_back_and_nobody_is_told_to_stay_away_for_long(taken, shared, slots):  # S66
    queue = BatchQueue(BatchConfig(max_size=MOST, capacity=CAPACITY))
    queue.slots = slots
    fair = queue.share() if shared else None
    tenants = {name: Tenant(name, weight=weight) for name, weight in zip("abc", (0.5, 1.0, 7.0), strict=True)}
    now, before, told = 10.0, {}, set()
    for kind, name, size, seconds, late_s in taken:
        now += seconds / 10
        tenant = tenants.get(name) if shared else None
        if kind == "run":
            if queue.waiting + 1 <= CAPACITY:
                queue.offer(Request(None, print, tenant=tenant), now)
            if (batch := queue.take(now)) is not None:
                batch.model_s = seconds
                now += seconds
                queue.answered(batch, now)
            continue
        moment = queue.next_ticket(tenant, size, now, late_s)
        assert now < moment <= now + MOST_S
        assert (tenant, moment) not in told
        told.add((tenant, moment))
        assert queue.tickets is not None
        ticket = queue.tickets.ticket if fair is None else fair.flow_of(tenant).ticket
        assert ticket >= before.get(tenant, 0.0)
        before[tenant] = ticket
        queue.check()
