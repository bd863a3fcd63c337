# SPDX-License-Identifier: Apache-2.0
"""A queue with a latency objective, whatever arrives and however long batches take."""

from __future__ import annotations

import heapq
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checked_queue import CheckedQueue

from forebay.batching.cost import Cost, steps
from forebay.batching.queue import BatchConfig
from forebay.testing import MemoryOrigin
from forebay.types.call import ALONE, Request

ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 0.05),  # seconds since the one before
        st.integers(1, 8),  # samples
        st.sampled_from([None, None, None, "a", "b", ALONE]),
        st.none() | st.integers(0, 5),  # origin
        st.booleans(),  # cancelled while it waits, if it still does a moment later
    ),
    min_size=1,
    max_size=120,
)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=ARRIVALS,
    max_size=st.integers(8, 40),
    objective_s=st.floats(0.001, 0.5),
    idle=st.sampled_from(["go", "gather", "wait"]),
    slots=st.integers(1, 3),
    seconds=st.lists(st.floats(0.0, 0.2), min_size=1, max_size=7),
)
def test_whatever_comes_leaves_once_in_time_and_in_bounds(arrivals, max_size, objective_s, idle, slots, seconds):
    queue = CheckedQueue(BatchConfig(max_size=max_size, objective_s=objective_s, idle=idle))
    queue.slots = slots
    origins = [MemoryOrigin() for _ in range(6)]
    events = []
    now = 1.0
    for number, (gap, size, key, origin, cancelled) in enumerate(arrivals):
        now += gap
        request = Request(body=number, reply=print, size=size, key=key)
        request.origin = None if origin is None else origins[origin]
        heapq.heappush(events, (now, len(events), "arrival", request))
        if cancelled:
            heapq.heappush(events, (now + 0.01, len(events), "cancel", request))
    count = len(events)
    running = 0
    left = []
    gone = set()
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "arrival":
            queue.offer(what, now)
        elif kind == "cancel":
            if not what.taken:
                gone.add(what.body)
            queue.cancel(what)
        elif kind == "done":
            running -= 1
            queue.answered(what, now)
        if events and events[0][0] == now:
            continue
        while running < slots and (batch := queue.take(now)) is not None:
            assert batch.entries
            assert batch.rows == sum(one.size for one in batch.entries) <= max_size
            assert len({one.key for one in batch.entries}) == 1
            left += [one.body for one in batch.entries]
            running += 1
            count += 1
            heapq.heappush(events, (now + seconds[count % len(seconds)], count, "done", batch))
        assert queue._order.first()[0] == min(map(queue._since, queue._lines.values()), default=math.inf)
        if running < slots and queue.waiting:
            oldest = min(one.arrived for line in queue._lines.values() for one in line.entries if not one.taken)
            assert now < oldest + objective_s  # nothing waits past the objective while a slot is free
            due = queue.next_due()
            assert now < due <= oldest + objective_s
            count += 1
            heapq.heappush(events, (due, count, "due", None))
    assert queue.waiting == 0
    assert sorted([*left, *gone]) == list(range(len(arrivals)))


@given(st.integers(1, 5000))
def test_the_sizes_told_apart_are_few_and_end_with_the_largest(max_size):
    sizes = steps(max_size)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_size
    assert len(sizes) <= 8 + 4 * max_size.bit_length()
    assert all(after <= before * 1.25 or after - before == 1 for before, after in itertools.pairwise(sizes))


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 10.0)), max_size=100))
def test_no_time_is_negative_and_none_beyond_all_proportion(batches):
    cost = Cost(steps(64))
    for rows, seconds in batches:
        cost.learn(rows, seconds)
    longest = max((seconds for _, seconds in batches), default=0.0)
    assert all(0.0 <= time <= 64 * longest for time in cost.times())
