# SPDX-License-Identifier: Apache-2.0
"""Kill: a worker process gets SIGKILL every two seconds under load; does every request get an answer?

Counts answers by status, requests whose connection closed or that nobody answered, and answers a second. Ends
with status 1 if a request went without an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter

import uvloop

from benchmarks.client import Connection, post
from benchmarks.launch import Running, start
from benchmarks.servers import Server, forebay_command
from benchmarks.work import JOBS

SERVER_CORES, LOAD_CORES = frozenset({0}), frozenset({1})
PATIENCE_S = 35.0  # longer than the time a request has


class Clients:
    """Closed-loop clients that keep account of each request."""

    def __init__(self, port: int, request: bytes) -> None:
        self.port = port
        self.request = request
        self.statuses: Counter[int] = Counter()
        self.by_second: Counter[int] = Counter()
        self.lost_requests = 0
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.stopping = False
        self.began = perf_counter()
        self.opening: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self.answered, self.lost), "127.0.0.1", self.port
        )
        self.ask(connection)

    def ask(self, connection: Connection) -> None:
        if not self.stopping:
            self.in_flight += 1
            connection.ask(self.request, perf_counter())

    def settled(self) -> None:
        self.in_flight -= 1
        if self.stopping and not self.in_flight:
            self.idle.set()

    def answered(self, connection: Connection, status: int, asked_at: float) -> None:
        self.settled()
        self.statuses[status] += 1
        if status == 200:
            self.by_second[int(perf_counter() - self.began)] += 1
        self.ask(connection)

    def lost(self, connection: Connection) -> None:
        if connection.asked_at is not None:
            self.settled()
            self.lost_requests += 1
        if not self.stopping:
            task = asyncio.ensure_future(self.open())
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def stop(self) -> None:
        """Wait for what is in flight; whatever is then missing was never answered."""
        self.stopping = True
        if self.in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), PATIENCE_S)


def workers(running: Running) -> list[int]:
    """List the server's children that live; one that was killed has no command line any more."""
    return [pid for pid in running.pids()[1:] if Path(f"/proc/{pid}/cmdline").read_bytes()]


async def run(running: Running, options: argparse.Namespace) -> tuple[Clients, int]:
    clients = Clients(running.port, post(options.job, running.server.path))
    await asyncio.gather(*(clients.open() for _ in range(options.connections)))
    kills, end = 0, clients.began + options.seconds
    while perf_counter() + options.every < end:
        await asyncio.sleep(options.every)
        if alive := workers(running):
            os.kill(random.choice(alive), signal.SIGKILL)
            kills += 1
    await asyncio.sleep(max(0.0, end - perf_counter()))
    await clients.stop()
    return clients, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", choices=JOBS, default="batchmodel")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between kills")
    options = parser.parse_args()
    os.sched_setaffinity(0, LOAD_CORES)
    server = Server("forebay:process", forebay_command("process", workers=options.workers))
    with start(server, options.job, SERVER_CORES) as running:
        clients, kills = uvloop.run(run(running, options))
        running.check_answer()
    rates = [clients.by_second[second] for second in range(int(options.seconds))]
    unanswered = clients.lost_requests + clients.in_flight
    print(f"{options.job}, {options.workers} workers, {options.seconds:g} s, {kills} kills")
    print(f"answers by status: {dict(sorted(clients.statuses.items()))}")
    print(f"without an answer: {unanswered} (closed {clients.lost_requests}, silent {clients.in_flight})")
    print(f"answers with 200 a second: median {median(rates):,.0f}, lowest {min(rates):,}")
    print("by second:", *rates)
    raise SystemExit(1 if unanswered else 0)


if __name__ == "__main__":
    main()
