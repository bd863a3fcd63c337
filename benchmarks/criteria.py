# SPDX-License-Identifier: Apache-2.0
"""What forebay has to reach, each line with the figure measured in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.records import OPEN, Records

OPEN_RATES = (300, 3000, 9000)
CROWDS = (1000, 4000)


@dataclass(frozen=True)
class Criterion:
    """A figure and the bar it is held against; `measured` is None when this run did not measure it."""

    text: str
    measured: float | None
    bar: float
    at_least: bool = True

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        passed = self.measured >= self.bar if self.at_least else self.measured <= self.bar
        return "pass" if passed else "**FAIL**"


def criteria(records: Records) -> list[Criterion]:
    return [*echo(records), *batchmodel(records), *open_loop(records), *iris(records), *memory_and_errors(records)]


def rate_ratio(records: Records, kind: str, other: str, job: str, connections: int) -> float | None:
    return records.ratio("rate", (f"forebay:{kind}", other), job, connections)


def echo(records: Records) -> Iterator[Criterion]:
    for kind, bar in (("inline", 2.3), ("thread", 2.3), ("process", 1.9)):
        measured = rate_ratio(records, kind, "mosec", "echo", 64)
        yield Criterion(f"echo, 64 connections, {kind}: rate / mosec", measured, bar)
    for kind in ("inline", "thread"):
        measured = rate_ratio(records, kind, f"raw:{kind}", "echo", 64)
        yield Criterion(f"echo, 64 connections, {kind}: rate / raw:{kind}", measured, 0.8)
    for kind in ("inline", "thread", "process"):
        measured = records.median("p50_ms", f"forebay:{kind}", "echo", 1)
        yield Criterion(f"echo, 1 connection, {kind}: p50 in ms", measured, 0.2, at_least=False)
    for connections in CROWDS:
        for kind in ("inline", "thread", "process"):
            measured = rate_ratio(records, kind, f"raw:{kind}", "echo", connections)
            yield Criterion(f"echo, {connections:,} connections, {kind}: rate / raw:{kind}", measured, 0.8)
            servers = (f"forebay:{kind}", f"raw:{kind}")
            measured = records.ratio("p99_ms", servers, "echo", connections)
            text = f"echo, {connections:,} connections, {kind}: p99 / raw:{kind}"
            yield Criterion(text, measured, 2.0, at_least=False)


def batchmodel(records: Records) -> Iterator[Criterion]:
    for kind in ("thread", "process"):
        for connections, bar in ((1, 1.9), (16, 1.8), (64, 1.15), (256, 1.15)):
            measured = rate_ratio(records, kind, "mosec", "batchmodel", connections)
            yield Criterion(f"batchmodel, {connections} connections, {kind}: rate / mosec", measured, bar)
        rate = records.median("rate", f"forebay:{kind}", "batchmodel", 64)
        limit = records.limit(kind)
        share = rate / limit if rate is not None and limit is not None else None
        yield Criterion(f"batchmodel, 64 connections, {kind}: rate / attainable limit", share, 0.95)


def open_loop(records: Records) -> Iterator[Criterion]:
    for kind in ("thread", "process"):
        servers = (f"forebay:{kind}", "mosec")
        for rate in OPEN_RATES:
            measured = records.ratio("mean_ms", servers, "batchmodel", rate, OPEN)
            yield Criterion(f"open loop, {rate:,}/s, {kind}: mean / mosec", measured, 0.65, at_least=False)
        measured = records.ratio("p99_ms", servers, "batchmodel", 9000, OPEN)
        yield Criterion(f"open loop, 9,000/s, {kind}: p99 / mosec", measured, 0.5, at_least=False)
    for rate in OPEN_RATES:
        measured = records.ratio("mean_ms", ("forebay:thread", "forebay:thread-go"), "batchmodel", rate, OPEN)
        yield Criterion(f"open loop, {rate:,}/s, thread: mean / idle=go", measured, 1.1, at_least=False)


def iris(records: Records) -> Iterator[Criterion]:
    for kind in ("inline", "thread"):
        yield Criterion(
            f"iris, 64 connections, {kind}: rate / mosec", rate_ratio(records, kind, "mosec", "iris", 64), 2.0
        )
    # On one core not even the bare process server reaches twice mosec's rate.
    share = records.ratio("rate", ("forebay:process", "raw:process"), "iris", 64)
    yield Criterion("iris, 64 connections, process: rate / raw:process", share, 0.75)


def memory_and_errors(records: Records) -> Iterator[Criterion]:
    mosec = records.median("pss_mib", "mosec", "echo", 64)
    for kind in ("inline", "thread", "process"):
        front = records.median("front_pss_mib", f"forebay:{kind}", "echo", 64)
        measured = front / mosec if front is not None and mosec is not None else None
        yield Criterion(f"echo, {kind}: PSS of the serving process / mosec (all)", measured, 0.6, at_least=False)
    ours = [record.errors for record in records.all if record.server.startswith("forebay:")]
    yield Criterion("errors in all runs of forebay", sum(ours) if ours else None, 0, at_least=False)
