# SPDX-License-Identifier: Apache-2.0
"""Records of the log that travel to another process, and are written there.

While an answer is under way its process keeps what is logged, so that the answer takes it along; at other times records
go where the process itself writes. A record travels as JSON of its fields; what has no form there becomes text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, cast

import msgspec

from forebay.types.failures import MAX_MESSAGE, clean, trace_of

KEPT: Final = 1000
"""Records that wait for the next answer; of more the newest."""
_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_TOLD: Final = frozenset({"name", "levelno", "levelname", "created"})


class LogRelay(logging.Handler):
    """Keeps records while an answer is under way."""

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

    @contextmanager
    def answering(self) -> Generator[None]:
        """Keep records while an answer is under way. After the last answer, write here what none took along."""
        self._expected += 1
        try:
            yield
        finally:
            self.acquire()
            try:
                self._expected -= 1
                left = [] if self._expected else self.take()
            finally:
                self.release()
            for line in left:
                self._pass_on(record_of(line))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if not self._expected:
            self._pass_on(record)
            return
        try:
            line = {name: value for name, value in vars(record).items() if name in _TOLD or name not in _USUAL}
            line["msg"] = clean(record.getMessage(), 8 * MAX_MESSAGE)
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


def record_of(line: bytes) -> logging.LogRecord:
    """Return the record that came as JSON."""
    return logging.makeLogRecord(msgspec.json.decode(line))


def write(line: bytes) -> None:
    """Write a record that came from another process, as if it had been logged here."""
    record = record_of(line)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
