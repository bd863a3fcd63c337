# SPDX-License-Identifier: Apache-2.0
"""What is asked of forebay beside Ray Serve, and whether it holds.

Every ratio is worked out in each round from what was measured within seconds, and its median over the rounds counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from benchmarks.front_rows import middle_half

SERVE, CLUSTER, FRONT, BARE = "Ray Serve", "forebay on the cluster", "forebay without Ray", "bare"
SERVERS = (SERVE, CLUSTER, FRONT, BARE)
AS_IT_COMES, ADVISED = "as it comes", "advised"
ECHO, BATCHES = "echo", "batchmodel"
LOADS = ((ECHO, 1), (ECHO, 64), (BATCHES, 64))

Load = tuple[str, int]
"""A job, and how many connections ask for it."""


class Piece(msgspec.Struct):
    """What one load told of a server.

    Attributes:
        rate: Requests a second.
        cpu_us: CPU time of all its processes for a request.
        errors: Requests that failed.
    """

    rate: float
    p50_ms: float
    cpu_us: float
    errors: int


class Round(msgspec.Struct):
    """What was measured within seconds, while Ray Serve had some settings."""

    settings: str
    pieces: dict[tuple[Load, str], Piece]


@dataclass(frozen=True)
class Row:
    """A ratio of forebay's figure to Ray Serve's, and what is asked of it.

    Attributes:
        field: Of a `Piece`.
        is_least: Whether more is better.
    """

    text: str
    load: Load
    settings: str
    field: str
    bar: float
    is_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.bar if self.is_least else value <= self.bar

    def figures(self, server: str, rounds: Sequence[Round]) -> list[float]:
        found = [each.pieces[self.load, server] for each in rounds if each.settings == self.settings]
        return [getattr(piece, self.field) for piece in found]

    def ratios(self, server: str, rounds: Sequence[Round]) -> list[float]:
        pairs = zip(self.figures(server, rounds), self.figures(SERVE, rounds), strict=True)
        return [figure / its for figure, its in pairs]

    def cells(self, rounds: Sequence[Round]) -> list[str]:
        """Return the row of the table."""
        asked = f"{'>=' if self.is_least else '<='} {shown(self.bar)}"
        ours = self.ratios(CLUSTER, rounds)
        if not ours:
            return [self.text, self.settings, "", "", "", "", "", "", asked, "not measured"]
        figures = [shown(median(self.figures(server, rounds))) for server in (SERVE, CLUSTER)]
        ratios = [shown(median(self.ratios(server, rounds))) for server in (CLUSTER, FRONT, BARE)]
        quartiles = " to ".join(map(shown, middle_half(ours)))
        verdict = self.verdict(ours, *(self.ratios(server, rounds) for server in (FRONT, BARE)))
        return [self.text, self.settings, *figures, ratios[0], quartiles, *ratios[1:], asked, verdict]

    def verdict(self, ours: Sequence[float], without_ray: Sequence[float], bare: Sequence[float]) -> str:
        if self.holds(median(ours)):
            return "PASS"
        notes = [] if self.holds(median(bare)) else ["the bare one misses it as well"]
        notes += ["holds without Ray"] if self.holds(median(without_ray)) else []
        notes += ["within its noise"] if any(map(self.holds, middle_half(ours))) else []
        return ": ".join(["**FAIL**", ", ".join(notes)]) if notes else "**FAIL**"


HEAD = ("measure", "Ray Serve", "its figure", "forebay's", "ratio", "quartiles", "without Ray", "bare", "asked", "")
_, CROWD, BATCHED = LOADS
ROWS = (
    Row("echo, 64 connections: requests a second", CROWD, AS_IT_COMES, "rate", 100, is_least=True),
    Row("echo, 64 connections: requests a second", CROWD, ADVISED, "rate", 8, is_least=True),
    Row("batchmodel, 64 connections: requests a second", BATCHED, AS_IT_COMES, "rate", 30, is_least=True),
    Row("batchmodel, 64 connections: requests a second", BATCHED, ADVISED, "rate", 2.5, is_least=True),
    Row("echo, 64 connections: CPU us of a request", CROWD, ADVISED, "cpu_us", 1 / 15),
    Row("echo, 1 connection: p50, ms", LOADS[0], AS_IT_COMES, "p50_ms", 1 / 20),
    Row("echo, 1 connection: p50, ms", LOADS[0], ADVISED, "p50_ms", 0.9),
)

DETAIL_HEAD = ("Ray Serve", "load", "connections", "server", "requests/s", "p50 ms", "CPU us", "errors")


def details(rounds: Sequence[Round]) -> list[list[str]]:
    """Return what was measured of each server: medians over the rounds, and the sum of the errors."""
    return [
        [settings, job, str(connections), server, *middles(pieces)]
        for settings in (AS_IT_COMES, ADVISED)
        for job, connections in LOADS
        for server in SERVERS
        if (pieces := [each.pieces[(job, connections), server] for each in rounds if each.settings == settings])
    ]


def middles(pieces: Sequence[Piece]) -> list[str]:
    fields = ("rate", "p50_ms", "cpu_us")
    return [*(shown(median(getattr(piece, field) for piece in pieces)) for field in fields), errors(pieces)]


def errors(pieces: Sequence[Piece]) -> str:
    return str(sum(piece.errors for piece in pieces))


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
