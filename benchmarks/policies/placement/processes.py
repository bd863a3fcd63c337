# SPDX-License-Identifier: Apache-2.0
"""Hold the simulation to real processes: one server, and an owner with two fronts, whose model sleeps.

    .venv/bin/python -m benchmarks.policies.placement.processes [--rounds 3] [--seconds 6]

Requests come by a Poisson process, in each round another one, the same for both; each front has half of the
connections. The model has two worker processes. All servers share core 0, the load has core 1. Servers take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import report
from benchmarks.front_loads import LOAD_CORES
from benchmarks.front_servers import ONE, UNIX, Ours, Way, up, up_alone
from benchmarks.launch import ServerFailed, need, python_helper
from benchmarks.load import Load
from benchmarks.policies.placement.owner import OneOwner, OneQueue
from benchmarks.policies.placement.scenario import BatchCost, Scenario
from benchmarks.policies.placement.simulation import Result, Simulation

WORKERS = FRONTS = 2
BAR = 0.15
MEASURED = Scenario(
    cost=BatchCost(0.010, 0.0002, 16), fronts=FRONTS, workers=WORKERS, load=0.1, way_s=0.05e-3, jitter=0.0
)
"""Messages on one machine take as long as a bare front adds for a lone client, divided by their number."""
LOADS = (0.1, 0.5)
CONTROL = "one server"
DESIGNS: dict[str, type[Simulation]] = {CONTROL: OneQueue, "an owner and two fronts": OneOwner}
HEAD = f"""# The simulation of one queue beside real processes

Written by `python -m benchmarks.policies.placement.processes`, which says how it measures. A batch of n rows, of
{MEASURED.cost.max_size} at most, takes {MEASURED.cost}, for which the model sleeps, in one of {WORKERS} processes.
What is simulated is the same without noise; a message takes {MEASURED.way_s * 1e6:g} us. Times are in milliseconds.
"""


def ask(way: Way, rate: float, seconds: float, seed: int) -> tuple[Load, float]:
    """Return what an open loop saw, and the mean rows of a batch."""
    way.place(ONE)
    before = way.owner.batches()
    options = [
        "--job",
        "echo",
        "--path",
        way.fronts[0].server.path,
        "--rate",
        f"{rate:.1f}",
        "--seconds",
        f"{seconds:g}",
    ]
    ports = ["--port", *(str(front.port) for front in way.fronts)]
    told = python_helper("openloop", *options, "--seed", str(seed), *ports, cores=LOAD_CORES)
    load = msgspec.convert(told, Load)
    if load.errors:
        raise ServerFailed(f"{load.errors} requests failed")
    batches, rows = (now - then for now, then in zip(way.owner.batches(), before, strict=True))
    return load, rows / batches


def mean_ms(found: list[tuple[Load, float]]) -> float:
    return median(seen.mean_ms for seen, _ in found)


def cells(
    name: str, load: float, simulated: Result, found: list[tuple[Load, float]], control: tuple[Result, float]
) -> list[str]:
    """Return a row of the table; `control` is what one server should need and does."""
    measured = mean_ms(found), median(seen.p50_ms for seen, _ in found), median(seen.p99_ms for seen, _ in found)
    pairs = zip((simulated.mean_ms, simulated.p50_ms, simulated.p99_ms), measured, strict=True)
    batches = f"{simulated.batch:.2f} / {median(batch for _, batch in found):.2f}"
    ratio, beside = measured[0] / simulated.mean_ms, control[1] / control[0].mean_ms
    verdict = "PASS" if is_within(ratio) else "**FAIL**"
    if not is_within(ratio) and not is_within(beside) and name != CONTROL:
        verdict += ": so does the control"
    times = [f"{one:.2f} / {other:.2f}" for one, other in pairs]
    return [name, f"{load:g}", *times, batches, f"{ratio:.3f}", f"{ratio / beside:.3f}", verdict]


def is_within(ratio: float) -> bool:
    return abs(ratio - 1) <= BAR


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "RESULTS-placement-processes.md")
    options = parser.parse_args()
    need(taskset="util-linux")
    kind = Ours("benchmarks/jobs/sleeping.py", "process", "sleeping", ("--workers", str(WORKERS), "--idle", "go"))
    found: dict[tuple[str, float], list[tuple[Load, float]]] = {(name, load): [] for load in LOADS for name in DESIGNS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = up_alone(kind, "echo", stack), up(kind, "echo", UNIX, folder, stack, FRONTS)
        ways = dict(zip(DESIGNS, servers, strict=True))
        for seed in range(options.rounds):
            for (name, load), seen in found.items():
                rate = replace(MEASURED, load=load).rate
                seen.append(ask(ways[name], rate, options.seconds, seed))
    simulated = {(name, load): DESIGNS[name](replace(MEASURED, load=load)).run() for name, load in found}
    rows = [
        cells(name, load, simulated[name, load], seen, (simulated[CONTROL, load], mean_ms(found[CONTROL, load])))
        for (name, load), seen in found.items()
    ]
    head = [
        "",
        "load",
        "mean",
        "p50",
        "p99",
        "rows of a batch",
        "measured / simulated mean",
        "the same, by the control's",
    ]
    head += [f"within {BAR:.0%}"]
    facts = [
        ["date", time.strftime("%d %b %Y %H:%M")],
        *map(list, report.machine().items()),
        ["measured", f"{options.rounds} rounds of {options.seconds:g} s; medians"],
    ]
    text = [HEAD, report.table(["", ""], facts), "", "Simulated / measured:\n", report.table(head, rows), ""]
    options.output.write_text("\n".join(text))
    print(options.output.read_text())


if __name__ == "__main__":
    main()
