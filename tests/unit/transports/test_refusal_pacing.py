# SPDX-License-Identifier: Apache-2.0
"""Refusals wait in line beyond their budget, each is told once and in turn, and nobody waits for a server that ends."""

import itertools
import random

import pytest

from forebay.transports import refusal_pacing
from forebay.transports.refusal_pacing import (
    BURST_S,
    HOLD_S,
    KERNEL_S,
    LATE_S,
    LEAST_SHARE,
    LOOKS_S,
    MAX_DEBT_S,
    MOST_SHARE,
    SHORT_S,
    RefusalLine,
)


class Timer:
    is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class Loop:
    """A loop whose time the test sets; it has one timer."""

    def __init__(self):
        self.now = 100.0
        self.timers = []

    def monotonic(self):
        return self.now

    def thread_time(self):
        return self.now

    def call_later(self, delay_s, call):
        timer = Timer()
        self.timers.append((self.now + delay_s, call, timer))
        return timer

    def advance(self, seconds):
        """Let time pass, with what is due."""
        end = self.now + seconds
        while due := [each for each in self.timers if each[0] <= end]:
            first = min(due, key=lambda each: each[0])
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            if not first[2].is_cancelled:
                first[1]()
        self.now = end


class Client:
    def __init__(self, number, told, loop, cost_s=2e-6):
        self.number, self.told, self.loop, self.cost_s = number, told, loop, cost_s

    def tell_refused(self):
        self.loop.now += self.cost_s
        self.told.append(self.number)


@pytest.fixture
def loop(monkeypatch):
    found = Loop()
    monkeypatch.setattr(refusal_pacing, "time", found)
    return found


def test_the_first_ones_are_told_at_once(loop):
    told = []
    line = RefusalLine(loop)
    for number in range(10):
        line.refuse(Client(number, told, loop))
    assert told == list(range(10))
    assert loop.timers == []


def test_a_flood_gets_its_share_of_the_time_and_no_more(loop):  # F69
    told = []
    line = RefusalLine(loop)
    for number in range(100_000):
        line.refuse(Client(number, told, loop))
    at_once = len(told)
    assert at_once == pytest.approx(BURST_S / (2e-6 + KERNEL_S), rel=0.1)
    loop.advance(1.0)
    spent_s = (len(told) - at_once) * (2e-6 + KERNEL_S)
    assert spent_s == pytest.approx(MOST_SHARE, rel=0.15)
    assert told == list(range(len(told)))  # in turn
    assert len(line) == 100_000 - len(told)


def waits(loop, length, cost_s):
    """Tell how long each of so many waits, who ask again once they are told, and what share of the time that takes."""
    told = []
    line = RefusalLine(loop)

    class Again(Client):
        def tell_refused(self):
            super().tell_refused()
            line.refuse(self)

    for number in range(length):
        line.refuse(Again(number, told, loop, cost_s - KERNEL_S))
    loop.advance(3.0)
    before, began = len(told), loop.now
    loop.advance(6.0)
    rate = (len(told) - before) / (loop.now - began)
    return length / rate, rate * cost_s


# Those for whom there is no room of 400 and of 2,000 clients, each at what it was seen to cost beside a busy model.
@pytest.mark.parametrize("length, longest_s, most", [(80, 0.09, 0.026), (1680, 0.95, 0.045)])
def test_they_wait_for_as_long_as_is_bearable_for_that_costs_least(loop, length, longest_s, most):  # F69
    wait_s, share = waits(loop, length, 22e-6)
    assert wait_s <= longest_s
    assert share <= most


@pytest.mark.parametrize("length, longest_s", [(80, SHORT_S), (1680, 1.0)])
def test_the_last_of_many_that_came_at_once_waits_no_longer_than_those_of_a_flood(loop, length, longest_s):  # F69
    told = []
    line = RefusalLine(loop)
    for number in range(length):
        line.refuse(Client(number, told, loop, 20e-6 - KERNEL_S))
    loop.advance(longest_s)
    assert len(line) == 0


@pytest.mark.parametrize("cost_s", [6e-6, 20e-6, 60e-6])
@pytest.mark.parametrize("length", [10, 80, 300, 900, 1700, 5000])
def test_nobody_waits_for_longer_unless_that_would_cost_too_much(loop, length, cost_s):  # F69
    wait_s, share = waits(loop, length, cost_s)
    assert LEAST_SHARE * 0.8 <= share <= MOST_SHARE * 1.2
    if length * cost_s / MOST_SHARE < SHORT_S * 0.9:
        assert wait_s <= SHORT_S
    assert wait_s <= LATE_S * 1.2 or share >= MOST_SHARE * 0.8
    if length * cost_s / MOST_SHARE > SHORT_S * 1.1:  # it cannot be told soon, so it is not told any sooner
        assert share <= max(LEAST_SHARE, length * cost_s / LATE_S) * 1.2


@pytest.mark.parametrize("cost_s", [10e-6, 20e-6, 35e-6, 50e-6])
def test_a_short_line_is_told_soon_whatever_a_refusal_costs_at_the_moment(loop, cost_s):  # F69
    wait_s, _ = waits(loop, 80, cost_s)
    assert wait_s <= 0.095


# The first of a group finds the caches full of the model's data; for a second the machine is slower than usual.
@pytest.mark.parametrize(
    "length, longest_s, first_s, each_s",
    [(80, 0.12, 80e-6, 15e-6), (80, 0.12, 150e-6, 20e-6), (1680, 1.15, 80e-6, 15e-6)],
)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_slow_second_makes_no_long_line_of_a_short_one(loop, length, longest_s, first_s, each_s, times):  # F69
    line = RefusalLine(loop)
    waited = []
    groups = 0
    draw = random.Random(1)

    class Again:
        def ask(self):
            self.asked_at = loop.now
            line.refuse(self)

        def tell_refused(self):
            nonlocal groups
            is_first = not waited or loop.now - waited[-1][0] > 1e-3
            groups += is_first
            slowness = times if 3.0 < loop.now - began < 4.0 else 1
            loop.now += (first_s * is_first + each_s) * slowness
            waited.append((loop.now, loop.now - self.asked_at))
            loop.call_later(draw.uniform(1e-3, 5e-3), self.ask)

    began = loop.now
    for _ in range(length):
        loop.call_later(draw.uniform(0.0, 0.05), Again().ask)
    loop.advance(7.0)
    assert max(wait_s for at, wait_s in waited if at > began + 2.0) < longest_s
    assert groups / 7.0 < 80  # to wake for a few at a time would cost more than to tell them


def test_who_comes_while_others_wait_goes_to_the_end(loop):
    told = []
    line = RefusalLine(loop)
    count = 0
    draw = random.Random(1)
    while count < 5000:
        for _ in range(draw.randrange(300)):
            line.refuse(Client(count, told, loop))
            count += 1
        loop.advance(draw.uniform(0, 3 * LOOKS_S[1]))
    loop.advance(100.0)
    assert told == list(range(count))
    assert len(line) == 0
    assert loop.timers == []


def test_dear_refusals_are_told_more_slowly(loop):
    told = []
    line = RefusalLine(loop)
    for number in range(1000):
        line.refuse(Client(number, told, loop, cost_s=1e-3))
    loop.advance(1.0)
    assert len(told) * 1e-3 == pytest.approx(MOST_SHARE, rel=0.25)


def test_a_pause_of_the_interpreter_is_not_paid_off_by_those_who_wait(loop):
    told = []
    line = RefusalLine(loop)
    line.refuse(Client(0, told, loop, cost_s=1.0))
    line.refuse(Client(1, told, loop))
    loop.advance(MAX_DEBT_S / LEAST_SHARE + 2 * LOOKS_S[1])
    assert told == [0, 1]


def test_nobody_waits_for_a_server_that_ends(loop):
    told = []
    line = RefusalLine(loop)
    for number in range(1000):
        line.refuse(Client(number, told, loop))
    assert len(told) < 1000
    line.stop()
    assert told == list(range(1000))
    loop.advance(1.0)
    assert told == list(range(1000))


def test_who_is_told_may_be_refused_again_and_nobody_is_told_twice(loop):
    told = []
    line = RefusalLine(loop)

    class Pipelining(Client):
        def tell_refused(self):
            super().tell_refused()
            if self.number < 200:
                line.refuse(Pipelining(self.number + 10, told, loop))

    for number in range(10):
        line.refuse(Pipelining(number, told, loop))
    loop.advance(10.0)
    assert sorted(told) == list(range(210))
    assert loop.timers == []


def test_a_group_that_is_due_is_told_once_answers_were_written_and_not_before(loop):  # F69
    told = []
    line = RefusalLine(loop)
    line.answered()
    for number in range(5000):
        line.refuse(Client(number, told, loop))
    line.answered()  # there is no budget for more yet
    at_once = len(told)
    for _ in range(40):
        before = len(told)
        loop.advance(HOLD_S * 0.8)
        assert len(told) == before
        line.answered()
    assert told == list(range(len(told)))
    assert len(told) > at_once
    before = len(told)
    loop.advance(0.5)  # nobody is answered any more
    assert len(told) > before
    assert loop.timers[0][0] < line._due + HOLD_S  # nor waited for


def test_one_that_cannot_be_told_keeps_nobody_else_from_it(loop, caplog):
    told = []
    line = RefusalLine(loop)

    class Broken(Client):
        def tell_refused(self):
            raise ValueError("broken")

    line.refuse_all([Client(0, told, loop), Broken(1, told, loop), Client(2, told, loop)])
    loop.advance(1.0)
    assert told == [0, 2]
    assert len(line) == 0
    assert [record.getMessage() for record in caplog.records] == ["failed to write a rejection"]


def test_the_share_of_a_line_never_falls_while_the_same_clients_wait(loop):
    line = RefusalLine(loop)
    line._cost_s = line._usual_cost_s = 1e-6
    came = loop.now
    line._waiting.extend((Client(number, [], loop), came) for number in range(20_000))
    shares = []
    while loop.now < came + 2 * LATE_S:
        shares.append(line._share(loop.now))
        loop.now += LATE_S / 100
    assert shares == sorted(shares)
    assert shares[-1] > shares[0]


def test_answers_hasten_no_group_by_more_than_it_waits_for_them(loop):
    told, times = [], []
    line = RefusalLine(loop)
    for number in range(2000):
        line.refuse(Client(number, told, loop, 22e-6))
    for _ in range(2000):
        loop.advance(0.0005)
        before = len(told)
        line.answered()
        times += [loop.now] * (len(told) > before)
    assert len(times) > 10
    assert min(after - before for before, after in itertools.pairwise(times)) >= LOOKS_S[0]
