# SPDX-License-Identifier: Apache-2.0
"""Which step of a request leads to which, worked out from times alone: a recording does not know its graphs.

Theory of operation. A step can only wait for steps that were over when it arrived. Of those, the ones that count are
those after which no other began and ended in between: an interval order has exactly these as its direct predecessors.
Steps of one graph are compared with each other; the first of them follow from the graph's own step, which is open all
the while.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec


class Visit(msgspec.Struct, frozen=True):
    """A request at an endpoint.

    Attributes:
        request: The request's id, equal at all of its visits.
        endpoint: Where; nodes of a graph `g` are called `g/node`.
        arrived: When it was submitted there.
        done: When it was answered.
    """

    request: str
    endpoint: str
    arrived: float
    done: float

    @property
    def graph(self) -> str:
        """The endpoint whose request this is a step of; empty if it is none."""
        return self.endpoint.rpartition("/")[0]


def arrows(visits: Iterable[Visit]) -> Iterator[tuple[Visit, Visit]]:
    """Yield pairs of visits of which the first leads to the second."""
    at: dict[tuple[str, str], list[Visit]] = {}
    inside: dict[tuple[str, str], list[Visit]] = {}
    for visit in visits:
        if visit.request:
            at.setdefault((visit.request, visit.endpoint), []).append(visit)
            if visit.graph:
                inside.setdefault((visit.request, visit.graph), []).append(visit)
    for where, steps in inside.items():
        doors = at.get(where, [])
        for before, step in _direct(steps):
            if before:
                yield from ((one, step) for one in before)
            else:
                yield from ((door, step) for door in doors if door.arrived <= step.arrived <= door.done)


def _direct(steps: Sequence[Visit]) -> Iterator[tuple[Sequence[Visit], Visit]]:
    """Yield each step with those that directly precede it."""
    over = sorted(steps, key=lambda step: step.done)
    ends = [step.done for step in over]
    # The latest arrival among the steps that are over first, second and so on.
    latest = list(accumulate((step.arrived for step in over), max))
    for step in steps:
        count = bisect_right(ends, step.arrived)
        yield over[bisect_right(ends, latest[count - 1]) : count] if count else (), step
