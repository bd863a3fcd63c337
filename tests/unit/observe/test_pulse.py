# SPDX-License-Identifier: Apache-2.0
"""Beats: what endpoints did since the last look."""

from __future__ import annotations

import msgspec
import pytest

from forebay.errors import DeadlineExceeded, RunnerFailed
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.exposition import SLICE, Reading
from forebay.observe.metrics.pulse import MAX_FAULTS, Pulse, for_strangers, shown


class One:
    def __init__(self, name="iris"):
        self.name = name
        self.metrics = EndpointMetrics()
        self.waiting = 0

    def call(self, seconds=0.003):
        self.metrics.codes["ok"] += 1
        self.metrics.request_s.observe(seconds)
        self.metrics.ran(2, 1, 0.5)

    def read(self):
        return Reading(self.name, "1", self.metrics, 0, self.waiting, 1, 0, idle=1, slots=2)


@pytest.fixture
def ones():
    return [One(), One("other")]


@pytest.fixture
def pulse(ones):
    return Pulse(lambda: ones, One.read)


def beat(pulse):
    return ended(pulse.beat())


def ended(turns):
    count = 0
    while True:
        try:
            next(turns)
            count += 1
        except StopIteration as end:
            return end.value, count


def test_the_first_beat_only_looks(pulse, ones):
    ones[0].call()
    assert beat(pulse) == ([], 0)
    assert beat(pulse) == ([], 0)


def test_a_beat_tells_what_came_since_the_last_one(pulse, ones):
    ones[0].call()
    beat(pulse)
    ones[0].call()
    ones[0].call(0.2)
    (told,), _ = beat(pulse)
    assert (told.endpoint, told.totals, told.codes) == ("iris", {"ok": 3}, {"ok": 2})
    assert dict(told.request) == {5: 1, 10: 1}
    assert (told.batches, told.rows, told.model_s) == (2, 4.0, 1.0)
    assert beat(pulse) == ([], 0)


def test_an_endpoint_that_only_stands_otherwise_is_told(pulse, ones):
    beat(pulse)
    ones[1].waiting = 7
    (told,), _ = beat(pulse)
    assert (told.endpoint, told.waiting, told.codes) == ("other", 7, {})


def test_an_endpoint_that_joins_is_told_from_its_beginning(pulse, ones):
    beat(pulse)
    ones.append(One("new"))
    ones[-1].call()
    (told,), _ = beat(pulse)
    assert (told.endpoint, told.codes) == ("new", {"ok": 1})


def test_one_that_is_replaced_under_its_name_counts_anew(pulse, ones):
    ones[0].call()
    beat(pulse)
    ones[0] = One()
    ones[0].call()
    (told,), _ = beat(pulse)
    assert (told.totals, told.codes) == ({"ok": 1}, {"ok": 1})


def test_who_begins_to_watch_is_told_how_all_stand_and_nothing_of_it_is_new(pulse, ones):
    ones[0].call()
    ones[1].waiting = 7
    told, _ = ended(pulse.standing())
    assert [(one.endpoint, one.totals, one.waiting, one.slots) for one in told] == [
        ("iris", {"ok": 1}, 0, 2),
        ("other", {"ok": 0}, 7, 2),
    ]
    assert not any(one.codes or one.request or one.batches or one.faults for one in told)


def test_what_was_seen_is_forgotten_when_nobody_looks(pulse, ones):
    beat(pulse)
    pulse.stop()
    ones[0].call()
    assert beat(pulse) == ([], 0)


def test_many_endpoints_are_looked_at_in_turns(ones, pulse):
    ones.extend(One(str(number)) for number in range(300))
    beat(pulse)
    for one in ones:
        one.call()
    told, turns = beat(pulse)
    assert (len(told), turns) == (302, 302 // SLICE)


def test_the_last_error_of_each_code_comes_with_its_reason(pulse, ones):
    beat(pulse)
    ones[0].metrics.failed(DeadlineExceeded("late"))
    ones[0].metrics.failed(DeadlineExceeded("later"), "r-1")
    ones[0].metrics.failed(RunnerFailed("attack at dawn", trace="line 1"))
    (told,), _ = beat(pulse)
    late, failed = told.faults
    assert (late.code, late.count, late.message, late.request_id) == ("deadline_exceeded", 2, "later", "r-1")
    assert (failed.kind, failed.message, failed.trace) == ("RunnerFailed", "attack at dawn", "line 1")
    assert pulse.faults() == [failed, late]


def test_strangers_are_not_told_what_a_model_raised(pulse, ones):
    ones[0].metrics.failed(RunnerFailed("attack at dawn", trace="line 1"))
    ones[0].metrics.failed(DeadlineExceeded("late"))
    told = msgspec.json.encode(for_strangers(pulse.faults()))
    assert b"late" in told
    assert b"RunnerFailed" in told
    assert b"dawn" not in told
    assert b"line 1" not in told


def test_errors_and_their_texts_are_bounded(pulse, ones):
    ones.extend(One(str(number)) for number in range(2 * MAX_FAULTS))
    for one in ones:
        one.metrics.failed(RunnerFailed("x" * 10_000 + "\udcff", trace="y" * 100_000 + "the end"))
    told = msgspec.json.encode(pulse.faults())
    assert len(pulse.faults()) == MAX_FAULTS
    assert len(told) < MAX_FAULTS * 8000
    assert pulse.faults()[0].trace.endswith("the end")


def test_a_text_that_json_cannot_carry_is_shown_as_well_as_can_be():
    assert shown("a\udcffb", 10) == "a?b"
