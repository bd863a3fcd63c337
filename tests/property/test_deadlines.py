# SPDX-License-Identifier: Apache-2.0
"""A queue that is told when answers are due, stepped by hand with a clock of numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checked_queue import CheckedQueue
from tests.property.test_fair_queue import CONFIGS, SECONDS, Run

from forebay.batching.deadlines import TRY_S
from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull, TooLarge, TooLate
from forebay.types.call import ALONE, Request
from forebay.types.tenant import Tenant

TIMES = [0.002, 0.01, 0.02, 0.04, 0.2, None]
ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.02]),  # seconds since the one before
        st.integers(1, 6),  # samples
        st.sampled_from([None, None, None, "a", ALONE]),
        st.integers(0, 4),  # tenant
        st.sampled_from(["", "", "", "cancel"]),
    ),
    min_size=1,
    max_size=150,
)


class Due(Run):
    """A run whose requests state deadlines."""

    def __init__(self, config, slots, seconds, tenants, times, later=0):
        super().__init__(config, slots, seconds, tenants)
        self.times, self.later = itertools.cycle(times), later
        self.deadlines = None

    def arrival(self, request, now):
        if not self.later:
            self.deadlines = self.queue.keep_deadlines()
        self.later -= 1
        time_s = next(self.times)
        if time_s is not None:
            request.deadline = request.due = now + time_s
        try:
            self.queue.offer(request, now)
        except (QueueFull, TooLarge, TooLate) as error:
            self.refused.append((request.body, type(error)))

    def left(self, batch, now, events):
        if self.deadlines is not None:
            last_due = self.deadlines.last_due(now)
            assert all(one.due > last_due for one in batch.entries)
        super().left(batch, now, events)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=ARRIVALS,
    config=CONFIGS,
    slots=st.integers(1, 3),
    seconds=SECONDS,
    weights=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, 1.0, 3.0])), max_size=5),
    times=st.lists(st.sampled_from(TIMES), min_size=1, max_size=9),
    later=st.integers(0, 40),
)
def test_whatever_is_due_whenever_is_refused_or_leaves_in_time_or_ends_once(
    arrivals, config, slots, seconds, weights, times, later
):
    """Also where the first deadline is stated while others wait and run, with tenants or without."""
    tenants = [Tenant(str(number), *one) for number, one in enumerate(weights)] or None
    run = Due(config, slots, seconds, tenants, times, later).go(arrivals)
    left = [body for _, bodies in run.batches for body in bodies]
    refused = {body for body, _ in run.refused}
    assert len(left) == len(set(left))
    assert not set(left) & (set(run.gone) | refused)
    assert run.queue.waiting == run.queue.running == 0


@settings(max_examples=100, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, slots=st.integers(1, 3), seconds=SECONDS, later=st.integers(0, 40))
def test_without_a_stated_deadline_batches_are_as_before(arrivals, config, slots, seconds, later):
    bare = Run(config, slots, seconds, None).go(arrivals)
    kept = Due(config, slots, seconds, None, [None], later).go(arrivals)
    assert kept.batches == bare.batches
    assert kept.refused == bare.refused


class Known:
    """A queue that has learned what batches take: 10 ms and 1 ms for each row."""

    def __init__(self, slots=1, **config):
        self.queue = CheckedQueue(BatchConfig(**{"max_size": 10, "idle": "go", **config}))
        self.queue.slots = slots
        self.now = 1.0
        self.deadlines = self.queue.keep_deadlines()
        self.tenants = {}
        for rows in (1, 10) * 10:
            self.offer(rows, None)
            self.now += config.get("max_wait_s", 0.0)
            self.answered(self.taken(), 0.010 + 0.001 * rows)

    def offer(self, rows, time_s, name="", body="", **more):
        tenant = self.tenants.setdefault(name, Tenant(name)) if name else None
        for _ in range(rows):
            request = Request(body=body, reply=print, tenant=tenant, **more)
            if time_s is not None:
                request.due = request.deadline = self.now + time_s
            self.queue.offer(request, self.now)

    def refused(self, time_s, name="", **more):
        """Whether one is refused that is due in so many seconds."""
        try:
            self.offer(1, time_s, name, **more)
        except TooLate:
            return True
        return False

    def taken(self):
        batch = self.queue.take(self.now)
        assert batch is not None
        return batch

    def answered(self, batch, seconds):
        self.now += seconds
        batch.model_s = seconds
        self.queue.answered(batch, self.now)


# F45: a request that cannot meet its deadline is refused on arrival
def test_what_is_ahead_and_what_that_takes_says_what_is_too_late():
    known = Known()
    known.offer(10, None)
    running = known.taken()  # for 20 ms
    known.offer(10, 0.050)
    assert known.refused(0.0505)  # 20 ms until a slot is free, 20 ms for those that wait, 20 ms for its own batch
    assert not known.refused(0.0605)
    known.answered(running, 0.020)
    assert known.taken().rows == 10
    assert known.queue.waiting == 1


def test_a_worker_that_starts_is_ahead_of_everything_where_none_is_up():
    known = Known(slots=4)
    known.deadlines.awaited = lambda now: (max(3.0 - now, 0.0), 1)  # the one that comes, at 3.0
    known.now = 2.0
    known.offer(10, 1.0205)
    assert known.refused(1.0395)  # one slot of the four comes: 20 ms for those that wait, 20 ms for its own batch
    assert not known.refused(1.0405)
    known.deadlines.awaited = lambda _: None
    assert not known.refused(0.050)


def test_nothing_is_learned_from_a_batch_that_was_called_off_and_never_ended():
    known = Known()
    before_s = known.deadlines.lasts_s(1)
    known.offer(1, None)
    batch = known.taken()
    batch.cancelled = True
    known.now += 30.0
    known.answered(batch, 0.0)
    assert known.deadlines.lasts_s(1) == before_s


@pytest.mark.parametrize("wait_s, is_refused", [(10.0, True), (86_400.0, False)])
def test_a_batch_that_waits_without_an_end_is_full_before_anybody_knows(wait_s, is_refused):
    known = Known(max_wait_s=wait_s, idle="wait")
    assert not known.refused(5.0)  # a try, as nothing waits
    assert known.refused(5.0) is is_refused


def test_what_comes_later_is_expected_to_find_itself_in_batches_as_large_as_lately():
    deadlines = Known().deadlines  # of eleven rows ten were in a batch of ten
    assert deadlines.usual_s(1) == deadlines.lasts_s(9) > deadlines.lasts_s(1)
    assert deadlines.usual_s(20) == deadlines.lasts_s(20)


def test_several_slots_are_free_one_after_the_other():
    known = Known(slots=2)
    known.offer(10, None)
    known.taken()
    known.now += 0.010
    known.offer(10, None)
    known.taken()
    assert known.refused(0.0195)
    assert not known.refused(0.0225)  # 10 ms until the first is free, 11 ms for itself


def test_others_are_ahead_as_their_shares_say():
    known = Known()
    known.offer(10, None, "flood")
    running = known.taken()
    known.offer(30, 0.095, "flood")
    assert known.refused(0.095, "flood")
    assert not known.refused(0.060, "light")
    known.answered(running, 0.020)
    assert "light" in {one.tenant.name for one in known.taken().entries}


def test_a_tenant_has_its_share_of_the_rounds_that_may_wait_where_a_queue_stands():
    """However much more another one has there."""
    known = Known()
    known.offer(10, None)
    known.taken()
    known.offer(30, 0.4, "a")
    known.offer(12, 0.4, "b")
    known.now += 0.001
    assert known.refused(0.02, "b")
    known.now += 0.45
    assert known.refused(0.44, "b")  # it would be in time: its 13 rows beside as many take 60 ms
    assert not known.refused(0.44, "c")


def test_batches_that_change_the_curve_do_not_count_twice():
    """What the first batches take shows the shape of the curve, and no change of the model."""
    known = Known()
    for rows, seconds in [(1, 0.011), (10, 0.020)] * 3:
        known.offer(rows, None)
        known.answered(known.taken(), seconds)
    fresh = CheckedQueue(BatchConfig(max_size=10, idle="go"))
    deadlines = fresh.keep_deadlines()
    known.queue = fresh
    for rows, seconds in [(1, 0.011), (10, 0.020)]:
        known.offer(rows, None)
        known.answered(known.taken(), seconds)
    assert deadlines.lasts_s(10) == pytest.approx(0.020, rel=0.1)


def test_a_wait_for_a_fuller_batch_is_part_of_what_is_ahead():
    known = Known(idle="wait", max_wait_s=0.050)
    known.offer(10, None)
    known.taken()
    assert known.refused(0.0805)  # 20 ms until the slot is free, 50 ms until it leaves, 11 ms for itself
    assert not known.refused(0.0815)


def test_ranks_hold_among_requests_of_like_times():
    known = Known(ranked=True)
    known.offer(10, None)
    running = known.taken()
    for body, time_s, rank in (("second", 0.20, 2), ("first", 0.21, 1), ("soon", 0.05, 9)):
        known.offer(1, time_s, body=body, rank=rank)
    known.answered(running, 0.020)
    assert [one.body for one in known.taken().entries] == ["soon", "first", "second"]


def test_what_is_due_first_leaves_first_and_those_of_like_times_as_they_came():
    known = Known()
    known.offer(10, None)
    running = known.taken()
    for body, time_s in (("late", 0.9), ("soon", 0.21), ("later", 0.95), ("soon too", 0.2)):
        known.offer(4, time_s, body=body)
    known.answered(running, 0.020)
    assert [one.body for one in known.taken().entries] == ["soon"] * 4 + ["soon too"] * 4 + ["late"] * 2


def test_a_line_is_as_old_as_its_oldest_entry_whatever_leaves_before_it():
    known = Known()
    known.offer(10, None)
    running = known.taken()
    known.offer(4, 0.05, body="soon")
    known.offer(12, 0.9, body="old")
    known.now += 0.01
    known.offer(12, 0.1, body="young")
    known.answered(running, 0.020)
    known.taken()  # those that are due first
    (line,) = known.queue._lines.values()
    assert line.oldest() == min(entry.arrived for entry in line.waiting()) < known.now


def test_a_time_that_is_half_as_long_again_is_no_like_time():
    queue = CheckedQueue(BatchConfig(max_size=1, idle="go"))
    queue.keep_deadlines()
    for number, time_s in enumerate((1.92, 1.28, 1.0)):
        queue.offer(Request(body=number, reply=print, deadline=1.0 + time_s, due=1.0 + time_s), 1.0)
    taken = [entry.body for _ in range(3) if (batch := queue.take(1.0)) is not None for entry in batch.entries]
    assert taken == [2, 1, 0]


def test_what_cannot_be_in_time_any_more_stays_out_and_needs_no_room():
    known = Known()
    known.offer(10, None)
    running = known.taken()
    known.offer(4, 0.045)
    known.offer(10, 0.5)
    known.answered(running, 0.036)  # longer than expected: 9 ms are left, a batch takes 11
    batch = known.taken()
    assert batch.rows == 10
    assert all(one.due > known.now + 0.1 for one in batch.entries)


def test_a_model_that_was_slow_once_gets_requests_all_the_same():
    """Nothing else would show that it is quick."""
    known = Known()
    known.offer(1, None)
    known.answered(known.taken(), 20.0)
    turns = 0
    while known.refused(0.030):
        known.now += TRY_S
        if not known.refused(0.030):
            known.answered(known.taken(), 0.011)
        turns += 1
        assert turns < 30
    assert known.queue.waiting == 1


def test_where_nothing_is_known_nobody_is_refused():
    queue = CheckedQueue(BatchConfig(max_size=1))
    queue.keep_deadlines()
    for _ in range(50):
        queue.offer(Request(body=0, reply=print, due=1.001, deadline=1.001), 1.0)
    assert queue.waiting == 50


def test_a_full_queue_without_tenants_says_so_as_before():
    """It is no share of anybody's: some protocols tell the two apart."""
    known = Known(capacity=20)
    known.offer(20, None)
    with pytest.raises(QueueFull, match="20 samples wait already, the queue takes 20") as told:
        known.offer(1, 5.0)
    assert type(told.value) is QueueFull
