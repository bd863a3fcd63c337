# SPDX-License-Identifier: Apache-2.0
"""What a batch of each size costs: a straight line, corrected where measurements show a bend.

Few models are a + b n seconds all the way: an accelerator rounds up to its tiles, a cache overflows, memory is
copied twice from some size on. So beside the line there is a measured time for each of some twenty sizes, and what
lies between two of them is interpolated. A time that was not measured lately is forgotten, so that one bad moment
never rules a size out for good.

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from forebay.batching.gather import Curve

FORGET: Final = 0.999
"""Weight that the time of a size keeps with each batch of any other size; one measured twice is unknown after 1400."""

LINE: Final = 0.5
"""Weight of the line, in measurements."""

MOST: Final = 32.0
"""Weight at which a time stops to gain any, in measurements: it then follows as an average of about so many."""

KNOWN: Final = 0.5
"""Weight from which on a time counts as measured."""

OUTLIER: Final = 2.0
"""How far above what is known one measurement counts at most: a pause of the machine is no property of a size."""


def steps(max_size: int) -> list[int]:
    """Return the sizes that are told apart: every one up to 8, then four to each doubling, and the largest.

    Example:
        >>> steps(20)
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    """
    found: list[int] = []
    size = 1
    while size < max_size:
        found.append(size)
        size += max(1, 1 << size.bit_length() >> 3)
    return [*found, max_size]


class Cost:
    """The time of a batch by its size.

    Attributes:
        sizes: The sizes that are told apart, ascending.
        curve: The line.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.curve = Curve()
        self._seconds = [0.0] * len(sizes)
        self._weights = [0.0] * len(sizes)
        self._seen_at = [0] * len(sizes)
        self._batches = 0

    def learn(self, rows: int, seconds: float) -> None:
        """Take one executed batch into account."""
        curve = self.curve
        place = bisect_left(self.sizes, rows)
        if self._batches:
            seconds = min(seconds, OUTLIER * max(self._time(place), curve.a + curve.b * rows))
        self._batches += 1
        curve.learn(rows, seconds)
        seconds += curve.b * (self.sizes[place] - rows)
        weight = self.weight(place) + 1.0
        self._seconds[place] += (seconds - self._seconds[place]) / weight
        self._weights[place] = min(weight, MOST)
        self._seen_at[place] = self._batches

    def times(self) -> list[float]:
        """Return the seconds a batch of each of `sizes` takes; what lies between measured sizes is interpolated."""
        sizes = self.sizes
        times = [self._time(place) for place in range(len(sizes))]
        before: int | None = None
        for place in range(len(sizes)):
            if self.weight(place) < KNOWN:
                continue
            if before is not None and place - before > 1:
                slope = (times[place] - times[before]) / (sizes[place] - sizes[before])
                for between in range(before + 1, place):
                    times[between] = times[before] + slope * (sizes[between] - sizes[before])
            before = place
        return times

    def weight(self, place: int) -> float:
        """Return the weight of what is known about the size at this index, as a number of recent measurements."""
        weight = self._weights[place]
        return weight * FORGET ** (self._batches - self._seen_at[place]) if weight else 0.0

    def _time(self, place: int) -> float:
        weight = self.weight(place)
        line = self.curve.a + self.curve.b * self.sizes[place]
        return (weight * self._seconds[place] + LINE * line) / (weight + LINE)
