# SPDX-License-Identifier: Apache-2.0
"""Storm: thousands of clients go away at random moments of their request; is the server the same afterwards?

Measures the rate, then lets the clients come and go (some in the middle of sending, most while they wait, some
with a reset and some with a clean close), then measures again. Says what is still in flight and whether threads
or descriptors leaked; ends with status 1 if something did.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import struct
import time

import uvloop

from benchmarks import proc
from benchmarks.client import post
from benchmarks.launch import Running, start
from benchmarks.load import run_wrk
from benchmarks.servers import SERVERS
from benchmarks.work import JOBS

SERVER_CORES, LOAD_CORES = frozenset({0}), frozenset({1})
CONNECTIONS = 64
AT_A_TIME = 256
LONGEST_STAY_S = 0.02  # a few times the latency of a busy server
SETTLE_S = 2.0
LOWEST_RATIO = 0.9
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset at once


async def storm(port: int, request: bytes, count: int) -> None:
    """Abandon `count` requests, some hundred clients at a time."""
    draw = random.Random(0)
    left = iter(range(count))

    async def come_and_go() -> None:
        for _ in left:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            part = draw.randrange(len(request)) if draw.random() < 0.1 else len(request)
            writer.write(request[:part])
            await asyncio.sleep(draw.uniform(0, LONGEST_STAY_S))
            if draw.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()

    await asyncio.gather(*(come_and_go() for _ in range(AT_A_TIME)))


def state(running: Running) -> dict[str, float]:
    front = running.front()
    counts = {"threads": proc.threads(front), "descriptors": proc.descriptors(front)}
    return {**counts, "in flight": running.metrics()["forebay_in_flight"]}  # last, as asking opens a connection


def main() -> None:
    names = {server.name: server for server in SERVERS if server.is_forebay}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", choices=names, default="forebay:process")
    parser.add_argument("--job", choices=JOBS, default="batchmodel")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=3, help="of each rate measurement")
    options = parser.parse_args()
    os.sched_setaffinity(0, LOAD_CORES)
    with start(names[options.server], options.job, SERVER_CORES) as running:

        def rate() -> float:
            load = run_wrk(running, CONNECTIONS, options.seconds, LOAD_CORES)
            time.sleep(SETTLE_S)
            return (load.requests - load.errors) / load.duration_s

        rate()  # warm-up
        rate_before, before = rate(), state(running)
        began = time.perf_counter()
        uvloop.run(storm(running.port, post(options.job, running.server.path), options.requests))
        storm_s = time.perf_counter() - began
        time.sleep(SETTLE_S)
        after = state(running)
        rate_after = rate()
    print(f"{options.server}, {options.job}: {options.requests:,} requests abandoned in {storm_s:.1f} s")
    print(f"rate: {rate_before:,.0f}/s before, {rate_after:,.0f}/s after, ratio {rate_after / rate_before:.2f}")
    for name in before:
        print(f"{name}: {before[name]:.0f} before, {after[name]:.0f} after")
    clean = after["in flight"] == 0 and all(after[name] <= before[name] for name in before)
    raise SystemExit(0 if clean and rate_after >= LOWEST_RATIO * rate_before else 1)


if __name__ == "__main__":
    main()
