# SPDX-License-Identifier: Apache-2.0
"""Every combination of settings serves: elsewhere odd ones break with an assertion, or batching does not happen."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.batching.queue import BatchConfig
from forebay.errors import Code
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import FakeClock, ManualPool, MemoryOrigin
from forebay.types.call import ALONE, Failure, Request


async def serve(batching, config, slots, sizes, keys):
    pool = ManualPool(slots)
    endpoint = Endpoint(config, batching, pool)
    await endpoint.start()
    answers = {}
    for number, size in enumerate(sizes):
        request = Request(
            body=[(number, row) for row in range(size)],
            reply=lambda request, outcome: answers.setdefault(request.id, []).append(outcome),
            size=size,
            key=keys[number % len(keys)],
            origin=MemoryOrigin(),
            id=str(number),
        )
        endpoint.submit(request)
    for _ in range(20 + 2 * sum(sizes)):
        await asyncio.sleep(0.03)
        for batch in list(pool.running):
            assert batch.rows <= batching.max_size
            pool.complete(batch, model_s=0.003)
    assert endpoint.in_flight == 0
    await endpoint.drain(0.0)
    for number, size in enumerate(sizes):
        (outcome,) = answers[str(number)]
        if type(outcome) is not Failure:
            assert outcome == [(number, row) for row in range(size)]
        elif size > batching.max_rows and not config.split:
            assert outcome.error.code == Code.INVALID_ARGUMENT
        else:
            assert outcome.error.code == Code.RESOURCE_EXHAUSTED
            assert sum(sizes) > batching.capacity


@given(
    max_size=st.sampled_from([1, 2, 3, 64]),
    max_wait_s=st.sampled_from([0.0, 0.001, 0.02]),
    capacity=st.sampled_from([1, 7, 4096]),
    idle=st.sampled_from(["gather", "go", "wait"]),
    max_running=st.sampled_from([None, 1, 3]),
    split=st.booleans(),
    slots=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    keys=st.sampled_from([[None], ["a", "b"], [ALONE], [None, ALONE, "a"]]),
)
@settings(max_examples=250, deadline=None)
def test_every_combination_of_settings_serves(  # noqa: PLR0917 - hypothesis hands them over by name
    max_size, max_wait_s, capacity, idle, max_running, split, slots, sizes, keys
):
    batching = BatchConfig(
        max_size=max_size, max_wait_s=max_wait_s, capacity=capacity, idle=idle, max_running=max_running
    )
    config = EndpointConfig(name="x", split=split, timeout_s=1e6)
    FakeClock().run(serve(batching, config, slots, sizes, keys))
