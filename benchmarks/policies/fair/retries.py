# SPDX-License-Identifier: Apache-2.0
"""Simulate clients that come back when `Retry-After` says, and write RESULTS-retries.md.

From the repository, `.venv/bin/python -m benchmarks.policies.fair.retries` takes five to ten minutes on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.policies.fair.deadlines import BATCH_S
from benchmarks.policies.fair.main import CAPACITY_1, A, B
from benchmarks.policies.fair.simulation import Load, Simulation

WINDOW_S = 0.05
"""How long the windows are in which calls are counted, to find the most."""

HEADLINE = """\
# Clients that obey Retry-After

Written by `python -m benchmarks.policies.fair.retries --seconds {seconds:g} --seed {seed}`. The simulation runs the
queue of the server; workers, clients and the clock are simulated. A batch of n rows takes 10 ms + 0.2 ms n (5 % noise),
at most 64 rows. So many clients call that they would offer 3 times what the workers can carry, if each were answered at
once: a client pauses between two calls for the time named (mean of an exponential distribution). One that is refused
comes back when it is told to: "1 s" after one second, as before there were tickets, "tickets" as the queue says. A
client whose deadline has passed pauses, and calls again. Deadlines are 5 or 20 times a full batch. With several
tenants, of weights 1, 1, 1, 2 and 5, each has as many clients. The first fifth of the time is not counted. "Peak" is
the most calls in {window:g} ms beside the mean. At most 2.5 tries for an answer are aimed at.

"Beside a flood" are clients that would offer a twentieth of what the workers can carry; ten times as much as these can
carry comes from others, which obey nothing and are not in the figures. They are a tenant of their own where there are
two.

| load | slots | tenants | told | tries for an answer | answered beside what can be | peak | refused |
|---|---|---|---|---|---|---|---|
"""


class Case(NamedTuple):
    """What is simulated.

    Attributes:
        title: What the table calls it.
        capacity: Rows that may wait.
        pause_s: Of a client.
        times_s: Deadlines; none if empty.
        offered: What the clients would offer, beside what the workers can carry.
        flood: What others send in any case.
    """

    title: str
    capacity: int
    pause_s: float
    times_s: tuple[float, ...] = ()
    offered: float = 3.0
    flood: float = 0.0


CASES = (
    Case("4,096 may wait, pauses of 1 s", 4096, 1.0),
    Case("256 may wait, pauses of 0.1 s", 256, 0.1),
    Case("256 may wait, pauses of 1 s", 256, 1.0),
    Case("deadlines, pauses of 0.1 s", 4096, 0.1, (5 * BATCH_S, 20 * BATCH_S)),
    Case("deadlines, pauses of 1 s", 4096, 1.0, (5 * BATCH_S, 20 * BATCH_S)),
    Case("beside a flood, 4,096 may wait, pauses of 1 s", 4096, 1.0, offered=0.05, flood=10.0),
    Case("beside a flood, 256 may wait, pauses of 1 s", 256, 1.0, offered=0.05, flood=10.0),
)


def row(
    case: Case, slots: int, weights: tuple[float, ...], seconds: float, seed: int, *, shared: bool, told: bool
) -> str:
    """Return a row of the table."""
    capacity = slots * CAPACITY_1
    clients = int(case.offered * capacity * (case.pause_s + BATCH_S))
    loads = [
        Load(str(n), 0.0, weight, times_s=case.times_s, clients=clients // len(weights), pause_s=case.pause_s)
        for n, weight in enumerate(weights)
    ]
    if case.flood:
        loads.append(Load("flood", case.flood * capacity))
    tenants = len(loads) if shared else 1
    simulation = Simulation(
        loads,
        a=A,
        b=B,
        slots=slots,
        seconds=seconds,
        shared=shared,
        seed=seed,
        kept=bool(case.times_s),
        capacity=case.capacity,
        retry_s=None if told else 1.0,
    )
    outcomes = simulation.run()
    found = [outcomes[load.tenant] for load in loads if load.clients]
    answered = sum(one.in_time if case.times_s else one.answered for one in found)
    tries = sum(one.tries for one in found)
    windows: dict[int, int] = {}
    for at in simulation.tries:
        windows[int(at / WINDOW_S)] = windows.get(int(at / WINDOW_S), 0) + 1
    peak = max(windows.values()) / (tries * WINDOW_S / (0.8 * seconds))
    refused = sum(one.refused for one in found)
    return (
        f"| {case.title} | {slots} | {tenants} | {'tickets' if told else '1 s'} | {tries / answered:.2f}"
        f" | {answered / (min(case.offered, 1.0) * capacity * 0.8 * seconds):.3f} | {peak:.1f}x | {refused:,} |"
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    lines: list[str] = []
    for case in CASES:
        for slots in (1, 4):
            for shared in (False, True):
                weights = (1.0, 1.0, 1.0, 2.0, 5.0) if shared and not case.flood else (1.0,)
                for told in (False, True):
                    lines.append(row(case, slots, weights, parsed.seconds, parsed.seed, shared=shared, told=told))
                    print(lines[-1], flush=True)
    head = HEADLINE.format(seconds=parsed.seconds, seed=parsed.seed, window=WINDOW_S * 1000)
    (Path(__file__).parents[1] / "RESULTS-retries.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
