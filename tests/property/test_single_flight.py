# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to equal requests that share a run, each is answered as it would be by itself."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S

from forebay.batching.queue import BatchConfig
from forebay.errors import Code, ValidationError
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.single_flight import _is_quick
from forebay.testing import FakeClock, ManualPool
from forebay.types.call import Failure, Request
from forebay.types.server_state import ServerState, here
from forebay.types.tenant import TenantConfig, Tenants

CONFIGS = {"a": TenantConfig(weight=2.0), "b": TenantConfig(), "c": TenantConfig(tier=2)}
INDEX = st.integers(0, 50)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(0, 3),
            st.integers(0, 2),
            st.sampled_from([0.02, 0.3, 1e9]),
            st.booleans(),
        ),
        st.tuples(st.just("cancel"), INDEX),
        st.tuples(st.just("complete"), INDEX),
        st.tuples(st.just("fail"), INDEX, INDEX),
        st.tuples(st.just("turn")),
        st.tuples(st.just("sleep"), st.sampled_from([0.001, 0.05, 0.5])),
    ),
    max_size=40,
)


class Story:
    """Plays the steps, and keeps for each request what has run for it."""

    def __init__(self, clock, sharing, slots, capacity, tenants):
        self.clock = clock
        self.pool = ManualPool(slots)
        config = EndpointConfig(name="x", timeout_s=60.0, max_timeout_s=60.0, single_flight=sharing)
        self.endpoint = Endpoint(config, BatchConfig(max_size=2, capacity=capacity, idle="go"), self.pool)
        self.sharing = sharing
        self.tenants = tenants
        self.requests = []
        self.replies = {}
        self.runs = {}
        self.failed = set()
        self.cancelled = set()
        self.busy_s = 0.0

    def submit(self, number, tenant, lives, is_due):
        body = [b"word", str(number).encode()]
        deadline = self.clock.now + lives
        request = Request(body, self.reply, deadline=deadline, tenant=self.tenants[tenant])
        if is_due:
            request.due = deadline
        self.requests.append(request)
        self.replies[request] = []
        self.endpoint.submit(request)

    def reply(self, request, outcome):
        self.replies[request].append(outcome)
        if type(outcome) is not Failure:
            outcome.append("mine")  # it is its own

    def cancel(self, which):
        if self.requests:
            request = self.requests[which % len(self.requests)]
            if not request.done:
                self.cancelled.add(request)
            self.endpoint.cancel(request)

    def end(self, which, bad):
        if self.pool.running:
            batch = self.pool.running[which % len(self.pool.running)]
            self.busy_s += 0.25
            outcomes: list[Any] = [["answer to", entry.body[1]] for entry in batch.entries]
            if bad is not None:
                place = bad % len(outcomes)
                outcomes[place] = Failure(ValidationError(f"bad {batch.entries[place].body[1]!r}"))
                self.failed.add(batch.entries[place].body[1])
            self.pool.complete(batch, outcomes, 0.25)

    def complete(self, which):
        self.end(which, None)

    def fail(self, which, bad):
        self.end(which, bad)

    async def turn(self):
        await asyncio.sleep(0)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    async def play(self, steps):
        await self.endpoint.start()
        for name, *arguments in steps:
            result = getattr(self, name)(*arguments)
            if result is not None:
                await result
            self.endpoint._queue.check()
            assert self.endpoint.in_flight == sum(not request.done for request in self.requests)
            self.check_shared()
        for _ in range(200):
            if self.pool.running:
                self.complete(0)
            elif not self.endpoint.in_flight:
                break
            await asyncio.sleep(0.1)
        assert self.endpoint.in_flight == self.endpoint.waiting == 0
        flights = self.endpoint._flights
        assert flights is None or (not flights._of and not flights._flights)
        await self.endpoint.drain(0.0)
        self.check()

    def check_shared(self):
        """What is open, equal and has not failed runs or waits once for each whose requests are shared."""
        if self.sharing == "off" or self.failed or self.endpoint.batching.capacity == 4:  # of which few are members
            return
        queue = self.endpoint._queue
        entries = [*queue.entries(), *(entry for batch in self.pool.running for entry in batch.entries)]
        whose = Counter(
            (entry.body[1], entry.tenant.name if entry.tenant and self.sharing == "tenant" else "")
            for entry in entries
            if not entry.done
        )
        assert all(count == 1 for count in whose.values()), whose

    def check(self):
        for request in self.requests:
            (outcome,) = self.replies[request]  # exactly one
            if type(outcome) is not Failure:
                assert outcome == ["answer to", request.body[1], "mine"]
                continue
            code = outcome.error.code
            if code == Code.CANCELLED:
                assert request in self.cancelled
            elif code == Code.INVALID_ARGUMENT:
                assert outcome.error.message == f"bad {request.body[1]!r}"
            elif code == Code.RESOURCE_EXHAUSTED:
                assert self.endpoint.batching.capacity < 1000
            elif code == Code.UNAVAILABLE:
                assert request.due < 1e8  # it would have been too late
            else:
                assert code == Code.DEADLINE_EXCEEDED
                assert request.deadline < 1e8
        paid_s = sum(request.cost_s for request in self.requests)
        assert math.isclose(paid_s, self.busy_s, abs_tol=1e-9)
        accounts = self.endpoint.metrics.tenants.values()
        assert math.isclose(sum(one.worker_s for one in accounts), self.busy_s, abs_tol=1e-9)


@pytest.mark.parametrize("sharing", ["off", "tenant", "all"])
@given(story=steps, slots=st.integers(1, 2), capacity=st.sampled_from([4, 1000]), are_named=st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_is_answered_as_by_itself(sharing, story, slots, capacity, are_named):
    clock = FakeClock()
    with ServerState().entered():
        here(Accounts).is_asked = True
        if are_named:
            here(Tenants).are_told_apart = True
            here(Tenants).configure(CONFIGS)
        tenants = [here(Tenants).of(name) if are_named else None for name in CONFIGS]
        clock.run(Story(clock, sharing, slots, capacity, tenants).play(story))


class Slow:
    """An outcome of which no copy is made before it may be."""

    def __init__(self, gate):
        self.gate = gate

    def __deepcopy__(self, _memo):
        assert self.gate.wait(PATIENCE_S)
        return Slow(self.gate)


def test_others_are_answered_while_copies_are_made():
    asyncio.run(_others_are_answered())


async def _others_are_answered():
    pool, gate = ManualPool(1), threading.Event()
    config = EndpointConfig(name="x", single_flight="all")
    endpoint = Endpoint(config, BatchConfig(max_size=1, capacity=100, idle="go"), pool)
    await endpoint.start()
    replies = {}

    def asked(body):
        request = Request(body, lambda one, outcome: replies[one].set_result(outcome))
        replies[request] = asyncio.get_running_loop().create_future()
        endpoint.submit(request)
        return request

    async def ran(outcome):
        for _ in range(100):
            if pool.running:
                break
            await asyncio.sleep(0)
        pool.complete(pool.running[0], [outcome], 0.25)

    first, second, gone = [asked(b"slow") for _ in range(3)]
    other = asked(b"other")
    slow = Slow(gate)
    await ran(slow)
    await ran(b"quick")
    assert await replies[other] == b"quick"
    endpoint.cancel(gone)
    assert not replies[first].done()  # it may change what it gets
    gate.set()
    copied = await asyncio.wait_for(replies[second], PATIENCE_S)
    assert await replies[first] is slow
    assert type(copied) is Slow
    assert copied is not slow
    assert type(replies[gone].result()) is Failure
    assert endpoint.metrics.shared == 1
    await endpoint.drain(0.0)


@pytest.mark.parametrize(
    "outcome, count, is_quick",
    [
        (b"x" * 10_000_000, 4000, True),
        ([b"x"], 500, True),
        ([[["output", "FP32", [1, 6], False]], b"x"], 90, True),
        ([[["output", "FP32", [1, 6], False]], b"x"], 4000, False),
        ([[0] * 2000], 1, False),
        ([{"a": 1}], 1, False),
        ({}, 0, True),
    ],
)
def test_copies_are_made_at_once_where_they_take_no_longer_than_a_millisecond(outcome, count, is_quick):
    assert _is_quick(outcome, count) == is_quick
