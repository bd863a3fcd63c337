# SPDX-License-Identifier: Apache-2.0
"""Lines, and which of them comes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.batching.lines import NEVER, Line, LineOrder, RankedLine
from forebay.types.call import Request

STEPS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1.0, 2.0, 3.0, 4.0, NEVER, None])), max_size=300)


@given(STEPS)
def test_the_first_line_is_found_whatever_becomes_of_the_others(steps):
    """A line is noted when it is new or its moment has moved forward; without a moment it leaves."""
    lines, moments = {}, {}
    order = LineOrder(lines, lambda line: moments[line.key])
    for key, moment in steps:
        before = moments.get(key, NEVER)
        if moment is None:
            lines.pop(key, None)
            moments.pop(key, None)
            continue
        moments[key] = moment
        if key not in lines or moment < before:
            order.note(lines.setdefault(key, Line(key)))
            assert len(order._heap) <= 2 * len(lines) + 64
        order.check()
        first = min(moments.values())
        found, line = order.first()
        assert found == first
        assert (NEVER if line is None else moments[line.key]) == first


@given(st.lists(st.integers(0, 5), min_size=1))
def test_ranked_lines_are_sorted_and_as_old_as_their_oldest_entry(ranks):
    line = RankedLine(None)
    for number, rank in enumerate(ranks):
        line.entries.append(Request(body=number, reply=print, rank=rank, arrived=1.0 + number))
    assert [(one.rank, one.body) for one in line.entries] == sorted((rank, n) for n, rank in enumerate(ranks))
    assert line.oldest() == 1.0
