# SPDX-License-Identifier: Apache-2.0
"""Tenants on a real server over HTTP: shares, floods, deadlines, closed loops and the bill, beside the simulation.

From the repository, `.venv/bin/python -m benchmarks.shares` takes at most 12 minutes and writes RESULTS-shares.md. The
server runs on core 0, the loads on core 1, each tenant's in a process of its own; the model sleeps. The page is written
after each part. mosec and Ray Serve are measured where the environments of `run.sh` and `ray_serve.sh` are.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.launch import ROOT, ServerFailed
from benchmarks.policies.fair.deadlines import TIMES
from benchmarks.policies.fair.queue_cost import table as queue_costs
from benchmarks.policies.fair.simulation import Load, Simulation
from benchmarks.servers import Server
from benchmarks.shares_servers import LARGEST, Run, Speed, Up, bare, mosec, ours, ray_serve, up

ONE, FOUR = Speed(1, 0.05), Speed(4, 0.064)
QUEUE = 256
LONG_QUEUE = 1024
"""Where requests have deadlines, which are shorter than this queue."""
CLIENTS = (1, 4, 16, 64)
PASS, FAIL = "pass", "**FAIL**"

HEADLINE = """\
# Tenants on a real server

Written by `python -m benchmarks.shares --seconds {seconds:g}` ({at}). Loads come over HTTP (Poisson), each tenant's
from a process of its own; the server has core 0, the loads core 1. The model sleeps: a batch of n rows takes
0.44 T + 0.56 T n / 16, at most 16 rows. "1 x 320/s" is one worker process that can answer 320 rows a second. {queue}
rows may wait ({long} where there are deadlines). Worker time is what the model itself has seen. All that is answered
after the first two seconds counts, for {seconds:g} s. "Without tenants" is the same server with a plain list of keys,
which behaves as it did before there were tenants. The bare server is plain Python with a queue that refuses when it is
full.

{facts}
"""


def mark(holds: object) -> str:
    return PASS if holds else FAIL


def near(found: float, wanted: float, part: float) -> bool:
    return abs(found - wanted) <= part * wanted


class Benchmark:
    """All parts, one after the other; the page is written after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seconds: float = options.seconds
        self.until = time.monotonic() + 60 * options.minutes
        self.blocks: list[str] = []
        self.load = f"{os.getloadavg()[0]:.1f}; a quiet machine has less than 0.5"

    def run(self) -> None:
        parts: dict[str, Callable[[], None]] = {
            "shares": self.shares,
            "flood": self.flood,
            "deadlines": self.deadlines,
            "loops": self.loops,
            "queue": self.queue,
        }
        for name in self.options.parts.split(","):
            try:
                parts[name]()
            except (ServerFailed, OSError, ValueError) as error:
                self.add("", [f"The part `{name}` {FAIL}ED: `{str(error).splitlines()[0]}`"])
                print(error, flush=True)

    def is_over(self, seconds: float) -> bool:
        """Whether there is no time left for something that takes so long."""
        return time.monotonic() + seconds > self.until

    def add(self, title: str, lines: list[str]) -> None:
        self.blocks += [f"\n## {title}\n"] * bool(title) + lines
        print("\n".join(lines), flush=True)
        machine = {**report.machine(), "load average before": self.load}
        facts = report.table(["", ""], [[key, value] for key, value in machine.items()])
        head = HEADLINE.format(
            seconds=self.seconds, at=time.strftime("%d %b %Y %H:%M"), queue=QUEUE, long=LONG_QUEUE, facts=facts
        )
        self.options.output.write_text(head + "\n".join(self.blocks) + "\n")

    def shares(self) -> None:
        """The scenarios of the simulation, and the bill."""
        rows: list[list[str]] = []
        bills: list[list[str]] = []
        for speed in (ONE, FOUR):
            for name, loads in scenarios(speed).items():
                if self.is_over(self.seconds + 8):
                    rows.append([f"{name}, {speed}", "not measured: the time was over", *[""] * 8])
                    continue
                with ours(loads, speed, queue=QUEUE) as server:
                    run = server.run(loads, self.seconds)
                    if name == "costs":
                        bills += self.bill(server, loads, speed)
                rows += compared(name, loads, speed, run)
        heads = [
            "load, server",
            "tenant",
            "weight",
            "share of worker time: simulated",
            "server",
            "rows/s: simulated",
            "server",
        ]
        heads += ["p99 ms: simulated", "server", "share, rows, p99"]
        bars = "The server's share and rows may differ by 10 % from the simulation's, its p99 by 25 %."
        self.add("Beside the simulation", [bars, "", report.table(heads, rows)])
        heads = ["load, server", "tenant", "first run: worker seconds by the model", "billed / that"]
        heads += ["second run: worker seconds by the model", "billed / that", "first, second"]
        bars = "Rows that cost 1x and 8x, twice on one server, which learns the costs. At most 15 % off."
        self.add("The bill", [bars, "", report.table(heads, bills)])
        weights = self.weights()
        bars = "Worker seconds within 3 % of the shares; twice on the same server."
        self.add("Weights", [bars, "", report.table(weights[0], weights[1:])])

    def bill(self, server: Up, loads: list[Load], speed: Speed) -> list[list[str]]:
        """Return what was billed for a load that has just ended, and for the same load once more."""
        totals: list[tuple[dict[str, float], dict[str, float]]] = []
        for turn in range(2):
            if turn:
                server.run(loads, self.seconds, seed=2)
            time.sleep(1.5)  # what was taken is answered, and charged
            totals.append((server.known_s(loads), server.cost_s()))
        rows: list[list[str]] = []
        for load in loads:
            (first, paid), (known, billed) = (tuple(one.get(load.tenant, 0.0) for one in total) for total in totals)
            parts = paid / first, (billed - paid) / (known - first)
            cells = [f"{first:.2f}", f"{parts[0]:.3f}", f"{known - first:.2f}", f"{parts[1]:.3f}"]
            rows.append(
                [f"costs, {speed}", load.tenant, *cells, ", ".join(mark(near(part, 1, 0.15)) for part in parts)]
            )
        return rows

    def weights(self) -> list[list[str]]:
        """Weights under saturation, with rows of one cost and of two."""
        rows = [
            ["load, server", "weight", "share promised", "first run", "second run", "without tenants", "first, second"]
        ]
        for name, costs in (("one cost", (1, 1, 1)), ("costs 1 and 8", (8, 1, 8))):
            loads = [Load(f"w{w}", 2 * ONE.rate, w, cost) for w, cost in zip((1, 2, 5), costs, strict=True)]
            if self.is_over(3.5 * self.seconds + 15):
                rows.append([name, "not measured: the time was over", *[""] * 5])
                continue
            with ours(loads, ONE, queue=QUEUE) as server:
                runs = [server.run(loads, 1.5 * self.seconds, seed=seed) for seed in (1, 2)]
            with ours(loads, ONE, queue=QUEUE, named=False) as server:
                runs.append(server.run(loads, 0.5 * self.seconds))
            for load in loads:
                got, wanted = [run.share(load.tenant) for run in runs], load.weight / 8
                cells = [f"{load.weight:g} (cost {load.cost:g})", *(f"{part:.3f}" for part in (wanted, *got))]
                marks = ", ".join(mark(near(part, wanted, 0.03)) for part in got[:2])
                rows.append([f"{name}, {ONE}", *cells, marks])
        return rows

    def flood(self) -> None:
        """A flood alone, and beside a light tenant, at all servers."""
        flood, light = Load("flood", 10 * ONE.rate), Load("light", 0.05 * ONE.rate)
        rows: list[list[str]] = []
        servers: dict[str, Server | bool] = {"forebay": True, "forebay without tenants": False, "bare": bare(QUEUE)}
        for name, python, made in (("mosec", self.options.mosec, mosec), ("Ray Serve", self.options.ray, ray_serve)):
            if Path(python).exists():
                servers[name] = made(python, QUEUE)
            else:
                rows.append([name, "not installed", *[""] * 7])
        for name, server in servers.items():
            if self.is_over(2 * self.seconds + 12):
                rows.append([name, "not measured: the time was over", *[""] * 7])
                continue
            try:
                started = (
                    ours([flood, light], ONE, queue=QUEUE, named=server)
                    if isinstance(server, bool)
                    else up(server, ONE)
                )
                with started as found:
                    alone = found.run([flood], self.seconds)
                    both = found.run([flood, light], self.seconds, seed=2)
            except (ServerFailed, OSError) as error:
                print(error, flush=True)
                rows.append([name, "did not run", *[""] * 7])
                continue
            one = both.told["light"]
            times, kept = one.percentile(0.99) / ONE.batch_s, both.answered / max(alone.answered, 1e-9)
            lost = one.refused + one.errors + one.ended
            holds = not lost and times <= 2.5 and kept >= 0.98
            cells = [f"{alone.told['flood'].sent / self.seconds:,.0f}", f"{alone.answered:.0f}", f"{kept:.3f}"]
            cells += [
                str(one.sent),
                str(one.refused),
                str(one.errors),
                f"{1e3 * one.percentile(0.99):.0f} ({times:.1f} T)",
            ]
            rows.append([name, *cells, mark(holds) if server is True else ""])
        heads = [
            "server",
            "flood alone: sent/s",
            "answered/s",
            "both / alone",
            "light: sent",
            "refused",
            "errors",
            "p99 ms",
            "",
        ]
        bars = "Nothing of the light tenant's refused, its p99 at most 2.5 batch times (T), both / alone at least 0.98."
        self.add(f"Flood of 10x beside a light tenant of 0.05x, {ONE}", [bars, "", report.table(heads, rows)])

    def deadlines(self) -> None:
        """Answers in time."""
        rows: list[list[str]] = []
        for speed in (ONE, FOUR):
            for tenants in (1, 5):
                rows += self.in_time(speed, tenants)
        heads = [
            "server",
            "tenants",
            "offered",
            "in time, simulated",
            "in time",
            "accepted/s",
            "late",
            "refused/s",
            "in time, late, as simulated",
        ]
        bars = "Deadlines of 3 to 30 batch times. In time of min(offered, a closed loop's rate): at least 0.93,"
        bars += (
            " and 0.9 at 10x. Late are answers after the deadline and accepted requests that it ended: at most 1 % of"
        )
        bars += " the accepted. The simulation is at most 10 % away."
        self.add("In time", [bars, "", report.table(heads, rows)])

    def in_time(self, speed: Speed, tenants: int) -> list[list[str]]:
        times_s = tuple(speed.batch_s * each for each in TIMES)
        names = [f"t{number}" for number in range(tenants)]
        rows: list[list[str]] = []
        with ours([Load(name, 0.0) for name in names], speed, queue=LONG_QUEUE) as server:
            loop = server.run([Load(names[0], 0.0)], 3.0, connections=LARGEST * (2 * speed.workers + 1))
            for offered in (0.8, 1.3, 3.0, 10.0):
                if self.is_over(self.seconds + 5):
                    rows.append(
                        [str(speed), str(tenants), f"{offered:g}x", "not measured: the time was over", *[""] * 5]
                    )
                    continue
                loads = [Load(name, offered * speed.rate / tenants, times_s=times_s) for name in names]
                run = server.run(loads, self.seconds, connections=2500 // tenants)
                found = run.told.values()
                in_time, ended = sum(one.in_time for one in found), sum(one.ended for one in found)
                late, accepted = ended + sum(one.late for one in found), ended + sum(one.answered for one in found)
                reached = in_time / self.seconds / min(offered * speed.rate, loop.answered)
                told = simulated(loads, speed, queue=LONG_QUEUE, kept=True)
                expected = told.in_time / told.seconds / (min(offered, 1.0) * speed.rate)
                marks = (
                    reached >= (0.9 if offered > 3 else 0.93),
                    late <= 0.01 * accepted,
                    near(reached, expected, 0.1),
                )
                cells = [
                    f"{expected:.3f}",
                    f"{reached:.3f}",
                    f"{accepted / self.seconds:.0f}",
                    f"{late} of {accepted:,}",
                ]
                cells += [f"{sum(one.refused for one in found) / self.seconds:,.0f}", ", ".join(map(mark, marks))]
                rows.append([str(speed), str(tenants), f"{offered:g}x", *cells])
        return rows

    def loops(self) -> None:
        """Closed loops without deadlines, of one tenant and without tenants."""
        found: dict[tuple[int, bool], Run] = {}
        for named in (True, False):
            with ours([Load("a", 0.0)], ONE, queue=QUEUE, named=named) as server:
                for clients in CLIENTS:
                    if not self.is_over(6):
                        found[clients, named] = server.run([Load("a", 0.0)], 2.0, connections=clients)
        rows: list[list[str]] = []
        for clients in CLIENTS:
            if (clients, False) not in found:
                continue
            ones = [found[clients, named] for named in (False, True)]
            cells = [f"{one.rows / max(one.batches, 1):.2f}" for one in ones] + [f"{one.answered:.0f}" for one in ones]
            refused = ones[1].told["a"].refused
            holds = not refused and near(float(cells[1]), float(cells[0]), 0.03)
            rows.append([str(clients), *cells, str(refused), mark(holds)])
        heads = [
            "clients",
            "rows a batch: without tenants",
            "one tenant",
            "answers/s: without tenants",
            "one tenant",
            "refused",
            "",
        ]
        bars = "Nothing refused, batches as without tenants (within 3 %)."
        self.add(f"Closed loops, {ONE}", [bars, "", report.table(heads, rows)])

    def queue(self) -> None:
        """What the queue costs."""
        bars = "Time of a row in the queue, beside the same without tenants: at most 1.6x with two, 4x with a thousand."
        if self.is_over(45):
            self.add("What the queue costs", [bars, "", "Not measured: the time was over."])
        else:
            self.add("What the queue costs", [bars, "", *queue_costs(self.options.repeats)])


class Simulated:
    """What the simulation says of a load."""

    def __init__(self, loads: list[Load], speed: Speed, queue: int, *, kept: bool) -> None:
        whole = 30.0 if sum(load.rate for load in loads) < 4000 else 12.0
        made = Simulation(
            loads,
            a=speed.a,
            b=speed.b,
            slots=speed.workers,
            seconds=whole,
            shared=True,
            seed=1,
            kept=kept,
            max_size=LARGEST,
            capacity=queue,
        )
        self.outcomes = made.run()
        self.seconds = 0.8 * whole
        self.busy_s = sum(one.worker_s for one in self.outcomes.values())
        self.in_time = sum(one.in_time for one in self.outcomes.values())


def simulated(loads: list[Load], speed: Speed, *, queue: int, kept: bool = False) -> Simulated:
    return Simulated(loads, speed, queue, kept=kept)


def scenarios(speed: Speed) -> dict[str, list[Load]]:
    """Return the loads of `benchmarks.policies.fair.main` for a server of this speed."""
    rate = speed.rate
    return {
        "flood": [Load("flood", 10 * rate), Load("light", 0.05 * rate)],
        "weights": [Load(f"w{weight}", 2 * rate, weight) for weight in (1, 2, 5)],
        "costs": [Load("cost-1", 2 * rate), Load("cost-8", 2 * rate, cost=8.0)],
        "calm": [Load("a", 0.3 * rate), Load("b", 0.3 * rate)],
    }


def compared(name: str, loads: list[Load], speed: Speed, run: Run) -> list[list[str]]:
    """Return a row for each tenant: the simulation's figures and the server's."""
    told = simulated(loads, speed, queue=QUEUE)
    rows: list[list[str]] = []
    for load in loads:
        one, real = told.outcomes[load.tenant], run.told[load.tenant]
        shares = one.worker_s / told.busy_s, run.share(load.tenant)
        rates = one.answered / told.seconds, real.answered / run.seconds
        p99s = one.percentile(0.99), real.percentile(0.99)
        cells = [f"{shares[0]:.3f}", f"{shares[1]:.3f}", f"{rates[0]:.0f}", f"{rates[1]:.0f}"]
        cells += [f"{1e3 * p99s[0]:.0f}", f"{1e3 * p99s[1]:.0f}"]
        marks = near(shares[1], shares[0], 0.1), near(rates[1], rates[0], 0.1), near(p99s[1], p99s[0], 0.25)
        rows.append([f"{name}, {speed}", load.tenant, f"{load.weight:g}", *cells, ", ".join(map(mark, marks))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.shares", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="that a load counts")
    parser.add_argument("--minutes", type=float, default=12.0, help="nothing is begun that would end later")
    parser.add_argument("--parts", default="shares,flood,deadlines,loops,queue")
    parser.add_argument("--repeats", type=int, default=3, help="of the queue's cost")
    parser.add_argument("--mosec", default=str(ROOT / "benchmarks/.venv/bin/python"), help="a Python that has mosec")
    parser.add_argument(
        "--ray", default=str(ROOT / "benchmarks/.venv-ray/bin/python"), help="a Python that has Ray Serve"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-shares.md"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {0, 1} & os.sched_getaffinity(0))
    Benchmark(options).run()


if __name__ == "__main__":
    main()
