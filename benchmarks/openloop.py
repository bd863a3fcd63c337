# SPDX-License-Identifier: Apache-2.0
"""Open-loop load: requests come when they come (Poisson), whether or not the server keeps up.

Latency counts from the moment a request was *due*, so a server that stalls is charged for everyone it kept
waiting. The arrivals are drawn before the clock starts. The loop spins instead of sleeping, because its timers
are a millisecond coarse; the core is the generator's own.

Prints JSON as `load.Load`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from collections import deque
from itertools import accumulate, cycle
from time import perf_counter

import msgspec
import uvloop

from benchmarks.client import Connection, post
from benchmarks.load import Load
from benchmarks.work import JOBS

CONNECTIONS = 512
WARM_UP_S = 1.0
PATIENCE_S = 3.0


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw the moments requests are due; the same seed gives every server the same load."""
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) for _ in range(int(rate * seconds)))
    return list(accumulate(gaps))


class Generator:
    """Send each request when it is due, on the connection that has been free for longest.

    Taking turns like this is the hard case for a server that learns who comes back: hardly anyone does.
    """

    connection: type[Connection] = Connection

    def __init__(self, request: bytes, due: list[float]) -> None:
        self.request = request
        self.due = due
        self.next = 0
        self.free: deque[Connection] = deque()
        self.waiting: deque[float] = deque()
        self.latencies: list[tuple[float, float]] = []  # due, seconds
        self.errors = 0
        self.turned_at = 0.0
        self.stall_s = 0.0
        self.loop = asyncio.get_running_loop()
        self.finished = self.loop.create_future()

    async def run(self, *ports: int) -> None:
        """Ask on connections to each of these in turn."""
        for _, port in zip(range(CONNECTIONS), cycle(ports), strict=False):
            _, connection = await self.loop.create_connection(
                lambda: self.connection(self.answered, self.lost), "127.0.0.1", port
            )
            self.free.append(connection)
        gc.collect()
        gc.disable()
        self.began = perf_counter()
        self.tick()
        try:
            await asyncio.wait_for(self.finished, self.due[-1] + PATIENCE_S)
        except TimeoutError:
            self.errors += len(self.due) - len(self.latencies)

    def tick(self) -> None:
        elapsed = perf_counter() - self.began
        self.stall_s = max(self.stall_s, elapsed - self.turned_at)
        self.turned_at = elapsed
        while self.next < len(self.due) and self.due[self.next] <= elapsed:
            self.send(self.due[self.next])
            self.next += 1
        if not self.finished.done():
            self.loop.call_soon(self.tick)

    def send(self, due: float) -> None:
        if self.free:
            self.free.popleft().ask(self.request, due)
        else:
            self.waiting.append(due)

    def answered(self, connection: Connection, status: int, due: float) -> None:
        self.latencies.append((due, perf_counter() - self.began - due))
        self.errors += status != 200
        if self.waiting:
            connection.ask(self.request, self.waiting.popleft())
        else:
            self.free.append(connection)
        if len(self.latencies) == len(self.due):
            self.finished.set_result(None)

    def lost(self, connection: Connection) -> None:
        self.errors += not self.finished.done()


async def measure(options: argparse.Namespace) -> Load:
    due = arrivals(options.rate, WARM_UP_S + options.seconds, options.seed)
    generator = Generator(post(options.job, options.path), due)
    await generator.run(*options.port)
    counted = sorted(1e3 * seconds for moment, seconds in generator.latencies if moment >= WARM_UP_S)
    return Load(
        requests=len(counted),
        duration_s=due[-1] - WARM_UP_S,
        p50_ms=counted[len(counted) // 2],
        p99_ms=counted[int(0.99 * len(counted))],
        mean_ms=sum(counted) / len(counted),
        errors=generator.errors,
        stall_ms=1e3 * generator.stall_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=JOBS, default="batchmodel")
    parser.add_argument("--port", type=int, nargs="+", required=True, help="of one server, or of several fronts")
    parser.add_argument("--path", default="/")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    print(msgspec.json.encode(uvloop.run(measure(parser.parse_args()))).decode())


if __name__ == "__main__":
    main()
