# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a graph did, in sums: how many requests, in how many runs, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self

import msgspec

from forebay.observe.traces.timeline import BatchListener, BatchRecord
from forebay.observe.traces.trace_format import PRE, cost_of

if TYPE_CHECKING:
    from forebay.types.batch import Phase


class NodeTotals(msgspec.Struct, array_like=True):
    """What one node did since some moment.

    Attributes:
        requests: Requests it ran.
        runs: Runs of its hooks: batches, or requests that only came together.
        waited_s: Time its requests waited for a worker.
        pre_s: Time before its model.
        process_s: Time in its model.
        post_s: Time after it.
        out_s: Time its results were on the way back.
        busy_s: Time its workers ran something.
    """

    requests: int = 0
    runs: int = 0
    waited_s: float = 0.0
    pre_s: float = 0.0
    process_s: float = 0.0
    post_s: float = 0.0
    out_s: float = 0.0
    busy_s: float = 0.0

    @classmethod
    def of(cls, record: BatchRecord) -> Self:
        """Return what a node did in one batch."""
        cost = cost_of(record)
        return cls(
            requests=len(record.steps),
            runs=max(len(runs_of(record.phases)), 1),
            waited_s=sum(max(record.started - step.arrived, 0.0) for step in record.steps),
            pre_s=cost.pre_s,
            process_s=cost.process_s,
            post_s=cost.post_s,
            out_s=max(record.done - record.ended, 0.0),
            busy_s=record.ended - record.started,
        )

    def add(self, more: NodeTotals) -> None:
        """Add what it did besides."""
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(more, field))


class NodeListener(BatchListener):
    """Hands on what the nodes of a graph do; as a context manager, on the loop, it listens to the timeline."""

    def __init__(self, graph: str, nodes: Iterable[str], ran: Callable[[str, NodeTotals], object]) -> None:
        """Describe the graph.

        Args:
            graph: Its name; the endpoints of its nodes are named `graph/node`.
            ran: Called with a node and what it did, for each batch.
        """
        self._names = {f"{graph}/{node}": node for node in nodes}
        self._ran = ran

    def hear(self, record: BatchRecord) -> None:
        """Hand on what a node did."""
        node = self._names.get(record.endpoint.name)
        if node is not None and record.started:
            self._ran(node, NodeTotals.of(record))


def runs_of(phases: Iterable[Phase]) -> list[list[Phase]]:
    """Return the phases of each run of a node's hooks.

    A batch is one run; requests that came together only to share the way to the worker are one each. A new run begins
    where what comes before the model follows something later.
    """
    runs: list[list[Phase]] = []
    for phase in phases:
        if not runs or (phase[1] in PRE and runs[-1][-1][1] not in PRE):
            runs.append([])
        runs[-1].append(phase)
    return runs
