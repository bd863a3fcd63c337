# SPDX-License-Identifier: Apache-2.0
"""Models in a bucket: 10,000 of them, 100 in memory; what a poll costs; versions that come and go under load.

    .venv/bin/python -m benchmarks.repository [--models 10000] [--requests 3000] [--swap-s 60] [--rate 5000]

The bucket is a real S3 server (nanio) on this machine, in a process of its own. Requests of the first part name models
by Zipf's law, one after the other, and an LRU of the same size is simulated beside them. In the last part, an open loop
sends `rate` requests a second to one model, while ten versions of it are uploaded and three removed.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from tests.buckets import Buckets, running_buckets

from benchmarks import proc
from benchmarks.launch import ROOT, environment, free_port

FOREBAY = str(Path(sys.executable).with_name("forebay"))


class Forebay:
    """A server of the small class, on a bucket."""

    def __init__(self, buckets: Buckets, bucket: str, folder: Path, *options: str) -> None:
        self.port = free_port()
        command = [FOREBAY, "serve", "benchmarks/jobs/stocked.py", "--http-port", str(self.port)]
        command += ["--worker-kind", "thread", "--repository-folder", str(folder), "--log-level", "error", *options]
        told = {**environment(), **buckets.environment(), "FOREBAY_BENCH_BUCKET": f"s3://{bucket}"}
        began = time.perf_counter()
        self.process = subprocess.Popen(command, cwd=ROOT, env=told, stderr=subprocess.DEVNULL)
        while True:
            try:
                if self.get("/readyz")[0] == 200:
                    break
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.02)
        self.start_s = time.perf_counter() - began

    def get(self, path: str):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def memory(self) -> dict[str, int]:
        return json.loads(self.get("/models")[1])["memory"]

    def rss_mib(self) -> float:
        return proc.pss_mib(self.process.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.process.terminate()
        self.process.wait(30)


def many(stack: ExitStack, buckets: Buckets, folder: Path, models: int, requests: int, room: int) -> None:
    """Ask a few of many models often and most of them rarely."""
    bucket = buckets.make("many")
    old = time.time() - 1000
    for number in range(models):
        path = bucket / f"m{number}" / "1" / "text"
        path.parent.mkdir(parents=True)
        path.write_text(f"model {number}")
        os.utime(path, (old, old))
    options = ["--max-models", str(room), "--max-disk-models", str(10 * room)]
    server = stack.enter_context(Forebay(buckets, "many", folder / "kept", *options))
    print(f"start to ready with {models:,} models: {server.start_s:.1f} s")
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(models)))
    draw = random.Random(5)
    order = list(range(models))
    draw.shuffle(order)
    lru: OrderedDict[int, None] = OrderedDict()
    hits = 0
    misses_s: list[float] = []
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    rss: list[float] = []
    for count in range(requests):
        model = order[bisect.bisect(weights, draw.random() * weights[-1])]
        is_hit = model in lru
        hits += is_hit
        lru[model] = None
        lru.move_to_end(model)
        if len(lru) > room:
            lru.popitem(last=False)
        began = time.perf_counter()
        connection.request("POST", f"/models/m{model}", b"1", {"content-type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        if not is_hit:
            misses_s.append(time.perf_counter() - began)
        assert (answer.status, body) == (200, f'"model {model}"'.encode()), (answer.status, body)
        if count % (requests // 10) == requests // 10 - 1:
            rss.append(server.rss_mib())
    told = server.memory()
    ours = 1 - told["loads"] / requests
    print(
        f"{requests:,} requests by Zipf, {room} models in memory: {ours:.2%} hits, "
        f"an LRU beside it {hits / requests:.2%}"
    )
    print(f"loaded at the end: {told['loaded']}, evicted {told['evictions']}")
    print(
        f"a miss: median {statistics.median(misses_s) * 1e3:.1f} ms, "
        f"p99 {sorted(misses_s)[-max(len(misses_s) // 100, 1)] * 1e3:.1f} ms"
    )
    print("memory after each tenth, MiB: " + ", ".join(f"{one:.0f}" for one in rss))


POLLS = """
import sys, time
from pathlib import Path
from forebay.repository.bucket import Bucket
from forebay.repository.disk import DiskCache
from forebay.repository.repository import Repository
from forebay.repository.tree_rules import TreeRules
source = Bucket(sys.argv[1])
repository = Repository(source, TreeRules(kind="models"), poll_s=0, disk=DiskCache(source, Path(sys.argv[2])))
repository.look()
listing, cpu = [], []
for _ in range(3):
    began, used = time.perf_counter(), time.process_time()
    repository.look()
    listing.append(time.perf_counter() - began)
    cpu.append(time.process_time() - used)
print(f"{min(listing) * 1e3:.0f} {min(cpu) * 1e3:.0f}")
"""


def polls(buckets: Buckets, folder: Path, sizes: list[int]) -> None:
    """Look at buckets of several sizes, when nothing has changed."""
    for size in sizes:
        bucket = buckets.make(f"polled-{size}")
        for number in range(size):
            path = bucket / f"m{number}" / "1" / "text"
            path.parent.mkdir(parents=True)
            path.write_text("x")
        command = [sys.executable, "-c", POLLS, f"s3://polled-{size}", str(folder / f"polled-{size}")]
        told = {**os.environ, **buckets.environment()}
        wall, cpu = subprocess.run(command, env=told, check=True, capture_output=True, text=True).stdout.split()
        print(f"a poll of {size:,} models: {wall} ms, of which {cpu} ms of this side's processor")


def swaps(stack: ExitStack, buckets: Buckets, folder: Path, seconds: float, rate: int) -> None:
    """Let versions come and go while requests do."""
    buckets.make("swapped")
    buckets.put("swapped/net/1/text", b"1")
    server = stack.enter_context(Forebay(buckets, "swapped", folder / "swapped", "--repository-poll-s", "1"))
    ends: list[tuple[float, float]] = []

    def change() -> None:
        for version in range(2, 12):
            time.sleep(seconds / 12)
            began = time.perf_counter()
            buckets.put(f"swapped/net/{version}/text", b"%d" % version, old=False)
            if version % 4 == 3:
                buckets.remove(f"swapped/net/{version - 2}/text")
            ends.append((began, seconds / 24))

    changing = threading.Thread(target=change)
    load = [sys.executable, "-m", "benchmarks.repository", "--load", f"{server.port}:{seconds}:{rate}"]
    generator = subprocess.Popen(load, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert generator.stdout is not None
    generator.stdout.readline()
    began = time.perf_counter()
    changing.start()
    told = json.loads(generator.stdout.read())
    changing.join()
    changes = [start - began for start, _ in ends]
    calm, busy = [], []
    for due, latency in told["latencies"]:
        # A version is noticed by the next look and settled by the one after it, a second later each.
        is_busy = any(0 <= due - change < min(3.0, seconds / 24) for change in changes)
        (busy if is_busy else calm).append(latency)

    def p99(found: list[float]) -> float:
        return sorted(found)[-max(len(found) // 100, 1)] * 1e3

    print(f"{told['answered']:,} answers in {seconds:g} s, {told['failed']} failed; versions seen: {told['versions']}")
    print(f"p99 while nothing changes {p99(calm):.2f} ms, in the seconds after an upload {p99(busy):.2f} ms")


async def send(port: int, seconds: float, rate: int) -> None:
    """Send requests when they are due, over 64 connections; the part of `swaps` that runs in a process of its own."""
    import asyncio

    draw = random.Random(3)
    due = list(itertools.accumulate(draw.expovariate(rate) for _ in range(int(rate * seconds))))
    latencies: list[tuple[float, float]] = []
    answers: dict[str, int] = {}
    failed = 0
    request = (
        b"POST /models/net HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n1"
    )
    turn = iter(due)
    print("go", flush=True)
    began = time.perf_counter()

    async def client() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in turn:
            pause_s = at - (time.perf_counter() - began)
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            latencies.append((at, time.perf_counter() - began - at))
            if head.startswith(b"HTTP/1.1 200"):
                answers[body.decode()] = answers.get(body.decode(), 0) + 1
            else:
                failed += 1
        writer.close()

    await asyncio.gather(*[client() for _ in range(64)])
    versions = sorted(int(json.loads(text)) for text in answers)
    told = {"latencies": latencies, "answered": sum(answers.values()), "failed": failed, "versions": versions}
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--room", type=int, default=100)
    parser.add_argument("--swap-s", type=float, default=60.0)
    parser.add_argument("--rate", type=int, default=5000)
    parser.add_argument("--load")
    options = parser.parse_args()
    if options.load:
        import uvloop

        port, seconds, rate = options.load.split(":")
        uvloop.run(send(int(port), float(seconds), int(rate)))
        return
    with tempfile.TemporaryDirectory() as name, running_buckets(Path(name)) as buckets:
        folder = Path(name)
        polls(buckets, folder, [size for size in (1000, 2000, 4000) if size < options.models])
        with ExitStack() as stack:
            swaps(stack, buckets, folder, options.swap_s, options.rate)
        with ExitStack() as stack:
            many(stack, buckets, folder, options.models, options.requests, options.room)


if __name__ == "__main__":
    main()
