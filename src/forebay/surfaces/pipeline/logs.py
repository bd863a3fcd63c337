# SPDX-License-Identifier: Apache-2.0
"""The log files of a pipeline server: everything, and a second file for warnings and worse.

They are written only where `$SERVING_LOG_PATH` or the configuration's `log_path` names a folder; the original writes
them into whatever folder it was started in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, TextIO, cast

from forebay.errors import ConfigError
from forebay.observe.logs import model_log
from forebay.observe.logs.log import TextFormatter, configure

FOLDER: Final = "PipelineServingLogs"
VARIABLE: Final = "SERVING_LOG_PATH"

MAX_BYTES: Final = 512 * 1024 * 1024
"""Size at which a file is put aside."""
KEPT: Final = 10
"""Files put aside that are kept."""

log = logging.getLogger("forebay.pipeline")

requests: Final = logging.getLogger("forebay.pipeline.requests")
"""A line for each request, with its ids; only in the files, for the console would drown in them."""
requests.propagate = False
requests.setLevel(logging.CRITICAL)


def base_of(log_path: str | None) -> Path | None:
    """Return where to make the folder of the log files: as configured, else as the variable says; None for nowhere."""
    base = log_path or os.environ.get(VARIABLE)
    return Path(base) if base else None


def write_to(base: Path, level: str) -> list[logging.Handler]:
    """Write forebay's records, the root logger's and what ops say to files below `base`; returns the handlers.

    Raises:
        ConfigError: If the folder cannot be made or written.
    """
    folder = base / FOLDER
    handlers: list[logging.Handler] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lowest in (("pipeline.log", level), ("pipeline.log.wf", "warning")):
            handler = PatientFile(
                folder / name, maxBytes=MAX_BYTES, backupCount=KEPT, encoding="utf-8", errors="backslashreplace"
            )
            handler.setLevel(lowest.upper())
            handler.setFormatter(_OneLine())
            handlers.append(handler)
    except OSError as error:
        msg = f"the log folder {folder} cannot be written: {error.strerror}; {VARIABLE} or log_path names another"
        raise ConfigError(msg) from error
    for handler in handlers:
        for name in ("forebay", requests.name):
            logging.getLogger(name).addHandler(handler)
    others: list[logging.Handler] = [_BesideOps(handler) for handler in handlers]
    for handler in others:
        logging.getLogger().addHandler(handler)
    model_log.writers.extend(handlers)
    requests.setLevel(level.upper())
    return handlers + others


def to_stderr(level: str) -> None:
    """Write forebay's records to stderr in a worker process, unless they go somewhere already."""
    if not logging.getLogger("forebay").hasHandlers():
        configure(level, "text" if sys.stderr.isatty() else "json")


class PatientFile(RotatingFileHandler):
    """Says why it cannot be written, once until it can be again; other handlers print a traceback for each record.

    It counts what it writes, instead of formatting each record twice and asking the file system how full it is.
    """

    _is_told = False
    _size = 0

    def handleError(self, record: logging.LogRecord) -> None:
        """Log what is wrong with the file, for the console and all other handlers."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            log.warning("%s cannot be written: %s; its log lines are lost", self.baseFilename, error.strerror)

    def flush(self) -> None:
        """Write what is not written yet."""
        super().flush()
        self._is_told = False

    def close(self) -> None:
        """Close the file, also if what is left cannot be written."""
        with contextlib.suppress(OSError):
            super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, into a new file if the old one is full."""
        try:
            line = self.format(record) + self.terminator
            length = len(line.encode(errors="replace"))
            if self._size > 0 and self._size + length > self.maxBytes:
                self.doRollover()
            self._size += length
            cast("TextIO", self.stream).write(line)
            self.flush()
        except Exception:  # noqa: BLE001 - as logging does it: what logs must not fail by it
            self.handleError(record)

    def _open(self) -> Any:
        stream = super()._open()
        self._size = stream.tell()
        return stream


class _BesideOps(logging.Handler):
    """Writes what the root logger is told to a file; what an op says comes once more, with its worker and requests."""

    def __init__(self, file: logging.Handler) -> None:
        super().__init__(file.level)
        self._file = file

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record, unless it comes again."""
        if model_log.origin.get() is None or model_log.level is None:
            self._file.handle(record)
        return True


class _OneLine(TextFormatter):
    """As on the console, with line breaks in a message escaped, so that nothing a client sends can make a new line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and a traceback below it."""
        message = record.getMessage()
        if "\n" in message or "\r" in message:
            record = logging.makeLogRecord(vars(record))
            record.msg, record.args = message.replace("\r", "\\r").replace("\n", "\\n"), None
        return super().format(record)


def end(handlers: list[logging.Handler]) -> None:
    """Stop writing to these, and close their files."""
    for name in ("", "forebay", requests.name):
        for handler in handlers:
            logging.getLogger(name).removeHandler(handler)
    model_log.writers[:] = [handler for handler in model_log.writers if handler not in handlers]
    for handler in handlers:
        handler.close()
    requests.setLevel(logging.CRITICAL)
