# SPDX-License-Identifier: Apache-2.0
"""What one tenant sends, in a process of its own: as it comes (Poisson), or in a closed loop.

All loads of a run begin at the same moment and count what is answered within the same time. A request that is due while
every connection waits for an answer is not sent, but counted. Prints JSON: a `Told`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from collections import deque
from time import perf_counter

import msgspec
import uvloop

from benchmarks.client import Connection, post

TICK_S = 0.001
REFUSALS = (429, 503)
TOO_LATE = 504


class Told(msgspec.Struct):
    """What the clients of a tenant saw; latencies in seconds, in order of size."""

    due: int = 0
    sent: int = 0
    answered: int = 0
    in_time: int = 0
    late: int = 0
    """Answered after the deadline."""
    ended: int = 0
    """Accepted, and told after the deadline that it is over."""
    refused: int = 0
    errors: int = 0
    stall_s: float = 0.0
    latencies: list[float] = []

    def percentile(self, part: float) -> float:
        """Return the time within which that part of the answers came; 0 if there is none."""
        found = self.latencies
        return found[min(int(len(found) * part), len(found) - 1)] if found else 0.0


class Caller(Connection):
    """A connection that knows until when its answer is of use."""

    limit_s = float("inf")


class Load:
    """Send requests while it is time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.draw = random.Random(options.seed)
        self.told = Told()
        self.free: deque[Caller] = deque()
        self.begins, self.ends = options.at + options.warm, options.at + options.warm + options.seconds
        self.requests = [(limit or float("inf"), self.request(limit)) for limit in options.limits or [0.0]]

    def request(self, limit_s: float) -> bytes:
        headers = f"X-API-Key: {self.options.key}\r\n"
        if limit_s:
            headers += f"X-Request-Timeout-Ms: {1e3 * limit_s:.0f}\r\n"
        return post("shared", self.options.path, str(self.options.row).encode(), headers)

    async def run(self) -> Told:
        """Send all of it."""
        loop = asyncio.get_running_loop()
        for _ in range(self.options.connections):
            await loop.create_connection(self.connection, "127.0.0.1", self.options.port)
        gc.collect()
        gc.disable()
        turned = max(perf_counter(), self.options.at)
        await asyncio.sleep(turned - perf_counter())
        due = turned
        while (now := perf_counter()) < self.ends:
            if now > self.begins:
                self.told.stall_s = max(self.told.stall_s, now - turned)
            turned = now
            while self.options.rate and due <= now:
                due += self.draw.expovariate(self.options.rate)
                self.told.due += self.counts(now)
                self.send(now)
            while self.free and not self.options.rate:
                self.send(now)
            await asyncio.sleep(TICK_S)
        self.told.latencies.sort()
        return self.told

    def connection(self) -> Caller:
        made = Caller(self.answered, self.lost)
        self.free.append(made)
        return made

    def counts(self, now: float) -> bool:
        return self.begins <= now < self.ends

    def send(self, now: float) -> None:
        if not self.free:
            return
        caller = self.free.popleft()
        caller.limit_s, request = self.draw.choice(self.requests)
        self.told.sent += self.counts(now)
        caller.ask(request, now)

    def answered(self, caller: Caller, status: int, at: float) -> None:
        now = perf_counter()
        if self.options.rate:
            self.free.append(caller)
        elif now < self.ends:
            caller.ask(self.requests[0][1], now)
        if not self.counts(now):
            return
        if status == 200:
            self.told.answered += 1
            self.told.latencies.append(now - at)
            self.told.in_time += now - at <= caller.limit_s
            self.told.late += now - at > caller.limit_s
        elif status in REFUSALS:
            self.told.refused += 1
        elif status == TOO_LATE:
            self.told.ended += 1
        else:
            self.told.errors += 1

    def lost(self, caller: Caller) -> None:
        self.told.errors += perf_counter() < self.ends
        if caller in self.free:
            self.free.remove(caller)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/")
    parser.add_argument("--key", default="")
    parser.add_argument("--row", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: a closed loop")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument(
        "--limits", type=msgspec.json.decode, default=[], help="deadlines in seconds, of which one is drawn"
    )
    parser.add_argument("--at", type=float, default=0.0, help="when it begins, by the machine's clock")
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    print(msgspec.json.encode(uvloop.run(Load(parser.parse_args()).run())).decode())


if __name__ == "__main__":
    main()
