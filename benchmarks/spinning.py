# SPDX-License-Identifier: Apache-2.0
"""What a model that computes in pure Python in two threads costs the requests beside it.

From the repository, on an idle machine: `.venv/bin/python -m benchmarks.spinning`; with `--write` it writes
RESULTS-spinning.md. Four clients keep that model busy; one asks an echo beside it, one request at a time. A server as
it is takes turns with one that has Python's own switch interval. Nothing is pinned.
"""

from __future__ import annotations

import argparse
import http.client
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.chaos import wait_ready
from benchmarks.large import CORES
from benchmarks.launch import ROOT, environment, free_port, python_helper, stop
from benchmarks.pings import Pings
from benchmarks.report import machine, table
from benchmarks.servers import LOGGING

SPINNERS = 4
TURNS = 300_000
"""Some 20 ms of pure Python."""
KINDS = ("inline", "thread")
INTERVALS = {"Python's own, 5 ms": {"SWITCH_S": "0.005"}, "the server's, 1 ms": {}}
RESULTS = Path(__file__).with_name("RESULTS-spinning.md")

PAGE = """\
# Beside a model that computes in pure Python

`.venv/bin/python -m benchmarks.spinning --write{arguments}`, {date}, {machine}; nothing pinned: two threads of the
model, the server's loop and five clients share them. Four clients keep the model busy, one asks an echo beside it,
which runs on the loop or in a thread of its own. Medians of {rounds} rounds, in turns.

{table}

"Calls a second" are those of the model that computes. The median of the inline echo says little: whoever asks again
before a thread has taken the interpreter is answered at once, and then many are.
"""


class Spinner(threading.Thread):
    """Keep the model busy until it is stopped."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port = port
        self.calls = 0
        self.is_over = threading.Event()

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        while not self.is_over.is_set():
            connection.request("POST", "/models/spin", str(TURNS), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.read(), answer.status
            self.calls += answer.status == 200
        connection.close()


def started(more, stack):
    """Start a server that runs until the stack is left; returns its port and its process."""
    port = free_port()
    program = str(Path(sys.executable).with_name("forebay"))
    command = [program, "serve", "--config", "benchmarks/jobs/spinning.yaml", "--http-port", str(port), *LOGGING]
    process = subprocess.Popen(command, cwd=ROOT, env=environment() | more, stdout=subprocess.DEVNULL)
    stack.callback(stop, process)
    wait_ready(process, port)
    return port, process.pid


def measure(kind, port, pid, seconds):
    """Return what the client of the echo saw, and how many calls of the model were answered a second."""
    spinners = [Spinner(port) for _ in range(SPINNERS)]
    for spinner in spinners:
        spinner.start()
    began = time.monotonic()
    options = f"--port {port} --pid {pid} --seconds {seconds:g} --path /models/{kind}"
    seen = msgspec.convert(python_helper("pings", *options.split(), cores=CORES), Pings)
    rate = sum(spinner.calls for spinner in spinners) / (time.monotonic() - began)
    for spinner in spinners:
        spinner.is_over.set()
    for spinner in spinners:
        spinner.join()
    return seen, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = {(kind, interval): [] for kind in KINDS for interval in INTERVALS}
    with ExitStack() as stack:
        up = {interval: started(more, stack) for interval, more in INTERVALS.items()}
        for _ in range(args.rounds):
            for (kind, interval), measured in found.items():
                measured.append(measure(kind, *up[interval], args.seconds))
    rows = []
    for (kind, interval), measured in found.items():
        p50_ms, p99_ms, count = (
            median(getattr(seen, name) for seen, _ in measured) for name in ("p50_ms", "p99_ms", "count")
        )
        calls = median(rate for _, rate in measured)
        mean_ms = 1000 * args.seconds / count
        rows.append([kind, interval, *(f"{ms:.1f}" for ms in (mean_ms, p50_ms, p99_ms)), f"{calls:.1f}"])
    told = table(["echo", "switch interval", "mean ms", "p50 ms", "p99 ms", "calls a second"], rows)
    print(told)
    if args.write:
        arguments = f" --rounds {args.rounds} --seconds {args.seconds:g}"
        date = time.strftime("%d %b %Y %H:%M")
        facts = {"arguments": arguments, "date": date, "machine": machine()["machine"], "rounds": args.rounds}
        RESULTS.write_text(PAGE.format(table=told, **facts))


if __name__ == "__main__":
    main()
