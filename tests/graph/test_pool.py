# SPDX-License-Identifier: Apache-2.0
"""A graph as an endpoint: batches across requests, deadlines, retries, cancellation, failures, worker processes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any, Self

import numpy as np
import pytest
from tests.graph import runners
from tests.graph.test_run import graph, node
from tests.waiting import PATIENCE_S, reached

from forebay.batching.queue import BatchConfig
from forebay.errors import (
    BadOutcome,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    ForebayError,
    InvalidRequest,
    QueueFull,
    RunnerFailed,
    Unavailable,
)
from forebay.graph.pool import GraphPool, Node
from forebay.graph.spec import GraphSpec, NodeSpec
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Failure, Request
from forebay.types.tenant import Tenants
from forebay.workers.memory.landing import HERE
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire.objects import packed

pytestmark = pytest.mark.anyio


def made(function: Any, *, kind: str = "thread", workers: int = 1, batch: int = 64, **more: Any) -> Node:
    """A node that calls a function for each request."""
    name = getattr(function, "__name__", "function")
    spec = RunnerSpec(factory="tests.graph.runners:named", kwargs={"function": name})
    if kind == "process":
        pool: Any = ProcessPool(packed(spec), workers=workers, path=["."])
    else:
        local = RunnerSpec(factory="", local=lambda: runners.Each(function))
        pool = InlinePool(local) if kind == "inline" else ThreadPool(local, workers=workers)
    ranked = more.pop("ranked", False)
    idle = more.pop("idle", "go")
    wait_s = more.pop("max_wait_s", 0.0)
    capacity = more.pop("capacity", 100_000)
    config = BatchConfig(max_size=batch, idle=idle, capacity=capacity, ranked=ranked, max_wait_s=wait_s)
    return Node(
        endpoint=Endpoint(EndpointConfig(name=name, timeout_s=60), config, pool), packs=kind == "process", **more
    )


class Serving:
    """A started graph; `async with` stops it."""

    def __init__(self, spec: GraphSpec, nodes: dict[str, Node], *, slots: int = 64, queue: int = 1000, **more: Any):
        self.pool = GraphPool(spec, nodes, slots=slots, **more)
        config = BatchConfig(max_size=1, idle="go", capacity=queue)
        self.endpoint = Endpoint(EndpointConfig(name=spec.name, timeout_s=30), config, self.pool)

    async def __aenter__(self) -> Self:
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoint.drain(2.0)

    async def __call__(self, value: Any, **more: Any) -> Any:
        answer = await self.endpoint.call({"x": value}, **more)
        return answer["result"] if isinstance(answer, dict) and set(answer) == {"result"} else answer


DIAMOND = graph(node("a", "x"), node("b", "a"), node("c", "a"), node("d", "b", "c"))


@pytest.mark.parametrize("kind", ["thread", "process", "inline"])
async def test_a_diamond_gives_each_request_its_own_answer(kind: str):  # P13, P64
    nodes = {name: made(runners.double, kind=kind) for name in "abc"} | {"d": made(runners.total, kind=kind)}
    async with Serving(DIAMOND, nodes) as serve:
        answers = await asyncio.gather(*(serve(i) for i in range(200)))
        assert answers == [8 * i for i in range(200)]
        assert serve.pool.in_flight == 0
        assert serve.endpoint.in_flight == 0
        assert all(one.endpoint.in_flight == 0 for one in nodes.values())


async def test_each_node_s_queue_has_the_tenant_the_class_and_the_time_of_a_request():
    nodes = {name: made(runners.double) for name in "abc"} | {"d": made(runners.total)}
    child = Tenants(are_named=True).of("one", 2, "child")
    found: list[Request] = []

    def noted(submit: Any) -> Any:
        def submit_noted(request: Request) -> None:
            found.append(request)
            submit(request)

        return submit_noted

    async with Serving(DIAMOND, nodes) as serve:
        for one in nodes.values():
            one.endpoint.submit = noted(one.endpoint.submit)
        before = time.monotonic()
        assert await serve(1, tenant=child, timeout_s=20.0) == 8
        assert len(found) == 4
        assert all(one.tenant is child for one in found)
        assert all(before + 20.0 <= one.deadline <= time.monotonic() + 20.0 for one in found)


async def test_requests_meet_in_the_batches_of_a_node():
    entered, gate = threading.Event(), threading.Event()

    def wait(inputs: Any) -> Any:
        entered.set()
        gate.wait(PATIENCE_S)
        return inputs["x"]

    nodes = {"a": made(wait)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        first = asyncio.ensure_future(serve(0))
        await reached(entered.is_set)
        rest = [asyncio.ensure_future(serve(i)) for i in range(1, 33)]
        await reached(lambda: nodes["a"].endpoint.waiting == 32)
        gate.set()
        assert await asyncio.gather(first, *rest) == list(range(33))
        runner = nodes["a"].endpoint.metrics.batch_size
        assert (runner.count, runner.total) == (2, 33)


async def test_branches_run_side_by_side():  # P66
    both = threading.Barrier(2, timeout=PATIENCE_S)
    nodes = {name: made(lambda inputs: both.wait()) for name in "ab"} | {"j": made(len)}
    async with Serving(graph(node("a", "x"), node("b", "x"), node("j", "a", "b")), nodes) as serve:
        assert await serve(0) == 2


async def test_a_list_is_spread_over_the_batches_of_a_node():
    nodes = {"a": made(runners.double, spread="x", batch=8)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        answers = await asyncio.gather(*(serve(list(range(n))) for n in (0, 1, 5, 20)))
        assert answers == [[2 * i for i in range(n)] for n in (0, 1, 5, 20)]
        assert nodes["a"].endpoint.metrics.batch_size.total == 26
        with pytest.raises(ForebayError, match="'a' runs for each element of 'x': expected a list, got int"):
            await serve(3)


async def test_a_list_longer_than_the_nodes_queue_is_fed_in():  # F36
    nodes = {"a": made(runners.double, spread="x", batch=8, capacity=20)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        assert await serve(list(range(300))) == [2 * i for i in range(300)]
        answers = await asyncio.gather(*(serve(list(range(n))) for n in (100, 3, 150)))
        assert answers == [[2 * i for i in range(n)] for n in (100, 3, 150)]


@pytest.mark.parametrize("sizes", [[15] * 20, [1, 19, 8, 100, 3] * 8])
async def test_lists_that_fit_one_by_one_wait_for_room_in_the_nodes_queue(sizes: list[int]):
    nodes = {"a": made(runners.double, spread="x", batch=8, capacity=20)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        called_off = [asyncio.ensure_future(serve(list(range(15)))) for _ in range(8)]
        tasks = [asyncio.ensure_future(serve(list(range(n)))) for n in sizes]
        await asyncio.sleep(0)
        for task in called_off:
            task.cancel()
        assert await asyncio.gather(*tasks) == [[2 * i for i in range(n)] for n in sizes]
        assert nodes["a"].endpoint.in_flight == serve.pool.in_flight == 0


async def test_arrays_go_through_worker_processes_and_back():  # P145
    nodes = {name: made(runners.pid_and_sum, kind="process") for name in "a"} | {
        "b": made(lambda inputs: inputs["a"], kind="thread")
    }
    array = np.ones((512, 512), np.float32)
    async with Serving(graph(node("a", "x"), node("b", "a")), nodes) as serve:
        answers = await asyncio.gather(*(serve(array * i) for i in range(5)))
    assert [answer["sum"] for answer in answers] == [i * array.size for i in range(5)]
    np.testing.assert_array_equal(answers[3]["array"], array * 3 + 1)


async def test_spread_lists_reach_processes_too():
    nodes = {"a": made(runners.double, kind="process", spread="x", batch=4)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        assert await serve(list(range(10))) == [2 * i for i in range(10)]
        assert await serve([7]) == [14]
        assert await serve([]) == []


async def test_a_branch_may_be_left_out():
    route = NodeSpec(name="route", inputs={"x": "x"}, outputs={"odd": "odd", "even": "even"})
    join = NodeSpec(name="join", inputs={"o": "odd", "e": "even"}, outputs={"out": "join"}, optional=frozenset("oe"))
    nodes = {"route": made(runners.parity), "join": made(dict)}
    async with Serving(graph(route, join), nodes) as serve:
        assert await serve(3) == {"o": 3}
        assert await serve(4) == {"e": 4}


async def test_a_node_that_skips_leaves_its_result_out():
    async with Serving(graph(node("a", "x")), {"a": made(runners.fails)}) as serve:
        assert await serve("skip") == {}
        assert await serve("fine") == "fine"


async def test_the_first_arrival_is_the_answer_without_waiting_for_the_second():  # P74
    spec = GraphSpec(
        name="g",
        inputs=("x", "y"),
        outputs={"result": "any"},
        nodes=(node("quick", "x"), node("slow", "y"), node("any", "quick", "slow", policy="first")),
    )
    gate = threading.Event()
    nodes = {"quick": made(runners.fails), "slow": made(lambda inputs: gate.wait(PATIENCE_S)), "any": made(dict)}
    async with Serving(spec, nodes) as serve:
        assert await serve.endpoint.call({"x": "B", "y": 1.0}) == {"result": {"quick": "B"}}
        assert not gate.is_set()
        assert nodes["slow"].endpoint.in_flight == 0
        gate.set()


async def test_the_first_failure_is_the_answer_and_the_other_branch_is_dropped():  # P70
    nodes = {"a": made(runners.fails), "b": made(runners.nap), "j": made(lambda inputs: 1)}
    spec = GraphSpec(
        name="g",
        inputs=("x", "y"),
        outputs={"result": "j"},
        nodes=(node("a", "x"), node("b", "y"), node("j", "a", "b")),
    )
    async with Serving(spec, nodes) as serve:
        for _ in range(50):
            with pytest.raises(RunnerFailed, match="ValueError: it cannot be"):
                await serve.endpoint.call({"x": "raise", "y": 0.001})
        with pytest.raises(InvalidRequest, match="not like this"):
            await serve.endpoint.call({"x": "refuse", "y": 0.001})
        assert serve.pool.in_flight == 0
        assert all(one.endpoint.in_flight == 0 for one in nodes.values())
        assert await serve.endpoint.call({"x": "fine", "y": 0.001}) == {"result": 1}


async def test_a_deadline_covers_every_node():  # P90
    gate = threading.Event()
    nodes = {"a": made(lambda inputs: gate.wait(PATIENCE_S))}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        with pytest.raises(DeadlineExceeded):
            await serve(0, timeout_s=0.1)
        assert serve.pool.in_flight == 0
        assert nodes["a"].endpoint.in_flight == 0
        gate.set()
        assert await serve(0) is True


async def test_who_is_late_in_a_graph_is_told_in_which_node_and_whether_it_ran_there(clock: Any):
    entered, gate = threading.Event(), threading.Event()

    def through(inputs: Any) -> Any:
        return inputs["x"]

    def stuck(_inputs: Any) -> Any:
        entered.set()
        return gate.wait(PATIENCE_S)

    spec, last = graph(node("a", "x"), node("b", "a")), made(stuck, batch=1)
    async with Serving(spec, {"a": made(through), "b": last}) as serve:
        first, second = [asyncio.ensure_future(serve(number, timeout_s=PATIENCE_S)) for number in range(2)]
        await reached(lambda: entered.is_set() and last.endpoint.in_flight == 2)
        clock.forward(PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match=r"in 'b' while it ran"):
            await first
        with pytest.raises(DeadlineExceeded, match=r"in 'b' before a worker was free"):
            await second
        gate.set()
    patient = made(through, batch=2, idle="wait", max_wait_s=2 * PATIENCE_S)
    async with Serving(spec, {"a": patient, "b": made(through)}) as serve:
        alone = asyncio.ensure_future(serve(0, timeout_s=PATIENCE_S))
        await reached(lambda: patient.endpoint.in_flight == 1)
        clock.forward(PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match=r"in 'a' while it waited for its batch"):
            await alone


async def test_a_node_that_is_late_is_tried_again():  # P87
    calls: list[int] = []
    gate = threading.Event()

    def slow_once(inputs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            gate.wait(PATIENCE_S)
        return "answer"

    async with Serving(graph(node("a", "x")), {"a": made(slow_once, workers=2, timeout_s=1.0, attempts=2)}) as serve:
        assert await serve(1) == "answer"
        assert len(calls) == 2
        gate.set()
    calls.clear()
    gate.clear()
    async with Serving(graph(node("a", "x")), {"a": made(slow_once, workers=2, timeout_s=0.1)}) as serve:
        with pytest.raises(DeadlineExceeded):
            await serve(1)
        gate.set()


async def test_a_worker_that_dies_takes_nobody_else_along():  # P97
    nodes = {"a": made(runners.dies, kind="process", workers=2, batch=1)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        doomed = asyncio.gather(serve("die"), return_exceptions=True)
        fine = await asyncio.gather(*(serve(str(i)) for i in range(20)), return_exceptions=True)
        (death,) = await doomed
        assert isinstance(death, ForebayError)
        assert fine == [str(i) for i in range(20)]
        assert await serve("after") == "after"
        assert serve.pool.statistics().restarts >= 1
        assert serve.pool.in_flight == 0


async def test_who_goes_away_leaves_the_queues():  # P98
    gate = threading.Event()
    seen: list[Any] = []

    def wait(inputs: Any) -> Any:
        seen.append(inputs["x"])
        gate.wait(PATIENCE_S)
        return inputs["x"]

    nodes = {"a": made(wait, batch=1)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        tasks = [asyncio.ensure_future(serve(i)) for i in range(50)]
        await reached(lambda: seen)
        for task in tasks[:-1]:
            task.cancel()
        gate.set()
        assert await tasks[-1] == 49
        assert len(seen) <= 3
        assert serve.pool.in_flight == serve.endpoint.in_flight == 0


async def test_no_more_than_so_many_requests_are_inside():  # P73
    inside = 0
    most = 0
    lock = threading.Lock()

    def count(inputs: Any) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with lock:
            inside -= 1
        return inputs["x"]

    nodes = {"a": made(count, workers=16, batch=1)}
    async with Serving(graph(node("a", "x")), nodes, slots=4, queue=46) as serve:
        tasks = [asyncio.ensure_future(serve(i)) for i in range(60)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, QueueFull)]
        assert most <= 4
        assert len(refused) >= 10
        assert all(answer == i for i, answer in enumerate(answers) if not isinstance(answer, QueueFull))


async def test_the_oldest_request_goes_first_where_a_node_is_ranked():  # P71
    order: list[int] = []
    entered, gate = threading.Event(), threading.Event()

    def shuffle(inputs: Any) -> Any:
        time.sleep(0.001 + 0.004 * random.random())
        return inputs["x"]

    def note(inputs: Any) -> Any:
        entered.set()
        gate.wait(PATIENCE_S)
        order.append(inputs["a"])
        return inputs["a"]

    nodes = {"a": made(shuffle, workers=8, batch=1), "b": made(note, batch=1, ranked=True)}
    async with Serving(graph(node("a", "x"), node("b", "a")), nodes) as serve:
        first = asyncio.ensure_future(serve(-1))
        await reached(entered.is_set)
        rest = [asyncio.ensure_future(serve(i)) for i in range(40)]
        await reached(lambda: nodes["b"].endpoint.waiting == 40)
        gate.set()
        await asyncio.gather(first, *rest)
    assert order == [-1, *range(40)]


async def test_a_batch_key_keeps_unlike_inputs_apart():
    nodes = {"a": made(runners.double, key_of=lambda inputs: inputs["x"] % 2, idle="wait", max_wait_s=0.02)}
    async with Serving(graph(node("a", "x")), nodes) as serve:
        assert await asyncio.gather(*(serve(i) for i in range(10))) == [2 * i for i in range(10)]
        assert nodes["a"].endpoint.metrics.batch_size.count >= 2


async def test_a_key_that_raises_fails_its_request_only():
    def bad(inputs: Any) -> Any:
        return 1 // inputs["x"]

    async with Serving(graph(node("a", "x")), {"a": made(runners.double, key_of=bad)}) as serve:
        with pytest.raises(RunnerFailed, match="ZeroDivisionError"):
            await serve(0)
        assert await serve(1) == 2


async def test_decoding_and_encoding_are_boundaries():
    def decode(item: Any) -> Any:
        return {"x": int(item.body)}

    def encode(item: Any, results: Any) -> Any:
        return str(10 // results["result"]).encode()

    nodes = {"a": made(runners.double)}
    async with Serving(graph(node("a", "x")), nodes, decode=decode, encode=encode) as serve:
        assert await serve.endpoint.call(b"2") == b"2"
        with pytest.raises(RunnerFailed, match="invalid literal"):
            await serve.endpoint.call(b"x")
        with pytest.raises(RunnerFailed, match="ZeroDivisionError"):
            await serve.endpoint.call(b"0")
        assert serve.pool.in_flight == 0


async def test_a_loop_runs_as_a_graph():
    looping = NodeSpec(
        name="count",
        inputs={"start": "x", "again": "loop"},
        outputs={"again": "loop", "out": "done"},
        policy="immediate",
        back_edges=frozenset({"again"}),
    )
    spec = GraphSpec(name="g", inputs=("x",), outputs={"result": "done"}, nodes=(looping,))

    def halve(inputs: Any) -> Any:
        value, steps = next(iter(inputs.values()))
        return runners.Outputs({"again": (value // 2, steps + 1)} if value > 1 else {"out": steps})

    async with Serving(spec, {"count": made(halve)}) as serve:
        assert await asyncio.gather(*(serve((2**n, 0)) for n in range(12))) == list(range(12))


async def test_a_node_that_writes_twice_at_the_only_time_of_a_request_is_told():
    both = NodeSpec(name="n", inputs={"x": "x", "y": "y"}, outputs={"out": "done"}, policy="immediate")
    spec = GraphSpec(name="g", inputs=("x", "y"), outputs={"result": "done"}, nodes=(both,))
    async with Serving(spec, {"n": made(runners.total)}) as serve:
        with pytest.raises(InvalidRequest, match="already"):
            await serve.endpoint.call({"x": 1, "y": 2})


async def test_a_value_of_a_node_without_outputs_is_none_of_its_outputs():
    sink = NodeSpec(name="sink", inputs={"a": "a"}, outputs={})
    spec = graph(node("a", "x"), sink, output="a")
    async with Serving(spec, {"a": made(runners.double), "sink": made(runners.double)}) as serve:
        with pytest.raises(BadOutcome, match="it must say which of its outputs: none"):
            await serve(1)


async def test_a_model_that_cannot_be_loaded_stops_the_start():  # P52
    class Broken(runners.Each):
        def open(self, ctx: Any) -> None:
            raise RuntimeError("no such file")

    broken = made(runners.double)
    broken.endpoint.pool = ThreadPool(RunnerSpec(factory="", local=lambda: Broken(runners.double)))
    serving = Serving(DIAMOND, {"a": broken, **{name: made(runners.double) for name in "bcd"}})
    with pytest.raises(ForebayError, match="no such file"):
        await serving.endpoint.start()


async def test_draining_lets_requests_inside_end():  # P96
    serving = Serving(graph(node("a", "x")), {"a": made(runners.nap)})
    await serving.endpoint.start()
    running = asyncio.ensure_future(serving(0.2))
    await reached(lambda: serving.pool.in_flight == 1)
    await serving.endpoint.drain(PATIENCE_S)
    assert await running
    with pytest.raises(ForebayError):
        await serving(0.0)


async def test_who_waits_twice_at_a_node_when_the_drain_time_is_over_is_answered_once():
    gate, entered = threading.Event(), threading.Event()

    def stuck(_inputs: Any) -> Any:
        entered.set()
        return gate.wait(PATIENCE_S)

    both = made(stuck, batch=1)
    serving = Serving(graph(node("a", "x"), node("b", "x")), {"a": both, "b": both})
    await serving.endpoint.start()
    asked = [asyncio.ensure_future(serving(number)) for number in range(2)]
    await reached(lambda: entered.is_set() and both.endpoint.in_flight == 4)
    await serving.endpoint.drain(0.0)
    for one in asked:
        with pytest.raises(Unavailable):
            await one
    assert both.endpoint.in_flight == 0
    gate.set()


def test_requests_land_where_the_only_node_that_reads_of_them_sees_them():
    line = graph(node("a", "x"), node("b", "a"))
    first, second = made(runners.double, kind="process"), made(runners.double, kind="process")
    places = GraphPool(line, {"a": first, "b": second}, slots=1).places
    assert places is first.endpoint.places is not None
    assert GraphPool(line, {"a": made(runners.double), "b": second}, slots=1).places is HERE
    both = graph(node("a", "x"), node("b", "x", "a"))
    assert GraphPool(both, {"a": first, "b": second}, slots=1).places is None, "two nodes read of it"


def test_every_node_must_be_told_how_to_run():
    with pytest.raises(ConfigError, match="how node 'b' is run"):
        GraphPool(DIAMOND, {"a": made(runners.double)}, slots=1)


@pytest.mark.slow
async def test_every_request_gets_one_answer_whatever_happens():  # P153
    """A storm of failures, time-outs, cancellations and deaths: one answer each, and nothing is left."""
    rng = random.Random(5)
    nodes = {
        "a": made(runners.fails, workers=2),
        "b": made(runners.dies, kind="process", workers=2, timeout_s=0.15, attempts=2),
        "c": made(runners.fails, workers=2),
        "d": made(len, batch=4),
    }
    answers: dict[int, int] = {}
    async with Serving(DIAMOND, nodes, slots=16, queue=10_000) as serve:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def reply(request: Request, outcome: Any) -> None:
            answers[int(request.id)] = answers.get(int(request.id), 0) + 1
            if len(answers) == 600:
                loop.call_soon(done.set)

        requests = []
        for i in range(600):
            kind = rng.choices(["fine", "raise", "refuse", "skip", "sleep", "die"], [60, 10, 10, 5, 3, 1])[0]
            deadline = time.monotonic() + rng.choice([0.05, 1.0, 20.0])
            request = Request(body={"x": kind}, reply=reply, id=str(i), deadline=deadline)
            requests.append(request)
            serve.endpoint.submit(request)
            if rng.random() < 0.1:
                serve.endpoint.cancel(rng.choice(requests))
            if i % 20 == 0:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert set(answers.values()) == {1}
        assert serve.pool.in_flight == serve.endpoint.in_flight == 0
        assert all(one.endpoint.in_flight == 0 and one.endpoint.waiting == 0 for one in nodes.values())
        outcomes = [type(await serve_one(serve, "fine")) for _ in range(20)]
        assert outcomes == [int] * 20


async def serve_one(serve: Serving, value: Any) -> Any:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:  # a worker may just be on its way up again
        try:
            return await serve(value)
        except (Cancelled, DeadlineExceeded, ForebayError):
            await asyncio.sleep(0.2)
    return Failure
