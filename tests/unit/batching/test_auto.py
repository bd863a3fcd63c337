# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOperatorIssue=false
"""Batching by a latency objective: what it decides by hand, and what it makes of whole traffic beside hand-set values.

The simulation steps the queue as the batcher does, in time that nobody waits for. Every curve serves about a thousand
rows a second at its best.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import random

import pytest
from tests.metrics_page import whole_page

from forebay.batching.auto import MAX_KEYS
from forebay.batching.batcher import Batcher
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.observe.metrics.exposition import Exposition, Reading
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import FakeClock, ManualPool, MemoryOrigin
from forebay.types.call import ALONE, Request

MAX_SIZE = 64


def fixed(rows):
    """Nearly all of the time is the same for every batch."""
    return 0.040 + 0.0004 * rows


def linear(rows):
    return 0.0005 + 0.001 * rows


def jumpy(rows):
    """Rows are rounded up to tiles of 8, tiles get cheaper, and from 33 rows on everything takes 1.3 times as long."""
    return (0.002 + 0.0072 * math.ceil(rows / 8) ** 0.8) * (1.3 if rows > 32 else 1.0)


CURVES = [fixed, linear, jumpy]
OBJECTIVE_S = {fixed: 0.25, linear: 0.1, jumpy: 0.12}


def most(curve):
    """Rows a second at the best size there is."""
    return max(rows / curve(rows) for rows in range(1, MAX_SIZE + 1))


def steady(rng, curve, until):
    now = 0.0
    while (now := now + rng.expovariate(0.75 * most(curve))) < until:
        yield now


def bursty(rng, curve, until):
    """Bursts of 1 to 31 rows, each within 5 ms."""
    now = 0.0
    while (now := now + rng.expovariate(0.5 * most(curve) / 16)) < until:
        for _ in range(rng.randint(1, 31)):
            yield now + rng.random() * 0.005


def rising(rng, curve, until):
    """From nearly nothing to what steady has."""
    return (moment for moment in steady(rng, curve, until) if rng.random() < moment / until)


def entry(name=b"", origin=None, size=1, key=None):
    return Request(body=name, reply=print, origin=origin, size=size, key=key)


class Run:
    """Traffic on one queue. Figures are those after `settled_s`, when the policy has learned."""

    def __init__(self, curve, *, moments=(), clients=0, slots=1, until=8.0, settled_s=3.0, **settings):
        self.curve = curve
        self.slots = slots
        self.queue = BatchQueue(BatchConfig(**{"max_size": MAX_SIZE, "capacity": 100_000, **settings}))
        self.queue.slots = slots
        self.random = random.Random(5)
        self.latencies = []
        self.sizes = []
        self._count = itertools.count()
        self._running = 0
        self._events = []
        strangers = [MemoryOrigin() for _ in range(500)]
        for moment in moments:
            self._at(moment, entry(origin=self.random.choice(strangers)))
        for _ in range(clients):
            self._at(self.random.random() * 1e-3, entry(b"returns", MemoryOrigin()))
        self._drive(until, settled_s)
        late = [until - one.arrived for line in self.queue._lines.values() for one in line.entries if not one.taken]
        everything = sorted([*self.latencies, *late])
        self.p95_s = everything[int(0.95 * len(everything))]
        self.throughput = len(self.latencies) / (until - settled_s)

    @property
    def state(self):
        return self.queue.auto.state()

    def _at(self, moment, what):
        heapq.heappush(self._events, (moment, next(self._count), what))

    def _drive(self, until, settled_s):
        queue = self.queue
        while self._events and (now := self._events[0][0]) < until:
            while self._events and self._events[0][0] == now:
                what = heapq.heappop(self._events)[2]
                if type(what) is Request:
                    queue.offer(what, now)
                elif what is not None:
                    self._answer(what, now, counts=now > settled_s)
            while self._running < self.slots and (batch := queue.take(now)) is not None:
                self._running += 1
                if now > settled_s:
                    self.sizes.append(batch.rows)
                self._at(now + self.curve(batch.rows), batch)
            if self._running < self.slots and (due := queue.next_due()) is not None:
                assert due > now, "the driver would be woken again and again"
                self._at(due, None)

    def _answer(self, batch, now, *, counts):
        self._running -= 1
        for position, one in enumerate(batch.entries):
            if counts:
                self.latencies.append(now - one.arrived)
            if one.body == b"returns":
                back = now + 8e-6 * position + 50e-6 + self.random.random() * 300e-6
                self._at(back, entry(b"returns", one.origin))
        self.queue.answered(batch, now)


GRID = [(4, 0.0), (16, 0.0), (16, 0.01), (32, 0.0), (32, 0.01), (64, 0.0), (64, 0.01), (64, 0.05)]


def by_hand(curve, **traffic):
    """The traffic with every pair of hand-set values."""
    return [Run(curve, idle="wait", max_size=size, max_wait_s=wait_s, **traffic) for size, wait_s in GRID]


def best_of(runs):
    return max(run.throughput for run in runs)


# Beside hand-set values


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("arrivals", [steady, bursty, rising])
def test_open_loop_traffic_is_served_as_with_the_best_values_within_the_objective(curve, arrivals):
    objective_s = OBJECTIVE_S[curve]
    moments = list(arrivals(random.Random(1), curve, 8.0))
    holding = [run for run in by_hand(curve, moments=moments) if run.p95_s <= objective_s]
    auto = Run(curve, moments=moments, objective_s=objective_s)
    assert auto.p95_s <= objective_s
    assert auto.throughput >= 0.95 * best_of(holding)
    assert auto.state.objective_held


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("clients", [1, 8, 64, 128])
def test_a_closed_loop_is_served_as_with_the_best_values_within_the_objective(curve, clients):
    objective_s = 2 * OBJECTIVE_S[curve]
    holding = [run for run in by_hand(curve, clients=clients) if run.p95_s <= objective_s]
    auto = Run(curve, clients=clients, objective_s=objective_s)
    assert auto.p95_s <= objective_s
    assert auto.throughput >= 0.95 * best_of(holding)


@pytest.mark.parametrize("curve", CURVES)
def test_more_than_can_be_served_is_served_as_fast_as_possible_and_it_says_so(curve):
    moments = [step / (1.3 * most(curve)) for step in range(int(8.0 * 1.3 * most(curve)))]
    auto = Run(curve, moments=moments, objective_s=OBJECTIVE_S[curve])
    assert auto.throughput >= 0.95 * best_of(by_hand(curve, moments=moments))
    assert not auto.state.objective_held
    assert "are the most that can be served" in auto.state.because


def test_a_model_that_is_too_slow_for_its_objective_says_so():
    auto = Run(fixed, clients=4, objective_s=0.03)
    assert not auto.state.objective_held
    assert auto.state.because == "one row alone takes 40.4 ms"


def test_what_it_says_it_has_learned_is_so():
    auto = Run(linear, moments=list(steady(random.Random(2), linear, 8.0)), objective_s=0.1)
    state = auto.state
    assert state.fixed_s + 8 * state.per_row_s == pytest.approx(linear(8), rel=0.05)
    assert state.rows_per_s == pytest.approx(0.75 * most(linear), rel=0.25)
    assert state.late < 0.05
    assert state.because == ""


def test_nothing_waits_while_single_rows_are_quick_enough():
    moments = [step * 0.1 for step in range(60)]
    auto = Run(fixed, moments=moments, objective_s=1.0, until=6.0, settled_s=1.0)
    assert set(auto.sizes) == {1}
    assert auto.p95_s == pytest.approx(fixed(1))
    assert (auto.state.goal, auto.state.wait_s) == (1, 0.0)


def test_waiting_spares_the_slots_and_stays_within_the_objective():
    """100 rows/s one by one would keep a model of 40 ms busy all the time; here they need not."""
    moments = list(
        itertools.takewhile(
            lambda moment: moment < 12.0,
            itertools.accumulate(random.Random(3).expovariate(100) for _ in itertools.count()),
        )
    )
    auto = Run(fixed, moments=moments, objective_s=0.5, until=12.0)
    at_once = Run(fixed, moments=moments, until=12.0)
    assert len(auto.sizes) < 0.9 * len(at_once.sizes)
    assert auto.p95_s <= 0.5


def test_clients_of_unknown_origin_are_not_made_to_wait_for_nobody():
    """A lone client in a closed loop: nothing else can arrive, so the waits that try are few."""
    run = Run(fixed, objective_s=1.0, idle="go", clients=1, settled_s=1.0)
    assert run.throughput >= 0.95 / (fixed(1) + 200e-6)


@pytest.mark.parametrize("slots", [2, 4])
def test_several_slots_share_the_arrivals(slots):
    rng = random.Random(4)
    moments = list(
        itertools.takewhile(
            lambda moment: moment < 5.0,
            itertools.accumulate(rng.expovariate(0.75 * slots * most(jumpy)) for _ in itertools.count()),
        )
    )
    traffic = {"moments": moments, "slots": slots, "until": 5.0, "settled_s": 2.0}
    auto = Run(jumpy, objective_s=OBJECTIVE_S[jumpy], **traffic)
    best = max(Run(jumpy, idle="wait", max_size=size, **traffic).throughput for size in (16, 32, 64))
    assert auto.p95_s <= OBJECTIVE_S[jumpy]
    assert auto.throughput >= 0.95 * best


# By hand


class Hand:
    """A queue whose batches all take a + b n seconds, asked by hand."""

    def __init__(self, curve, objective_s=1.0, idle="go", **settings):
        self.queue = BatchQueue(BatchConfig(objective_s=objective_s, idle=idle, **settings))
        self.curve = curve
        self.now = 10.0

    def arrive(self, count=1, **settings):
        for _ in range(count):
            self.queue.offer(entry(**settings), self.now)

    def serve(self):
        """Run the next batch to its end, once it is due."""
        while (batch := self.queue.take(self.now)) is None:
            self.now = self.queue.next_due()
        self.now += self.curve(batch.rows)
        self.queue.answered(batch, self.now)
        return batch

    def practise(self, sizes, **settings):
        for size in sizes:
            self.arrive(size, **settings)
            while self.queue.waiting:
                self.serve()
            self.now += 1.0
        return self


def test_nothing_is_known_at_first_so_everything_leaves_at_once():
    hand = Hand(fixed)
    hand.arrive(3)
    assert hand.serve().rows == 3


def test_a_batch_takes_what_is_in_time_for_its_first_row():
    hand = Hand(linear, objective_s=0.05).practise([1, 16, 32, 64] * 5)
    hand.arrive(64)
    assert 40 <= hand.queue.take(hand.now).rows <= 48  # 0.95 of 50 ms


def test_what_is_late_already_is_served_with_the_best_throughput():
    hand = Hand(fixed, objective_s=0.06).practise([1, 16, 32, 64] * 5)
    hand.arrive(64)
    hand.now += 0.1
    assert hand.queue.take(hand.now).rows >= 56


def test_nothing_waits_where_only_clients_that_were_answered_come_back():
    run = Run(fixed, moments=[step * 0.01 for step in range(500)], objective_s=0.5, until=5.0)
    auto = run.queue.auto
    pace = auto._known(None)
    auto._plan(pace, is_closed=False)
    assert pace.wait_s > 0.0
    auto._plan(pace, is_closed=True)
    assert pace.wait_s == 0.0


def test_a_key_that_has_what_a_slot_waits_for_overtakes_one_that_waits():
    queue = BatchQueue(BatchConfig(objective_s=1.0, idle="go"))
    for key in "ab":
        pace = queue.auto._pace(key)
        pace.goal, pace.wait_s = 4, 0.5
    for now, key in enumerate("baaaa"):
        assert queue.take(10.0) is None
        queue.offer(entry(key=key), 10.0 + now / 100)
    assert queue.take(10.05).key == "a"


def test_a_request_larger_than_the_chosen_size_is_still_taken():
    hand = Hand(linear, objective_s=0.02).practise([1, 16, 32, 64] * 5)
    assert hand.queue.auto.size(None) < 64
    hand.arrive(1, size=64)
    assert hand.queue.take(hand.now).rows == 64


def test_each_key_learns_for_itself():
    curves = {"quick": linear, "slow": fixed}
    hand = Hand(linear, objective_s=10.0)
    for size in (1, 8, 32) * 20:
        for key, curve in curves.items():
            hand.curve = curve
            hand.arrive(size, key=key)
            hand.serve()
            hand.now += 1.0
    found = {key: pace.cost.curve.a for key, pace in hand.queue.auto._paces.items()}
    assert found == pytest.approx({"quick": 0.0005, "slow": 0.04}, rel=0.01)
    assert hand.queue.auto.state().fixed_s == pytest.approx(0.04, rel=0.01)  # the one that keeps the slots busy


def test_keys_without_end_are_forgotten():
    hand = Hand(linear)
    for key in range(3 * MAX_KEYS):
        hand.arrive(key=key)
        hand.serve()
    assert len(hand.queue.auto._paces) == MAX_KEYS


def test_what_runs_alone_is_left_alone():
    hand = Hand(linear)
    hand.arrive(3, key=ALONE)
    assert [hand.serve().rows for _ in range(3)] == [1, 1, 1]


# What it tells


def test_the_log_says_once_that_an_objective_is_missed_and_once_that_it_is_held_again(caplog):
    clock = FakeClock()
    caplog.set_level(logging.INFO, "forebay.batching")

    async def main():
        pool = ManualPool()
        pool.idle = 1
        queue = BatchQueue(BatchConfig(objective_s=0.1))
        batcher = Batcher(queue, pool, lambda *_: None, asyncio.get_running_loop(), name="iris")
        for seconds in [0.3] * 200 + [0.01] * 2_000:
            batcher.submit(entry(), clock.now)
            await asyncio.sleep(0.001)
            clock.advance(seconds)
            pool.complete()
            await asyncio.sleep(0.2)

    clock.run(main())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith(
        "iris: cannot meet the objective of 100 ms for 95 of 100 requests, 5 of 100 are late: one row alone"
    )
    assert lines[1] == "iris: 95 of 100 requests meet the objective of 100 ms again"


def test_the_page_of_a_model_and_the_metrics_tell_what_was_chosen():
    config = BatchConfig(objective_s=0.05)
    endpoint = Endpoint(EndpointConfig(name="iris"), config, ManualPool())
    app = App([Served(endpoint, Contract())])
    told = app.describe("iris")["batching"]["auto"]
    assert told["latency_objective_ms"] == 50.0
    assert (told["objective_held"], told["because"]) == (True, None)
    assert (told["batch_size"], told["waits_for"], told["wait_ms"]) == (64, 1, 0.0)
    reading = Reading("iris", "1", endpoint.metrics, 0, 0, 1, 0, objective_held=False)
    page, _ = whole_page(Exposition(lambda: [reading], lambda one: one))
    assert b'forebay_objective_held{endpoint="iris",version="1"} 0.0' in page


def test_without_an_objective_nothing_is_told():
    endpoint = Endpoint(EndpointConfig(name="iris"), BatchConfig(), ManualPool())
    assert App([Served(endpoint, Contract())]).describe("iris")["batching"]["auto"] is None
    reading = Reading("iris", "1", endpoint.metrics, 0, 0, 1, 0)
    page, _ = whole_page(Exposition(lambda: [reading], lambda one: one))
    assert b"forebay_objective_held{" not in page
