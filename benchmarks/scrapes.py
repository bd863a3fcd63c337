# SPDX-License-Identifier: Apache-2.0
"""What a scrape costs the others: one model is called all the time while `/metrics` is fetched beside it.

From the repository, on an idle machine: `.venv/bin/python -m benchmarks.scrapes`. It serves 300 models on core 0, has
16 clients on core 1 call one of them, with and without a scrape every 200 ms in turns, and prints the latencies of
both; then the longest turn of the loop of a page of 300 and of 10,000 endpoints.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.chaos import wait_ready
from benchmarks.flood import Flood
from benchmarks.launch import ROOT, environment, free_port, pinned, python_helper, stop
from benchmarks.overload import LOAD_CORES, SERVER_CORES
from forebay.batching.queue import BatchConfig
from forebay.observe.metrics.exposition import Exposition, pieces
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import ManualPool
from forebay.transports.http.pages import reading

EVERY_S = 0.2
CLIENTS = 16


def endpoints(count):
    """Endpoints in whose histograms something was counted."""
    draw = random.Random(1)
    pool = ManualPool()
    made = []
    for number in range(count):
        endpoint = Endpoint(EndpointConfig(name=f"model {number}"), BatchConfig(), pool)
        metrics = endpoint.metrics
        metrics.codes["ok"] += 5
        for histogram in (metrics.request_s, metrics.queue_s, metrics.model_s, metrics.batch_size):
            for _ in range(5):
                histogram.observe(draw.random() * 10)
        made.append(endpoint)
    return made


class Scraper(threading.Thread):
    """Fetch `/metrics` every now and then until it is stopped."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.bytes = 0
        self.is_over = threading.Event()

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        while not self.is_over.wait(EVERY_S):
            connection.request("GET", "/metrics")
            self.bytes = len(connection.getresponse().read())
        connection.close()


def beside(rounds, seconds):
    """Call one of 300 models with and without scrapes, in turns, over sockets; return the p99 of each, in ms."""
    program = str(Path(sys.executable).with_name("forebay"))
    port = free_port()
    command = [program, "serve", "benchmarks/jobs/many.py", "--http-port", str(port), "--worker-kind", "thread"]
    process = subprocess.Popen(
        pinned([*command, "--log-level", "error"], SERVER_CORES),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found: dict[bool, list[Flood]] = {False: [], True: []}
    size = 0
    try:
        wait_ready(process, port)
        for turn in range(2 * rounds):
            scraper = Scraper(port)
            if turn % 2:
                scraper.start()
            flags = f"--port {port} --path /models/called --job echo --connections {CLIENTS} --seconds {seconds:g}"
            found[bool(turn % 2)].append(
                msgspec.convert(python_helper("flood", *flags.split(), cores=LOAD_CORES), Flood)
            )
            scraper.is_over.set()
            if turn % 2:
                scraper.join()
                size = scraper.bytes
    finally:
        stop(process)
    return found, size


def longest_turn(count):
    """Return the most CPU time that one turn of a scrape takes, and how many there are."""
    made = endpoints(count)
    gc.collect()
    gc.freeze()  # as a server does once it is ready
    page = Exposition(lambda: made, reading)
    turns = page.write()
    longest, number, columns = 0.0, 0, []
    while True:
        started = time.thread_time()
        try:
            next(turns)
        except StopIteration as end:
            columns = end.value
            break
        finally:
            longest = max(longest, time.thread_time() - started)
            number += 1
    started = time.thread_time()
    for _ in pieces(columns, "text/plain"):
        longest = max(longest, time.thread_time() - started)
        started = time.thread_time()
        number += 1
    return longest, number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    os.sched_setaffinity(0, LOAD_CORES)
    found, size = beside(args.rounds, args.seconds)
    for scraped, floods in found.items():
        told = f"with a scrape every {EVERY_S * 1000:.0f} ms" if scraped else "without scrapes"
        p50, p99 = median(each.accepted_p50_ms for each in floods), median(each.accepted_p99_ms for each in floods)
        print(
            f"300 models, {told}: {median(each.accepted for each in floods):,.0f}/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        )
    pairs = zip(found[False], found[True], strict=True)
    ratio = median(scraped.accepted_p99_ms / plain.accepted_p99_ms for plain, scraped in pairs)
    print(f"p99 with / without: {ratio:.2f}; the page has {size:,} bytes")
    for count in (300, 10_000):
        longest, number = longest_turn(count)
        print(f"{count} endpoints: {number} turns of the loop, the longest takes {longest * 1000:.2f} ms of CPU time")


if __name__ == "__main__":
    main()
