# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOperatorIssue=false
"""Several slots: each clause of the rule, and what it makes of whole crowds beside hand-set sizes and waits.

`python -m benchmarks.policies.slots` looks at all of the grid; here are the corners of it.
"""

from __future__ import annotations

import pytest
from benchmarks.policies.simulation import CURVES, OBJECTIVE_S, RETURNS, Crowd, by_hand, most

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.batching.shares import Shares
from forebay.testing import MemoryOrigin
from forebay.types.call import Request

A, B = 0.010, 0.0002


def entries(count):
    return [Request(body=b"", reply=print, origin=MemoryOrigin()) for _ in range(count)]


class Hand:
    """A queue with several slots whose batches take a + b n; everything starts at 10 s."""

    def __init__(self, slots=2, **settings):
        self.queue = BatchQueue(BatchConfig(**settings))
        self.queue.slots = slots
        self.now = 10.0
        for size in (1, 64):  # it has learned the curve
            batch = self.take_of(entries(size))
            self.now += A + B * batch.rows
            self.queue.answered(batch, self.now)
        self.now += 1.0
        self.arrive(entries(1))
        self.take()  # nobody came back, but that is over
        self.queue.running = self.queue.running_rows = 0
        self.queue.gather.rho = 1.0

    def take_of(self, arriving):
        self.queue.slots, slots = 1, self.queue.slots
        self.arrive(arriving)
        batch = self.queue.take(self.now)
        self.queue.slots = slots
        return batch

    def arrive(self, arriving):
        for one in arriving:
            self.queue.offer(one, self.now)

    def come_back(self, batch, count):
        self.arrive([Request(body=b"", reply=print, origin=one.origin) for one in batch.entries[:count]])

    def take(self):
        return self.queue.take(self.now)

    def answer(self, batch):
        self.queue.answered(batch, self.now)
        return batch

    @property
    def shares(self):
        assert isinstance(self.queue.gather, Shares)
        return self.queue.gather

    @property
    def due_in_s(self):
        due = self.queue.next_due()
        return None if due is None else due - self.now


def test_each_idle_slot_takes_its_share():
    hand = Hand(slots=4)
    hand.arrive(entries(10))
    assert [hand.take().rows for _ in range(4)] == [3, 3, 3, 1]


def test_a_slot_leaves_the_others_their_share_of_what_waits():
    hand = Hand(slots=2)
    hand.arrive(entries(30))
    first = hand.take()
    assert first.rows == 15
    hand.arrive(entries(30))
    assert hand.take().rows == 30  # of 60: 15 run, 45 wait


def test_a_slot_waits_for_the_clients_of_its_batch_until_it_has_its_share():
    hand = Hand(slots=2)
    hand.arrive(entries(20))
    first, _second = hand.take(), hand.take()
    hand.now += 0.012
    hand.answer(first)
    hand.come_back(first, 1)
    assert hand.take() is None
    assert hand.due_in_s == pytest.approx(A, rel=0.01)
    hand.now += 0.001
    hand.come_back(first, 9)
    hand.arrive(entries(1))
    assert hand.take().rows == 11  # half of 21


def test_those_that_do_not_come_back_are_not_waited_for_any_longer():
    hand = Hand(slots=2)
    hand.arrive(entries(20))
    first, _second = hand.take(), hand.take()
    hand.now += 0.012
    hand.answer(first)
    hand.come_back(first, 4)
    assert hand.take() is None
    hand.now += hand.due_in_s
    assert hand.take().rows == 4
    assert hand.queue.gather.rho == pytest.approx(1.0 + 0.3 * (0.4 - 1.0))


def test_nothing_is_due_while_nothing_waits():
    """G6: the driver would arm a timer for nobody."""
    hand = Hand(slots=2)
    hand.arrive(entries(4))
    hand.answer(hand.take())
    assert hand.queue.waiting == 2
    hand.answer(hand.take())
    assert hand.take() is None
    assert hand.queue.next_due() is None


def test_few_are_not_waited_for_while_many_are_there():
    hand = Hand(slots=2)
    hand.arrive(entries(2))
    first, _second = hand.take(), hand.take()
    hand.answer(first)
    hand.arrive(entries(40))
    assert hand.take().rows >= 20


def test_clients_are_waited_for_while_the_next_saves_more_than_waiting_for_it_costs():  # F70
    """They took 8 ms to come back, so the first of two is due in 4 ms, which costs 4 rows what it saves them, a / 4."""

    def waits(rows):
        hand = Hand(slots=2)
        shares = hand.shares
        shares._returned, shares._delays_s = 100.0, 100 * 0.8 * A
        hand.arrive(entries(20))
        first, _second = hand.take(), hand.take()
        hand.now += A + 10 * B
        hand.answer(first)
        for one in first.entries[:8]:
            shares.arrived(one)
        hand.arrive(entries(rows))
        return hand.take() is None

    assert waits(2)
    assert not waits(3)


def test_those_that_are_usually_late_are_not_counted_on():  # F70
    """Of ten half are back in time; when they are, nobody is coming, whoever is still out."""
    hand = Hand(slots=2)
    hand.queue.gather.rho = 0.5
    hand.arrive(entries(20))
    first, _second = hand.take(), hand.take()
    hand.now += A + 10 * B
    hand.answer(first)
    hand.come_back(first, 4)
    assert hand.take() is None
    hand.come_back(first, 1)
    assert hand.take().rows == 5


def test_strangers_are_not_waited_for():
    hand = Hand(slots=2)
    hand.queue.gather.rho = 0.1
    hand.arrive(entries(20))
    first, _second = hand.take(), hand.take()
    hand.answer(first)
    hand.arrive(entries(1))
    assert hand.take().rows == 1


def test_clients_that_cannot_be_told_apart_are_not_waited_for():
    hand = Hand(slots=2)
    for _ in range(8):
        hand.arrive([Request(body=b"", reply=print) for _ in range(8)])
        hand.answer(hand.take_of([]))
    hand.arrive([Request(body=b"", reply=print)])
    assert hand.take().rows == 1


def test_an_origin_with_many_requests_comes_back_with_each():
    """HTTP/2: one connection, many calls, answered by two batches."""
    peer = MemoryOrigin()
    hand = Hand(slots=2)
    calls = [Request(body=b"", reply=print, origin=peer) for _ in range(8)]
    hand.arrive(calls)
    first, second = hand.take(), hand.take()
    hand.answer(first)
    hand.answer(second)
    assert hand.shares.missing == 8
    hand.arrive([Request(body=b"", reply=print, origin=peer) for _ in range(12)])
    assert hand.shares.missing == 0


def test_batches_of_one_size_per_slot_keep_to_the_limit():
    hand = Hand(slots=2, max_size=8)
    hand.arrive(entries(64))
    assert [hand.take().rows, hand.take().rows] == [8, 8]


# Whole crowds


CORNERS = [
    (2, 4, "flat", "at once"),
    (2, 64, "even", "within 1 ms"),
    (2, 256, "steep", "at once"),
    (4, 16, "flat", "within 1 ms"),
    (4, 64, "even", "at once"),
    (4, 256, "flat", "within 1 ms"),
    (2, 8, "linear", "within 1 ms"),
    (8, 16, "linear", "within 1 ms"),
    (8, 4, "linear", "at once"),
    (8, 64, "flat", "within 1 ms"),
    (8, 256, "linear", "at once"),
]


@pytest.mark.parametrize("slots, clients, curve, returns", CORNERS)
def test_a_closed_loop_is_served_as_with_the_best_values_by_hand(slots, clients, curve, returns):  # F70
    size = min(max(clients // slots, 1), 64)
    grid = [(rows, wait_ms) for rows in {max(size // 2, 1), size, min(2 * size, 64)} for wait_ms in (0, 1, 5)]
    traffic = {"clients": clients, "returns": RETURNS[returns], "rows": max(2_000, 24 * clients)}
    best, _ = by_hand(CURVES[curve], slots, grid=grid, **traffic)
    assert Crowd(CURVES[curve], slots, **traffic).throughput >= 0.97 * best


@pytest.mark.parametrize(
    "slots, curve, load", [(2, "flat", 0.1), (2, "even", 0.6), (4, "even", 0.3), (8, "flat", 0.3), (8, "steep", 0.8)]
)
def test_open_loop_arrivals_are_answered_as_soon_as_if_nobody_waited(slots, curve, load):  # F70
    traffic = {"rate": load * most(CURVES[curve], slots), "rows": 6_000}
    go = Crowd(CURVES[curve], slots, idle="go", **traffic)
    assert Crowd(CURVES[curve], slots, **traffic).mean_s <= 1.03 * go.mean_s


@pytest.mark.parametrize("clients, curve", [(16, "flat"), (64, "flat"), (64, "even")])
def test_closed_clients_beside_strangers_are_served_nearly_as_with_the_best_values(clients, curve):  # F70
    """A third of the load comes whenever it likes, and there are two slots: the weak spot of the rule."""
    rate = 0.24 * most(CURVES[curve], 2)
    traffic = {"clients": clients, "rate": rate, "rows": 4_000}
    best, _ = by_hand(CURVES[curve], 2, grid=[(16, 1), (32, 1), (64, 1), (16, 20), (32, 5)], **traffic)
    assert Crowd(CURVES[curve], 2, **traffic).throughput >= 0.93 * best


@pytest.mark.parametrize("origins", [True, False])
@pytest.mark.parametrize(
    "slots, clients, curve, returns",
    [
        (2, 4, "linear", "within 1 ms"),
        (2, 64, "even", "at once"),
        (4, 16, "flat", "within 1 ms"),
        (8, 64, "flat", "at once"),
    ],
)
def test_an_objective_costs_closed_clients_nothing(slots, clients, curve, returns, origins):  # F70
    """Also where they cannot be told apart; it was 3 to 35 % below the best by hand."""
    size = clients // slots
    grid = [(rows, wait_ms) for rows in {max(size // 2, 1), size, 2 * size} for wait_ms in (0, 1, 5)]
    traffic = {"clients": clients, "returns": RETURNS[returns], "rows": 4_000, "origins": origins}
    traffic["objective_s"] = OBJECTIVE_S[curve]
    best, _ = by_hand(CURVES[curve], slots, grid=grid, **traffic)
    auto = Crowd(CURVES[curve], slots, **traffic)
    assert auto.quantile_s(0.95) <= OBJECTIVE_S[curve]
    assert auto.throughput >= 0.95 * best
