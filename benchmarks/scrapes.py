# SPDX-License-Identifier: Apache-2.0
"""What a scrape costs the others: one model is called all the time while `/metrics` is fetched beside it.

From the repository, on an idle machine: `.venv/bin/python -m benchmarks.scrapes`. It makes an app of 300 models,
without HTTP, calls one of them by 16 clients, with and without a scrape every 200 ms in turns, and prints the latencies
of both; then the longest turn of the loop of a page of 300 and of 10,000 endpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import uvloop

from forebay.batching.queue import BatchConfig
from forebay.observe.exposition import Exposition, pieces
from forebay.protocols.native import Contract
from forebay.server.app import App, Served
from forebay.server.config import HttpConfig
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import ManualPool
from forebay.transports.http.asgi import Pages, reading
from forebay.workers.runner import RunnerSpec
from forebay.workers.threads import ThreadPool

EVERY_S = 0.2
CLIENTS = 16


class Nothing:
    def open(self, ctx):
        pass

    def run(self, items):
        return [None] * len(items)

    def close(self):
        pass


class Scrape:
    """As much of a request as the page asks for."""

    headers = {"accept": "text/plain"}  # noqa: RUF012


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


async def calls(endpoint, until, latencies):
    while (started := time.perf_counter()) < until:
        await endpoint.call(None)
        latencies.append(time.perf_counter() - started)


async def scrapes(pages, busy, until, sizes):
    draw = random.Random(2)
    while time.perf_counter() < until:
        for endpoint in busy:  # nothing of the text can be kept
            endpoint.metrics.request_s.observe(draw.random())
        answer = await pages.metrics(Scrape())
        sizes.append(int(answer.headers["content-length"]))
        await asyncio.sleep(EVERY_S)


async def beside(count, turns, seconds):
    """Call one model with and without scrapes, in turns; return the latencies of both and the size of the page."""
    others = endpoints(count - 1)
    spec = RunnerSpec("benchmarks.scrapes:Nothing", {})
    called = Endpoint(EndpointConfig(name="called"), BatchConfig(), ThreadPool(spec))
    await called.start()
    app = App([Served(endpoint, Contract()) for endpoint in (called, *others)])
    pages = Pages(app, HttpConfig())
    found: dict[bool, list[float]] = {False: [], True: []}
    sizes: list[int] = [0]
    for turn in range(2 * turns):
        until = time.perf_counter() + seconds
        scraped = turn % 2 == 1
        work = [calls(called, until, found[scraped]) for _ in range(CLIENTS)]
        if scraped:
            work.append(scrapes(pages, others, until, sizes))
        await asyncio.gather(*work)
    await called.drain(1.0)
    return found, sizes[-1]


def longest_turn(count):
    """Return the most CPU time that one turn of a scrape takes, and how many there are."""
    made = endpoints(count)
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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    found, size = uvloop.run(beside(300, args.turns, args.seconds))
    for scraped, latencies in found.items():
        latencies.sort()
        p50, p99 = (latencies[int(share * len(latencies))] * 1000 for share in (0.5, 0.99))
        told = f"with a scrape every {EVERY_S * 1000:.0f} ms" if scraped else "without scrapes"
        print(f"300 models, {told}: {len(latencies)} calls, p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    print(f"the page has {size} bytes")
    for count in (300, 10_000):
        longest, number = longest_turn(count)
        print(f"{count} endpoints: {number} turns of the loop, the longest takes {longest * 1000:.2f} ms of CPU time")


if __name__ == "__main__":
    main()
