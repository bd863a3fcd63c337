# SPDX-License-Identifier: Apache-2.0
"""Rows of the tables and what is written of them; nothing is simulated here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.policies.placement.offers import Offers
from benchmarks.policies.placement.own_workers import OwnWorkers
from benchmarks.policies.placement.owner import OneOwner, OneOwnerAhead, OneQueue
from benchmarks.policies.placement.scenario import BatchCost, Scenario
from benchmarks.policies.placement.simulation import Result, Simulation
from benchmarks.policies.placement.two_choices import TwoChoices

Simulate = Callable[[type[Simulation], Scenario], Result]

DESIGNS: tuple[type[Simulation], ...] = (OneQueue, OwnWorkers, Offers, OneOwner, TwoChoices)
MIDDLE = BatchCost(0.010, 0.0002, 64)
LONG = BatchCost(0.040, 0.0005, 32)
SHORT = BatchCost(0.002, 0.00002, 64)

FRAME_S, SEAT_S = 5e-6, 0.9e-6
"""CPU time of a bare owner for a frame and for a request, measured on one machine over a Unix socket."""
MOST_CPU = 0.6
"""How busy an owner may be; a model that needs more gets more owners."""
NODES = (10, 100, 1000)
MOST_LINKS = 10_000
"""Most links of B: beyond that its messages take hours to simulate."""


def scenarios(seed: int, requests: int) -> list[Scenario]:
    """Return the rows of the table of designs."""
    few = Scenario(cost=MIDDLE, fronts=4, workers=8, load=0.1, seed=seed, requests=requests)
    many = replace(few, cost=LONG, fronts=8, workers=64)
    return [
        *(replace(few, load=load) for load in (0.1, 0.5, 0.8, 0.95)),
        replace(few, load=0.6, burst=3.0),
        *(replace(many, load=load) for load in (0.5, 0.8, 0.95)),
        *(replace(few, cost=SHORT, load=load) for load in (0.1, 0.5, 0.8, 0.95)),
    ]


def fleets(seed: int, requests: int) -> list[Scenario]:
    """Return the rows of the table of nodes: each node has one front and one worker."""
    rows: list[Scenario] = []
    for nodes in NODES:
        for load in (0.5, 0.8):
            count = max(requests, 400 * nodes)
            scenario = Scenario(
                cost=LONG,
                fronts=nodes,
                workers=nodes,
                load=load,
                frame_s=FRAME_S,
                seat_s=SEAT_S,
                seed=seed,
                requests=count,
            )
            # A front's frame holds one request, and so do most frames with answers where there are many fronts.
            shards = math.ceil(scenario.rate * (2 * FRAME_S + SEAT_S) / MOST_CPU)
            rows.append(replace(scenario, shards=shards))
    return rows


def design_table(rows: Sequence[Scenario], simulate: Simulate) -> Iterator[str]:
    """Yield the lines of the table of designs: p50 / p99 in ms."""
    yield from _header("cost of a batch", "fronts", "workers", "load", *(design.name for design in DESIGNS))
    for row in rows:
        load = f"{row.load:g}" + (f", bursts of {row.burst:g}x" if row.burst > 1 else "")
        cells = [_times(simulate(design, row)) for design in DESIGNS]
        yield _line(str(row.cost), row.fronts, row.workers, load, *cells)


def ahead_table(rows: Sequence[Scenario], simulate: Simulate) -> Iterator[str]:
    """Yield the lines of the table of an owner that sends a batch ahead."""
    yield from _header("cost of a batch", "fronts", "workers", "load", "S", "C", "C, one batch ahead")
    for row in rows:
        cells = [_times(simulate(design, row)) for design in (OneQueue, OneOwner, OneOwnerAhead)]
        yield _line(str(row.cost), row.fronts, row.workers, f"{row.load:g}", *cells)


def fleet_table(rows: Sequence[Scenario], simulate: Simulate) -> Iterator[str]:
    """Yield the lines of the table of nodes: p50 / p99 in ms."""
    yield from _header("nodes", "load", "requests a second", *(design.name for design in DESIGNS), "owners in C")
    for row in rows:
        cells = [_times(simulate(design, row)) if _fits(design, row) else "-" for design in DESIGNS]
        yield _line(row.fronts, f"{row.load:g}", f"{row.rate:,.0f}", *cells, row.shards)


def traffic_table(rows: Sequence[Scenario], simulate: Simulate) -> Iterator[str]:
    """Yield the lines of the table of messages, and of what the owners do."""
    designs = (OwnWorkers, Offers, OneOwner, TwoChoices)
    messages = [f"{design.name}: messages a request" for design in designs]
    yield from _header("nodes", "load", *messages, "C: cores of the busiest owner", "C: links", "B and D: links")
    for row in rows:
        counts = [f"{simulate(design, row).messages:.2f}" if _fits(design, row) else "-" for design in designs]
        links = row.shards * row.fronts + row.workers
        cpu = f"{simulate(OneOwner, row).cpu:.2f}"
        yield _line(row.fronts, f"{row.load:g}", *counts, cpu, f"{links:,}", f"{row.fronts * row.workers:,}")


def _fits(design: type[Simulation], row: Scenario) -> bool:
    return design is not Offers or row.fronts * row.workers <= MOST_LINKS


def _times(result: Result) -> str:
    digits = 0 if result.p99_ms >= 10 else 1
    return f"{result.p50_ms:.1f} / {result.p99_ms:.{digits}f}"


def _header(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield _line(*("---" for _ in names))


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
