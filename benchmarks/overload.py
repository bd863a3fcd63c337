# SPDX-License-Identifier: Apache-2.0
"""Overload: how much of its work does a server still do when it is offered many times what it can serve?

    benchmarks/.venv/bin/python -m benchmarks.overload

The batchmodel job, server on core 0, load on core 1. In each round one client measures a server: in a closed loop (256
connections, which its queue holds), at 0.8 of that rate in an open loop, then at 1.3, 3 and 10 times of it with 400
and with 2,000 connections, each between two closed loops. `flood.py` says what is counted. The speed of the machine
drifts within seconds, so phases are short, each flood is compared with the closed loops just before and after it, and
RESULTS-overload.md has the medians of many rounds. With `--raw` rounds are kept in a file and those of several runs
make one table; `--long` adds a flood of so many seconds in a row, with the memory meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import proc, report
from benchmarks.flood import Flood, Phase
from benchmarks.launch import ServerFailed, python_helper, start
from benchmarks.servers import SERVERS, Server, forebay_command

SERVER_CORES, LOAD_CORES = frozenset({0}), frozenset({1})
JOB = "batchmodel"
CALM = 0.8
FACTORS = (1.3, 3.0, 10.0)
CONNECTIONS = (400, 2000)
CLOSED_CONNECTIONS = 256
CLOSED_S = 0.6
CALM_S = 1.5
PSS_S = 10.0
"""Between two looks at the memory."""
QUEUE = 256
LIMITS = ("--max-queue", str(QUEUE), "--max-connections", "20000")

PEERS = {"mosec", "litserve"}
BARE = "bare beside "
"""How the names of servers begin that are compared with, and not judged."""

MAX_OTHERS = 0.05
"""Cores that other processes may take beside a flood that counts: what they take of the server's, it lacks."""

ACCEPTED_BAR = 0.95
LATENCY_BAR = 3.0
REFUSED_BARS_MS = {400: 100.0, 2000: 1000.0}


def servers() -> dict[str, Server]:
    ours = [Server(f"forebay:{kind}", forebay_command(kind, *LIMITS)) for kind in ("thread", "process")]
    others = [server for server in SERVERS if server.name in PEERS]
    return {server.name: server for server in (*ours, *others)}


class Round(msgspec.Struct):
    """What one server did in one round."""

    server: str
    at: str
    idle: int
    phases: list[Phase]
    floods: list[Flood]
    pss_mib: list[float]
    """Before, every `PSS_S`, and after."""

    @property
    def calm_p99_ms(self) -> list[float]:
        return [
            flood.accepted_p99_ms for phase, flood in zip(self.phases, self.floods, strict=True) if phase.factor == CALM
        ]

    def over(self) -> Iterable[tuple[Phase, Flood, Flood, Flood]]:
        """Give each flood with the closed loops just before and after it."""
        for place, phase in enumerate(self.phases):
            if phase.factor > 1 or (not phase.factor and phase.connections > self.phases[0].connections):
                yield phase, self.floods[place], self.floods[place - 1], self.floods[place + 1]


def plan(options: argparse.Namespace) -> list[Phase]:
    closed = Phase(CLOSED_CONNECTIONS, 0, CLOSED_S)
    loads = [Phase(CONNECTIONS[0], CALM, CALM_S)]
    if options.long:
        loads.append(Phase(max(options.connections), options.factors[-1], options.long))
    else:
        loads += [
            Phase(connections, factor, options.seconds)
            for connections in options.connections
            for factor in options.factors
        ]
    return [closed, *(phase for load in loads for phase in (load, closed))]


def measure(name: str, port: int, pids: list[int], phases: list[Phase], idle: int, *flags: str) -> Round:
    """Load a server with one phase after the other; the flags are further ones of `flood`."""
    found = Round(name, time.strftime("%d %b %Y %H:%M"), idle, phases, [], [])
    is_over = threading.Event()

    def look() -> None:
        found.pss_mib.append(sum(map(proc.pss_mib, pids)))

    def watch() -> None:
        while not is_over.wait(PSS_S):
            look()

    look()
    watching = threading.Thread(target=watch)
    watching.start()
    facts = {"port": port, "idle": idle, "phases": json(phases), "pids": json(pids)}
    flags += tuple(text for key, value in facts.items() for text in (f"--{key}", str(value)))
    try:
        found.floods = msgspec.convert(python_helper("flood", *flags, cores=LOAD_CORES), list[Flood])
    finally:
        is_over.set()
        watching.join()
    look()
    for phase, flood, before, after in found.over():
        say(
            f"{name:20} {phase.factor:4g}x {phase.connections:5} connections: accepted {flood.accepted:7,.0f}/s"
            f" ({share(flood, before, after):.2f}), p99 {flood.accepted_p99_ms:.0f} ms, no: {flood.refused:7,.0f}/s,"
            f" p99 {flood.refused_p99_ms:.0f} ms; errors {flood.errors}; stood still {flood.stall_ms:.0f} ms,"
            f" others {max(each.others for each in (flood, before, after)):.2f} cores"
        )
    return found


def json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def share(flood: Flood, before: Flood, after: Flood) -> float:
    return flood.accepted / ((before.accepted + after.accepted) / 2)


def rows_of(rounds: list[Round], *, judges_p99: bool) -> list[list[str]]:
    """Tell of one server in the same surroundings, a row for each kind of flood."""
    is_compared = rounds[0].server in PEERS or rounds[0].server.startswith(BARE)
    kinds: dict[tuple[float, int], list[tuple[Flood, Flood, Flood]]] = {}
    for each in rounds:
        for phase, *three in each.over():
            kinds.setdefault((phase.factor, phase.connections), []).append((three[0], three[1], three[2]))
    calm_ms = median([ms for each in rounds for ms in each.calm_p99_ms] or [0.0])
    rows: list[list[str]] = []
    for (factor, connections), measured in kinds.items():
        calm = [three for three in measured if max(flood.others for flood in three) <= MAX_OTHERS]
        found = calm or measured
        floods = [flood for flood, _, _ in found]
        accepted = median(share(*three) for three in found)
        p99_ms = median(flood.accepted_p99_ms for flood in floods)
        refused_ms = median(flood.refused_p99_ms for flood in floods)
        errors = sum(flood.errors for flood in floods)
        cpu = median((before.cpu_us + after.cpu_us) / 2 / max(flood.cpu_us, 1) for flood, before, after in found)
        passes = (
            round(accepted, 2) >= ACCEPTED_BAR
            and (p99_ms <= LATENCY_BAR * calm_ms or not judges_p99)
            and refused_ms <= REFUSED_BARS_MS.get(connections, 1000.0)
            and not errors
        )
        rows.append(
            [
                rounds[0].server,
                f"{factor:g}x" if factor else "all at once",
                f"{connections:,}",
                f"{len(calm)} of {len(measured)}",
                f"{median(flood.accepted for flood in floods):,.0f}",
                f"{accepted:.2f}",
                f"{cpu:.2f}",
                f"{p99_ms:.0f}",
                f"{p99_ms / max(calm_ms, 0.001):.1f}",
                f"{median(flood.refused for flood in floods):,.0f}",
                f"{refused_ms:.0f}",
                f"{errors:,}",
                "" if is_compared else "pass" if passes else "**FAIL**",
            ]
        )
    return rows


def write(path: Path, title: str, name: str, rounds: list[Round], bars: str, *, judges_p99: bool) -> None:
    heads = [
        "server",
        "offered",
        "connections",
        "undisturbed",
        "accepted/s",
        "/ closed loop",
        "by CPU",
        "p99 ms",
        "/ p99 at 0.8",
    ]
    heads += ["refused/s", "p99 ms", "errors", ""]
    groups: dict[str, dict[str, list[Round]]] = {}
    for each in rounds:
        longest_s = max(phase.seconds for phase in each.phases)
        around = f"{longest_s:g} s in a row" if longest_s > 10 else "Offered more than it can serve"
        if each.idle:
            around += f", with {each.idle:,} idle connections beside it"
        groups.setdefault(around, {}).setdefault(each.server, []).append(each)
    facts = {
        "date": f"{min(each.at for each in rounds)} to {max(each.at for each in rounds)[-5:]}",
        **report.machine(),
        "bars": bars,
    }
    text = [
        f"# {title}\n\nWritten by `python -m benchmarks.{name}`; [README.md](README.md) says how it measures.\n",
        report.table(["", ""], [[key, value] for key, value in facts.items()]),
    ]
    for surroundings, by_server in sorted(groups.items(), reverse=True):
        rows = [row for found in by_server.values() for row in rows_of(found, judges_p99=judges_p99)]
        told = [
            [
                name,
                str(len(found)),
                f"{median(phase[1].accepted for each in found for phase in closed(each)):,.0f}",
                f"{median([ms for each in found for ms in each.calm_p99_ms] or [0.0]):.1f}",
                " ".join(f"{mib:.0f}" for mib in found[-1].pss_mib),
            ]
            for name, found in by_server.items()
        ]
        text += [f"\n## {surroundings}\n", report.table(heads, rows), ""]
        columns = ["server", "rounds", "closed loop/s", f"p99 ms at {CALM}", f"PSS MiB, every {PSS_S:g} s"]
        text.append(report.table(columns, told))
    path.write_text("\n".join(text) + "\n")


def closed(each: Round) -> list[tuple[Phase, Flood]]:
    return [pair for pair in zip(each.phases, each.floods, strict=True) if not pair[0].factor]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def earlier(raw: Path | None) -> list[Round]:
    """Return the rounds that were kept in a file."""
    return msgspec.json.decode(raw.read_bytes(), type=list[Round]) if raw and raw.exists() else []


def numbers(kind: type, text: str) -> list[float]:
    return [kind(part) for part in text.split(",")]


def main() -> None:
    known = servers()
    parser = argparse.ArgumentParser(prog="benchmarks.overload", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--servers", default=",".join(known), help=f"of {','.join(known)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.8, help="a flood, once it has settled")
    parser.add_argument("--long", type=float, default=0.0, help="one flood in a row instead, of so many seconds")
    parser.add_argument("--factors", type=partial(numbers, float), default=FACTORS)
    parser.add_argument("--connections", type=partial(numbers, int), default=CONNECTIONS)
    parser.add_argument("--idle", type=int, default=0, help="connections that say nothing, beside it")
    parser.add_argument("--raw", type=Path, help="file with the rounds of earlier runs; those of this one are added")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-overload.md"))
    options = parser.parse_args()
    os.sched_setaffinity(0, LOAD_CORES)
    rounds = earlier(options.raw)
    with ExitStack() as stack:
        up = [stack.enter_context(start(known[name], JOB, SERVER_CORES)) for name in options.servers.split(",")]
        for _ in range(options.rounds):
            for running in up:
                flags = ("--job", JOB, "--path", running.server.path, "--seed", str(len(rounds)))
                try:
                    running.check_answer()
                    found = measure(
                        running.server.name, running.port, running.pids(), plan(options), options.idle, *flags
                    )
                    running.check_answer()
                except (ServerFailed, OSError) as error:
                    say(f"FAILED {running.server.name}: {error}")
                    continue
                rounds.append(found)
                if options.raw:  # at once: a run may be ended before its last server
                    options.raw.write_bytes(msgspec.json.encode(rounds))
    bars = f"accepted / closed loop >= {ACCEPTED_BAR}, its p99 at most {LATENCY_BAR:g} times that at {CALM} of the"
    bars += " closed loop's rate, refusals' p99 at most 100 ms (400 connections) and 1 s (2,000), no error"
    write(options.output, "Overload", "overload", rounds, bars, judges_p99=True)
    print(options.output.read_text())


if __name__ == "__main__":
    main()
