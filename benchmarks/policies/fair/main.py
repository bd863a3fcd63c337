# SPDX-License-Identifier: Apache-2.0
"""Simulate tenants that share a queue, measure what that costs, and write RESULTS-fair.md.

From the repository, `.venv/bin/python -m benchmarks.policies.fair.main` takes a few minutes on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.policies.fair.queue_cost import table
from benchmarks.policies.fair.simulation import MAX_SIZE, Load, Simulation

A, B = 0.010, 0.0002
"""Seconds of a batch, and of each of its rows."""
CAPACITY_1 = MAX_SIZE / (A + B * MAX_SIZE)
"""Rows a second that one slot can answer."""

HEADLINE = """\
# Tenants that share a queue

Written by `python -m benchmarks.policies.fair.main --seconds {seconds:g} --seed {seed}`. The simulation runs the queue
of the server (`forebay.batching.queue`); workers, clients and the clock are simulated. A batch of n rows takes 10 ms +
0.2 ms n (5 % noise), at most 64 rows; 4,096 rows may wait. The first fifth of the time is not counted. Rows with "no
tenants" show the same load on the queue without tenants.
"""


def rows_of(title: str, loads: list[Load], slots: int, seconds: float, seed: int) -> list[str]:
    """Return the rows of a table for one load, without and with tenants."""
    lines: list[str] = []
    for shared in (False, True):
        found = Simulation(loads, a=A, b=B, slots=slots, seconds=seconds, shared=shared, seed=seed).run()
        busy = sum(one.worker_s for one in found.values())
        total = sum(one.answered for one in found.values()) / (0.8 * seconds)
        for load in loads:
            one = found[load.tenant]
            offered = one.answered + one.refused
            queue = "tenants" if shared else "no tenants"
            lines.append(
                f"| {title} | {queue} | {load.tenant} | {load.rate:,.0f} | {load.weight:g}"
                f" | {one.worker_s / busy:.3f} | {one.refused:,} of {offered:,} | {one.percentile(0.5) * 1e3:.0f}"
                f" / {one.percentile(0.99) * 1e3:.0f} | {total:,.0f} |"
            )
    return lines


def page(seconds: float, seed: int, repeats: int) -> str:
    """Return the page."""
    lines = [HEADLINE.format(seconds=seconds, seed=seed), "## What each gets", ""]
    head = ["load, slots", "queue", "tenant", "rows/s offered", "weight", "share of worker time", "refused"]
    head += ["p50 / p99, ms", "rows/s answered, all"]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for slots in (1, 4):
        capacity = slots * CAPACITY_1
        flood = [Load("flood", 10 * capacity), Load("light", 0.05 * capacity)]
        lines += rows_of(f"flood, {slots}", flood, slots, seconds, seed)
        weights = [Load(str(weight), 2 * capacity, weight) for weight in (1, 2, 5)]
        lines += rows_of(f"weights, {slots}", weights, slots, seconds, seed)
        costs = [Load("cost 1", 2 * capacity), Load("cost 8", 2 * capacity, cost=8.0)]
        lines += rows_of(f"costs, {slots}", costs, slots, seconds, seed)
        calm = [Load("a", 0.3 * capacity), Load("b", 0.3 * capacity)]
        lines += rows_of(f"calm, {slots}", calm, slots, seconds, seed)
    lines += ["", "## What the queue costs", ""]
    lines += [
        "Time of a row in the queue (offer, its part of `take` and `answered`), and beside the same queue without"
    ]
    lines += [
        "tenants. Measured in one run on a machine that had other work; of all rounds the quickest fifth counts.",
        "At most 1.6x with two tenants and 4x with a thousand are aimed at.",
        "",
    ]
    lines += table(repeats)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=6)
    parsed = parser.parse_args()
    written = page(parsed.seconds, parsed.seed, parsed.repeats)
    (Path(__file__).parents[1] / "RESULTS-fair.md").write_text(written)
    print(written)


if __name__ == "__main__":
    main()
