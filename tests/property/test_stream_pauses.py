# SPDX-License-Identifier: Apache-2.0
"""When a streamed answer is ended, against an oracle that looks at every hundredth of a second of its life."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.batching.queue import BatchConfig
from forebay.errors import Code
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.stream_delivery import WINDOW_BYTES
from forebay.testing import FakeClock, ManualPool
from forebay.types.call import Failure, Request
from forebay.workers.pool import CREDIT

TIMEOUT_S, IDLE_S, MAX_S, STATED_S = 2.03, 1.11, 6.07, 3.09
LARGE = b"x" * (WINDOW_BYTES // CREDIT)
"""With one more than `CREDIT` of these a window is full."""

actions = st.sampled_from(["part", "nothing", "flood", "take"])
stories = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.25]), st.integers(0, 2), actions), max_size=30)


class Stream:
    """A stream as it runs, and what was done to it at which time."""

    def __init__(self, clock, endpoint, is_stated):
        self.clock = clock
        self.done = []
        self.untaken = []
        self.began = clock.now
        self.limit_s = STATED_S if is_stated else MAX_S
        self.first_s = STATED_S if is_stated else TIMEOUT_S
        self.ended = None
        deadline = clock.now + STATED_S if is_stated else float("inf")
        self.request = Request(b"", self._reply, deadline=deadline, due=deadline, on_part=self._part)
        endpoint.submit(self.request)

    def _part(self, part, release):
        self.untaken.append(release)

    def _reply(self, _request, outcome):
        assert type(outcome) is Failure
        assert outcome.error.code == Code.DEADLINE_EXCEEDED
        self.ended = round(self.clock.now - self.began, 3), outcome.error.message

    def act(self, pool, batch, action):
        self.done.append((round(self.clock.now - self.began, 3), action))
        if action == "take":
            taken, self.untaken = self.untaken, []
            for release in taken:
                release()
        for _ in range(CREDIT + 1 if action == "flood" else action != "take"):
            pool.part([{"flood": LARGE, "part": b"", "nothing": None}[action]], lambda: None, batch)

    def expected(self, until_s):
        """When it is ended, and by which setting; None if not by then."""
        untaken, size, silent, has_begun = 0, 0, 0, False
        events = list(self.done)
        for tick in range(round(until_s * 100) + 1):
            now = tick / 100
            while events and events[0][0] <= now:
                _, action = events.pop(0)
                if action == "take":
                    silent = 0 if is_full(untaken, size) else silent
                    untaken = size = 0
                elif action != "nothing":
                    has_begun, silent = True, 0
                    count = CREDIT + 1 if action == "flood" else 1
                    untaken, size = untaken + count, size + count * (256 + len(LARGE) * (action == "flood"))
            if now >= (self.limit_s if has_begun else self.first_s):
                limit_ms = round((self.limit_s if has_begun else self.first_s) * 1000)
                return now, f"timed out after {limit_ms} ms"
            if has_begun and silent / 100 >= IDLE_S:
                return now, "no part for 1110 ms (stream_idle_ms)"
            silent = 0 if is_full(untaken, size) else silent + 1
        return None


def is_full(count, size):
    return count > CREDIT and size > WINDOW_BYTES


async def play(clock, story, stated):
    pool = ManualPool(slots=3)
    config = EndpointConfig(
        name="x", streams=True, timeout_s=TIMEOUT_S, max_timeout_s=MAX_S, stream_idle_s=IDLE_S, split=False
    )
    endpoint = Endpoint(config, BatchConfig(max_size=1, idle="go"), pool)
    await endpoint.start()
    streams = [Stream(clock, endpoint, is_stated) for is_stated in stated]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    batches = {batch.entries[0]: batch for batch in pool.seen}
    for gap, number, action in story:
        await asyncio.sleep(gap)
        if streams[number].ended is None:
            streams[number].act(pool, batches[streams[number].request], action)
    check(clock, streams)
    await asyncio.sleep(MAX_S)
    check(clock, streams)
    assert all(stream.ended for stream in streams)
    await endpoint.drain(0.0)


def check(clock, streams):
    for stream in streams:
        wanted = stream.expected(clock.now - stream.began)
        if wanted is None or stream.ended is None:
            # what is due at this very moment may be a moment late
            assert stream.ended is None
            assert wanted is None or clock.now - stream.began - wanted[0] < 0.02
            continue
        (when, why), (was, text) = wanted, stream.ended
        assert when - 0.02 <= was <= when + 0.03, (stream.done, wanted, stream.ended)
        assert text.startswith(why)


@given(story=stories, stated=st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_stream_ends_when_its_model_is_silent_or_its_time_is_over_and_not_before(story, stated):
    clock = FakeClock()
    clock.run(play(clock, story, stated))
