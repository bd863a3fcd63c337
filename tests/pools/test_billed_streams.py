# SPDX-License-Identifier: Apache-2.0
"""What streams cost is charged while they run, and each server divides time only if it asks for costs."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.waiting import PATIENCE_S

from forebay.batching.queue import BatchConfig
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Request
from forebay.types.server_state import ServerState
from forebay.types.tenant import Tenant, Tenants
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec

STEP_S = 0.003


class Steps(Runner):
    """A stream without an end, in which each step takes a while."""

    def run_async(self, items):
        return self._steps(len(items))

    def run(self, items):
        while True:
            time.sleep(STEP_S)
            yield ["x"] * len(items)

    async def _steps(self, rows):
        while True:
            time.sleep(STEP_S)  # noqa: ASYNC251 - it is busy for so long
            yield ["x"] * rows
            await asyncio.sleep(0)


def pool_of(kind):
    spec = RunnerSpec("", local=Steps)
    return InlinePool(spec, seats=4) if kind == "inline" else ThreadPool(spec, seats=4)


class Server:
    """An endpoint of streams in a state of its own."""

    def __init__(self, kind, tenants=None, *, is_asked=False):
        self.state = ServerState()
        self.state.of(Accounts).is_asked = is_asked
        if tenants is not None:
            self.state.put(tenants)
        with self.state.entered():
            config = EndpointConfig(name="steps", streams=True)
            self.endpoint = Endpoint(config, BatchConfig(max_size=1, idle="go"), pool_of(kind))

    async def __aenter__(self):
        with self.state.entered():
            await self.endpoint.start()
        return self

    async def __aexit__(self, *_):
        await self.endpoint.drain(0.0)

    async def step(self, count, tenant=None):
        """Open a stream and take some parts of it; returns the request, which is open still."""
        left, taken = count, asyncio.Event()

        def on_part(_part, release):
            nonlocal left
            left -= 1
            if left > 0:
                release()
            else:
                taken.set()

        request = Request(body=b"", reply=lambda *_: None, tenant=tenant, on_part=on_part)
        self.endpoint.submit(request)
        async with asyncio.timeout(PATIENCE_S):
            await taken.wait()
        return request


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_a_server_divides_time_if_it_is_asked_for_costs_whatever_another_one_does(kind):
    async def main():
        async with Server(kind, is_asked=True) as billed, Server(kind) as other:
            assert (await billed.step(3)).cost_s >= STEP_S
            assert (await other.step(3)).cost_s == 0.0
            assert other.endpoint.metrics.tenants == {}

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_streams_are_charged_while_they_run(kind):
    async def main():
        tenants = Tenants(are_named=True)
        a, b = Tenant("team-a"), Tenant("team-b")
        async with Server(kind, tenants) as server:
            request = await server.step(20, a)
            assert not request.done
            account = server.endpoint.metrics.tenants["team-a"]
            assert account.worker_s == pytest.approx(request.cost_s, abs=1e-9)
            assert account.worker_s >= 15 * STEP_S
            assert account.rows == account.queue_s.count == 1
            fair = server.endpoint._queue.fair
            assert fair is not None
            flow, other = fair.flow_of(a), fair.flow_of(b)
            assert flow.time == pytest.approx(account.worker_s, rel=1e-6)
            assert other.time == 0.0
            server.endpoint.cancel(request)
            assert server.endpoint.in_flight == 0

    asyncio.run(main())
