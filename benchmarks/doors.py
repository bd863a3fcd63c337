# SPDX-License-Identifier: Apache-2.0
"""Calls a second: `batched_run` from many threads, the bare hand-over beneath it, and HTTP doors to the same function.

The function gives back the rows it got. One core runs everything that serves, and in the first two lines the callers
as well; the HTTP load comes from the other core. `bare queue` is the least that threads need for such a call: each puts
its row into a `queue.SimpleQueue` and waits on a lock, one thread takes what is there and releases the locks.
Rounds alternate; the table has medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from benchmarks.launch import python_helper, start
from benchmarks.load import run_wrk
from benchmarks.servers import SERVERS
from forebay import Batch, Serving

THREADS = 64
WARM_UP_S = 1
SERVE, LOAD = frozenset({0}), frozenset({1})
ROW = np.arange(64, dtype=np.float32)
HTTP = ("forebay:thread", "mosec", "litserve")


def calls_per_s(call: Callable[[], Any], seconds: float) -> float:
    """Let all threads call again and again; counts after the warm-up."""
    counts = [0] * THREADS
    is_over = False

    def caller(index: int) -> None:
        while not is_over:
            call()
            counts[index] += 1

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_S)
    before, began = sum(counts), time.perf_counter()
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - began)
    is_over = True
    for thread in threads:
        thread.join()
    return rate


def bare_queue(seconds: float) -> float:
    queue: SimpleQueue[Any] = SimpleQueue()
    own = threading.local()

    def serve() -> None:
        while (first := queue.get()) is not None:
            taken = [first]
            try:
                while len(taken) < THREADS:
                    taken.append(queue.get_nowait())
            except Empty:
                pass
            for call in taken:
                call[1] = call[0]
                call[2].release()

    def call() -> Any:
        lock = getattr(own, "lock", None)
        if lock is None:
            lock = own.lock = threading.Lock()
            lock.acquire()
        work = [ROW, None, lock]
        queue.put(work)
        lock.acquire()
        return work[1]

    server = threading.Thread(target=serve)
    server.start()
    try:
        return calls_per_s(call, seconds)
    finally:
        queue.put(None)
        server.join()


def batched_run(seconds: float) -> float:
    serving = Serving.new(lambda _options: lambda batch: batch.realize())
    with serving.start(batch_size=THREADS, batch_timeout_ms=0) as process:
        answer = process.batched_run(Batch.stack([ROW]))
        assert np.array_equal(answer, ROW[None]), answer
        return calls_per_s(lambda: process.batched_run(Batch.stack([ROW])), seconds)


def batched_run_async(seconds: float) -> float:
    """The same from as many tasks of one loop."""
    serving = Serving.new(lambda _options: lambda batch: batch.realize())
    count = 0

    async def caller(process: Any) -> None:
        nonlocal count
        while True:
            await process.batched_run_async(Batch.stack([ROW]))
            count += 1

    async def measure() -> float:
        async with serving.start(batch_size=THREADS, batch_timeout_ms=0) as process:
            tasks = [asyncio.create_task(caller(process)) for _ in range(THREADS)]
            await asyncio.sleep(WARM_UP_S)
            before, began = count, time.perf_counter()
            await asyncio.sleep(seconds)
            rate = (count - before) / (time.perf_counter() - began)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return rate

    return asyncio.run(measure())


INSIDE = {"bare queue": bare_queue, "batched_run": batched_run, "from tasks": batched_run_async}


def behind_http(name: str, seconds: int) -> float:
    server = next(server for server in SERVERS if server.name == name)
    with start(server, "echo", SERVE) as running:
        run_wrk(running, THREADS, WARM_UP_S, LOAD)
        load = run_wrk(running, THREADS, seconds, LOAD)
        assert not load.errors, load
        return load.requests / load.duration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--inside", choices=INSIDE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(INSIDE[options.inside](options.seconds))
        return
    os.sched_setaffinity(0, LOAD)
    names = [*INSIDE, *HTTP]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(options.rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            if name in INSIDE:
                flags = ["--inside", name, "--seconds", str(options.seconds)]
                rate = float(python_helper("doors", *flags, cores=SERVE))
            else:
                rate = behind_http(name, options.seconds)
            rates[name].append(rate)
            print(f"{name:16} {rate:10,.0f}/s", file=sys.stderr)
    ours = rates["batched_run"]
    print(f"| {THREADS} callers | calls/s | batched_run is |\n|---|--:|--:|")
    for name in names:
        ratio = statistics.median(mine / other for mine, other in zip(ours, rates[name], strict=True))
        print(f"| {name} | {statistics.median(rates[name]):,.0f} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
