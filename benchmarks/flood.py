# SPDX-License-Identifier: Apache-2.0
"""More load than a server can serve: requests come as they come (Poisson), each connection carries one at a time.

A request that is due while every connection waits for an answer is not sent: a client cannot have more requests on
the way than connections. Latency counts from the moment a request was written until its answer was read. Answers are
told apart by their status: 200 is accepted, 429 and 503 are refused, everything else is an error, and so is a
connection that closes.

Without a rate it is a closed loop: every connection asks again as soon as it has its answer, which shows what the
server serves to a client that costs as much. With `--phases` several loads follow each other on the same connections,
so that what is compared is seconds apart; the rate of a phase is a factor of what the last closed loop reached.

With `--idle` so many more connections are opened first, and say nothing. Prints JSON: a `Flood`, or a list of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
from collections import deque
from pathlib import Path
from time import perf_counter, process_time

import msgspec
import uvloop

from benchmarks import proc
from benchmarks.client import Connection, post
from benchmarks.work import JOBS

WARM_UP_S = 1.0
MANY = 1000
SETTLE_S = {False: 0.3, True: 1.2}
"""Before a phase counts, once all that was asked before it is answered, and longer with `MANY` who may be told late."""
PATIENCE_S = 5.0
"""How long what was asked before is waited for."""
REFUSALS = (429, 503)


class Phase(msgspec.Struct, array_like=True):
    """One load of several."""

    connections: int
    factor: float
    """Of the rate of the last closed loop; 0 for such a loop."""
    seconds: float


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
    cpu_us: float = 0.0
    """CPU time of the server for each accepted answer, where its processes were named."""
    stall_ms: float = 0.0
    """Longest time in which the client itself stood still."""
    others: float = 0.0
    """Cores that other processes took meanwhile, where the server's were named."""


class Generator:
    """Send each request when it is due, on the connection that has been free for longest."""

    def __init__(self, port: int, request: bytes, pids: list[int], seed: int) -> None:
        self.port = port
        self.request = request
        self.pids = pids
        self.draw = random.Random(seed)
        self.rate = self.due = self.turned_at = 0.0
        self.connections = self.busy = self.left = 0
        self.started = 0.0
        self.is_running = self.counts = False
        self.free: deque[Connection] = deque()
        self.resting: list[Connection] = []
        self.loop = asyncio.get_running_loop()
        self.clear()

    def clear(self) -> None:
        self.sent = self.count = self.errors = 0
        self.stall_s = 0.0
        self.accepted: list[float] = []
        self.refused: list[float] = []

    async def connect(self, count: int) -> None:
        for _ in range(count):
            _, connection = await self.loop.create_connection(
                lambda: Connection(self.answered, self.lost), "127.0.0.1", self.port
            )
            self.add(connection)

    def add(self, connection: Connection) -> None:
        (self.free if len(self.free) + self.busy < self.connections else self.resting).append(connection)

    async def run(self, connections: int, rate: float, settle_s: float, seconds: float) -> Flood:
        """Load the server with so many connections, and go on with it until the next load.

        A connection that waits for an answer of the load before does not count, and takes part once it has it.
        """
        self.connections, self.rate = connections, rate
        self.left, self.busy = self.left + self.busy, 0
        self.started = perf_counter()
        while self.resting and len(self.free) + self.busy < connections:
            self.free.append(self.resting.pop())
        await self.connect(connections - len(self.free) - self.busy - self.left)
        while self.free and len(self.free) + self.busy > connections:
            self.resting.append(self.free.pop())
        gc.collect()
        gc.disable()
        self.due = self.turned_at = perf_counter()
        if not self.is_running:
            self.is_running = True
            self.tick()
        while self.left and perf_counter() < self.started + PATIENCE_S:  # noqa: ASYNC110 - an event would cost each answer
            await asyncio.sleep(0.01)
        await asyncio.sleep(settle_s)
        self.clear()
        began, cpu_s = perf_counter(), proc.cpu_s(self.pids)
        machine_s = proc.machine_times_s()[0] - process_time()
        self.counts = True
        await asyncio.sleep(seconds)
        self.counts = False
        lasted, cpu_s = perf_counter() - began, proc.cpu_s(self.pids) - cpu_s
        machine_s = proc.machine_times_s()[0] - process_time() - machine_s
        return Flood(
            accepted=len(self.accepted) / lasted,
            refused=len(self.refused) / lasted,
            accepted_p50_ms=percentile(self.accepted, 0.5),
            accepted_p99_ms=percentile(self.accepted, 0.99),
            refused_p99_ms=percentile(self.refused, 0.99),
            refused_max_ms=1e3 * max(self.refused, default=0.0),
            errors=self.errors,
            sent=self.sent / lasted,
            due=self.count / lasted,
            cpu_us=1e6 * cpu_s / max(len(self.accepted), 1),
            stall_ms=1e3 * self.stall_s,
            others=max(machine_s - cpu_s, 0.0) / lasted if self.pids else 0.0,
        )

    def tick(self) -> None:
        now = perf_counter()
        self.stall_s = max(self.stall_s, now - self.turned_at)
        self.turned_at = now
        while self.free and not self.rate:
            self.send()
        while self.rate and self.due <= now:
            self.due += self.draw.expovariate(self.rate)
            self.count += 1
            if self.free:
                self.send()
        if self.is_running:
            self.loop.call_soon(self.tick)

    def send(self) -> None:
        self.busy += 1
        self.sent += 1
        self.free.popleft().ask(self.request, perf_counter())

    def answered(self, connection: Connection, status: int, at: float) -> None:
        if at < self.started:
            self.left -= 1
        else:
            self.busy -= 1
        self.add(connection)
        if not self.counts or at < self.started:
            return
        now = perf_counter()
        if status == 200:
            self.accepted.append(now - at)
        elif status in REFUSALS:
            self.refused.append(now - at)
        else:
            self.errors += 1

    def lost(self, connection: Connection) -> None:
        if not self.is_running:
            return
        self.errors += 1
        for place in (self.free, self.resting):
            if connection in place:
                place.remove(connection)
                break
        else:
            if connection.asked_at is not None and connection.asked_at < self.started:
                self.left -= 1
            else:
                self.busy -= 1
        connecting = self.loop.create_task(self.connect(1))
        connecting.add_done_callback(lambda task: task.exception())


def percentile(seconds: list[float], share: float) -> float:
    return 1e3 * sorted(seconds)[int(share * len(seconds))] if seconds else 0.0


def request_of(options: argparse.Namespace) -> bytes:
    return post(options.job, options.path, options.body.read_bytes() if options.body else None)


async def measure(options: argparse.Namespace) -> list[Flood]:
    idle = [socket.create_connection(("127.0.0.1", options.port)) for _ in range(options.idle)]
    generator = Generator(options.port, request_of(options), options.pids, options.seed)
    found: list[Flood] = []
    if not options.phases:
        found.append(await generator.run(options.connections, options.rate, WARM_UP_S, options.seconds))
    closed = 0.0
    for phase in options.phases:
        settle_s = SETTLE_S[phase.connections >= MANY]
        found.append(await generator.run(phase.connections, phase.factor * closed, settle_s, phase.seconds))
        if not phase.factor:
            closed = found[-1].accepted
    generator.is_running = False
    for connection in idle:
        connection.close()
    return found


def phases(text: str) -> list[Phase]:
    return msgspec.json.decode(text, type=list[Phase])


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
    parser.add_argument("--phases", type=phases, default=[], help="[[connections, factor, seconds], ...]")
    parser.add_argument("--pids", type=msgspec.json.decode, default=[], help="the server's processes: [pid, ...]")
    options = parser.parse_args()
    found = uvloop.run(measure(options))
    print(msgspec.json.encode(found if options.phases else found[0]).decode())


if __name__ == "__main__":
    main()
