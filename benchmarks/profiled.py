# SPDX-License-Identifier: Apache-2.0
"""What profiling costs: a pipeline of one trivial op at 500 requests a second, profiled and not.

    .venv/bin/python -m benchmarks.profiled

The same Poisson arrivals go to both servers in turns. Latencies say little at this rate, for a server waits most of the
time; what counts is the processor's time for each request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import uvloop

from benchmarks import proc
from benchmarks.chaos import wait_ready
from benchmarks.launch import ROOT, environment, free_port, stop
from benchmarks.openloop import Generator, arrivals
from benchmarks.report import table

BODY = json.dumps({"key": ["x"], "value": ["a small request"]}).encode()
HEAD = (
    "POST /echo/prediction HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
REQUEST = (HEAD % len(BODY)).encode() + BODY
KINDS = ("not profiled", "profiled")


async def load(port: int, due: list[float]) -> float:
    """Send requests when they are due; returns the median of their times in milliseconds."""
    generator = Generator(REQUEST, due)
    await generator.run(port)
    assert generator.errors == 0
    return 1e3 * median(seconds for _, seconds in generator.latencies)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.profiled", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rate", type=float, default=500.0)
    options = parser.parse_args()
    servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    try:
        for kind in KINDS:
            port = free_port()
            program = str(Path(sys.executable).with_name("forebay"))
            command = [program, "serve", "benchmarks/jobs/pipeline_echo.py"]
            command += ["--log-level", "warning", "--", str(free_port()), str(port), "thread"]
            command += ["profile"] if kind == "profiled" else []
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
            servers[kind] = process, port
            wait_ready(process, port)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for round_ in range(options.rounds + 1):  # the first one warms up
            due = arrivals(options.rate, options.seconds, round_)
            for kind in KINDS if round_ % 2 else reversed(KINDS):
                process, port = servers[kind]
                before = proc.cpu_s([process.pid])
                p50_ms = uvloop.run(load(port, due))
                cost_us = 1e6 * (proc.cpu_s([process.pid]) - before) / len(due)
                found[kind] += [(cost_us, p50_ms)] if round_ else []
    finally:
        for process, _ in servers.values():
            stop(process)
    rows = []
    usual_us = median(cost for cost, _ in found[KINDS[0]])
    for kind, pairs in found.items():
        cost_us = median(cost for cost, _ in pairs)
        more = (cost_us - usual_us) * options.rate / 1e6
        rows.append([kind, f"{cost_us:.0f}", f"{median(p50 for _, p50 in pairs):.2f}", f"{more:.2%}"])
    print(f"{options.rate:g} requests a second, {options.rounds} rounds of {options.seconds:g} s\n")
    print(table(["server", "CPU us a request", "p50 ms", "of a core, more"], rows))


if __name__ == "__main__":
    main()
