# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""Waiting for the clients that were just answered: each clause of the rule, and what it makes of whole crowds."""

from __future__ import annotations

import heapq
import random

import pytest

from forebay.batching.gather import PROBE, SLICE, Curve
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.testing import MemoryOrigin
from forebay.types.batch import EntryBatch
from forebay.types.call import ALONE, Request

A, B = 2.778e-3, 2.22e-5  # T(1) = 2.8 ms, T(64) = 4.2 ms: the batch model of the comparison with peers


def entry(origin=None, size=1):
    return Request(body=b"", reply=lambda *_: None, origin=origin, size=size)


def crowd(count):
    return [entry(MemoryOrigin()) for _ in range(count)]


# The curve


@pytest.mark.parametrize("sizes", [[1, 64], [3, 17, 40], [64, 1, 64, 64, 64]])
def test_the_curve_finds_a_and_b(sizes):
    curve = Curve()
    for _ in range(5):
        for size in sizes:
            curve.learn(size, A + B * size)
    assert curve.a == pytest.approx(A, rel=1e-6)
    assert curve.b == pytest.approx(B, rel=1e-4)


def test_one_size_only_makes_a_half_of_the_time():
    curve = Curve()
    for seconds in (0.2, 0.4):
        curve.learn(8, seconds)
    assert curve.a == pytest.approx((0.2 * 0.97 + 0.4) / 1.97 / 2)
    assert curve.b * 8 == pytest.approx(curve.a)


def test_equal_sizes_scale_the_shape_that_is_known():
    curve = Curve()
    for size in (1, 64) * 10:
        curve.learn(size, A + B * size)
    for _ in range(600):
        curve.learn(64, 2 * (A + B * 64))
    assert curve.a + curve.b * 64 == pytest.approx(2 * (A + B * 64), rel=1e-3)


def test_the_curve_forgets():
    curve = Curve()
    for size in (1, 64) * 100:
        curve.learn(size, 1.0)
    for size in (1, 64) * 200:
        curve.learn(size, A + B * size)
    assert curve.a == pytest.approx(A, rel=0.1)


@pytest.mark.parametrize("first, second", [(1.0, 0.1), (0.1, 100.0)])
def test_a_and_b_are_never_negative(first, second):
    curve = Curve()
    for _ in range(20):
        curve.learn(1, first)
        curve.learn(64, second)
    assert curve.a >= 0.0
    assert curve.b >= 0.0


# When it waits


class Known(Curve):
    def __init__(self):
        super().__init__()
        self.a = 1.0

    def learn(self, rows, seconds):
        pass


class Hand:
    """A queue whose curve is known (a = 1 s), and a slot that asks it by hand. Everything starts at 10 s."""

    def __init__(self, max_size=64, rho=1.0):
        self.queue = BatchQueue(BatchConfig(max_size=max_size))
        self.gather = self.queue.gather
        self.gather.curve = Known()
        self.gather.rho = rho

    def answer(self, clients, queued=0, now=10.0):
        self.arrive([entry(MemoryOrigin()) for _ in range(queued)], now)
        self.queue.answered(EntryBatch(clients, None, sum(one.size for one in clients)), now)
        return self

    def arrive(self, entries, now):
        for one in entries:
            self.queue.offer(one, now)

    def come_back(self, clients, now):
        self.arrive([entry(one.origin, one.size) for one in clients], now)

    def takes(self, now):
        batch = self.queue.take(now)
        return 0 if batch is None else batch.rows

    @property
    def waits(self):
        return self.queue.next_due() is not None

    @property
    def rho(self):
        return pytest.approx(self.gather.rho)


def test_it_waits_two_slices_for_those_just_answered():
    hand = Hand().answer(crowd(8), queued=1)
    assert hand.queue.next_due() == pytest.approx(10.0 + 2 * SLICE)
    assert [hand.takes(10.0), hand.takes(10.59), hand.takes(10.61)] == [0, 0, 1]


def test_nothing_is_gathered_when_the_queue_is_full():
    hand = Hand(max_size=8).answer(crowd(8), queued=8)
    assert (hand.waits, hand.takes(10.0)) == (False, 8)


@pytest.mark.parametrize("rho, waits", [(0.0, False), (0.06, False), (0.07, True)])
def test_it_does_not_wait_for_less_than_half_a_row(rho, waits):
    assert Hand(rho=rho).answer(crowd(8)).waits is waits


@pytest.mark.parametrize("queued, waits", [(6, True), (7, False)])
def test_it_does_not_make_many_wait_for_few(queued, waits):
    """rho n / 0.3 < base / 2 does not pay: 1 / 0.3 = 3.3."""
    assert Hand().answer(crowd(1), queued=queued).waits is waits


@pytest.mark.parametrize("queued, waits", [(6, True), (7, False)])
def test_nor_does_it_where_it_tries_again_whether_anybody_comes_back(queued, waits):
    hand = Hand(rho=0.0).answer(crowd(1), queued=queued)
    for _ in range(PROBE - 2):
        assert not hand.answer(crowd(1)).waits
    assert hand.answer(crowd(1)).waits is waits


def test_clients_without_an_origin_are_not_waited_for():
    assert not Hand().answer([entry() for _ in range(8)]).waits


def test_a_client_whose_requests_run_alone_is_not_waited_for():
    hand = Hand()
    hand.arrive([Request(body=b"", reply=print, key=ALONE, origin=MemoryOrigin())], 10.0)
    hand.queue.answered(hand.queue.take(10.0), 10.5)
    assert not hand.waits


def test_a_new_answer_ends_the_old_wait():
    hand = Hand().answer(crowd(8)).answer([entry()], now=11.0)
    assert not hand.waits


# When it stops waiting


def test_it_leaves_at_the_end_of_the_turn_in_which_the_last_is_back():
    clients = crowd(3)
    hand = Hand().answer(clients, queued=2)
    hand.come_back(clients[:2], 10.1)
    assert hand.takes(10.1) == 0
    hand.come_back(clients[2:], 10.2)
    hand.arrive(crowd(1), 10.2)  # in the same turn: it joins
    assert hand.takes(10.2) == 6
    assert not hand.waits
    assert hand.rho == 1.0


def test_rho_rises_slowly_when_as_many_came_back_as_expected():
    clients = crowd(10)
    hand = Hand(rho=0.5).answer(clients)
    hand.come_back(clients[:5], 10.1)
    assert hand.takes(10.1) == 5
    assert hand.rho == 0.5 + 0.1 * 0.5


def test_rho_falls_quickly_when_strangers_met_the_target():
    hand = Hand().answer(crowd(4))
    hand.arrive(crowd(4), 10.1)
    assert hand.takes(10.1) == 4
    assert hand.rho == 1.0 + 0.3 * (0.0 - 1.0)


def test_rho_does_not_rise_when_nobody_came_back_however_few_were_answered():
    hand = Hand(rho=0.25).answer(crowd(2))
    hand.arrive(crowd(1), 10.1)
    assert hand.takes(10.1) == 1
    assert hand.rho == 0.25 + 0.3 * (0.0 - 0.25)


def test_rho_falls_when_the_slice_ends_first():
    clients = crowd(10)
    hand = Hand().answer(clients, queued=3)
    hand.come_back(clients[:1], 10.1)
    assert hand.takes(10.59) == 0
    assert hand.takes(10.61) == 4
    assert hand.rho == 1.0 + 0.3 * (0.1 - 1.0)


def test_a_slice_that_brought_many_is_followed_by_another():
    """r a > k: the next row saves more than waiting for it costs; but never longer than a in all."""
    clients = crowd(64)
    hand = Hand().answer(clients)
    hand.come_back(clients[:30], 10.1)
    assert hand.takes(10.601) == 0  # 30 rows in 0.6 a: r a = 50 > 30
    assert hand.queue.next_due() == pytest.approx(10.601 + SLICE)
    hand.come_back(clients[30:60], 10.7)
    assert hand.takes(10.902) == 60  # 30 rows in 0.3 a: r a = 100 > 60, yet one more slice would exceed a


def test_a_slice_that_brought_few_is_the_last():
    hand = Hand().answer(crowd(64), queued=40)
    hand.arrive(crowd(10), 10.1)
    assert hand.takes(10.601) == 50  # 10 rows in 0.6 a: r a = 16.7 < 50


def test_a_row_is_back_only_if_the_last_release_answered_it():
    early = crowd(4)
    hand = Hand().answer(early).answer(crowd(4), now=11.0)
    hand.come_back(early, 11.1)
    assert hand.takes(11.1) == 4
    assert hand.gather.rho < 1.0


def test_a_row_that_was_there_before_the_answer_is_not_back():
    """Pipelined or multiplexed origins have several requests under way."""
    peer = MemoryOrigin()
    hand = Hand(rho=0.5)
    hand.arrive([entry(peer) for _ in range(4)], 9.0)
    hand.answer([entry(peer) for _ in range(4)])
    assert hand.takes(10.61) == 4  # nobody came
    assert hand.gather.rho < 0.5


def test_rows_count_not_requests():
    client = entry(MemoryOrigin(), size=4)
    hand = Hand(max_size=8).answer([client])
    hand.come_back([client], 10.1)
    assert hand.takes(10.1) == 4
    assert hand.rho == 1.0


def test_the_end_of_the_wait_is_the_same_for_all_keys():
    hand = Hand().answer(crowd(8))
    for key in "ab":
        hand.arrive([Request(body=b"", reply=print, key=key)], 10.1)
    assert hand.takes(10.5) == 0
    assert [hand.takes(10.7), hand.takes(10.7)] == [1, 1]


# The queue's part in it


def test_next_due_is_the_end_of_the_slice():
    queue = BatchQueue(BatchConfig())
    queue.offer(entry(MemoryOrigin()), 0.5)
    batch = queue.take(0.5)
    batch.model_s = 0.5
    queue.answered(batch, 1.0)
    assert queue.next_due() == pytest.approx(1.0 + 2 * SLICE * 0.25)


def test_nobody_came_back_then_nothing_is_due():
    """G6: without this the driver arms a timer for a moment that has passed, again and again."""
    queue = BatchQueue(BatchConfig())
    queue.offer(entry(MemoryOrigin()), 0.5)
    batch = queue.take(0.5)
    batch.model_s = 1.0
    queue.answered(batch, 1.0)
    assert queue.take(50.0) is None
    assert queue.next_due() is None


# Whole crowds, simulated: one slot, a model of a + b n seconds


class Simulation:
    """Steps a queue as the batcher does: arrivals of one moment are one turn, answers are written one after another."""

    def __init__(self, idle="gather", max_size=64, seed=1):
        self.queue = BatchQueue(BatchConfig(idle=idle, max_size=max_size, capacity=100_000))
        self.random = random.Random(seed)
        self.events = []
        self.count = 0
        self.batches = []
        self.latency = []
        self.held_s = 0.0

    def at(self, when, what):
        heapq.heappush(self.events, (when, self.count, what))
        self.count += 1

    def run(self, until, returns):
        running = None
        now = 0.0
        while self.events and now < until:
            now, _, what = heapq.heappop(self.events)
            if type(what) is MemoryOrigin:
                self.queue.offer(entry(what), now)
            elif what is not None:
                batch = running = what
                batch.model_s = A + B * batch.rows
                for position, one in enumerate(batch.entries):
                    self.latency.append(now - one.arrived)
                    returns(self, one.origin, now + 8e-6 * position)
                self.queue.answered(batch, now)
                running = None
            if running is None and not any(type(e[2]) is not MemoryOrigin and e[2] is not None for e in self.events):
                batch = self.queue.take(now)
                if batch is not None:
                    self.batches.append(batch)
                    self.held_s += sum(now - one.arrived for one in batch.entries)
                    self.at(now + A + B * batch.rows, batch)
                elif (due := self.queue.next_due()) is not None and due > now:
                    self.at(due, None)
        return self


def comes_back(simulation, origin, now):
    simulation.at(now + 50e-6 + simulation.random.random() * 300e-6, origin)


def forgets(simulation, origin, now):
    pass


@pytest.mark.parametrize("clients, attainable", [(1, 1), (16, 16), (64, 64), (256, 64)])
def test_a_closed_loop_fills_its_batches(clients, attainable):
    """Elsewhere: batching silently does not happen; `go` splits such clients into cohorts."""
    simulation = Simulation()
    for _ in range(clients):
        simulation.at(simulation.random.random() * 1e-3, MemoryOrigin())
    settled = simulation.run(2.0, comes_back).batches[20:]
    assert sum(batch.rows for batch in settled) / len(settled) >= 0.95 * attainable


def test_a_closed_loop_fills_its_batches_again_after_a_storm_of_clients_that_went_away():
    """Nobody came back for long, so it does not wait; two halves of a crowd then take turns, and nothing raises rho."""
    simulation = Simulation()
    simulation.queue.gather.rho = 0.0
    for _ in range(64):
        simulation.at(simulation.random.random() * 1e-3, MemoryOrigin())
    batches = simulation.run(2.0, comes_back).batches
    assert batches[10].rows < 60
    settled = batches[len(batches) // 2 :]
    assert sum(batch.rows for batch in settled) / len(settled) >= 0.95 * 64


def test_a_lone_client_never_waits():
    simulation = Simulation()
    simulation.at(0.0, MemoryOrigin())
    simulation.run(1.0, comes_back)
    assert len(simulation.batches) > 300
    assert simulation.held_s == 0.0


@pytest.mark.parametrize("rate", [300, 1_000, 3_000, 9_000])
def test_open_loop_arrivals_do_not_wait_for_nothing(rate):
    """Poisson arrivals over 1,000 connections are answered about as quickly as with `go`."""
    mean = {}
    for idle in ("go", "gather"):
        simulation = Simulation(idle, seed=rate)
        origins = [MemoryOrigin() for _ in range(1_000)]
        now = 0.0
        while now < 3_000 / rate:
            now += simulation.random.expovariate(rate)
            simulation.at(now, simulation.random.choice(origins))
        simulation.run(now, forgets)
        mean[idle] = sum(simulation.latency) / len(simulation.latency)
    assert mean["gather"] <= 1.2 * mean["go"]


def test_new_clients_each_time_do_not_wait_for_nothing():
    """Connections that never come back: rho falls, and soon nobody waits for them."""
    simulation = Simulation(seed=7)
    now = 0.0
    for _ in range(3_000):
        now += simulation.random.expovariate(1_000)
        simulation.at(now, MemoryOrigin())
    simulation.run(now, forgets)
    assert simulation.queue.gather.rho < 0.2
