# SPDX-License-Identifier: Apache-2.0
"""Things that overlap in time, laid on lanes where they do not: viewers show a thread for each lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import TypeVar

T = TypeVar("T")


def lanes(items: Iterable[T], times: Callable[[T], tuple[float, float]]) -> Iterator[tuple[int, T]]:
    """Give each item the lowest lane on which nothing else happens meanwhile; yields in order of beginning.

    Args:
        times: Tells when one begins and when it is over.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    count = 0
    for item in sorted(items, key=times):
        begun, over = times(item)
        while busy and busy[0][0] <= begun:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, count)
            count += 1
        lane = heappop(free)
        heappush(busy, (over, lane))
        yield lane, item
