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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.observe.metrics.node_totals import NodeTotals
from forebay.surfaces.pipeline import logs
from forebay.types.failures import MAX_MESSAGE, clean, trace_of
from forebay.types.first_use import known

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.figures.tracer import Tracer

KEPT: Final = 1000
"""Records, and calls, that wait for the next answer; of more the newest."""
_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_TOLD: Final = frozenset({"name", "levelno", "levelname", "created"})


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What happened in a process since its last report.

    Attributes:
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


class Reporter(logging.Handler):
    """Keeps what is to be told, in the process with the graph; as a context manager, on the loop of the graph.

    It takes the place of the handlers of our log, which get what is not kept.
    """

    def __init__(self, nodes: Mapping[str, Endpoint], level: str | None) -> None:
        """Describe the graph.

        Args:
            level: Lowest level of the lines of requests that are told; None if the server writes none.
        """
        super().__init__()
        self._nodes = nodes
        self._request_level = level
        self._lines: deque[bytes] = deque(maxlen=KEPT)
        self._calls: deque[tuple[int, float, bool]] = deque(maxlen=KEPT)
        self._ops: dict[str, NodeTotals] = {}
        self._answers = 0
        self._others: list[logging.Handler] = []
        self._above: logging.Logger | None = None
        self._undo = ExitStack()

    def __enter__(self) -> None:
        log = logging.getLogger("forebay")
        self._others, self._above = log.handlers, log.parent if log.propagate else None
        self._undo.callback(setattr, log, "handlers", log.handlers)
        self._undo.callback(setattr, log, "propagate", log.propagate)
        log.handlers, log.propagate = [self], False
        if self._request_level is not None:
            self._undo.callback(logs.requests.setLevel, logs.requests.level)
            self._undo.callback(logs.requests.removeHandler, self)
            logs.requests.setLevel(self._request_level.upper())
            logs.requests.addHandler(self)

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    @contextmanager
    def answering(self) -> Generator[None]:
        """Answer a request in the block: its outcome will take along whatever there is to report.

        After the last answer, records that none took along are written here.
        """
        self._answers += 1
        try:
            yield
        finally:
            self.acquire()
            try:
                self._answers -= 1
                left = [] if self._answers else self._take_lines()
            finally:
                self.release()
            for line in left:
                self._pass_on(_record_of(line))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as JSON of its fields while an answer is under way; what has no form there becomes text."""
        if not self._answers:
            self._pass_on(record)
            return
        try:
            line = {name: value for name, value in vars(record).items() if name in _TOLD or name not in _USUAL}
            line["msg"] = clean(record.getMessage(), 8 * MAX_MESSAGE)
            if record.exc_info:
                line["trace"] = trace_of(cast("BaseException", record.exc_info[1]))
            self._lines.append(msgspec.json.encode(line, enc_hook=str))
        except Exception:  # noqa: BLE001 - as every handler does: what is wrong with a line stops nobody
            self.handleError(record)

    def answered(self, data_id: int, latency_s: float, *, ok: bool) -> None:
        """Note a request that has ended."""
        self._calls.append((data_id, latency_s, ok))

    def ran(self, op: str, totals: NodeTotals) -> None:
        """Note what an op did."""
        self._ops.setdefault(op, NodeTotals()).add(totals)

    def beside(self, answer: bytes) -> Any:
        """Return an answer as an outcome: in a list with a report, or alone if there is nothing to report."""
        lines = self._take_lines()
        if not lines and not self._calls and not self._ops:
            return answer
        waiting = [node.waiting for node in self._nodes.values()]
        report = Report(os.getpid(), lines, list(self._calls), self._ops, waiting)
        self._calls.clear()
        self._ops = {}
        return [answer, report]

    def _take_lines(self) -> list[bytes]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _pass_on(self, record: logging.LogRecord) -> None:
        for handler in self._others:
            if record.levelno >= handler.level:
                handler.handle(record)
        if self._above is not None:
            self._above.callHandlers(record)


class Reports:
    """Takes the reports of all processes, in the server."""

    def __init__(self, ops: Iterable[str], alive: Callable[[], Iterable[int]]) -> None:
        """Describe who reports.

        Args:
            ops: The ops of the graph, in the order of `Report.waiting`.
        """
        self._ops = list(ops)
        self._alive = alive
        self._waiting: dict[int, Sequence[int]] = {}

    def waiting(self) -> dict[str, int]:
        """Return how many requests were before each op when each process last reported."""
        self._waiting = {pid: self._waiting[pid] for pid in self._alive() if pid in self._waiting}
        return {op: sum(counts[place] for counts in self._waiting.values()) for place, op in enumerate(self._ops)}

    def read(self, told: Any, tracer: Tracer | None) -> None:
        """Take a report: write its lines, and have the tracer count what it says."""
        report = msgspec.convert(told, known(Report))
        for line in report.lines:
            _write(line)
        if tracer is None:
            return
        for op, totals in report.ops.items():
            tracer.ran(op, totals)
        for data_id, latency_s, ok in report.calls:
            tracer.answered(data_id, latency_s, ok=ok)
        self._waiting[report.pid] = report.waiting


def _record_of(line: bytes) -> logging.LogRecord:
    return logging.makeLogRecord(msgspec.json.decode(line))


def _write(line: bytes) -> None:
    """Write a record that came from another process, as if it had been logged here."""
    record = _record_of(line)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
