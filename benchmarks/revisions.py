# SPDX-License-Identifier: Apache-2.0
"""What a change costs: CPU time of the server for an echo, in two revisions of the code.

    .venv/bin/python -m benchmarks.revisions BEFORE AFTER --minutes 5

Both servers are up together, each with the code of its revision, and echo on the loop: there an answer costs least, so
that a change weighs most. A client with some connections asks each of them in turn for a group of requests; which one
comes first alternates. The ratio of the two CPU times in a pair of groups is what other load disturbs least. The figure
is the mean of the logarithms of all ratios but the outer tenths, with its interval of 95 % from resampling the pairs.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import report
from benchmarks.client import post
from benchmarks.launch import ROOT, Running, ServerFailed, start
from benchmarks.servers import LOGGING, Server

CONNECTIONS = 32
RESAMPLES = 4000
BOUNDS = (0.99, 1.01)


def checked_out(revision: str, stack: ExitStack) -> Path:
    """Put the files of a revision into a folder of their own."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder


def served(name: str, folder: Path) -> Server:
    def command(job: str, port: int) -> list[str]:
        paths = f"PYTHONPATH={folder}:{folder / 'src'}"
        flags = ["--worker-kind", "inline", "--http-port", str(port), *LOGGING]
        return [
            "env",
            paths,
            sys.executable,
            "-m",
            "forebay",
            "serve",
            str(folder / f"benchmarks/jobs/{job}.py"),
            *flags,
        ]

    return Server(name, command)


class Asker:
    """The connections to one server."""

    def __init__(self, running: Running, stack: ExitStack) -> None:
        self._clock = (~running.process.pid << 3) | 2  # the CPU clock of that process; it has no others
        self._request = post("echo", running.server.path)
        self._sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(CONNECTIONS)
        ]
        self._sockets[0].sendall(self._request)
        self._size = len(self._sockets[0].recv(1 << 16))

    def cost_us(self, rounds: int) -> float:
        """Ask on all connections so many times; returns the CPU time of the server for a request."""
        before = time.clock_gettime(self._clock)
        for _ in range(rounds):
            for one in self._sockets:
                one.sendall(self._request)
            for one in self._sockets:
                if not one.recv(1 << 16).startswith(b"HTTP/1.1 200"):
                    raise ServerFailed("a request was not answered")
        return 1e6 * (time.clock_gettime(self._clock) - before) / rounds / CONNECTIONS


def middle(ratios: list[float]) -> float:
    logs = sorted(map(math.log, ratios))
    cut = len(logs) // 10
    return math.exp(statistics.fmean(logs[cut : len(logs) - cut]))


def interval(ratios: list[float]) -> tuple[float, float]:
    dice = random.Random(1)
    found = sorted(middle(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return found[RESAMPLES * 25 // 1000], found[RESAMPLES * 975 // 1000]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.revisions", description=str(__doc__).partition("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=60, help="requests of a connection in a group")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-revisions.md"))
    options = parser.parse_args()
    costs: list[tuple[float, float]] = []
    with ExitStack() as stack:
        names = options.before, options.after
        servers = [served(name, checked_out(name, stack)) for name in names]
        cores = frozenset(range(os.cpu_count() or 1))
        askers = [Asker(stack.enter_context(start(server, "echo", cores)), stack) for server in servers]
        for asker in askers:
            asker.cost_us(options.rounds)  # warms up
        ends = time.monotonic() + 60 * options.minutes
        while time.monotonic() < ends:
            if len(costs) % 2:
                after, before = (askers[index].cost_us(options.rounds) for index in (1, 0))
            else:
                before, after = (askers[index].cost_us(options.rounds) for index in (0, 1))
            costs.append((before, after))
    ratios = [after / before for before, after in costs]
    low, high = interval(ratios)
    is_met = low <= BOUNDS[1] and high >= BOUNDS[0]
    rows = [
        [options.before, f"{statistics.median(before for before, _ in costs):.2f}", ""],
        [options.after, f"{statistics.median(after for _, after in costs):.2f}", f"{middle(ratios):.4f}"],
    ]
    told = (
        f"{len(costs)} pairs of groups of {options.rounds * CONNECTIONS:,} requests. The interval of the ratio at 95 % "
    )
    told += f"is {low:.4f} to {high:.4f}. It overlaps {BOUNDS[0]} to {BOUNDS[1]}: {'yes' if is_met else 'no'}."
    text = [
        "# What a change costs an echo\n\nWritten by `python -m benchmarks.revisions`, which says how it measures.\n",
        report.table(["", ""], [["date", time.strftime("%d %b %Y %H:%M")], *map(list, report.machine().items())]),
        "",
        report.table(["revision", "CPU us of a request (median)", "ratio"], rows),
        "",
        told,
    ]
    options.output.write_text("\n".join(text) + "\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
