# SPDX-License-Identifier: Apache-2.0
"""Simulate five places for the queue of a model, and write the tables and the picture.

From the repository, `.venv/bin/python -m benchmarks.policies.placement.main` takes some minutes on one core;
`--requests 10000` is enough for a first look.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.policies.placement.picture import Line, picture
from benchmarks.policies.placement.scenario import Scenario
from benchmarks.policies.placement.simulation import Result, Simulation
from benchmarks.policies.placement.tables import (
    DESIGNS,
    MIDDLE,
    ahead_table,
    design_table,
    fleet_table,
    fleets,
    scenarios,
    traffic_table,
)

HERE = Path(__file__).parent
LOADS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

HEADLINE = """\
# One queue or many: a simulation

A simulation, not a measurement: no server runs in it. This page is written by `python -m
benchmarks.policies.placement.main --requests {requests} --seed {seed}`. What it means is in
[why a model has one queue](../../docs/explanation/one-queue.md).

Times are p50 / p99 in milliseconds, from the arrival of a request at its front to the arrival of its answer there.

| design | where requests wait |
| --- | --- |
| S | in one queue, without a network: what the others are compared with |
| A | at each front, which has an equal part of the workers for itself |
| B | at each front; all workers offer themselves to all fronts |
| C | in one queue at the model's owner, to which all fronts forward |
| D | at each worker; a front chooses the shorter of two queues, by what it last heard of them |

Assumptions:

- An open loop: requests arrive by a Poisson process, at all fronts alike. With bursts, the rate alternates between a
  base and three times that; each phase lasts a quarter of a second on average, and the load is that of the mean rate.
- A load of 1 is what all workers serve with full batches: of 64 rows, or of 32 where a batch costs 40 ms + 0.5 n.
- A batch takes what the table says, with uniform noise of 5 % to both sides. A free worker takes what waits, up to a
  full batch.
- A message takes 0.1 ms to another machine, and none is lost. In C every request crosses the network to its owner, also
  where a front and the owner could share a machine. Fronts and workers need no time of their own, and in the first two
  tables an owner does not either.
- All designs see the same arrivals: {requests:,} requests a cell, and in the last tables at least 400 for each node.
  The first 20 % and the last 5 % are not counted. With 1,000 nodes that is about a second of traffic.

S is no strict bound: a free worker takes what waits, and a message on its
way gives a batch time to fill. So single cells of other designs lie below those of S.
"""
AHEAD = """
## A batch ahead

After each batch a worker of C is idle for a round trip. With "one batch ahead" a busy worker gets its next batch as
soon as a full one waits: a full batch loses nothing by leaving early.
"""
FLEET = """
## Ten, a hundred and a thousand nodes

Each node has one front and one worker, for which a batch costs {cost}. An owner needs 5 us of its CPU for
each frame that it reads or writes and 0.9 us for each request, as a bare owner did in a measurement. A frame of a front
holds one request. That is the worst case: requests that arrive in one turn of the loop share a frame. A model that
would keep its owner's core busier than 0.6 gets several owners, each with an equal part of the workers; a front chooses
the owner with the shortest queue, by what it last heard. B is not simulated with 1,000 nodes: it has too many messages.
"""
TRAFFIC = """
Messages between machines, and links that are open:
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE.parent / "RESULTS-placement.md")
    parser.add_argument("--picture", type=Path, default=HERE.parents[2] / "docs/explanation/one-queue.svg")
    args = parser.parse_args()
    lines: list[str] = []
    for line in report(args.seed, args.requests):
        print(line, flush=True)
        lines.append(line)
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    args.picture.write_text(drawn(args.seed, args.requests), encoding="utf-8")


@cache
def simulate(design: type[Simulation], scenario: Scenario) -> Result:
    """Run a design; two tables may ask for one run."""
    return design(scenario).run()


def report(seed: int, requests: int) -> Iterator[str]:
    """Yield the lines of the page."""
    rows, nodes = scenarios(seed, requests), fleets(seed, requests)
    yield HEADLINE.format(seed=seed, requests=requests)
    yield from design_table(rows, simulate)
    yield AHEAD
    yield from ahead_table([row for row in rows if row.burst == 1 and row.workers == 8], simulate)
    yield FLEET.format(cost=nodes[0].cost)
    yield from fleet_table(nodes, simulate)
    yield TRAFFIC
    yield from traffic_table(nodes, simulate)


def drawn(seed: int, requests: int) -> str:
    """Draw p50 and p99 over the load."""
    base = Scenario(cost=MIDDLE, fronts=4, workers=8, load=LOADS[0], seed=seed, requests=requests)
    medians: dict[str, Line] = {}
    tails: dict[str, Line] = {}
    for design in DESIGNS:
        results = [simulate(design, replace(base, load=load)) for load in LOADS]
        medians[design.name] = [(load, one.p50_ms) for load, one in zip(LOADS, results, strict=True)]
        tails[design.name] = [(load, one.p99_ms) for load, one in zip(LOADS, results, strict=True)]
    title = f"Latency of five designs: batches of {base.cost}, {base.fronts} fronts, {base.workers} workers"
    return picture(title, {"p50, ms": medians, "p99, ms": tails})


if __name__ == "__main__":
    main()
