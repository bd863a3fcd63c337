# SPDX-License-Identifier: Apache-2.0
"""What serving a token costs, beside other servers: a trivial generator, 32 clients, 100 tokens a stream.

    benchmarks/.venv/bin/python -m benchmarks.streams [--rounds 2] [--seconds 3] [--write]

A server has one core, with all of its processes, and the clients another one. The servers take turns. Of ours, the
model is the generator of `benchmarks/work/streaming.py`; *steps* is the same by `start` and `step`. `CPU us` is CPU
time of all the server's processes for a token. FastAPI is a bare `StreamingResponse`: no queue, no validation of parts,
no deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

import uvloop

from benchmarks.launch import ROOT, environment, free_port, pinned, stop
from benchmarks.proc import cpu_s, tree
from benchmarks.report import machine, table

CLIENTS = 32
TOKENS = 100
START_S = 60.0


class Server(NamedTuple):
    name: str
    command: list[str]
    path: str
    body: bytes = b"%d" % TOKENS


def ours(kind: str) -> list[str]:
    return ["-m", "forebay", "serve", "benchmarks/work/streaming.py", "--worker-kind", kind, "--log-level", "warning"]


def peer(name: str) -> list[str]:
    return ["-m", f"benchmarks.servers.{name}_streams"]


SERVERS = (
    *(Server(f"forebay {kind}", ours(kind), "/models/generated") for kind in ("inline", "thread", "process")),
    *(Server(f"forebay {kind}, steps", ours(kind), "/models/counting") for kind in ("inline", "thread", "process")),
    Server("FastAPI", peer("fastapi"), "/"),
    Server("mosec", peer("mosec"), "/inference"),
    Server("LitServe", peer("litserve"), "/predict", json.dumps({"length": TOKENS}).encode()),
)


class Client(asyncio.Protocol):
    """One connection that asks for streams, one after the other; counts what begins with `data:`."""

    def __init__(self, server: Server) -> None:
        head = f"POST {server.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self.request = f"{head}content-length: {len(server.body)}\r\n\r\n".encode() + server.body
        self.firsts: list[float] = []
        self.tokens = 0
        self.ended = 0
        self.errors = 0
        self.until = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._found = 0
        self._asked = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def begin(self, until: float) -> None:
        self.until, self.done = until, asyncio.get_running_loop().create_future()
        self.firsts, self.tokens, self.ended = [], 0, 0
        self._ask()

    def _ask(self) -> None:
        self._found, self._rest, self._asked = 0, b"", time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        count = data.count(b"data:")
        if count and not self._found:
            self.firsts.append(time.perf_counter() - self._asked)
        self._found += count
        if not data.endswith(b"0\r\n\r\n"):
            self._rest = data[-4:]
            return
        self.errors += self._found != TOKENS
        self.tokens += self._found
        self.ended += 1
        if time.perf_counter() < self.until:
            self._ask()
        else:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server hung up"))


class Figures(NamedTuple):
    """One run.

    Attributes:
        rate: Tokens a second.
        cpu_us: For a token.
        first_ms: Half of the first tokens came sooner.
        last_ms: 99 of 100 did.
    """

    rate: float
    cpu_us: float
    first_ms: float
    last_ms: float


async def measure(server: Server, port: int, pid: int, seconds: float) -> Figures:
    loop = asyncio.get_running_loop()
    until = time.monotonic() + START_S
    clients: list[Client] = []
    while len(clients) < CLIENTS:
        try:
            _, client = await loop.create_connection(lambda: Client(server), "127.0.0.1", port)
            clients.append(client)
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)
    await run(clients, min(1.0, seconds))
    before, began = cpu_s(tree(pid)), time.perf_counter()
    await run(clients, seconds)
    took, cost = time.perf_counter() - began, cpu_s(tree(pid)) - before
    errors = sum(client.errors for client in clients)
    assert not errors, f"{server.name}: {errors} streams had not {TOKENS} tokens"
    tokens = sum(client.tokens for client in clients)
    firsts = sorted(first for client in clients for first in client.firsts)
    last = firsts[round(0.99 * (len(firsts) - 1))]
    for client in clients:
        client.transport.close()
    return Figures(tokens / took, cost / tokens * 1e6, median(firsts) * 1000, last * 1000)


async def run(clients: list[Client], seconds: float) -> None:
    until = time.perf_counter() + seconds
    for client in clients:
        client.begin(until)
    await asyncio.gather(*(client.done for client in clients))


def one_round(server: Server, cores: list[int], seconds: float) -> Figures:
    port = free_port()
    extra = ["--http-port", str(port)] if server.name.startswith("forebay") else [str(port)]
    command = pinned([sys.executable, *server.command, *extra], frozenset(cores[:1]))
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(process, port)
            return uvloop.run(measure(server, port, process.pid, seconds))
        finally:
            stop(process)


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until somebody listens; what answers 503 meanwhile is not ready."""
    import http.client

    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the server did not start"
        assert time.monotonic() < until, "the server is not ready"
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status != 503:
                return
        except OSError:
            pass
        time.sleep(0.1)


def verdicts(found: dict[str, Figures]) -> list[list[str]]:
    """Hold the generator of the best and of the default kind to the bars."""
    rows: list[list[str]] = []
    for kind in ("thread", "process"):
        mine = found.get(f"forebay {kind}")
        if mine is None:
            continue
        checks = [
            ("CPU us a token", mine.cpu_us, 8.0, False),
            ("first token p50, ms", mine.first_ms, 2.0, False),
        ]
        for name, bar in (("FastAPI", 1.4), ("mosec", 5.0)):
            if name in found:
                checks.append((f"tokens/s beside {name}", mine.rate / found[name].rate, bar, True))
        for what, value, bar, is_least in checks:
            holds = value >= bar if is_least else value <= bar
            rows.append([f"{kind}: {what}", f"{value:.2f}", f"{bar:g}", "holds" if holds else "**misses**"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="names that begin so, separated by commas")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS-streams.md")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    runs: dict[str, list[Figures]] = defaultdict(list)
    names = tuple(options.only.split(","))
    for _ in range(options.rounds):
        for server in SERVERS:
            if server.name.startswith(names):
                runs[server.name].append(one_round(server, cores, options.seconds))
                print(server.name, *(f"{value:.5g}" for value in runs[server.name][-1]), file=sys.stderr)
    found = {name: Figures(*map(median, zip(*figures, strict=True))) for name, figures in runs.items()}
    best = sorted(found.items(), key=lambda one: -one[1].rate)
    lines = [[name, f"{one.rate:,.0f}", *(f"{value:.2f}" for value in one[1:])] for name, one in best]
    page = table(["server", "tokens/s", "CPU us a token", "first token p50 ms", "p99 ms"], lines)
    page += "\n\n" + table(["a generator, worker kind", "found", "bar", ""], verdicts(found))
    print(page)
    if options.write:
        text = "# Streams of a trivial generator\n\n`python -m benchmarks.streams --write`; it says what is measured. "
        text += f"{options.rounds} rounds of {options.seconds:g} s, medians; "
        text += ", ".join(f"{what} {told}" for what, told in machine().items()) + ".\n\n"
        Path(ROOT, "benchmarks", "RESULTS-streams.md").write_text(text + page + "\n")


if __name__ == "__main__":
    main()
