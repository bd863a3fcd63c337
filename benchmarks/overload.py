# SPDX-License-Identifier: Apache-2.0
"""Overload: how much of its work does a server still do when it is offered many times what it can serve?

    benchmarks/.venv/bin/python -m benchmarks.overload

The batchmodel job, server on core 0, load on core 1. In each round every server is first measured in a closed loop
(256 connections, which its queue holds), then at 0.8 of that rate in an open loop, then at 1.3, 3 and 10 times
of it with 400 and with 2,000 connections, each between two closed loops of its own;
`flood.py` says what is counted. Medians over the rounds are written to RESULTS-overload.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import proc, report
from benchmarks.flood import Flood
from benchmarks.launch import Running, ServerFailed, python_helper, start
from benchmarks.load import run_wrk
from benchmarks.servers import SERVERS, Server, forebay_command

SERVER_CORES, LOAD_CORES = frozenset({0}), frozenset({1})
JOB = "batchmodel"
CALM = 0.8
FACTORS = (1.3, 3.0, 10.0)
CONNECTIONS = (400, 2000)
CLOSED_CONNECTIONS = 256
QUEUE = 256
LIMITS = ("--max-queue", str(QUEUE), "--max-connections", "20000")

ACCEPTED_BAR = 0.95
LATENCY_BAR = 3.0
REFUSED_BARS_MS = {400: 100.0, 2000: 1000.0}


def servers() -> dict[str, Server]:
    ours = [Server(f"forebay:{kind}", forebay_command(kind, *LIMITS)) for kind in ("thread", "process")]
    others = [server for server in SERVERS if server.name in {"mosec", "litserve"}]
    return {server.name: server for server in (*ours, *others)}


@dataclass
class Figures:
    """What one server did, one entry a round."""

    closed: list[float] = field(default_factory=list)
    calm_p99_ms: list[float] = field(default_factory=list)
    floods: dict[tuple[float, int], list[tuple[Flood, float]]] = field(default_factory=dict)
    """What came of a flood, and of the closed loops just before and after it: the machine's speed drifts."""
    memory: list[tuple[float, float]] = field(default_factory=list)


def flood(running: Running, rate: float, connections: int, options: argparse.Namespace, seed: int) -> Flood:
    facts = {
        "port": running.port,
        "path": running.server.path,
        "rate": rate,
        "connections": connections,
        "seconds": options.seconds,
        "idle": options.idle,
        "seed": seed,
    }
    flags = [text for name, value in facts.items() for text in (f"--{name}", str(value))]
    return msgspec.convert(python_helper("flood", "--job", JOB, *flags, cores=LOAD_CORES), Flood)


def measure(running: Running, figures: Figures, options: argparse.Namespace, round_: int) -> None:
    running.check_answer()
    closed = closed_loop(running, options)
    figures.closed.append(closed)
    calm = flood(running, CALM * closed, CONNECTIONS[0], options, round_)
    figures.calm_p99_ms.append(calm.accepted_p99_ms)
    say(f"{running.server.name:16} closed {closed:9,.0f}/s   at {CALM}: p99 {calm.accepted_p99_ms:.1f} ms")
    before = sum(map(proc.pss_mib, running.pids()))
    for connections in options.connections:
        for factor in options.factors:
            rate_before = closed_loop(running, options)
            found = flood(running, factor * rate_before, connections, options, round_)
            closed = (rate_before + closed_loop(running, options)) / 2
            figures.closed.append(closed)
            figures.floods.setdefault((factor, connections), []).append((found, closed))
            say(
                f"{running.server.name:16} {factor:4g}x {connections:5} connections: accepted {found.accepted:9,.0f}/s"
                f" ({found.accepted / closed:.2f}), p99 {found.accepted_p99_ms:.0f} ms, no: {found.refused:8,.0f}/s,"
                f" p99 {found.refused_p99_ms:.0f} ms; errors {found.errors}"
            )
    figures.memory.append((before, sum(map(proc.pss_mib, running.pids()))))
    running.check_answer()


def closed_loop(running: Running, options: argparse.Namespace) -> float:
    """Answers a second to as many clients as its queue holds, from the same client."""
    return flood(running, 0.0, CLOSED_CONNECTIONS, options, 0).accepted


def rows_of(name: str, figures: Figures) -> list[list[str]]:
    rows: list[list[str]] = []
    for (factor, connections), measured in figures.floods.items():
        floods = [found for found, _ in measured]
        shares = [found.accepted / closed for found, closed in measured]
        slower = [
            found.accepted_p99_ms / max(calm, 0.001) for found, calm in zip(floods, figures.calm_p99_ms, strict=False)
        ]
        accepted, late = median(shares), median(slower)
        refused = median(found.refused_p99_ms for found in floods)
        passes = (
            accepted >= ACCEPTED_BAR
            and late <= LATENCY_BAR
            and refused <= REFUSED_BARS_MS.get(connections, 1000.0)
            and not any(found.errors for found in floods)
        )
        rows.append(
            [
                name,
                f"{factor:g}x",
                f"{connections:,}",
                f"{median(found.accepted for found in floods):,.0f}",
                f"{accepted:.2f}",
                f"{median(found.accepted_p99_ms for found in floods):.0f}",
                f"{late:.1f}",
                f"{median(found.refused for found in floods):,.0f}",
                f"{refused:.0f}",
                f"{sum(found.errors for found in floods):,}",
                ("pass" if passes else "**FAIL**") if name.startswith("forebay") else "",
            ]
        )
    return rows


def write(path: Path, all_figures: dict[str, Figures], options: argparse.Namespace) -> None:
    heads = ["server", "offered", "connections", "accepted/s", "/ closed loop", "p99 ms", "/ p99 at 0.8"]
    heads += ["refused/s", "p99 ms", "errors", ""]
    rows = [row for name, figures in all_figures.items() for row in rows_of(name, figures)]
    memory = [
        [name, f"{median(f.closed):,.0f}", f"{median(f.calm_p99_ms):.1f}"]
        + [f"{median(pair[i] for pair in f.memory):.0f}" for i in (0, 1)]
        for name, f in all_figures.items()
        if f.memory
    ]
    facts = {
        "date": time.strftime("%d %b %Y %H:%M"),
        **report.machine(),
        "rounds": f"{options.rounds}, {options.seconds:g} s a flood, {options.idle:,} idle connections beside it",
        "bars": f"accepted / closed loop >= {ACCEPTED_BAR}, its p99 at most {LATENCY_BAR:g} times that at {CALM} of the"
        " closed loop's rate, refusals' p99 at most 100 ms (400 connections) and 1 s (2,000), no error",
    }
    text = [
        "# Overload\n\nWritten by `python -m benchmarks.overload`; [README.md](README.md) says how it measures.\n",
        report.table(["", ""], [[key, value] for key, value in facts.items()]),
        "\n## Offered more than it can serve\n",
        report.table(heads, rows),
        "\n## Closed loop, and memory around the floods\n",
        report.table(["server", "closed loop/s", f"p99 ms at {CALM}", "PSS MiB before", "after"], memory),
    ]
    path.write_text("\n".join(text) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def numbers(kind: type, text: str) -> list[float]:
    return [kind(part) for part in text.split(",")]


def main() -> None:
    known = servers()
    parser = argparse.ArgumentParser(prog="benchmarks.overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", default=",".join(known), help=f"of {','.join(known)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="a flood")
    parser.add_argument("--factors", type=partial(numbers, float), default=FACTORS)
    parser.add_argument("--connections", type=partial(numbers, int), default=CONNECTIONS)
    parser.add_argument("--idle", type=int, default=0, help="connections that say nothing, beside it")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-overload.md"))
    options = parser.parse_args()
    os.sched_setaffinity(0, LOAD_CORES)
    figures = {name: Figures() for name in options.servers.split(",")}
    with ExitStack() as stack:
        up = [stack.enter_context(start(known[name], JOB, SERVER_CORES)) for name in figures]
        for running in up:
            run_wrk(running, CLOSED_CONNECTIONS, 1, LOAD_CORES)
        for round_ in range(options.rounds):
            for running in up:
                try:
                    measure(running, figures[running.server.name], options, round_)
                except (ServerFailed, OSError) as error:
                    say(f"FAILED {running.server.name}: {error}")
    write(options.output, figures, options)
    print(options.output.read_text())


if __name__ == "__main__":
    main()
