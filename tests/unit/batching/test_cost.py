# SPDX-License-Identifier: Apache-2.0
"""What a batch of each size is thought to take, after some were measured."""

from __future__ import annotations

import pytest

from forebay.batching.cost import Cost, steps


def learned(curve, sizes, rounds=10, max_size=64):
    cost = Cost(steps(max_size))
    for _ in range(rounds):
        for size in sizes:
            cost.learn(size, curve(size))
    return cost


def times(cost):
    return dict(zip(cost.sizes, cost.times(), strict=True))


def straight(rows):
    return 0.010 + 0.001 * rows


def cliff(rows):
    return straight(rows) * (2.0 if rows > 32 else 1.0)


def test_the_sizes_told_apart_get_coarser():
    assert steps(40) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
    assert steps(1) == [1]
    assert steps(50)[-2:] == [48, 50]


def test_a_straight_line_is_found_from_a_few_sizes():
    found = times(learned(straight, [1, 8, 64]))
    assert found == pytest.approx({size: straight(size) for size in found}, rel=0.01)


def test_a_cliff_is_found_where_it_is():
    found = times(learned(cliff, [1, 8, 16, 32, 40, 64], rounds=40))
    assert found[32] == pytest.approx(cliff(32), rel=0.05)
    assert found[40] == pytest.approx(cliff(40), rel=0.05)


def test_what_lies_between_measured_sizes_is_interpolated():
    found = times(learned(cliff, [1, 32, 64], rounds=40))
    assert found[48] == pytest.approx((found[32] + found[64]) / 2)


def test_one_pause_of_the_machine_counts_at_most_twice_what_is_known():
    cost = learned(straight, [1, 8, 64])
    cost.learn(8, 60.0)
    assert times(cost)[8] <= 1.2 * straight(8)


def test_a_model_that_got_slower_is_followed():
    cost = learned(straight, [1, 8, 64])
    for _ in range(100):
        cost.learn(8, 5 * straight(8))
    assert times(cost)[8] == pytest.approx(5 * straight(8), rel=0.1)


def test_a_time_that_was_not_measured_for_long_is_forgotten():
    cost = learned(straight, [1, 8, 16], rounds=20)
    for _ in range(2):
        cost.learn(64, 0.120)
    place = cost.sizes.index(64)
    before = cost.weight(place)
    for _ in range(2_000):
        for size in (1, 8, 16):
            cost.learn(size, straight(size))
    assert before > 1.9
    assert cost.weight(place) < 0.1
    assert times(cost)[64] == pytest.approx(straight(64), rel=0.1)
