# SPDX-License-Identifier: Apache-2.0
"""Writes the lines of the log without waiting for their reader.

Theory of operation. A pipe that is not read is full after 64 KiB, a terminal may be stopped, and who then writes waits:
the event loop, and with it every client. So a line is written at once only where that cannot wait: into a file, or, if
it is short, where the kernel says that there is room. A terminal says so when there is room for one character. Other
lines are kept, and with them those that come after; a thread writes them and ends. Beyond `KEPT_BYTES` lines are
dropped and counted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import stat
import threading
from collections import deque
from typing import IO, Final

KEPT_BYTES: Final = 1 << 20
"""Lines that wait for somebody to read may have so much together."""
LAST_S: Final = 0.5
"""How long the end of the process waits for the last lines to be read."""


class LineHandler(logging.StreamHandler[IO[str]]):
    """Writes lines to a stream, past its own buffer if it has a descriptor."""

    def __init__(self, stream: IO[str], encoding: str) -> None:
        """Describe where lines go.

        Args:
            stream: Is asked for its descriptor for each line; one without any is written to as it is.
            encoding: Of the lines; what it does not have is escaped.
        """
        super().__init__(stream)
        self._encoding = encoding
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._dropped = 0
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            self.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler does: what is wrong with a line stops nobody
            self.handleError(record)

    def write(self, text: str) -> None:
        """Write whole lines, or keep them.

        Raises:
            OSError: They cannot be written.
            ValueError: The stream is closed.
        """
        descriptor = _descriptor_of(self.stream)
        self.acquire()
        try:
            if descriptor is None:
                self.stream.write(text)
                self.stream.flush()
                return
            lines = text.encode(self._encoding, "backslashreplace")
            if self._is_waiting() or not _takes(descriptor, lines):
                self._keep(lines)
            else:
                _write(descriptor, lines)
        finally:
            self.release()

    def close(self) -> None:
        """Have the last lines written if they are read soon."""
        writer = self._writer
        if writer is not None:
            writer.join(LAST_S)
        super().close()

    def _is_waiting(self) -> bool:
        return self._writer is not None and self._writer.is_alive()  # a process that was forked off has no such thread

    def _keep(self, line: bytes) -> None:
        if self._kept_bytes + len(line) > KEPT_BYTES:
            self._dropped += 1
        else:
            self._kept.append(line)
            self._kept_bytes += len(line)
        if not self._is_waiting():
            writer = threading.Thread(target=self._write_kept, name="forebay-log", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be had: the next line tries again
                writer.start()
                self._writer = writer

    def _write_kept(self) -> None:
        while (line := self._next()) is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody will ever read it
                _write(self.stream.fileno(), line)

    def _next(self) -> bytes | None:
        """Return the line to be written next; None if there is none, and then the thread is none any more."""
        self.acquire()
        try:
            if self._kept:
                line = self._kept.popleft()
                self._kept_bytes -= len(line)
                return line
            if self._dropped:
                return self._told_dropped()
            self._writer = None
            return None
        finally:
            self.release()

    def _told_dropped(self) -> bytes:
        text = f"{self._dropped} log lines were dropped because their reader was too slow"
        told = logging.makeLogRecord(
            {"name": "forebay", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        )
        told.dropped = self._dropped
        self._dropped = 0
        return f"{self.format(told)}\n".encode(self._encoding, "backslashreplace")


def _descriptor_of(stream: IO[str]) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return None


def _takes(descriptor: int, line: bytes) -> bool:
    """Whether a line can be written without a wait; an error does not wait either."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return True
    if len(line) > select.PIPE_BUF or os.isatty(descriptor):
        return False
    polled = select.poll()
    polled.register(descriptor, select.POLLOUT)
    return bool(polled.poll(0))


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # somebody who shares the pipe has made it so
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()
