# SPDX-License-Identifier: Apache-2.0
"""The way through a front on one machine, beside a bare front and a bare owner.

    .venv/bin/python -m benchmarks.fronts [--minutes 8] [--seconds 1] [--loads "one client,600 KB"] [--output FILE]

All servers are up together: of ours and of the bare ones (`servers/raw_front.py`) one alone, and owners with one or two
fronts over a Unix socket, with one over TCP, and with one over TCP and TLS. They take turns of about a second; every
other round takes them backwards. Where they run is changed between two turns: see `front_servers.py`. A turn in which
other processes took more than 0.15 core is repeated once (`--repeats`). Clients: `pings.py`, which sleeps while it
waits; `wrk`, one process for each front; and `bodyflood.py`, which does not copy what it sends.

A figure is worked out in each round from turns that are seconds apart, and its median over all rounds counts; the page
shows the quartiles beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.front_loads import Asking, Piece, crowd, large, lone, measure
from benchmarks.front_rows import (
    ALONE,
    BATCHES,
    CROWD,
    LARGE,
    LONE,
    MANY,
    TWO_FRONTS,
    Cell,
    Round,
    rows,
)
from benchmarks.front_servers import BARE, ONE, OURS, TCP, TLS, TWO, UNIX, Bare, Foreign, Kind, Ours, Way, up, up_alone
from benchmarks.launch import ServerFailed, need
from benchmarks.records import FOREIGN_LIMIT

WAYS = {
    LONE: (ALONE, UNIX, TLS),
    CROWD: (ALONE, UNIX, TWO_FRONTS),
    MANY: (ALONE, UNIX, TWO_FRONTS),
    LARGE: (ALONE, UNIX, TCP, TLS),
    BATCHES: (ALONE, UNIX),
}
ASKINGS: dict[str, Asking] = {LONE: lone, CROWD: crowd(64), MANY: crowd(256), LARGE: large, BATCHES: crowd(64)}
PLACES = {MANY: (ONE,)}
WARM_UP_S = 0.2
HEAD = """# The way through a front on one machine

Written by `python -m benchmarks.fronts`, which says how it measures. *One core*: all servers share core 0. *Two cores*:
the owner, with its worker, shares core 1 with the load. A server alone has core 0, and the load core 1, in both cases.
*Bare*: `servers/raw_front.py`, in the same rounds. A Unix socket of the bare ones has long bodies in shared memory.
"""


class Benchmark:
    """All servers, and what was measured of them."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options = options
        self.rounds: list[Round] = []
        self.turns = self.repeated = self.disturbed = 0
        self.ways: dict[tuple[str, str, str], Way] = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinds: list[Kind] = [Bare("inline"), Ours("benchmarks/jobs/fronts.py", "inline")]
        for kind in kinds:
            self.bring_up(kind, "echo", [load for load in options.loads if load != BATCHES], folder, stack)
        if BATCHES in options.loads:
            models: list[Kind] = [Bare("process"), Ours("benchmarks/jobs/batchmodel.py", "process", "batch-model")]
            for kind in models:
                self.bring_up(kind, "batchmodel", [BATCHES], folder, stack)

    def bring_up(self, kind: Kind, job: str, loads: Sequence[str], folder: Path, stack: ExitStack) -> None:
        """Start what the loads ask: one server alone, and an owner for each link."""
        asked = {way for load in loads for way in WAYS[load]}
        started: dict[str, Way] = {}
        if ALONE in asked:
            started[ALONE] = up_alone(kind, job, stack)
        for link in (UNIX, TCP, TLS):
            if link in asked:
                started[link] = up(kind, job, link, folder, stack, 1 + (link == UNIX and TWO_FRONTS in asked))
        if TWO_FRONTS in asked:
            both = started[UNIX]
            started[UNIX], started[TWO_FRONTS] = Way(both.owner, both.fronts[:1]), both
        self.ways |= {(kind.name, way, load): started[way] for load in loads for way in WAYS[load]}

    def cells(self) -> list[Cell]:
        """Return what a round measures, what is compared side by side."""
        return [
            (kind, way, load, where)
            for load in self.options.loads
            for way in WAYS[load]
            for where in ([ONE] if way == ALONE else PLACES.get(load, (ONE, TWO)))
            for kind in (BARE, OURS)
        ]

    def run(self) -> None:
        ends = time.monotonic() + 60 * self.options.minutes
        self.warm_up()
        while not self.rounds or time.monotonic() < ends:
            took = time.monotonic()
            self.rounds.append(self.round(self.options.seconds))
            took = time.monotonic() - took
            print(
                f"round {len(self.rounds)}: {took:.0f} s, {self.disturbed} of {self.turns} turns disturbed", flush=True
            )
            if time.monotonic() + took > ends:
                break

    def warm_up(self) -> None:
        for (_, _, load), way in self.ways.items():
            ASKINGS[load](way, WARM_UP_S)

    def round(self, seconds: float) -> Round:
        cells = self.cells()
        return {cell: self.turn(cell, seconds) for cell in (cells if len(self.rounds) % 2 else reversed(cells))}

    def turn(self, cell: Cell, seconds: float) -> Piece:
        kind, name, load, where = cell
        way = self.ways[kind, name, load]
        self.turns += 1
        for attempt in range(1 + self.options.repeats):
            foreign = Foreign([way])
            try:
                piece = measure(way, where, ASKINGS[load], seconds)
            except ServerFailed as error:
                raise ServerFailed(f"{', '.join(cell)}: {error}") from error
            if foreign.cores() <= FOREIGN_LIMIT:
                break
            self.repeated += attempt < self.options.repeats
        else:
            self.disturbed += 1
        return piece

    def page(self) -> str:
        facts = {
            "date": time.strftime("%d %b %Y %H:%M"),
            **report.machine(),
            "measured": f"{len(self.rounds)} rounds of turns of {self.options.seconds:g} s; of {self.turns} turns "
            f"{self.repeated} were repeated, and in {self.disturbed} others took more than {FOREIGN_LIMIT} core",
        }
        asked = [row for row in rows() if row.load in self.options.loads]
        head = ["measure", "servers on", "bare", "forebay", "quartiles", "asked", ""]
        return "\n".join(
            [
                HEAD,
                report.table(["", ""], list(map(list, facts.items()))),
                "",
                report.table(head, [row.cells(self.rounds) for row in asked]),
                "",
                "Ours of batchmodel's rate is divided by the bare rate, which stands beside it in requests a second.",
                "",
                "## What was measured\n",
                report.table(
                    ["load", "way", "servers on", "", "requests/s", "p50 ms", "CPU us", "of the owner", "mean batch"],
                    list(map(self.detail, self.cells())),
                ),
                "",
            ]
        )

    def detail(self, cell: Cell) -> list[str]:
        kind, way, load, where = cell
        pieces = [each[cell] for each in self.rounds]

        def middle(name: str) -> float:
            return median(getattr(piece, name) for piece in pieces)

        figures = [f"{middle('rate'):,.0f}", f"{middle('p50_ms'):.3f}", f"{middle('all_us'):.2f}"]
        return [load, way, where, kind, *figures, f"{middle('owner_us'):.2f}", f"{middle('batch'):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fronts", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no further round is begun that would end later")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=1, help="of a turn that other processes disturbed")
    parser.add_argument("--loads", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-fronts.md"))
    options = parser.parse_args()
    need(wrk="wrk", taskset="util-linux", openssl="openssl")
    problem = ""
    with ExitStack() as stack:
        try:
            benchmark = Benchmark(options, stack)
            benchmark.run()
        except ServerFailed as error:  # each server that is up would add its log to it
            problem = str(error)
        else:
            options.output.write_text(benchmark.page())
    if problem:
        raise SystemExit(problem)
    print(options.output.read_text())


if __name__ == "__main__":
    main()
