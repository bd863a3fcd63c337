# SPDX-License-Identifier: Apache-2.0
"""Measure the auto policy beside a grid of hand-set (max_batch_size, max_wait_ms), on one endpoint each.

All configurations of one curve and one kind of traffic run at the same time in one process: their models sleep, so they
do not disturb each other, and whatever disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import time
from pathlib import Path

import uvloop

from benchmarks.policies.curves import ARRIVALS, CURVES, MAX_SIZE, OBJECTIVE_MS, most, spec
from forebay.batching.queue import BatchConfig
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Failure, Request
from forebay.workers.pools.threads import ThreadPool

GRID = [(size, wait_ms) for size in (4, 16, 32, 64) for wait_ms in (0, 5, 25)]
CLIENTS = 64
LATE_S = 2.0
"""How long requests that were due in the window are waited for after its end."""


class Origin:
    def __init__(self) -> None:
        self.release = 0


class Traffic:
    """One endpoint under load; counts what is due between `opens` and `closes`."""

    def __init__(self, endpoint: Endpoint, opens: float, closes: float) -> None:
        self.endpoint = endpoint
        self.opens, self.closes = opens, closes
        self.latencies: list[float] = []
        self.answered = self.due = 0

    def send(self, due: float, origin: Origin, then=None) -> None:
        if self.opens <= due < self.closes:
            self.due += 1

        def reply(_request, outcome):
            now = time.monotonic()
            if type(outcome) is not Failure:
                self.answered += self.opens <= now < self.closes
                if self.opens <= due < self.closes:
                    self.latencies.append(now - due)
            if then is not None and now < self.closes:
                then(origin)

        self.endpoint.submit(Request(body=None, reply=reply, origin=origin))

    async def open_loop(self, started: float, moments: list[float]) -> None:
        origins = [Origin() for _ in range(500)]
        draw = random.Random(4)
        for moment in moments:
            if (wait := started + moment - time.monotonic()) > 0.0005:
                await asyncio.sleep(wait)
            self.send(started + moment, draw.choice(origins))

    def closed_loop(self) -> None:
        loop = asyncio.get_running_loop()
        draw = random.Random(5)

        def again(origin: Origin) -> None:
            loop.call_later(draw.random() * 0.002, lambda: self.send(time.monotonic(), origin, again))

        for _ in range(CLIENTS):
            again(Origin())

    @property
    def throughput(self) -> float:
        return self.answered / (self.closes - self.opens)

    @property
    def p95_ms(self) -> float:
        """What was due and never answered counts as late."""
        everything = sorted(self.latencies) + [float("inf")] * (self.due - len(self.latencies))
        return everything[int(0.95 * len(everything))] * 1000


async def longest_stall(until: float) -> float:
    """Return the longest time by which the loop was late for a timer: what the machine adds to all latencies."""
    longest = 0.0
    while (now := time.monotonic()) < until:
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - now - 0.01)
    return longest


async def measure(curve: str, arrivals: str, settle_s: float, window_s: float) -> list[str]:
    """Run one kind of traffic on every configuration at once; return the row of the table."""
    objective_ms = OBJECTIVE_MS[curve]
    configs = [
        BatchConfig(max_size=size, max_wait_s=wait_ms / 1000, idle="wait", capacity=100_000) for size, wait_ms in GRID
    ]
    configs.append(BatchConfig(max_size=MAX_SIZE, objective_s=objective_ms / 1000, capacity=100_000))
    endpoints = [
        Endpoint(EndpointConfig(name=str(number), timeout_s=60.0), config, ThreadPool(spec(curve)))
        for number, config in enumerate(configs)
    ]
    for endpoint in endpoints:
        await endpoint.start()
    gc.collect()
    gc.disable()  # small sizes leave 100,000 requests behind; looking through them would stop everything
    started = time.monotonic()
    opens, closes = started + settle_s, started + settle_s + window_s
    runs = [Traffic(endpoint, opens, closes) for endpoint in endpoints]
    watch = asyncio.create_task(longest_stall(closes))
    if arrivals == "closed":
        for run in runs:
            run.closed_loop()
        await asyncio.sleep(closes - time.monotonic())
    else:
        moments = ARRIVALS[arrivals](most(curve), settle_s + window_s)
        await asyncio.gather(*(run.open_loop(started, moments) for run in runs))
    state = endpoints[-1].auto
    await asyncio.gather(*(endpoint.drain(LATE_S) for endpoint in endpoints))
    gc.enable()
    return row(curve, arrivals, runs, state, await watch)


def row(curve, arrivals, runs, state, stall_s) -> list[str]:
    objective_ms = OBJECTIVE_MS[curve]
    by_hand = list(zip(GRID, runs[:-1], strict=True))
    holding = [(values, run) for values, run in by_hand if run.p95_ms <= objective_ms]
    (size, wait_ms), best = max(holding or by_hand, key=lambda one: one[1].throughput)
    auto = runs[-1]
    ratio = auto.throughput / best.throughput
    fine = ratio >= 0.95 and (auto.p95_ms <= objective_ms or not (holding or state.objective_held))
    return [
        curve,
        arrivals,
        f"{objective_ms}",
        f"{size}, {wait_ms} ms" + ("" if holding else " (none holds it)"),
        f"{best.throughput:.0f}",
        f"{best.p95_ms:.0f}",
        f"{auto.throughput:.0f}",
        f"{auto.p95_ms:.0f}",
        "yes" if state.objective_held else "no",
        f"{ratio:.3f}",
        f"{len(holding)} of {len(by_hand)}",
        f"{stall_s * 1000:.0f}",
        "pass" if fine else "FAIL",
    ]


HEADLINE = """\
# The auto policy beside hand-set sizes and waits

Measured by `python -m benchmarks.policies.main`: {window_s:.0f} s each, after {settle_s:.0f} s to learn in.
`best by hand` is the (max_batch_size, max_wait_ms) with the most rows/s of those whose p95 holds the objective.
A row passes with at least 0.95 of its rows/s and a p95 within the objective, unless that is held by none and said
not to be. The closed loop has {clients} clients. The longest stall is by how much the machine was late for a timer.
README.md says what the curves and the arrivals are.

"""

HEAD = [
    "curve", "arrivals", "objective ms", "best by hand", "rows/s", "p95 ms", "auto rows/s", "auto p95 ms",
    "says held", "ratio", "hand-set that hold", "longest stall ms", "",
]  # fmt: skip


def table(rows: list[list[str]]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settle-s", type=float, default=8.0, help="time to learn in, not measured")
    parser.add_argument("--window-s", type=float, default=20.0, help="time that is measured")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "RESULTS.md")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # small batches fall behind by thousands of requests: that is what is measured
    rows = []
    for curve in CURVES:
        for arrivals in [*ARRIVALS, "closed"]:
            rows.append(uvloop.run(measure(curve, arrivals, args.settle_s, args.window_s)))
            print(" | ".join(rows[-1]), flush=True)
    text = HEADLINE.format(window_s=args.window_s, settle_s=args.settle_s, clients=CLIENTS)
    args.output.write_text(text + table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
