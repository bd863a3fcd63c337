# SPDX-License-Identifier: Apache-2.0
"""Predicts when a request will have passed the nodes of a graph, by what waits and runs at each of them.

Theory of operation. Each node's queue says when an entry that came now would be answered, and how many rows leave
before it (`batching/deadlines.py`). The nodes are gone through in the order of the streams. At each of them the request
ends when the node has worked off what is ahead there, and not before the request has come, and run. What is ahead at a
node counts as ahead at the nodes behind it as well, where it has yet to arrive. A node that runs more than once for a
request, or not for each, counts as often as it did lately.

A node of which nothing is known takes no time, so that nothing is refused on its account. Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from forebay.batching.row_costs import UNKNOWN_ROW_S

if TYPE_CHECKING:
    from forebay.batching.deadlines import Deadlines
    from forebay.graph.plan import Plan, PlannedNode
    from forebay.types.batch import Entry

WEIGHT: Final = 0.1
"""Of the last request, in how often a node runs for one."""


class Forecast:
    """What is known of the time that requests need in a graph."""

    def __init__(self, plan: Plan, deadlines: Mapping[PlannedNode, Deadlines | None]) -> None:
        """Begin without having seen a request.

        Args:
            plan: The graph; no node fires twice for a request.
            deadlines: What each node's queue predicts with; None where it has nothing.
        """
        self._deadlines = deadlines
        self._before = _in_order(plan)
        self._behind: dict[PlannedNode, list[PlannedNode]] = {node: [] for node in self._before}
        for node, before in self._before.items():
            for one in before:
                self._behind[one].append(node)
        last = [node for node in self._before if any(stream.results for stream in node.outputs.values())]
        self._last = last if plan.ends_early else list(self._before)
        self._rows: dict[PlannedNode, float] = {}

    def ran(self, rows: Mapping[PlannedNode, int]) -> None:
        """Learn how many rows nodes have run for a request that was answered."""
        for node in self._before:
            found = rows.get(node, 0)
            known = self._rows.get(node, found)
            self._rows[node] = known + WEIGHT * (found - known)

    def end(self, entry: Entry, start: float, before: int, now: float) -> float:
        """Return when a request would have passed the graph that enters it at `start`, after so many that wait."""
        ends: dict[PlannedNode, tuple[float, float, float]] = {}
        """When the request leaves each node, how many others leave before it, and when the first of them."""
        for node, writers in self._before.items():
            found = [ends[one] for one in writers] or [(start, float(before), now)]
            begin = (min if node.spec.policy == "first" else max)(one[0] for one in found)
            requests, first = max(one[1] for one in found), max(one[2] for one in found)
            end, rows, deadlines = begin, self._rows.get(node, 1.0), self._deadlines[node]
            if deadlines is not None and (least_s := self._least_s(node)):
                size = max(round(rows), 1)
                worked_off, before_it, first = deadlines.expect(entry, size, int(requests * rows), first, now)
                end += min(rows, 1.0) * (max(worked_off, begin + least_s) - begin)
                requests += before_it / max(rows, 1.0)
            ends[node] = end, requests, first
        return max((ends[node][0] for node in self._last), default=start)

    def least_s(self, after: PlannedNode | None = None) -> float:
        """Return the seconds that the nodes behind one take at least; of all, without one."""
        longest: dict[PlannedNode, float] = {}
        for node in reversed(self._before):
            behind_s = max((longest[one] for one in self._behind[node]), default=0.0)
            if node is after:
                return behind_s
            longest[node] = behind_s + min(self._rows.get(node, 1.0), 1.0) * self._least_s(node)
        return max(longest.values(), default=0.0)

    @property
    def row_s(self) -> float:
        """Seconds in which the slowest node answers what a request brings."""
        found = ((one, self._rows.get(node, 1.0)) for node, one in self._deadlines.items() if one is not None)
        return max((one.row_s * rows for one, rows in found), default=0.0) or UNKNOWN_ROW_S

    def _least_s(self, node: PlannedNode) -> float:
        """Return the seconds in which a node answers what a request brings, with nothing ahead; 0 if unknown."""
        deadlines = self._deadlines[node]
        return 0.0 if deadlines is None else deadlines.usual_s(max(round(self._rows.get(node, 1.0)), 1))


def _in_order(plan: Plan) -> dict[PlannedNode, list[PlannedNode]]:
    """Return each node with those that it reads from, which come before it."""
    writers = {stream.name: node for node in plan.nodes for stream in node.outputs.values()}
    ordered: dict[PlannedNode, list[PlannedNode]] = {}
    todo = {
        node: [writers[stream.name] for stream in node.ports.values() if stream.name in writers] for node in plan.nodes
    }
    while todo:
        ready = [node for node, before in todo.items() if not any(one in todo for one in before)]
        ordered |= {node: todo.pop(node) for node in ready}
    return ordered
