# SPDX-License-Identifier: Apache-2.0
"""What a process that hosts a whole graph tells the server of it: with `build_dag_each_worker`.

Theory of operation. Only the server writes the log files and the tracer's, and serves the counters. What a process has
to say is kept until its next answer and travels beside that, one report at a time. A report says what happened since
the last one, so that sums only rise, whatever becomes of the process; what one that dies had not told yet is lost.
Lines of the log wait for an answer only while one is under way; at other times they go where the process itself writes.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.figures.tracer import OpListener, OpTotals
from forebay.types.failures import trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.figures.tracer import Tracer

KEPT: Final = 1000
"""Lines, and requests, that wait for the next answer; of more the newest."""
_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_TOLD: Final = frozenset({"name", "levelno", "levelname", "created"})


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
    ops: Mapping[str, OpTotals]
    waiting: Sequence[int]


class Reporter:
    """Keeps what is to be told, in the process with the graph; as a context manager, on the loop of the graph."""

    def __init__(self, graph: str, nodes: Mapping[str, Endpoint], *, counts: bool, level: str | None) -> None:
        """Describe the graph.

        Args:
            graph: Its name.
            nodes: The endpoint of each op.
            counts: Whether the server wants figures.
            level: Lowest level of the lines of requests that are told; None if the server writes none.
        """
        self._nodes = nodes
        self._counts = counts
        self._level = level
        self._lines = _Lines()
        self._calls: deque[tuple[int, float, bool]] = deque(maxlen=KEPT)
        self._ops: dict[str, OpTotals] = {}
        self._listener = OpListener(graph, nodes, self._ran)
        self._open = ExitStack()

    def __enter__(self) -> None:
        if self._counts:
            self._open.enter_context(self._listener)
        self._open.enter_context(self._lines.in_place_of(logging.getLogger("forebay")))
        if self._level is not None:
            self._open.callback(logs.requests.setLevel, logs.requests.level)
            self._open.callback(logs.requests.removeHandler, self._lines)
            logs.requests.setLevel(self._level.upper())
            logs.requests.addHandler(self._lines)

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    @contextmanager
    def answering(self) -> Generator[None]:
        """Answer a request inside: there will be an outcome that takes along what there is to tell."""
        self._lines.expect()
        try:
            yield
        finally:
            self._lines.expect_no_more()

    def answered(self, data_id: int, latency_s: float, *, ok: bool) -> None:
        """Note a request that has ended."""
        if self._counts:
            self._calls.append((data_id, latency_s, ok))

    def beside(self, answer: bytes) -> Any:
        """Return an answer as an outcome: a list of it and a report, or it alone if there is nothing to tell."""
        lines = self._lines.take()
        if not lines and not self._calls and not self._ops:
            return answer
        waiting = [node.waiting for node in self._nodes.values()] if self._counts else []
        report = Report(os.getpid(), lines, list(self._calls), self._ops, waiting)
        self._calls.clear()
        self._ops = {}
        return [answer, report]

    def _ran(self, op: str, totals: OpTotals) -> None:
        self._ops.setdefault(op, OpTotals()).add(totals)


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
        """Return how many requests were before each op when each process last told."""
        self._waiting = {pid: self._waiting[pid] for pid in self._alive() if pid in self._waiting}
        return {op: sum(counts[place] for counts in self._waiting.values()) for place, op in enumerate(self._ops)}

    def read(self, told: Any, tracer: Tracer | None) -> None:
        """Take a report: write its lines, count what it says.

        Args:
            told: The report, as it came.
            tracer: Who counts; None if nobody does.
        """
        report = msgspec.convert(told, Report)
        for line in report.lines:
            record = _record(line)
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        if tracer is None:
            return
        for op, totals in report.ops.items():
            tracer.ran(op, totals)
        for data_id, latency_s, ok in report.calls:
            tracer.answered(data_id, latency_s, ok=ok)
        self._waiting[report.pid] = report.waiting


class _Lines(logging.Handler):
    """Keeps records as JSON of their fields while an answer is under way; what has no form there becomes text."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._expected = 0
        self._others: list[logging.Handler] = []
        self._above: logging.Logger | None = None

    @contextmanager
    def in_place_of(self, logger: logging.Logger) -> Generator[None]:
        """Take the place of a logger's handlers; they get what is not kept."""
        propagates = logger.propagate
        self._others = logger.handlers
        self._above = logger.parent if propagates else None
        logger.handlers = list[logging.Handler]([self])
        logger.propagate = False
        try:
            yield
        finally:
            logger.handlers = self._others
            logger.propagate = propagates

    def expect(self) -> None:
        """Keep what comes: an answer is under way."""
        self._expected += 1

    def expect_no_more(self) -> None:
        """An answer has left, or there is none; if it was the last one, tell what it did not take along."""
        self.acquire()
        try:
            self._expected -= 1
            left = [] if self._expected else self.take()
        finally:
            self.release()
        for line in left:
            self._pass_on(_record(line))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if not self._expected:
            self._pass_on(record)
            return
        try:
            line = {name: value for name, value in vars(record).items() if name in _TOLD or name not in _USUAL}
            line["msg"] = record.getMessage()
            if record.exc_info:
                line["trace"] = trace_of(cast("BaseException", record.exc_info[1]))
            self._kept.append(msgspec.json.encode(line, enc_hook=str))
        except Exception:  # noqa: BLE001 - as every handler does: what is wrong with a line stops nobody
            self.handleError(record)

    def take(self) -> list[bytes]:
        """Return the records that were kept, and keep them no longer."""
        return [self._kept.popleft() for _ in range(len(self._kept))]

    def _pass_on(self, record: logging.LogRecord) -> None:
        for handler in self._others:
            if record.levelno >= handler.level:
                handler.handle(record)
        if self._above is not None:
            self._above.callHandlers(record)


def _record(line: bytes) -> logging.LogRecord:
    return logging.makeLogRecord(msgspec.json.decode(line))
