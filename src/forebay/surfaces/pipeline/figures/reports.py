# SPDX-License-Identifier: Apache-2.0
"""What a process that hosts a whole graph tells the server of it: with `build_dag_each_worker`.

Theory of operation. Only the server writes the log files and the tracer's, and serves the counters. What a process has
to report is kept until its next answer and travels with it, one report at a time. A report says what happened since the
last one, so sums only rise, whatever becomes of the process. What a process had not reported when it died is lost.
Lines of the log wait for an answer only while one is under way; at other times they go where the process itself writes.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.observe.logs import log_relay
from forebay.observe.logs.log_relay import KEPT, LogRelay
from forebay.observe.metrics.node_totals import NodeTotals
from forebay.surfaces.pipeline import logs
from forebay.types.first_use import known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.figures.tracer import Tracer


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What happened in a process since its last report.

    Attributes:
        pid: The process.
        lines: Records of the log, as JSON of their fields.
        calls: The number of each request that ended, its time in seconds, and whether it ended without an error.
        ops: What the ops did.
        waiting: Requests before each op now.
    """

    pid: int
    lines: Sequence[bytes]
    calls: Sequence[tuple[int, float, bool]]
    ops: Mapping[str, NodeTotals]
    waiting: Sequence[int]


class Reporter:
    """Keeps what is to be told, in the process with the graph; as a context manager, on the loop of the graph."""

    def __init__(self, nodes: Mapping[str, Endpoint], level: str | None) -> None:
        """Describe the graph.

        Args:
            nodes: The endpoint of each op.
            level: Lowest level of the lines of requests that are told; None if the server writes none.
        """
        self._nodes = nodes
        self._level = level
        self._lines = LogRelay()
        self._calls: deque[tuple[int, float, bool]] = deque(maxlen=KEPT)
        self._ops: dict[str, NodeTotals] = {}
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._lines.in_place_of(logging.getLogger("forebay")))
        if self._level is not None:
            self._open.callback(logs.requests.setLevel, logs.requests.level)
            self._open.callback(logs.requests.removeHandler, self._lines)
            logs.requests.setLevel(self._level.upper())
            logs.requests.addHandler(self._lines)

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def answering(self) -> AbstractContextManager[None]:
        """Answer a request in the block: its outcome will take along whatever there is to report."""
        return self._lines.answering()

    def answered(self, data_id: int, latency_s: float, *, ok: bool) -> None:
        """Note a request that has ended."""
        self._calls.append((data_id, latency_s, ok))

    def ran(self, op: str, totals: NodeTotals) -> None:
        """Note what an op did."""
        self._ops.setdefault(op, NodeTotals()).add(totals)

    def beside(self, answer: bytes) -> Any:
        """Return an answer as an outcome: in a list with a report, or alone if there is nothing to report."""
        lines = self._lines.take()
        if not lines and not self._calls and not self._ops:
            return answer
        waiting = [node.waiting for node in self._nodes.values()]
        report = Report(os.getpid(), lines, list(self._calls), self._ops, waiting)
        self._calls.clear()
        self._ops = {}
        return [answer, report]


class Reports:
    """Takes the reports of all processes, in the server."""

    def __init__(self, ops: Iterable[str], alive: Callable[[], Iterable[int]]) -> None:
        """Describe who reports.

        Args:
            ops: The ops of the graph, in the order of `Report.waiting`.
            alive: Returns the processes that are up.
        """
        self._ops = list(ops)
        self._alive = alive
        self._waiting: dict[int, Sequence[int]] = {}

    def waiting(self) -> dict[str, int]:
        """Return how many requests were before each op when each process last reported."""
        self._waiting = {pid: self._waiting[pid] for pid in self._alive() if pid in self._waiting}
        return {op: sum(counts[place] for counts in self._waiting.values()) for place, op in enumerate(self._ops)}

    def read(self, told: Any, tracer: Tracer | None) -> None:
        """Take a report: write its lines, count what it says.

        Args:
            told: The report, as it came.
            tracer: Who counts; None if nobody does.
        """
        report = msgspec.convert(told, known(Report))
        for line in report.lines:
            log_relay.write(line)
        if tracer is None:
            return
        for op, totals in report.ops.items():
            tracer.ran(op, totals)
        for data_id, latency_s, ok in report.calls:
            tracer.answered(data_id, latency_s, ok=ok)
        self._waiting[report.pid] = report.waiting
