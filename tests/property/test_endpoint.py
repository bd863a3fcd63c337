# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to an endpoint in whatever order, each request gets exactly one reply (G1 to G5)."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.batching.queue import BatchConfig
from forebay.errors import Code, ValidationError
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import FakeClock, ManualPool, MemoryOrigin
from forebay.types.call import ALONE, Failure, ReplyToAll, Request

INDEX = st.integers(0, 50)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 9),
            st.sampled_from([None, "a", ALONE]),
            st.sampled_from([0.02, 0.3, 1e9]),
            st.integers(0, 3),
        ),
        st.tuples(st.just("crowd"), st.integers(1, 6), st.integers(0, 3)),
        st.tuples(st.just("cancel"), INDEX),
        st.tuples(st.just("complete"), INDEX),
        st.tuples(st.just("mixed"), INDEX, INDEX),
        st.tuples(st.just("fail"), INDEX),
        st.tuples(st.just("die"), INDEX),
        st.tuples(st.just("revive")),
        st.tuples(st.just("turn")),
        st.tuples(st.just("sleep"), st.sampled_from([0.001, 0.05, 0.5])),
        st.tuples(st.just("block"), st.sampled_from([0.03, 1.0])),
    ),
    max_size=40,
)


class RestingPool(ManualPool):
    """Lets the loop rest for as long as it likes: no worker says anything."""

    can_rest = True

    def __init__(self, slots, clock):
        super().__init__(slots)
        self.clock = clock

    def rest(self, seconds):
        self.clock.advance(seconds)


class Port(ReplyToAll):
    """Submits what has arrived together, and answers it together, but for every third."""

    def __init__(self, story):
        self.story = story
        self.arrived = []

    def bring(self, now):
        endpoint, (arrived, self.arrived) = self.story.endpoint, (self.arrived, [])
        together = len(arrived) <= endpoint.spare
        for group in [arrived] if together else [[one] for one in arrived]:
            requests = [
                Request(
                    [(len(self.story.requests) + at, 0)],
                    self,
                    origin=self.story.origins[origin] if origin < 3 else None,
                    deadline=now + 60.0,
                    arrived=now,
                )
                for at, origin in enumerate(group)
            ]
            self.story.requests += requests
            self.story.replies.update((request, []) for request in requests)
            endpoint.submit_all(requests, now)

    def __call__(self, request, outcome):
        self.story.reply(request, outcome)

    def to_all(self, requests, outcomes):
        pairs = list(zip(requests, outcomes, strict=True))
        assert {request.reply for request in requests} == {self}
        for request, outcome in pairs:
            if request.body[0][0] % 3:
                self.story.reply(request, outcome)
        return [pair for pair in pairs if pair[0].body[0][0] % 3 == 0]


class Story:
    """Plays the steps and keeps what each request may be told."""

    def __init__(self, clock, slots, batching, *, rests=False):
        self.clock = clock
        self.blocked_s = 0.0
        self.pool = RestingPool(slots, clock) if rests else ManualPool(slots)
        self.endpoint = Endpoint(EndpointConfig(name="x", timeout_s=60.0, max_timeout_s=60.0), batching, self.pool)
        self.requests = []
        self.replies = {}
        self.may_fail = set()
        self.cancelled = set()
        self.origins = [MemoryOrigin() for _ in range(3)]
        self.ports = [Port(self) for _ in range(2)]

    def reply(self, request, outcome):
        self.replies[request].append((outcome, self.clock.now))

    def submit(self, size, key, lives, origin):
        rows = [(len(self.requests), row) for row in range(size)]
        request = Request(
            body=rows,
            reply=self.reply,
            size=size,
            key=key,
            deadline=self.clock.now + lives,
            origin=self.origins[origin] if origin < 3 else None,
        )
        self.requests.append(request)
        self.replies[request] = []
        self.endpoint.submit(request)

    def crowd(self, count, origin):
        port = self.ports[count % 2]
        if not port.arrived:
            self.endpoint.expect(port.bring)
        port.arrived += [origin] * count

    def cancel(self, which):
        if self.requests:
            request = self.requests[which % len(self.requests)]
            if not request.done:
                self.cancelled.add(request)
            self.endpoint.cancel(request)

    def batch(self, which):
        return self.pool.running[which % len(self.pool.running)] if self.pool.running else None

    def complete(self, which):
        if batch := self.batch(which):
            self.pool.complete(batch)

    def mixed(self, which, bad):
        """One bad sample: its owner only may be told."""
        if batch := self.batch(which):
            outcomes = [entry.body for entry in batch.entries]
            owner = outcomes[bad % len(outcomes)][0][0]
            self.may_fail.add(self.requests[owner])
            outcomes[bad % len(outcomes)] = Failure(ValidationError("bad"))
            self.pool.complete(batch, outcomes)

    def whole(self, batch):
        self.may_fail |= {self.requests[entry.body[0][0]] for entry in batch.entries}
        return batch

    def fail(self, which):
        if batch := self.batch(which):
            self.pool.fail(ValueError("boom"), self.whole(batch))

    def die(self, which):
        if batch := self.batch(which):
            self.pool.die(self.whole(batch))

    def revive(self):
        if self.pool.lost:
            self.pool.revive()

    async def turn(self):
        await asyncio.sleep(0)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    def block(self, seconds):
        """The loop does not turn for a while."""
        self.blocked_s += seconds
        self.clock.advance(seconds)

    async def play(self, steps):
        await self.endpoint.start()
        for name, *arguments in steps:
            result = getattr(self, name)(*arguments)
            if result is not None:
                await result
            assert sum(entry.size for batch in self.pool.running for entry in batch.entries) <= 4 * self.pool.slots
            assert self.endpoint.in_flight == sum(not request.done for request in self.requests)
        while self.pool.lost:
            self.pool.revive()
        for _ in range(500):
            await asyncio.sleep(0.1)  # slots may wait for clients as long as the slowest batch took
            if not self.endpoint.in_flight and not self.pool.running:
                break
            if self.pool.running:
                self.pool.complete()
        assert self.endpoint.in_flight == 0, "somebody still waits although every batch was completed"
        assert self.endpoint.waiting == 0
        before = self.clock.turns
        await asyncio.sleep(100.0)
        assert self.clock.turns - before < 10, "an idle endpoint keeps its loop busy"  # G6
        await self.endpoint.drain(0.0)
        self.check()

    def check(self):
        for number, request in enumerate(self.requests):
            ((outcome, when),) = self.replies[request]  # exactly one
            if type(outcome) is not Failure:
                assert outcome == [(number, row) for row in range(request.size)]
                continue
            code = outcome.error.code
            if code == Code.CANCELLED:
                assert request in self.cancelled
            elif code == Code.DEADLINE_EXCEEDED:
                assert request.deadline - 0.0011 <= when <= request.deadline + self.blocked_s + 0.02
            elif code == Code.RESOURCE_EXHAUSTED:
                assert self.endpoint.batching.capacity == 10
            else:
                assert request in self.may_fail, f"a neighbour was harmed: {outcome.error}"
        assert sum(self.endpoint.metrics.codes.values()) == len(self.requests)


@pytest.mark.parametrize("idle", ["go", "wait", "gather"])
@given(story=steps, slots=st.integers(1, 3), capacity=st.sampled_from([10, 1000]))
@settings(max_examples=150, deadline=None)
def test_each_request_gets_exactly_one_reply(idle, story, slots, capacity):
    clock = FakeClock()
    batching = BatchConfig(max_size=4, capacity=capacity, idle=idle, max_wait_s=0.05)
    clock.run(Story(clock, slots, batching).play(story))


@given(story=steps, slots=st.integers(1, 3), capacity=st.sampled_from([10, 1000]))
def test_a_loop_that_rests_keeps_all_of_that(story, slots, capacity):
    clock = FakeClock()
    batching = BatchConfig(max_size=4, capacity=capacity)
    with mock.patch("os.sched_getaffinity", return_value={0}):
        clock.run(Story(clock, slots, batching, rests=True).play(story))
