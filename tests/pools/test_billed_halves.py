# SPDX-License-Identifier: Apache-2.0
"""Workers of each kind say what runs of halves cost, and whoever caused them pays for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from forebay.batching.queue import BatchConfig
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Request
from forebay.types.server_state import ServerState
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec

COSTLY = Path(__file__).parents[1] / "models/costly.py"
JSON = {"in": "json", "out": "json"}


async def costs(pool, is_asked):
    """Run a batch of four of which one fails; returns what each has cost."""
    state, left = ServerState(), asyncio.Event()
    state.of(Accounts).is_asked = is_asked
    answers = []

    def reply(request, outcome):
        answers.append((request, outcome))
        if len(answers) == 4:
            left.set()

    with state.entered():
        endpoint = Endpoint(EndpointConfig(name="halves"), BatchConfig(max_size=4, idle="go"), pool)
        await endpoint.start()
    try:
        requests = [Request(body, reply, JSON) for body in (b"1", b"2", b"10", b"3")]
        for request in requests:
            endpoint.submit(request)
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()
        return [request.cost_s for request in requests]
    finally:
        await endpoint.drain(PATIENCE_S)


@pytest.mark.parametrize("kind", [InlinePool, ThreadPool, ProcessPool])
def test_what_fails_pays_for_the_runs_that_find_it(kind):
    spec = RunnerSpec(
        "forebay.serving.models.model_runner:from_file",
        {"path": str(COSTLY), "name": "Costly", "isolate_errors": True},
    )
    first, second, failed, last = asyncio.run(costs(kind(spec), is_asked=True))
    assert failed > 4 * max(first, second, last) > 0.0
    assert asyncio.run(costs(kind(spec), is_asked=False)) == [0.0] * 4
