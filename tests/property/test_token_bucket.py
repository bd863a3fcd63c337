# SPDX-License-Identifier: Apache-2.0
"""A token bucket gives no more than its limit in any period, whatever the clock does, and no less to who waits."""

import heapq
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.types.retry_tickets import MOST_S
from forebay.types.token_bucket import ROUNDING_S, TokenBucket

rates = st.floats(0.01, 1e5)
bursts = st.floats(1.0, 1e4)
steps = st.lists(st.tuples(st.floats(-2.0, 5.0), st.floats(0.0, 20.0)), max_size=60)


# F45: limits of a tenant
@given(rates, bursts, st.floats(0.0, 1e7), steps)
def test_no_period_gives_more_than_the_burst_and_the_rate(rate, burst, now, steps):
    bucket, given_at = TokenBucket(rate, burst), []
    for step, tokens in steps:
        now += step  # a step may go back
        if tokens <= burst and not bucket.wait_s(tokens, now):
            bucket.take(tokens, now)
            given_at.append((now, tokens))
    latest = -math.inf
    ordered = [(latest := max(latest, at), tokens) for at, tokens in given_at]
    for first in range(len(ordered)):
        total = 0.0
        for at, tokens in ordered[first:]:
            total += tokens
            passed = at - ordered[first][0]
            assert total <= burst + rate * (passed + 2 * ROUNDING_S) + 1e-6 * burst


@given(rates, bursts, st.floats(0.0, 1e7), steps)
def test_a_client_that_waits_as_long_as_it_is_told_gets_its_tokens(rate, burst, now, steps):
    bucket = TokenBucket(rate, burst)
    for step, some in steps:
        now += abs(step)
        tokens = min(some, burst)
        wait_s = bucket.wait_s(tokens, now)
        assert not wait_s or bucket.left(now) < tokens
        now += wait_s
        assert bucket.wait_s(tokens, now) == 0.0
        bucket.take(tokens, now)


@given(rates, bursts, st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.01, 1.0)), max_size=100))
def test_whoever_is_refused_is_told_a_moment_that_is_neither_too_early_nor_far_beyond_what_it_lacks(rate, burst, steps):
    bucket, now = TokenBucket(rate, burst), 0.0
    for step, part in steps:
        now += step / rate
        tokens = part * burst
        if not (wait_s := bucket.wait_s(tokens, now)):
            bucket.take(tokens, now)
            continue
        told = bucket.retry_at(tokens, tokens, now)
        assert now + wait_s - ROUNDING_S <= told <= now + wait_s + MOST_S


# F45: clients that obey Retry-After
@pytest.mark.parametrize("rate, burst, clients", [(100, 200, 64), (10, 10, 100), (1, 1, 20)])
def test_clients_that_come_when_they_are_told_to_are_seldom_refused_twice_and_use_the_whole_rate(rate, burst, clients):
    draw, bucket, answers = random.Random(1), TokenBucket(rate, burst), 0
    coming = [draw.random() / 100 for _ in range(clients)]
    heapq.heapify(coming)
    tries = 0
    while (now := coming[0]) < 60.0:
        tries += 1
        if bucket.wait_s(1, now):
            back = bucket.retry_at(1, 1, now)
        else:
            bucket.take(1, now)
            answers, back = answers + 1, now + 0.005
        heapq.heapreplace(coming, back + 0.001 + draw.random() / 1000)
    assert tries <= 3.5 * answers  # those told one moment needed as many tries as there are clients
    assert answers >= 0.97 * rate * 60


@given(st.integers(1, 1000), st.integers(1, 1000), st.lists(st.tuples(st.integers(0, 4096), st.integers(1, 50))))
def test_refills_are_exact(rate, burst, steps):
    bucket, left, now = TokenBucket(rate, burst), Fraction(burst), Fraction(0)
    for ticks, tokens in steps:
        now += Fraction(ticks, 1024)
        left = min(left + Fraction(ticks, 1024) * rate, Fraction(burst))
        for _ in range(3):  # asking changes nothing
            assert bucket.left(float(now)) == pytest.approx(float(left), abs=1e-6)
        if tokens <= left - Fraction(1, 1000):
            assert not bucket.wait_s(tokens, float(now))
            bucket.take(tokens, float(now))
            left -= tokens


def test_a_clock_that_goes_back_gives_nothing_twice():
    bucket = TokenBucket(10.0, 5.0)
    bucket.take(5, 100.0)
    assert bucket.left(50.0) < 0
    assert bucket.wait_s(1, 50.0) == pytest.approx(50.1)
    assert bucket.left(100.5) == pytest.approx(5.0)


def test_what_is_taken_beyond_what_is_there_comes_back_at_the_rate():
    bucket = TokenBucket(2.0, 4.0)
    bucket.take(10, 0.0)
    assert (bucket.left(0.0), bucket.wait_s(0, 0.0), bucket.full_s(0.0)) == (-6.0, 3.0, 5.0)
