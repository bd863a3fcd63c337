# SPDX-License-Identifier: Apache-2.0
"""Streams that share their steps, beside an ideal that is simulated, and what the server itself costs a token.

    .venv/bin/python -m benchmarks.steps [--kind process] [--only all] [--rounds 3] [--write]

A step takes 5 ms and 0.1 ms a stream, a worker has 16 seats, streams are 20 to 400 tokens long (log-uniform). The
ideal is a schedule without any server: who waits sits down between two steps, in order, and each step costs its time
alone. *Bare* is a server of plain Python that can do nothing else (`servers/raw_steps.py`), in turns with forebay: what
there is to win. *End together* is what there was before: a batch of streams runs until the longest has ended, at the
price of the whole batch. The model `costly` sleeps until its step is over, `busy` computes: who sleeps leaves the
processor to others, and to other guests of the machine, and finds its caches cold. `CPU us` is CPU time of all the
server's processes for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.chaos import wait_ready
from benchmarks.launch import ROOT, environment, free_port, stop
from benchmarks.proc import cpu_s, tree
from benchmarks.report import table
from benchmarks.work.streaming import SEATS, STEP_S, STREAM_S, Costly

STREAMS = 400
LOAD = 0.8
MODELS = ROOT / "benchmarks" / "work" / "streaming.py"


class Told(NamedTuple):
    """What a client saw of one stream: seconds."""

    asked: float
    first: float
    ended: float
    tokens: int

    @property
    def first_s(self) -> float:
        return self.first - self.asked


class Row(NamedTuple):
    """One figure and its bar."""

    what: str
    found: float
    bar: float
    unit: str
    is_least: bool

    @property
    def holds(self) -> bool:
        return self.found >= self.bar if self.is_least else self.found <= self.bar


class Client(asyncio.Protocol):
    """One connection that asks for streams, one after the other."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.loop = asyncio.get_running_loop()
        self.tokens = 0
        self.asked = self.first = 0.0
        self.done: asyncio.Future[Told] | None = None
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, length: int) -> Told:
        body = b"%d" % length
        self.tokens, self.tail = 0, b""
        self.done = self.loop.create_future()
        self.asked = time.perf_counter()
        self.transport.write(
            b"POST /models/%b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (self.path.encode(), len(body), body)
        )
        return await self.done

    def data_received(self, data: bytes) -> None:
        if b"data: " in data:
            if not self.tokens:
                self.first = time.perf_counter()
            self.tokens += data.count(b"data: ")
        self.tail = (self.tail + data)[-5:]
        if self.tail == b"0\r\n\r\n" and self.done is not None and not self.done.done():
            self.done.set_result(Told(self.asked, self.first, time.perf_counter(), self.tokens))


async def connect(port: int, path: str) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(path), "127.0.0.1", port)
    return client


def lengths_of(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [round(math.exp(dice.uniform(math.log(20), math.log(400)))) for _ in range(count)]


def ideal(arrivals: list[float], lengths: list[int]) -> tuple[list[float], float]:
    """Simulate the best there can be; returns the time to each first token, and when all have ended."""
    now, at = 0.0, 0
    left: dict[int, int] = {}
    first: dict[int, float] = {}
    while at < len(arrivals) or left:
        if not left:
            now = max(now, arrivals[at])
        while at < len(arrivals) and arrivals[at] <= now and len(left) < SEATS:
            left[at] = lengths[at]
            at += 1
        now += STEP_S + STREAM_S * len(left)
        for one in list(left):
            first.setdefault(one, now - arrivals[one])
            left[one] -= 1
            if not left[one]:
                del left[one]
    return [first[one] for one in range(len(lengths))], now


def end_together(lengths: list[int]) -> float:
    """Return how long batches need whose streams begin and end together."""
    now = 0.0
    for begin in range(0, len(lengths), SEATS):
        batch = lengths[begin : begin + SEATS]
        now += (STEP_S + STREAM_S * len(batch)) * max(batch)
    return now


def alone() -> Row:
    """Step the model in a bare loop: what a step costs here beside what it is said to cost."""
    model, states = Costly(), [[0, 10_000] for _ in range(SEATS)]
    began = time.perf_counter()
    for _ in range(100):
        model.step(states)
    price = (STEP_S + STREAM_S * SEATS) * 100
    return Row("costly alone in a loop, beside the ideal", price / (time.perf_counter() - began), 0.0, "x", True)


async def all_at_once(port: int, path: str) -> list[Row]:
    lengths = lengths_of(STREAMS, 1)
    clients = [await connect(port, path) for _ in lengths]
    began = time.perf_counter()
    told = await asyncio.gather(*(client.ask(length) for client, length in zip(clients, lengths, strict=True)))
    took = max(one.ended for one in told) - began
    assert [one.tokens for one in told] == lengths
    _, best = ideal([0.0] * STREAMS, lengths)
    tokens = sum(lengths)
    return [
        Row(
            f"{path}: all at once, tokens/s beside batches that end together",
            end_together(lengths) / took,
            2.4,
            "x",
            True,
        ),
        Row(f"{path}: all at once, tokens/s beside the ideal", best / took, 0.95, "x", True),
        Row(f"{path}: all at once, tokens/s", tokens / took, 0.0, "/s", True),
    ]


async def at_random(port: int, path: str) -> list[Row]:
    lengths = lengths_of(STREAMS, 2)
    dice = random.Random(3)
    seconds = STEP_S + STREAM_S * SEATS
    rate = LOAD * SEATS / seconds / (sum(lengths) / len(lengths))
    arrivals = [0.0]
    for _ in lengths[1:]:
        arrivals.append(arrivals[-1] + dice.expovariate(rate))
    free = [await connect(port, path) for _ in range(64)]
    began = time.perf_counter()

    async def one(at: float, length: int) -> Told:
        await asyncio.sleep(max(began + at - time.perf_counter(), 0.0))
        client = free.pop() if free else await connect(port, path)
        told = await client.ask(length)
        free.append(client)
        return told

    told = await asyncio.gather(*(one(at, length) for at, length in zip(arrivals, lengths, strict=True)))
    best, _ = ideal([one.asked - began for one in sorted(told)], [one.tokens for one in sorted(told)])
    found = sorted(one.first_s for one in told)
    best = sorted(best)
    p99 = round(0.99 * (len(found) - 1))
    steps = median(found) / seconds
    return [
        Row(f"{path}: random arrivals at 0.8, first token p50", steps, 2.0, "steps of 6.6 ms", False),
        Row(f"{path}: random arrivals at 0.8, first token p50", median(found) * 1000, math.inf, "ms", False),
        Row("... of the ideal", median(best) * 1000, math.inf, "ms", False),
        Row(
            f"{path}: random arrivals at 0.8, first token p99 beside the ideal", found[p99] / best[p99], 1.2, "x", False
        ),
        Row(f"{path}: random arrivals at 0.8, first token p99", found[p99] * 1000, math.inf, "ms", False),
    ]


async def trivial(port: int, path: str, pid: int, length: int, bar_us: float, seconds: float) -> list[Row]:
    clients = [await connect(port, path) for _ in range(32)]
    told: list[Told] = []

    async def loop(client: Client, until: float) -> None:
        while time.perf_counter() < until:
            told.append(await client.ask(length))

    await asyncio.gather(*(loop(client, time.perf_counter() + 0.5) for client in clients))
    told.clear()
    before, began = cpu_s(tree(pid)), time.perf_counter()
    await asyncio.gather(*(loop(client, began + seconds) for client in clients))
    took, cost = time.perf_counter() - began, cpu_s(tree(pid)) - before
    tokens = sum(one.tokens for one in told)
    name = f"{path}: 32 clients x {length} tokens"
    firsts = sorted(one.first_s for one in told)
    return [
        Row(f"{name}, CPU us a token", cost / tokens * 1e6, bar_us, "us", False),
        Row(f"{name}, first token p50", median(firsts) * 1000, 2.0 if path == "generated" else math.inf, "ms", False),
        Row(f"{name}, tokens/s", tokens / took, 0.0, "/s", True),
    ]


async def costs(port: int, pid: int) -> list[Row]:
    return await trivial(port, "counting", pid, 400, 4.0, 4.0) + await trivial(port, "generated", pid, 100, 8.0, 4.0)


async def schedules(port: int) -> list[Row]:
    return [row for path in ("costly", "busy") for row in await all_at_once(port, path) + await at_random(port, path)]


def as_bare(row: Row) -> Row:
    """Return the same figure of the bare server, which has no bar to reach."""
    return row._replace(what=f"bare, {row.what}", bar=0.0 if row.is_least else math.inf)


def medians(rounds: list[list[Row]]) -> list[Row]:
    return [same[0]._replace(found=median(row.found for row in same)) for same in zip(*rounds, strict=True)]


@contextmanager
def served(command: list[str]) -> Iterator[tuple[int, int]]:
    """Run a server; yields its port and its pid."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *command, str(port)], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_ready(process, port)
        yield port, process.pid
    finally:
        stop(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="process", choices=["inline", "thread", "process"])
    parser.add_argument("--only", default="all", choices=["all", "trivial", "costly"])
    parser.add_argument("--rounds", type=int, default=1, help="of which the medians are shown")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS-steps.md")
    options = parser.parse_args()
    ours = ["-m", "forebay", "serve", str(MODELS), "--worker-kind", options.kind, "--http-port"]
    bare = ["-m", "benchmarks.servers.raw_steps", "--port"]
    rounds: list[list[Row]] = []
    with served(ours) as (port, pid), served(bare) as (bare_port, _):
        for _ in range(options.rounds):
            rows: list[Row] = []
            if options.only in {"trivial", "all"}:
                rows += asyncio.run(costs(port, pid))
            if options.only in {"costly", "all"}:
                rows += [alone(), *asyncio.run(schedules(port)), *map(as_bare, asyncio.run(schedules(bare_port)))]
            rounds.append(rows)
    lines = [
        [row.what, f"{row.found:.4g} {row.unit}", "" if row.bar in {0.0, math.inf} else f"{row.bar:g}", verdict(row)]
        for row in sorted(medians(rounds), key=lambda row: row.holds)
    ]
    page = table([f"worker kind {options.kind}", "found", "bar", ""], lines)
    print(page)
    if options.write:
        text = "# Streams that share their steps\n\n`python -m benchmarks.steps --write`; it says what is measured.\n\n"
        Path(ROOT, "benchmarks", "RESULTS-steps.md").write_text(text + page + "\n")


def verdict(row: Row) -> str:
    return "" if row.bar in {0.0, math.inf} else "holds" if row.holds else "**misses**"


if __name__ == "__main__":
    main()
