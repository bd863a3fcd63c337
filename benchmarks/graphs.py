# SPDX-License-Identifier: Apache-2.0
"""What a graph costs for each node: trivial thread nodes in chains and in a fan-out, and Ray Serve's composition.

    benchmarks/.venv/bin/python -m benchmarks.graphs

64 clients in the same process ask again as soon as they are answered, so what is measured is the engine and not a
protocol. Rounds are interleaved; the table shows medians. The process is kept on one core, as servers are in the other
benchmarks; on two, each hand-over between the loop and a node's thread goes from core to core. Ray Serve has both cores
and gets the same chains as deployments that hand on their results by reference, called through its own handle.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.records import line
from benchmarks.report import machine, table
from forebay.batching.queue import BUNDLE_S, BatchConfig
from forebay.graph.pool import GraphPool, Node
from forebay.graph.spec import GraphSpec, NodeSpec
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Request
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec

CLIENTS = 64
CHAINS = (1, 4, 16, 64)
WIDE = 16
WARM_UP_S = 0.3
RAY_CHAINS = (1, 4, 16)
MODES = {"batched": (64, True), "unbatched": (1, True), "unbatched, two cores": (1, False)}
"""Rows of a batch, and whether the process is kept on one core."""
BARS_US = {"batched": 15.0, "unbatched": 30.0, "unbatched, two cores": 30.0}


class Nothing(Runner):
    """A runner that answers at once: what is left is the engine."""

    def run(self, items):
        return [0] * len(items)


def chain(length: int) -> GraphSpec:
    nodes = tuple(
        NodeSpec(name=f"n{i}", inputs={"x": f"n{i - 1}" if i else "x"}, outputs={"out": f"n{i}"}) for i in range(length)
    )
    return GraphSpec(name="chain", inputs=("x",), outputs={"result": f"n{length - 1}"}, nodes=nodes)


def fan(width: int) -> GraphSpec:
    nodes = tuple(NodeSpec(name=f"n{i}", inputs={"x": "x"}, outputs={"out": f"n{i}"}) for i in range(width))
    join = NodeSpec(name="join", inputs={f"n{i}": f"n{i}" for i in range(width)}, outputs={"out": "join"})
    return GraphSpec(name="fan", inputs=("x",), outputs={"result": "join"}, nodes=(*nodes, join))


def node(max_batch: int) -> Node:
    pool = ThreadPool(RunnerSpec(factory="", local=Nothing))
    # As a composition runs its nodes: functions of one request share the way to their thread.
    bundle_s = BUNDLE_S if max_batch == 1 else 0.0
    config = BatchConfig(max_size=max_batch, idle="go", capacity=100_000, bundle_s=bundle_s)
    return Node(endpoint=Endpoint(EndpointConfig(name="node"), config, pool))


async def drive(spec: GraphSpec, max_batch: int, seconds: float) -> float:
    """Return requests a second."""
    nodes = {one.name: node(max_batch) for one in spec.nodes}
    config = BatchConfig(max_size=1, idle="go", capacity=10_000)
    endpoint = Endpoint(EndpointConfig(name=spec.name), config, GraphPool(spec, nodes, slots=CLIENTS))
    await endpoint.start()
    loop = asyncio.get_running_loop()
    answered, left, over = 0, CLIENTS, asyncio.Event()
    is_over = False

    def reply(_request, _outcome) -> None:
        nonlocal answered, left
        answered += 1
        if not is_over:
            loop.call_soon(ask)
            return
        left -= 1
        if left == 0:
            over.set()

    def ask() -> None:
        endpoint.submit(Request(body={"x": 1}, reply=reply))

    for _ in range(CLIENTS):
        ask()
    await asyncio.sleep(WARM_UP_S)
    before, began = answered, time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (answered - before) / (time.perf_counter() - began)
    is_over = True
    await over.wait()
    await endpoint.drain(1.0)
    return rate


def ray_rates(rounds: int, seconds: float) -> dict[int, list[float]]:
    """Measure Ray Serve's composition of the same chains: requests a second, by nodes and round."""
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    @serve.deployment(max_ongoing_requests=2 * CLIENTS, ray_actor_options={"num_cpus": 0})
    class Step:
        def __call__(self, value):
            return value

    @serve.deployment(max_ongoing_requests=2 * CLIENTS, ray_actor_options={"num_cpus": 0})
    class Chain:
        def __init__(self, *steps):
            self.steps = steps

        async def __call__(self, value):
            response = value
            for step in self.steps:
                response = step.remote(response)  # by reference: the value goes from replica to replica
            return await response

    async def drive_ray(handle) -> float:
        answered, end = 0, time.perf_counter() + WARM_UP_S + seconds
        began = time.perf_counter() + WARM_UP_S

        async def client() -> None:
            nonlocal answered
            while time.perf_counter() < end:
                await handle.remote(1)
                answered += time.perf_counter() >= began

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return answered / seconds

    rates: dict[int, list[float]] = {length: [] for length in RAY_CHAINS}
    for length in RAY_CHAINS:
        steps = [Step.options(name=f"step{i}").bind() for i in range(length)]
        handle = serve.run(Chain.bind(*steps), name="chain", route_prefix=None)
        for _ in range(rounds):
            rates[length].append(asyncio.run(drive_ray(handle)))
        serve.delete("chain")
    ray.shutdown()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.graphs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--no-ray", action="store_true", help="leave Ray Serve out")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-graphs.md"))
    options = parser.parse_args()
    specs = {
        **{f"chain of {length}": chain(length) for length in CHAINS},
        f"{WIDE} beside each other, joined": fan(WIDE),
    }
    every_core = os.sched_getaffinity(0)
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for mode, (max_batch, is_pinned) in MODES.items():
            os.sched_setaffinity(0, {0} if is_pinned else every_core)
            for name, spec in specs.items():
                rates.setdefault((mode, name), []).append(uvloop.run(drive(spec, max_batch, options.seconds)))
    os.sched_setaffinity(0, every_core)
    ray = {} if options.no_ray else ray_rates(options.rounds, options.seconds)
    rows = []
    for mode in MODES:
        costs = {}
        for name, spec in specs.items():
            rate = median(rates[mode, name])
            count = len(spec.nodes)
            costs[count] = 1e3 / rate
            peer = median(ray[count]) if name.startswith("chain") and count in ray else None
            beside = ["", ""] if peer is None else [f"{peer:,.0f}", f"{rate / peer:.0f}"]
            bar = BARS_US.get(mode)
            judged = "" if bar is None else "pass" if 1e6 / rate / count <= bar else "**FAIL**"
            rows.append([mode, name, f"{rate:,.0f}", f"{1e6 / rate / count:.1f}", judged, *beside])
        costs.pop(WIDE + 1)
        fixed_ms, per_node_us = line(costs)
        rows.append([mode, f"a chain of n takes {1e3 * fixed_ms:.0f} + {per_node_us:.1f} n us", "", "", "", "", ""])
    head = [
        "",
        "graph",
        "req/s",
        "us a node",
        f"at most {BARS_US['batched']:g} / {BARS_US['unbatched']:g}",
        "Ray Serve",
        "ratio",
    ]
    facts = {
        "date": time.strftime("%d %b %Y %H:%M"),
        **machine(),
        "rounds": f"{options.rounds} of {options.seconds:g} s",
    }
    told = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    text = f"# What a graph costs\n\n{told}\n\n{(__doc__ or '').split(chr(10) * 2)[2]}\n\n{table(head, rows)}\n"
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
