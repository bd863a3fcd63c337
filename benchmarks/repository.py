# SPDX-License-Identifier: Apache-2.0
"""Models in a bucket: 10,000 of them, 100 in memory; what a poll costs; versions that come and go under load.

    .venv/bin/python -m benchmarks.repository [--only many polls swaps] [--write]

The bucket is a real S3 server (nanio) on this machine, in a process of its own.

many    requests name models by Zipf's law, one after the other, and an LRU of the same size is simulated beside them
polls   buckets of several sizes are listed while nothing changes in them; nanio walks all of a bucket for each page of
        1,000 objects, so that its own part of the time grows faster than their number
swaps   an open loop sends requests to one model, while ten versions of it are uploaded, each in three files one after
        the other, and three removed; an answer holds what is in all three. A scraper reads the metrics each second
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Self

from tests.buckets import Buckets, running_buckets

from benchmarks import proc
from benchmarks.client import post
from benchmarks.launch import ROOT, environment, free_port
from benchmarks.load_apart import LoadApart
from benchmarks.openloop import WARM_UP_S

FOREBAY = str(Path(sys.executable).with_name("forebay"))
RESULTS = Path(ROOT, "benchmarks", "RESULTS-repository.md")
BUSY_S = 3.0
"""So long after its last file a version may still be noticed, settled, copied, loaded and swapped in."""

Rows = list[tuple[str, str]]


class Forebay:
    """A server of the small class, on a bucket."""

    def __init__(self, buckets: Buckets, bucket: str, folder: Path, *options: str, core: int | None = None) -> None:
        self.port = free_port()
        command = [FOREBAY, "serve", "benchmarks/jobs/stocked.py", "--http-port", str(self.port)]
        command += ["--worker-kind", "thread", "--repository-folder", str(folder), "--log-level", "error", *options]
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
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

    def get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.terminate()
        self.process.wait(30)


def many(stack: ExitStack, buckets: Buckets, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Ask a few of many models often and most of them rarely."""
    models, requests, room = options.models, options.requests, options.room
    bucket = buckets.make("many")
    old = time.time() - 1000
    for number in range(models):
        path = bucket / f"m{number}" / "1" / "text"
        path.parent.mkdir(parents=True)
        path.write_text(f"model {number}")
        os.utime(path, (old, old))
    limits = ["--max-models", str(room), "--max-disk-models", str(10 * room)]
    server = stack.enter_context(Forebay(buckets, "many", folder / "kept", *limits))
    yield f"start to ready with {models:,} models in the bucket", f"{server.start_s:.1f} s"
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(models)))
    draw = random.Random(5)
    order = list(range(models))
    draw.shuffle(order)
    lru: OrderedDict[int, None] = OrderedDict()
    hits = 0
    misses_s: list[float] = []
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    mib = [proc.pss_mib(server.process.pid)]
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
            mib.append(proc.pss_mib(server.process.pid))
    told = json.loads(server.get("/models")[1])["memory"]
    what = f"{requests:,} requests by Zipf's law, {room} of {models:,} models in memory"
    yield f"{what}: hits", f"{1 - told['loads'] / requests:.2%}; a simulated LRU {hits / requests:.2%}"
    yield "in memory at the end; left to make room", f"{told['loaded']}; {told['evictions']:,}"
    p99 = sorted(misses_s)[-max(len(misses_s) // 100, 1)]
    yield "a miss (one copied, loaded, another one out), p50 and p99", f"{_ms(statistics.median(misses_s))}, {_ms(p99)}"
    yield "memory before, and after each tenth of the requests", ", ".join(f"{one:.0f}" for one in mib) + " MiB"


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


def polls(_stack: ExitStack, buckets: Buckets, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Look at buckets of several sizes, when nothing has changed."""
    for size in [options.models // 8, options.models // 4, options.models // 2, options.models]:
        bucket = buckets.make(f"polled-{size}")
        for number in range(size):
            path = bucket / f"m{number}" / "1" / "text"
            path.parent.mkdir(parents=True)
            path.write_text("x")
        command = [sys.executable, "-c", POLLS, f"s3://polled-{size}", str(folder / f"polled-{size}")]
        told = {**os.environ, **buckets.environment()}
        wall, cpu = subprocess.run(command, env=told, check=True, capture_output=True, text=True).stdout.split()
        yield f"a poll of {size:,} models", f"{wall} ms, {cpu} of them of our own processor time"


def swaps(stack: ExitStack, buckets: Buckets, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Let versions come and go while requests do."""
    seconds, rate = options.swap_s, options.rate
    bucket = buckets.make("swapped")

    def upload(version: int, pause_s: float) -> None:
        for name, text in (("a", b"<"), ("b", b"%d" % version), ("c", b">")):
            buckets.put(f"swapped/net/{version}/{name}", text, old=False)
            time.sleep(pause_s)

    upload(1, 0.0)
    old = time.time() - 1000
    for path in bucket.rglob("?"):
        os.utime(path, (old, old))
    poll = ["--repository-poll-s", "1"]
    server = stack.enter_context(Forebay(buckets, "swapped", folder / "swapped", *poll, core=0))
    request = post("echo", "/models/net", b"1")
    load = stack.enter_context(LoadApart(server.port, request, seconds, rate))
    began = load.began + WARM_UP_S
    changes: list[tuple[float, float]] = []

    def change() -> None:
        time.sleep(WARM_UP_S)
        for turn, version in enumerate(range(2, 12), 1):
            time.sleep(max(began + turn * seconds / 12 - time.perf_counter(), 0.0))
            start = time.perf_counter() - began
            upload(version, 0.1)
            if version % 4 == 3:
                for name in "abc":
                    buckets.remove(f"swapped/net/{version - 2}/{name}")
            changes.append((start, time.perf_counter() - began + BUSY_S))

    seen: dict[str, float] = {}
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(1.0):
            text = server.get("/metrics")[1].decode()
            counted = re.findall(r'forebay_requests_total\{code="ok",endpoint="net",version="(\d+)"\} ([\d.]+)', text)
            seen.update((version, float(count)) for version, count in counted)

    threads = [threading.Thread(target=one) for one in (change, scrape)]
    for thread in threads:
        thread.start()
    told = load.told()
    is_over.set()
    for thread in threads:
        thread.join()
    calm, busy = [], []
    for due, latency in told.latencies:
        at = due - WARM_UP_S
        if at >= 0:
            (busy if any(start <= at <= end for start, end in changes) else calm).append(latency)
    versions = sorted(int(text[2:-2]) for text in told.answers if re.fullmatch(r'"<\d+>"', text))
    others = [text for text in told.answers if not re.fullmatch(r'"<\d+>"', text)]
    many = sum(one.count for one in told.answers.values())
    yield f"{seconds:g} s at {rate:,} requests a second, ten versions uploaded, three removed", f"{many:,} answers"
    yield (
        "failed; from a version that was not complete",
        f"{told.errors}; {sum(told.answers[one].count for one in others)}",
    )
    yield "answers came from versions", ", ".join(map(str, versions))
    yield "versions that a scraper saw answer", ", ".join(sorted((one for one in seen if seen[one]), key=int))
    yield "p99 while nothing changes", f"{_ms(_p99(calm))} of {len(calm):,}"
    yield f"p99 from an upload to {BUSY_S:g} s after it", f"{_ms(_p99(busy))} of {len(busy):,}"
    yield (
        "p99.9 of the two, and the longest pause of the load's own",
        (f"{_ms(_p99(calm, 1000))}, {_ms(_p99(busy, 1000))}, {_ms(told.stall_s)}"),
    )


def _p99(found: list[float], part: int = 100) -> float:
    return sorted(found)[-max(len(found) // part, 1)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


Part = Callable[[ExitStack, Buckets, Path, argparse.Namespace], Iterator[tuple[str, str]]]
PARTS: dict[str, Part] = {"many": many, "polls": polls, "swaps": swaps}


def page(found: dict[str, Rows]) -> str:
    """Return the results, those of parts that did not run as they were."""
    before = RESULTS.read_text() if RESULTS.exists() else ""
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", before, re.DOTALL | re.MULTILINE))
    for name, rows in found.items():
        lines = "".join(f"| {what} | {measured} |\n" for what, measured in rows)
        sections[name] = (
            f"{time.strftime('%d %b %Y')}, load before it {os.getloadavg()[0]:.1f}.\n\n| | |\n|---|--:|\n{lines}\n"
        )
    text = "# Models in a bucket\n\n`.venv/bin/python -m benchmarks.repository --write` wrote this, on two cores; its "
    text += "docstring says what is measured.\n"
    return text + "".join(f"\n## {name}\n\n{sections[name].strip()}\n" for name in PARTS if name in sections)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--room", type=int, default=100)
    parser.add_argument("--swap-s", type=float, default=60.0)
    parser.add_argument("--rate", type=int, default=5000)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    found: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as name, running_buckets(Path(name)) as buckets:
        for part in options.only:
            found[part] = []
            with ExitStack() as stack:
                for row in PARTS[part](stack, buckets, Path(name), options):
                    print(": ".join(row), flush=True)
                    found[part].append(row)
    if options.write:
        RESULTS.write_text(page(found))


if __name__ == "__main__":
    main()
