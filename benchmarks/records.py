# SPDX-License-Identifier: Apache-2.0
"""One record a measurement, and the medians over rounds that tables and criteria are made of."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

CLOSED, OPEN = "closed", "open"
FOREIGN_LIMIT = 0.15
STALL_LIMIT_MS = 10.0


class Record(msgspec.Struct, kw_only=True):
    """One server under one load in one round.

    Attributes:
        load: Connections in a closed loop, requests a second in an open one.
        rate: Answers a second.
        cpu_us: CPU time of all the server's processes for one answer.
        batch: Mean rows a batch.
        pss_mib: Memory of all its processes; `front_pss_mib` of the one that holds the port.
        stall_ms: Longest time the load generator itself could not work.
        foreign: Cores that processes other than the server and the load generator took.
    """

    server: str
    job: str
    loop: str
    load: int
    rate: float
    p50_ms: float
    p99_ms: float
    mean_ms: float
    errors: int
    cpu_us: float
    batch: float
    pss_mib: float
    front_pss_mib: float
    start_s: float
    stall_ms: float
    foreign: float

    @property
    def is_disturbed(self) -> bool:
        return self.foreign > FOREIGN_LIMIT or self.stall_ms > STALL_LIMIT_MS


class Records:
    """All measurements of one run of the benchmarks."""

    def __init__(self) -> None:
        self.all: list[Record] = []
        self.curves: list[dict[str, float]] = []
        self.failures: list[str] = []

    def of(self, server: str, job: str, loop: str, load: int) -> list[Record]:
        wanted = (server, job, loop, load)
        return [record for record in self.all if (record.server, record.job, record.loop, record.load) == wanted]

    def median(self, field: str, server: str, job: str, load: int, loop: str = CLOSED) -> float | None:
        values = [getattr(record, field) for record in self.of(server, job, loop, load)]
        return median(values) if values else None

    def ratio(self, field: str, servers: tuple[str, str], job: str, load: int, loop: str = CLOSED) -> float | None:
        """Divide the median of the first server by that of the second."""
        first, second = (self.median(field, server, job, load, loop) for server in servers)
        return first / second if first is not None and second else None

    def curve(self) -> dict[int, float]:
        """Return the batchmodel job's milliseconds by rows, medians over rounds."""
        return {int(rows): median(curve[rows] for curve in self.curves) for rows in self.curves[0]}

    def limit(self, kind: str) -> float | None:
        """Return the batchmodel rate one core can reach with forebay's serving: full batches and no waiting.

        `raw:whole` knows that there are 64 clients and runs whole batches only. What it needs for a request, less
        its serving (what `raw:inline` needs to echo), is the function where it is served, with a server's caches.
        """
        rate = self.median("rate", "raw:whole", "batchmodel", 64)
        bare_us = self.median("cpu_us", "raw:inline", "echo", 64)
        serving_us = self.median("cpu_us", f"forebay:{kind}", "echo", 64)
        if rate is None or bare_us is None or serving_us is None:
            return None
        return 1e6 / (1e6 / rate - bare_us + serving_us)


def line(curve: dict[int, float]) -> tuple[float, float]:
    """Fit T = a + b n: milliseconds a batch, microseconds a row."""
    rows_mean = sum(curve) / len(curve)
    time_mean = sum(curve.values()) / len(curve)
    slope = sum((n - rows_mean) * (t - time_mean) for n, t in curve.items()) / sum((n - rows_mean) ** 2 for n in curve)
    return time_mean - slope * rows_mean, 1e3 * slope


def spread(values: Iterable[float]) -> float:
    values = list(values)
    return (max(values) - min(values)) / (median(values) or 1.0)  # a server may not answer at all
