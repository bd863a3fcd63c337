# SPDX-License-Identifier: Apache-2.0
"""Learn what rows cost, where those of one flow take longer than those of another.

Theory of operation. A batch takes some seconds of its own, and some for each row, which depend on the flow. Each of
these figures is kept with its doubt, the variance of its error. How far a batch is off is put down to the figures in
proportion to their doubts, which then fall: a Kalman filter without covariances. Many batches of the same mixture would
make all of its figures certain, though they only show their sum; so a figure gains certainty only as far as a batch
consists of it.

A batch of one flow shows most. Until it has had some, a batch that a flow can fill is left to it (`fair_lines.py`), and
now and then after that, since costs that always come together cannot be told apart.

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, Protocol

NOISE: Final = 0.05
"""Usual difference between the time of a batch and what is expected, as a part of that."""

FIXED: Final = 0.5
"""Usual error of the first guess at the seconds that a batch takes beside its rows, as a part of them."""

FIRST: Final = 1.5
"""Usual difference between a row of a new flow and the mean, as a part of the mean."""

DRIFT: Final = 0.005
"""Usual change of a figure from one batch to the next, as a part of it."""

SURPRISE: Final = 3.0
"""So many standard deviations count at most: a pause of the machine is no property of the rows."""

DISTRUST: Final = 4.0
"""Factor of the doubts after a batch that was off by more: if it was no exception, the next batches count more."""

FOLLOW: Final = 0.05
"""Weight of a batch in the mean."""

LEAST: Final = 1 / 64
"""Least cost of a row beside the mean."""

LEAST_S: Final = 1e-9
"""The same in seconds; batches that take less show nothing."""

SHOWN: Final = 2.5
"""Batches that a flow has alone until what it costs counts as known."""

FADE: Final = 0.99
"""Weight that these keep with each batch in which the flow has rows."""

LOOKS: Final = 8
"""So many flows of a batch are looked at on average: a batch of more says little of each, and counts now and then."""

UNKNOWN_ROW_S: Final = 0.001
"""What a row takes while nothing is known of the model."""


class Figure:
    """Seconds that are known up to a doubt, a variance.

    Attributes:
        shown: Batches that consisted of rows of this flow alone; older ones count less.
    """

    __slots__ = ("doubt", "seconds", "shown")

    def __init__(self, seconds: float, error: float) -> None:
        """Begin with a guess and its usual error, as a part of it."""
        self.seconds = seconds
        self.doubt = (error * seconds) ** 2
        self.shown = 0.0


class Payer(Protocol):
    """A flow, which knows what a row of it takes."""

    row: Figure


class Portion(Protocol):
    """Rows of a flow in a batch."""

    rows: int


class RowCosts:
    """The time of a batch by the flows of its rows.

    Attributes:
        fixed: What a batch takes beside its rows.
        mean: What a row of any flow takes; flows begin with it.
    """

    def __init__(self) -> None:
        """Begin without having seen a batch."""
        self.fixed = Figure(0.0, 0.0)
        self.mean = Figure(UNKNOWN_ROW_S, 0.0)
        self._looks = 0
        """Flows that may be looked at."""

    def learn(self, portions: Collection[tuple[Payer, Portion]], rows: int, seconds: float) -> None:
        """Take one executed batch into account."""
        self._looks += LOOKS
        if self._looks < len(portions) or seconds < LEAST_S:
            return
        self._looks = 0
        fixed, mean = self.fixed, self.mean
        if not fixed.doubt:
            fixed = self.fixed = Figure(seconds / 2, FIXED)
            mean.seconds = seconds / 2 / rows
        fixed.doubt += (DRIFT * fixed.seconds) ** 2
        rows_s, doubt = 0.0, fixed.doubt
        figures: list[tuple[Figure, int]] = []
        for flow, portion in portions:
            row, count = flow.row, portion.rows
            if row is mean:
                row = flow.row = Figure(mean.seconds, FIRST)
            figures.append((row, count))
            row.doubt += (DRIFT * row.seconds) ** 2
            rows_s += count * row.seconds
            doubt += count * count * row.doubt
        expected_s = fixed.seconds + rows_s
        doubt += (NOISE * max(expected_s, seconds)) ** 2
        off_s, most_s = seconds - expected_s, SURPRISE * math.sqrt(doubt)
        trust = 1.0
        if abs(off_s) > most_s:
            off_s, trust = math.copysign(most_s, off_s), DISTRUST
        least_s = max(LEAST * mean.seconds, LEAST_S)
        now_s = 0.0
        for row, count in figures:
            gain = count * row.doubt / doubt
            row.doubt *= (1.0 - gain * count * count * row.seconds / rows_s) * trust
            row.seconds = max(row.seconds + gain * off_s, least_s)
            row.shown = min(FADE * row.shown / trust + (count == rows), SHOWN + 1.0)
            now_s += count * row.seconds
        mean.seconds += FOLLOW * (now_s / rows - mean.seconds)
        gain = fixed.doubt / doubt
        fixed.doubt *= (1.0 - gain * fixed.seconds / expected_s) * trust
        fixed.seconds = max(fixed.seconds + gain * off_s, 0.0)
