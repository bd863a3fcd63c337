# SPDX-License-Identifier: Apache-2.0
"""More load than a server can serve: requests come as they come (Poisson), each connection carries one at a time.

A request that is due while every connection waits for an answer is not sent: a client cannot have more requests on
the way than connections. Latency counts from the moment a request was written. Answers are told apart by their
status: 200 is accepted, 429 and 503 are refused, everything else is an error, and so is a connection that closes.

Without a rate it is a closed loop: every connection asks again as soon as it has its answer, which shows what the
server serves to a client that costs as much.

With `--idle` so many more connections are opened first, and say nothing. Prints JSON as `Flood`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
from collections import deque
from pathlib import Path
from time import perf_counter

import msgspec
import uvloop

from benchmarks.client import Connection, post
from benchmarks.work import JOBS

WARM_UP_S = 1.0
REFUSALS = (429, 503)


class Flood(msgspec.Struct):
    """What the clients saw, after the warm-up."""

    accepted: float
    """A second."""
    refused: float
    """A second."""
    accepted_p50_ms: float
    accepted_p99_ms: float
    refused_p99_ms: float
    refused_max_ms: float
    errors: int
    sent: float
    """A second."""
    due: float
    """A second."""


class Generator:
    """Send each request when it is due, on the connection that has been free for longest."""

    def __init__(self, request: bytes, rate: float, seconds: float, seed: int) -> None:
        self.request = request
        self.rate = rate
        self.end = WARM_UP_S + seconds
        self.draw = random.Random(seed)
        self.due = 0.0
        self.sent = self.count = self.errors = 0
        self.free: deque[Connection] = deque()
        self.accepted: list[float] = []
        self.refused: list[float] = []
        self.loop = asyncio.get_running_loop()
        self.finished = self.loop.create_future()
        self.port = 0

    async def connect(self, count: int) -> None:
        for _ in range(count):
            _, connection = await self.loop.create_connection(
                lambda: Connection(self.answered, self.lost), "127.0.0.1", self.port
            )
            self.free.append(connection)

    async def run(self, port: int, connections: int) -> None:
        self.port = port
        await self.connect(connections)
        gc.collect()
        gc.disable()
        self.began = perf_counter()
        self.tick()
        await self.finished

    def tick(self) -> None:
        elapsed = perf_counter() - self.began
        counts = elapsed >= WARM_UP_S
        while self.free and not self.rate:
            self.free.popleft().ask(self.request, perf_counter())
            self.sent += counts
        while self.rate and self.due <= elapsed:
            self.due += self.draw.expovariate(self.rate)
            self.count += counts
            if self.free:
                self.free.popleft().ask(self.request, perf_counter())
                self.sent += counts
        if elapsed < self.end:
            self.loop.call_soon(self.tick)
        elif not self.finished.done():
            self.finished.set_result(None)

    def answered(self, connection: Connection, status: int, at: float) -> None:
        self.free.append(connection)
        now = perf_counter()
        if now - self.began < WARM_UP_S or self.finished.done():
            return
        if status == 200:
            self.accepted.append(now - at)
        elif status in REFUSALS:
            self.refused.append(now - at)
        else:
            self.errors += 1

    def lost(self, connection: Connection) -> None:
        if self.finished.done():
            return
        self.errors += 1
        if connection in self.free:
            self.free.remove(connection)
        connecting = self.loop.create_task(self.connect(1))
        connecting.add_done_callback(lambda task: task.exception())


def percentile(seconds: list[float], share: float) -> float:
    return 1e3 * sorted(seconds)[int(share * len(seconds))] if seconds else 0.0


def request_of(options: argparse.Namespace) -> bytes:
    return post(options.job, options.path, options.body.read_bytes() if options.body else None)


async def measure(options: argparse.Namespace) -> Flood:
    idle = [socket.create_connection(("127.0.0.1", options.port)) for _ in range(options.idle)]
    generator = Generator(request_of(options), options.rate, options.seconds, options.seed)
    await generator.run(options.port, options.connections)
    for connection in idle:
        connection.close()
    seconds = options.seconds
    return Flood(
        accepted=len(generator.accepted) / seconds,
        refused=len(generator.refused) / seconds,
        accepted_p50_ms=percentile(generator.accepted, 0.5),
        accepted_p99_ms=percentile(generator.accepted, 0.99),
        refused_p99_ms=percentile(generator.refused, 0.99),
        refused_max_ms=1e3 * max(generator.refused, default=0.0),
        errors=generator.errors,
        sent=generator.sent / seconds,
        due=generator.count / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=JOBS, default="batchmodel")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/")
    parser.add_argument("--body", type=Path, help="file with the body of a request, instead of the job's")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: as many as are answered")
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    print(msgspec.json.encode(uvloop.run(measure(parser.parse_args()))).decode())


if __name__ == "__main__":
    main()
