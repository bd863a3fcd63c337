# SPDX-License-Identifier: Apache-2.0
"""What is asked of the way through a front, and whether it holds, of ours and of the bare one.

Every figure is worked out in each round from what was measured within seconds, and its median over the rounds counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.front_loads import Piece
from benchmarks.front_servers import BARE, ONE, OURS, TCP, TLS, TWO, UNIX

ALONE, TWO_FRONTS = "no front", "two fronts"
LONE, CROWD, MANY, LARGE, BATCHES = "one client", "64 connections", "256 connections", "600 KB", "batchmodel"

Cell = tuple[str, str, str, str]
"""Kind of servers, way, load, and where the servers run."""
Round = dict[Cell, Piece]
Figure = Callable[[Callable[[str, str, str], Piece], str], float]
"""Works out a figure from the pieces of a kind (way, load, where) in a round, for servers that run somewhere."""


@dataclass(frozen=True)
class Row:
    """A figure and what is asked of it.

    Attributes:
        loads: What must have been measured for it.
        is_least: Whether more is better.
        is_against_bare: Whether ours is divided by the bare one's, whose own figure is then nothing to hold to it.
    """

    text: str
    load: str
    where: str
    bar: float
    figure: Figure
    is_least: bool = False
    is_against_bare: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.bar if self.is_least else value <= self.bar

    def values(self, kind: str, rounds: Sequence[Round]) -> list[float]:
        """Return the figure of each round in which all of it was measured."""
        found: list[float] = []
        for each in rounds:
            try:
                found.append(self.figure(lambda way, load, where, each=each: each[kind, way, load, where], self.where))
            except KeyError:
                continue
        return found

    def cells(self, rounds: Sequence[Round]) -> list[str]:
        """Return the row of the table."""
        bare, ours = (self.values(kind, rounds) for kind in (BARE, OURS))
        if self.is_against_bare:
            ours = [mine / its for mine, its in zip(ours, bare, strict=False)]
        asked = f"{'>=' if self.is_least else '<='} {self.bar:g}"
        return [self.text, self.where, shown(bare), shown(ours), spread(ours), asked, self.verdict(bare, ours)]

    def verdict(self, bare: Sequence[float], ours: Sequence[float]) -> str:
        if not ours:
            return "not measured"
        if self.holds(median(ours)):
            return "PASS"
        notes = ["the bare one misses it as well"] if not self.is_against_bare and not self.holds(median(bare)) else []
        notes += ["within its noise"] if any(map(self.holds, middle_half(ours))) else []
        return ": ".join(["**FAIL**", ", ".join(notes)]) if notes else "**FAIL**"


def added(link: str) -> Figure:
    """Return the figure of what a front adds to the p50 of a client that asks alone, in ms."""
    return lambda piece, where: piece(link, LONE, where).p50_ms - piece(ALONE, LONE, ONE).p50_ms


def owner_share(load: str) -> Figure:
    return lambda piece, where: piece(UNIX, load, where).owner_us / piece(ALONE, load, ONE).all_us


def total(way: str, load: str) -> Figure:
    return lambda piece, where: piece(way, load, where).all_us / piece(ALONE, load, ONE).all_us


def rate_share(link: str) -> Figure:
    return lambda piece, where: piece(link, LARGE, where).rate / piece(ALONE, LARGE, ONE).rate


def batch_rate(piece: Callable[[str, str, str], Piece], where: str) -> float:
    return piece(UNIX, BATCHES, where).rate


def batch_share(piece: Callable[[str, str, str], Piece], where: str) -> float:
    return piece(UNIX, BATCHES, where).batch / piece(ALONE, BATCHES, ONE).batch


def rows() -> list[Row]:
    """Return all that is asked."""
    made: list[Row] = []

    def add(
        text: str, load: str, figure: Figure, one: float | None, two: float | None, *, is_least: bool = False
    ) -> None:
        made.extend(
            Row(text, load, where, bar, figure, is_least=is_least)
            for where, bar in ((ONE, one), (TWO, two))
            if bar is not None
        )

    add("p50 that a front adds for a lone client, ms", LONE, added(UNIX), 0.10, 0.12)
    add("the same over TCP and TLS, ms", LONE, added(TLS), 0.15, 0.15)
    add(
        "CPU of the owner for an echo through a front / for one of its own, 64 connections",
        CROWD,
        owner_share(CROWD),
        0.5,
        0.55,
    )
    add("the same, 256 connections", MANY, owner_share(MANY), 0.4, None)
    add("CPU of all servers / of one alone, one front, 64 connections", CROWD, total(UNIX, CROWD), 1.4, 1.7)
    add("the same, two fronts, 64 connections", CROWD, total(TWO_FRONTS, CROWD), 1.6, 2.0)
    add("the same, two fronts, 256 connections", MANY, total(TWO_FRONTS, MANY), 1.4, None)
    for link, one, two in ((UNIX, 0.75, 0.5), (TCP, 0.25, 0.25), (TLS, 0.1, 0.1)):
        text = f"600 KB each way, 8 connections, {link}: rate / rate of one alone"
        add(text, LARGE, rate_share(link), one, two, is_least=True)
    for where in (ONE, TWO):
        text = "batchmodel, 64 connections, one front: rate / rate of the bare ones"
        made.append(Row(text, BATCHES, where, 0.9, batch_rate, is_least=True, is_against_bare=True))
    add("the same: mean batch / mean batch of one alone", BATCHES, batch_share, 0.95, 0.95, is_least=True)
    return made


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    value = median(values)
    return f"{value:,.0f}" if value > 100 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    return " to ".join(shown([value]) for value in middle_half(values)) if values else ""
