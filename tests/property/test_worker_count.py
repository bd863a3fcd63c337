# SPDX-License-Identifier: Apache-2.0
"""How many workers a model needs, whatever it is asked and however long its batches take."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from forebay.batching.worker_count import BatchTime, Seen, WorkerCount, queue_s, slots_for, slots_for_backlog
from forebay.types.worker_range import WorkerRange

BATCHES = st.builds(BatchTime, st.floats(0.0, 5.0), st.floats(0.0, 0.5), st.integers(1, 64))
TARGETS = st.floats(0.001, 5.0)
RATES = st.floats(0.0, 1e5)
SEEN = st.builds(
    Seen,
    waiting=st.integers(0, 5000),
    busy=st.integers(0, 40),
    running=st.integers(0, 400),
    up=st.integers(0, 10),
    starting=st.integers(0, 10),
    starting_s=st.floats(0.0, 100.0),
    start_s=st.floats(0.0, 100.0),
    arrived=st.floats(0.0, 1e4),
    batch=BATCHES,
)
LOOK_S = 0.1


@given(batch=BATCHES, rate=RATES, target_s=TARGETS, most=st.integers(1, 100))
def test_no_fewer_slots_would_meet_the_target_and_these_do_or_are_all(batch, rate, target_s, most):
    slots = slots_for(rate, batch, target_s, most)
    assert 1 <= slots <= most
    assert slots == most or queue_s(slots, rate, batch) <= target_s
    assert slots == 1 or queue_s(slots - 1, rate, batch) > target_s


@given(batch=BATCHES, rate=RATES, slots=st.integers(1, 100), more=st.floats(1.0, 10.0))
def test_more_slots_wait_less_and_more_arrivals_wait_more(batch, rate, slots, more):
    assert queue_s(slots + 1, rate, batch) <= queue_s(slots, rate, batch) * (1 + 1e-9)
    assert queue_s(slots, rate * more, batch) >= queue_s(slots, rate, batch) * (1 - 1e-9)


@given(seen=SEEN, each=st.integers(1, 8), target_s=TARGETS)
def test_a_backlog_asks_for_no_more_than_a_slot_for_each_row_that_waits(seen, each, target_s):
    wanted = slots_for_backlog(seen, each, target_s)
    assert 0 <= wanted <= seen.busy + seen.starting * each + seen.waiting
    assert seen.waiting or wanted == 0


@given(
    looks=st.lists(st.tuples(st.floats(0.001, 50.0), SEEN), min_size=1, max_size=40),
    least=st.integers(0, 5),
    more=st.integers(1, 10),
    each=st.integers(1, 8),
    target_s=TARGETS,
    quiet_s=st.floats(0.1, 60.0),
)
def test_the_number_stays_within_its_bounds_and_falls_by_one_after_a_quiet_time(
    looks, least, more, each, target_s, quiet_s
):
    bounds = WorkerRange(min=least, max=least + more)
    count = WorkerCount(bounds, each, target_s, quiet_s, max(least, 1))
    now = changed = 0.0
    for pause_s, seen in looks:
        now += pause_s
        before = count.wanted
        wanted = count.look(seen, now)
        assert bounds.min <= wanted <= bounds.max
        if seen.waiting or seen.busy or seen.arrived:
            assert wanted >= 1
        if wanted < before:
            assert wanted == before - 1
            assert now - changed >= quiet_s * (1 - 1e-9)
        if wanted != before:
            changed = now


def idle(**more):
    return Seen(**{"waiting": 0, "busy": 0, "running": 0, "up": 1, "batch": BatchTime(0.1, 0.0, 1), **more})


def test_a_backlog_that_outlasts_a_start_gets_workers_at_once_and_one_that_does_not_gets_none():
    for waiting, wanted in ((5, 1), (40, 8)):  # ten rows a second, and a start takes one
        count = WorkerCount(WorkerRange(min=1, max=8), 1, 0.05, 60.0, 1)
        count.look(idle(), 0.0)
        assert count.look(idle(waiting=waiting, busy=1, running=1, start_s=1.0, arrived=waiting), LOOK_S) == wanted


def test_a_client_that_asks_one_after_the_other_keeps_one_worker_busy_and_gets_no_second():
    count = WorkerCount(WorkerRange(min=1, max=8), 1, 0.05, 60.0, 1)
    assert {count.look(idle(busy=1, running=1, arrived=1.0, start_s=0.5), look * LOOK_S) for look in range(600)} == {1}


def test_rows_that_wait_for_the_first_worker_start_no_second_one_that_would_come_too_late():
    count = WorkerCount(WorkerRange(min=0, max=8), 1, 0.05, 60.0, 1)
    for look in range(30):  # two rows a second, of which a worker does ten; it takes three seconds to start
        start = {"up": 0, "starting": 1, "starting_s": look * LOOK_S, "start_s": 3.0}
        assert count.look(idle(waiting=1 + look // 5, arrived=0.2, **start), look * LOOK_S) == 1


class Simulated:
    """Workers that take one row at a time, behind a queue, with a clock of their own."""

    def __init__(self, count, start_s, batch_s):
        self.count, self.start_s, self.batch_s = count, start_s, batch_s
        self.up, self.starting, self.running, self.queue = 1, [], [], []
        self.waited = []

    def run(self, now, arrivals):
        """One look; returns the number of workers that are wanted."""
        self.up += len([at for at in self.starting if at + self.start_s <= now])
        self.starting = [at for at in self.starting if at + self.start_s > now]
        self.queue += arrivals
        self.running = [end for end in self.running if end > now]
        ends = sorted(self.running)
        free = [now - LOOK_S] * (self.up - len(ends)) + ends
        while self.queue and free and max(free[0], self.queue[0]) <= now:
            arrived = self.queue.pop(0)
            begins = max(free.pop(0), arrived)
            self.waited.append(begins - arrived)
            free = sorted([*free, begins + self.batch_s])
        self.running = [end for end in free if end > now]
        seen = Seen(
            waiting=len(self.queue),
            busy=len(self.running),
            running=len(self.running),
            up=self.up,
            starting=len(self.starting),
            starting_s=now - min(self.starting, default=now),
            start_s=self.start_s,
            arrived=len(arrivals),
            batch=BatchTime(self.batch_s, 0.0, 1),
        )
        wanted = self.count.look(seen, now)
        more = wanted - self.up - len(self.starting)
        self.starting += [now] * max(more, 0)
        if more < 0:
            self.up += more
        return wanted


def test_under_a_steady_load_the_queue_time_meets_the_target_and_then_all_but_one_leave():
    seeded = random.Random(7)
    simulated = Simulated(WorkerCount(WorkerRange(min=1, max=20), 1, 0.05, 5.0, 1), start_s=1.0, batch_s=0.1)
    wanted, now, next_at = [], 0.0, 0.0
    while now < 60.0:
        now += LOOK_S
        arrivals = []
        while next_at < now:
            next_at += seeded.expovariate(30.0)
            arrivals.append(next_at)
        wanted.append(simulated.run(now, arrivals))
        if len(wanted) == 200:
            simulated.waited.clear()
    assert sum(simulated.waited) / len(simulated.waited) < 0.05
    assert max(wanted[300:]) <= 8  # three are busy all the time
    numbers = wanted[-1:]
    while wanted[-1] > 1:
        now += LOOK_S
        wanted.append(simulated.run(now, []))
        numbers.append(wanted[-1])
    assert sorted(set(numbers), reverse=True) == list(range(numbers[0], 0, -1))
