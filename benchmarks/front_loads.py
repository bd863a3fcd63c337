# SPDX-License-Identifier: Apache-2.0
"""The loads of `benchmarks.fronts`, and what a load of a second or two tells of the servers on a request's way."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from benchmarks.front_servers import LOAD_CORE, OURS, Way
from benchmarks.launch import ROOT, ServerFailed, pinned, python_helper
from benchmarks.load import Load, run_wrk
from benchmarks.pings import WARM_UP_S, Pings

LOAD_CORES = frozenset({LOAD_CORE})
LARGE_BYTES = 600_000
LARGE_CONNECTIONS = 8

Seen = tuple[float, float, float]
"""How many requests were answered, how many a second, and the p50 of their time in ms."""
Asking = Callable[[Way, float], Seen]


class Piece(msgspec.Struct):
    """What one load told.

    Attributes:
        rate: Requests a second.
        owner_us: CPU time of the owner for a request.
        all_us: CPU time of all servers for a request.
        batch: Mean rows of a batch.
    """

    rate: float
    p50_ms: float
    owner_us: float
    all_us: float
    batch: float


def measure(way: Way, where: str, asking: Asking, seconds: float) -> Piece:
    """Have a load ask by a way."""
    way.place(where)
    batches, owner_s, all_s = way.owner.batches(), *way.cpu_s()
    requests, rate, p50_ms = asking(way, seconds)
    owner_now_s, all_now_s = way.cpu_s()
    if not requests:
        raise ServerFailed(f"{way.owner.server.name} answered nothing within {seconds} s")
    count, rows = (now - before for now, before in zip(way.owner.batches(), batches, strict=True))
    return Piece(
        rate,
        p50_ms,
        1e6 * (owner_now_s - owner_s) / requests,
        1e6 * (all_now_s - all_s) / requests,
        rows / count if count else 0.0,
    )


def lone(way: Way, seconds: float) -> Seen:
    """Have one client ask, which sleeps while it waits."""
    front = way.fronts[0]
    options = ["--port", str(front.port), "--pid", str(front.front()), "--path", front.server.path]
    told = python_helper("pings", *options, "--seconds", f"{seconds:g}", cores=LOAD_CORES)
    seen = msgspec.convert(told, Pings)
    return seen.count * (1 + WARM_UP_S / seconds), seen.count / seconds, seen.p50_ms


def crowd(connections: int) -> Asking:
    """Return what has wrk ask over so many connections, spread over the fronts."""

    def asking(way: Way, seconds: float) -> Seen:
        each = connections // len(way.fronts)
        asks = partial(run_wrk, connections=each, seconds=max(round(seconds), 1), cores=LOAD_CORES)
        with ThreadPoolExecutor(len(way.fronts)) as threads:
            loads: list[Load] = list(threads.map(asks, way.fronts))
        if any(load.errors for load in loads):
            raise ServerFailed(f"{way.owner.server.name}: some of {loads} failed")
        rate = sum(load.requests / load.duration_s for load in loads)
        return sum(load.requests for load in loads), rate, max(load.p50_ms for load in loads)

    return asking


def large(way: Way, seconds: float) -> Seen:
    """Have long bodies sent and echoed, by a client that does not copy what it sends."""
    front = way.fronts[0]
    path = "/models/large" if OURS in front.server.name else "/"
    with tempfile.NamedTemporaryFile() as body:
        body.write(bytes(range(250)) * (LARGE_BYTES // 250))
        body.flush()
        command = [sys.executable, "-m", "benchmarks.bodyflood", "http", str(front.port), path, body.name]
        command += ["--answer", body.name, "--connections", str(LARGE_CONNECTIONS), "--seconds", f"{seconds:g}"]
        command += ["--header", "content-type: application/octet-stream"]
        done = subprocess.run(pinned(command, LOAD_CORES), check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise ServerFailed(f"{front.server.name}: {done.stderr[-500:]}")
    told = json.loads(done.stdout)
    return told["rate"] * seconds, told["rate"], told["p50_ms"]
