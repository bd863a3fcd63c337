# SPDX-License-Identifier: Apache-2.0
"""Soak: does the memory of a pipeline grow with the requests it answers, fails, is late for or loses the client of?

    .venv/bin/python -m benchmarks.soak

Four ops, their calls profiled, 20 kB in every request. Memory is that of the server and its workers together, read
twenty times; the slope is a straight line through the second half of the readings. Ends with status 1 if that is more
than a hundredth of what the requests carried, if an answer was wrong, or if a request is still in flight at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import linear_regression
from urllib.request import urlopen

from benchmarks import proc
from benchmarks.chaos import wait_ready
from benchmarks.launch import ROOT, environment, free_port, stop

BLOB = "b" * 20_000
WISHES = {"answer": 80, "raise in C": 8, "late in B": 6, "leave": 6}
LIMIT_MS = 2
REFUSED = 503
ALLOWED = {"answer": {0}, "raise in C": {10000}, "late in B": {6000, REFUSED}}
READINGS = 20


class Soak:
    """Requests that are still to be sent, and what became of those that were."""

    def __init__(self, pid: int, port: int, requests: int) -> None:
        self.pid = pid
        self.port = port
        self.numbers = iter(range(1, requests + 1))
        self.every = requests // READINGS
        self.readings: list[tuple[int, float]] = []
        self.codes: Counter[tuple[str, int]] = Counter()
        self.left = 0

    async def client(self, draw: random.Random) -> None:
        """Ask again and again on one connection; a new one after going away."""
        streams = None
        for number in self.numbers:
            if number % self.every == 0:
                self.readings.append((number, memory_mib(self.pid)))
            wish = draw.choices(list(WISHES), list(WISHES.values()))[0]
            body = json.dumps({"key": ["q", "blob"], "value": [wish, f"{number}{BLOB}"]})
            limit = f"X-Request-Timeout-Ms: {LIMIT_MS}\r\n" if wish == "late in B" else ""
            head = f"POST /diamond/prediction HTTP/1.1\r\nHost: localhost\r\n{limit}Content-Length: {len(body)}\r\n\r\n"
            if streams is None:
                streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = streams
            writer.write((head + body).encode())
            if wish == "leave":
                await asyncio.sleep(draw.random() * 0.005)
                writer.transport.abort()
                streams = None
                self.left += 1
                continue
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            self.codes[wish, json.loads(await reader.readexactly(length)).get("err_no", REFUSED)] += 1
        if streams is not None:
            streams[1].close()

    def wrong(self) -> list[tuple[str, int]]:
        # A machine that is busy may be late for others, too.
        return [(wish, code) for wish, code in self.codes if code not in ALLOWED[wish]]


def memory_mib(pid: int) -> float:
    return sum(map(proc.pss_mib, proc.tree(pid)))


async def run(soak: Soak, options: argparse.Namespace) -> None:
    draw = random.Random(options.seed)
    await asyncio.gather(*(soak.client(random.Random(draw.random())) for _ in range(options.connections)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--kind", choices=["thread", "process"], default="thread")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ports = free_port(), free_port()
    program = str(Path(sys.executable).with_name("forebay"))
    command = [program, "serve", "benchmarks/jobs/pipeline_diamond.py", "--log-level", "error", "--"]
    command += [*map(str, ports), options.kind, "profile"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    try:
        wait_ready(process, ports[1])
        soak = Soak(process.pid, ports[1], options.requests)
        began = time.perf_counter()
        asyncio.run(run(soak, options))
        taken_s = time.perf_counter() - began
        time.sleep(1.0)
        with urlopen(f"http://127.0.0.1:{ports[1]}/models", timeout=10) as answer:
            (about,) = json.load(answer)["models"]
            in_flight = about["in_flight"]
    finally:
        stop(process)
    readings = soak.readings
    slope = linear_regression(*zip(*readings[READINGS // 2 :], strict=True)).slope * 1024 * 1024
    print(f"{options.requests} requests, {options.connections} connections, ops are a {options.kind}: {taken_s:.0f} s")
    for (wish, code), count in sorted(soak.codes.items()):
        print(f"  {wish:12} {code:6} {count:7}")
    print(f"  {'left':12} {'':6} {soak.left:7}")
    print("memory in MiB:", *(f"{mib:.1f}" for _, mib in readings))
    print(f"slope of the second half: {slope:.0f} bytes a request of {len(BLOB)}; in flight at the end: {in_flight}")
    wrong = soak.wrong()
    print(f"wrong answers: {wrong or 'none'}")
    raise SystemExit(1 if wrong or in_flight or slope > len(BLOB) / 100 else 0)


if __name__ == "__main__":
    main()
