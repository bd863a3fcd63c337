# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false
"""Each rule of a queue by itself."""

from __future__ import annotations

import pytest

from forebay.batching.lines import NEVER, Line
from forebay.batching.policies import Bundles, LongestWait, MostRunning, Policy, SizeOfKey
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.types.batch import EntryBatch


def batch(key=None, rows=1, model_s=0.0):
    return EntryBatch([], key, rows, model_s=model_s)


def test_a_rule_that_says_nothing_changes_nothing():
    assert Policy().due(Line(None), 1.0) == 1.0
    assert Policy().room(Line(None), 4, None, 1.0) == 4


def test_a_full_line_is_due_when_it_became_full():
    line = Line(None)
    assert LongestWait(2.0).due(line, 1.0) == 3.0
    line.full_since = 1.5
    assert LongestWait(2.0).due(line, 1.0) == 1.5


def test_a_key_is_never_due_while_as_many_of_its_batches_run_as_may():
    rule = MostRunning(2)
    for _ in range(2):
        assert rule.due(Line("a"), 1.0) == 1.0
        rule.took(batch("a"), 0, 1.0)
    assert rule.due(Line("a"), 1.0) == NEVER
    assert rule.due(Line("b"), 1.0) == 1.0
    rule.answered(batch("a"), None, 1.0)
    assert rule.due(Line("a"), 1.0) == 1.0
    rule.answered(batch("a"), None, 1.0)
    assert not rule._running


def test_a_key_says_its_size_within_what_there_is_room_for():
    rule = SizeOfKey({"a": 8}.get)
    assert [rule.room(Line("a"), most, None, 1.0) for most in (4, 16)] == [4, 8]


def test_as_many_rows_as_the_time_is_enough_for_are_one_bundle():
    rule = Bundles(0.001)
    assert not rule.is_open
    rule.answered(batch(rows=2, model_s=0.0005), None, 1.0)
    assert rule.is_open
    assert [rule.room(Line(None), most, None, 1.0) for most in (3, 64)] == [3, 4]


@pytest.mark.parametrize(
    "settings",
    [{"idle": "go"}, {"idle": "gather", "max_size": 8}, {"idle": "go", "ranked": True}],
)
def test_a_queue_asks_no_rule_where_none_is_configured(settings):
    """The usual way costs what the size of a batch costs, however many rules there are."""
    queue = BatchQueue(BatchConfig(**settings))
    assert [queue._arrived, queue._due, queue._waits, queue._room, queue._took] == [[]] * 5
