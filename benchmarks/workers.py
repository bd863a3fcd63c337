# SPDX-License-Identifier: Apache-2.0
"""Several thread workers beside a grid of hand-set sizes and waits, with a model that sleeps 10 ms and 0.2 ms a row.

From the repository, on an idle machine: `.venv/bin/python -m benchmarks.workers` (7 minutes; `--rounds 1 --workers 2
--clients 16` for a first look). Of the grid only those are measured that do best in the simulation (`--points 0` for
all of it, a quarter of an hour). Each configuration is an endpoint of its own in one process; they take turns, for the
machine's speed drifts. Clients are closed loops without HTTP that send again within 1 ms of an answer. Writes
RESULTS-workers.md; the bar is 0.98 of the best by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from pathlib import Path

import uvloop

from benchmarks.policies.simulation import Crowd, even, within_1_ms
from forebay.batching.queue import BatchConfig
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import MemoryOrigin
from forebay.types.call import Request
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec

SIZES = (2, 4, 8, 16, 32, 64)
WAITS_MS = (0, 2, 10)
BAR = 0.98


class Sleeper(Runner):
    def run(self, items):
        time.sleep(even(len(items)))
        return [None] * len(items)


async def serve(endpoint, clients, window_s):
    """Return the answers a second within a window, after a third of it to settle in."""
    loop = asyncio.get_running_loop()
    draw = random.Random(5)
    opens = time.monotonic() + window_s / 3
    closes = opens + window_s
    answered = under_way = 0
    over = asyncio.Event()

    def send(origin):
        endpoint.submit(Request(body=None, reply=reply, origin=origin))

    def reply(request, _outcome):
        nonlocal answered, under_way
        now = time.monotonic()
        answered += opens <= now < closes
        if now < closes:
            loop.call_later(draw.random() * 0.001, send, request.origin)
            return
        under_way -= 1
        if not under_way:
            over.set()

    for _ in range(clients):
        under_way += 1
        send(MemoryOrigin())
    await over.wait()
    return answered / window_s


def promising(workers, clients, points):
    """Return the points of the grid with the most answers a second in the simulation; 0 for all that make sense."""
    most = max(min(2 * clients // workers, clients), 2)
    grid = [(size, wait_ms) for size in SIZES if size <= most for wait_ms in WAITS_MS]
    if not points:
        return grid

    def simulated(point):
        by_hand = {"idle": "wait", "max_size": point[0], "max_wait_s": point[1] / 1000}
        rows = max(2_000, 24 * clients)
        return Crowd(even, workers, clients=clients, returns=within_1_ms, rows=rows, **by_hand).throughput

    return sorted(grid, key=simulated)[-points:]


async def compare(workers, clients, grid, window_s, rounds):
    """Return the medians of the rule and of each hand-set configuration."""
    configs: dict[object, BatchConfig] = {"forebay": BatchConfig(capacity=100_000)}
    for size, wait_ms in grid:
        configs[size, wait_ms] = BatchConfig(max_size=size, max_wait_s=wait_ms / 1000, idle="wait", capacity=100_000)
    found: dict[object, list[float]] = {name: [] for name in configs}
    for _ in range(rounds):
        for name, config in configs.items():
            spec = RunnerSpec("benchmarks.workers:Sleeper", {})
            endpoint = Endpoint(EndpointConfig(name="sleeper"), config, ThreadPool(spec, workers=workers))
            await endpoint.start()
            gc.collect()
            found[name].append(await serve(endpoint, clients, window_s))
            await endpoint.drain(1.0)
    return {name: statistics.median(rates) for name, rates in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--points", type=int, default=6, help="hand-set (size, wait) that are measured; 0 for all")
    parser.add_argument("--window-s", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "RESULTS-workers.md")
    args = parser.parse_args()
    lines = [
        "# Several workers beside hand-set sizes and waits",
        "",
        f"Measured by `python -m benchmarks.workers`: {args.rounds} rounds of {args.window_s:g} s each, medians,",
        f"beside {f'the {args.points} best in the simulation' if args.points else 'all'} of up to 18 sizes and waits.",
        "",
        "| workers | clients | best by hand (size, wait ms) | answers/s | forebay answers/s | ratio | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workers in args.workers:
        for clients in args.clients:
            found = uvloop.run(
                compare(workers, clients, promising(workers, clients, args.points), args.window_s, args.rounds)
            )
            ours = found.pop("forebay")
            best = max(found, key=lambda name: found[name])
            ratio = ours / found[best]
            verdict = "pass" if ratio >= BAR else "FAIL"
            row = (workers, clients, best, f"{found[best]:.0f}", f"{ours:.0f}", f"{ratio:.3f}", verdict)
            lines.append("| " + " | ".join(map(str, row)) + " |")
            print(lines[-1], flush=True)
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
