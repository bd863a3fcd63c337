# SPDX-License-Identifier: Apache-2.0
"""Deadlines in a graph: what is ahead at all nodes counts when a request comes, and what is left at each of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.graph.test_run import graph, node

from forebay.batching.queue import BatchConfig
from forebay.errors import Code, TooLate
from forebay.graph.pool import GraphPool, Node
from forebay.graph.spec import GraphSpec
from forebay.graph.values import Outputs
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import FakeClock, ManualPool
from forebay.types.call import Failure, Request
from forebay.types.tenant import Tenant

LONG_S = 1000.0


class Takes(ManualPool):
    """Needs so many seconds for each batch."""

    def __init__(self, seconds: float, answer: Any = None) -> None:
        super().__init__(1)
        self.seconds = seconds
        self.answer = answer or (lambda body: next(iter(body.values())))

    def submit(self, batch: Any, done: Any) -> None:
        super().submit(batch, done)
        asyncio.get_running_loop().call_later(self.seconds, self.end, batch)

    def end(self, batch: Any) -> None:
        self.complete(batch, [self.answer(entry.body) for entry in batch.entries], model_s=self.seconds)


class World:
    """A graph whose nodes need known times, on a clock that is moved by hand."""

    def __init__(self, spec: GraphSpec, *, slots: int = 64, **seconds: Any) -> None:
        self.pools = {name: one if isinstance(one, Takes) else Takes(one) for name, one in seconds.items()}
        one_by_one = BatchConfig(max_size=1, idle="go")
        nodes = {
            name: Node(endpoint=Endpoint(EndpointConfig(name=name), one_by_one, pool), attempts=2)
            for name, pool in self.pools.items()
        }
        self.endpoint = Endpoint(EndpointConfig(name="g"), one_by_one, GraphPool(spec, nodes, slots=slots))
        self.answers: list[tuple[Request, Any, float]] = []
        self._ends: dict[Request, asyncio.Event] = {}

    def ask(self, time_s: float = LONG_S, value: Any = 1, tenant: Tenant | None = None) -> Request:
        """Send a request that is due in so many seconds."""
        due = time.monotonic() + time_s

        def reply(request: Request, outcome: Any) -> None:
            self.answers.append((request, outcome, time.monotonic()))
            self._ends[request].set()

        request = Request(body={"x": value}, reply=reply, deadline=due, due=due, tenant=tenant)
        self._ends[request] = asyncio.Event()
        self.endpoint.submit(request)
        return request

    async def answered(self, request: Request) -> None:
        """Wait for the answer to a request."""
        await self._ends[request].wait()

    async def learn(self, times: int = 3, value: Any = 1) -> None:
        """Have some requests answered, one after the other."""
        await self.endpoint.start()
        for _ in range(times):
            request = self.ask(value=value)
            await self.answered(request)
        self.answers.clear()

    def refused(self, time_s: float, **more: Any) -> TooLate | None:
        """Return the error if a request is refused as it comes."""
        self.ask(time_s, **more)
        if self.answers and type(self.answers[-1][1]) is Failure:
            error = self.answers.pop()[1].error
            assert isinstance(error, TooLate)
            return error
        return None


def run(world: World, scenario: Any) -> None:
    async def main() -> None:
        await scenario(world)
        await world.endpoint.drain(LONG_S)

    FakeClock().run(main())


CHAIN = graph(node("a", "x"), node("b", "a"))


# P90: what the nodes have ahead is counted on arrival, so that little ends on its way for want of time
@pytest.mark.parametrize("is_inside", [0, 3, 4, None])
@pytest.mark.parametrize("a, b, last", [(0.1, 0.2, 1.3), (0.2, 0.1, 1.3), (0.12, 0.1, 0.82)])
def test_a_burst_that_stands_before_the_first_node_counts_at_the_second_as_well(
    a: float, b: float, last: float, is_inside: int | None
):
    async def scenario(world: World) -> None:
        await world.learn()
        for number in range(5):
            assert world.refused(last - 0.05) is None
            if number == is_inside:
                await asyncio.sleep(0)  # they have left the queue of the graph
                await asyncio.sleep(0)
        began = time.monotonic()
        error = world.refused(last - 0.01)
        assert error is not None
        assert error.after_s == pytest.approx(0.01, abs=1e-6)
        assert 0.01 <= error.retry_at - began <= 0.01 + 2 * max(a, b)  # its turn after that of others who were refused
        request = world.ask(last + 0.01)
        await world.answered(request)
        assert world.answers[-1][1] == {"result": 1}
        assert world.answers[-1][2] - began == pytest.approx(last)

    run(World(CHAIN, a=a, b=b), scenario)


def test_what_was_refused_for_its_deadline_is_not_refused_without_one_nor_before_anything_is_known():
    async def scenario(world: World) -> None:
        await world.endpoint.start()
        assert world.refused(0.01) is None
        await asyncio.sleep(LONG_S)
        await world.learn()
        assert world.refused(0.25) is None  # a try, as nothing is inside
        assert world.refused(0.25) is not None
        assert await world.endpoint.call({"x": 1}) == {"result": 1}

    run(World(CHAIN, a=0.1, b=0.2), scenario)


def test_a_node_gives_up_what_the_rest_leaves_no_time_for_and_is_not_tried_again():
    async def scenario(world: World) -> None:
        await world.learn()
        request = world.ask(0.4)
        await asyncio.sleep(0.05)
        world.pools["b"].seconds = 0.5  # a request that came by another way holds up the second node
        for _ in range(2):
            hop = Request(body={"a": 0}, reply=lambda *_: None)
            world.endpoint.pool.endpoints[1].submit(hop)  # type: ignore[attr-defined]
        await world.answered(request)
        ((_, outcome, _),) = world.answers
        assert type(outcome) is Failure
        assert isinstance(outcome.error, TooLate)
        assert outcome.error.retry_at > time.monotonic()
        assert len(world.pools["a"].seen) == 4
        assert world.endpoint.pool.endpoints[1].metrics.codes[Code.UNAVAILABLE] == 1  # type: ignore[attr-defined]
        assert request.deadline > time.monotonic() + 0.1

    run(World(CHAIN, a=0.1, b=0.2), scenario)


def test_a_request_that_waits_for_room_in_the_graph_counts_what_is_inside():
    async def scenario(world: World) -> None:
        await world.learn()
        for _ in range(3):
            assert world.refused(1.1) is None
        assert world.refused(1.15) is not None
        assert world.refused(1.25) is None

    run(World(CHAIN, slots=1, a=0.1, b=0.2), scenario)


def test_a_branch_counts_as_often_as_it_is_taken():
    ways = graph(
        node("a", "x", out="a"),
        node("slow", "a"),
        output="slow",
    )

    async def scenario(world: World) -> None:
        await world.learn(9, value=0)
        await world.learn(1, value=1)
        await world.answered(world.ask(0.3, value=0))
        assert world.answers.pop()[1] == {}

    skips = Takes(0.1, lambda body: body["x"] or Outputs({}))
    run(World(ways, a=skips, slow=1.0), scenario)


def test_branches_count_side_by_side_and_a_join_waits_for_the_slower_one():
    diamond = graph(node("a", "x"), node("b", "a"), node("c", "a"), node("d", "b", "c"))

    async def scenario(world: World) -> None:
        await world.learn()
        request = world.ask(0.51)
        assert world.refused(0.5) is not None
        await world.answered(request)
        assert world.answers.pop()[1] == {"result": 1}

    run(World(diamond, a=0.1, b=0.3, c=0.1, d=0.1), scenario)


def test_a_light_tenant_is_not_refused_for_what_a_flood_has_before_it():
    flood, light = Tenant("flood"), Tenant("light")

    async def scenario(world: World) -> None:
        await world.learn()
        for _ in range(40):
            world.ask(9.0, tenant=flood)
        await asyncio.sleep(0)
        assert world.refused(8.25, tenant=flood) is not None
        began = time.monotonic()
        request = world.ask(1.0, tenant=light)
        await world.answered(request)
        assert world.answers[-1][1] == {"result": 1}
        assert world.answers[-1][2] - began < 1.0

    run(World(CHAIN, a=0.1, b=0.2), scenario)
