# SPDX-License-Identifier: Apache-2.0
"""Logs: one JSON object a line, or plain text for a person at a terminal.

Everything logs through the standard library under the name `forebay`; a request's id travels as
`extra={"request_id": ...}` and becomes a field of the line.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import re
import sys
from typing import Any, Final, Literal

import msgspec

from forebay.observe.logs import model_log
from forebay.observe.logs.colors import colored, has_colors, red
from forebay.observe.logs.line_handler import LineHandler
from forebay.types.failures import trace_of, words_of

LogFormat = Literal["json", "text"]

_AS_IMPORTED: Final = re.compile(r"\bforebay_target\.(\w+)_[0-9a-f]{8}\b")
"""What files of users are imported as; they have called their logger by it."""
_SAID: Final = {"forebay.access": frozenset({"method", "path", "status"})}
"""What messages of a logger hold of its fields."""
_OF_CLIENTS: Final = frozenset({"forebay.access", "forebay.refusals"})
"""Loggers of lines that hold what clients sent."""
_ESCAPED: Final = {number: repr(chr(number))[1:-1] for number in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""What would begin a line, or tell a terminal what to do."""
_STEERING: Final = re.compile("\x1b\\[[0-9;]*m|[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters in what may have several lines; models may set colors, and nothing else of a terminal."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what `extra` gave; libraries that make records of their own keep notes in names with an underscore."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD and name[:1] != "_"}


class _Formatter(logging.Formatter):
    """Writes the traceback of any error; a user's error may itself fail while it is formatted."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        """Return what the boundary to user code can tell of it."""
        return trace_of(ei[1]).rstrip("\n")

    def text(self, record: logging.LogRecord) -> str:
        """Return the message; of a warning without the line of code that `warnings` puts below it."""
        text = record.getMessage()
        return re.sub(r"\n  .*\n$", "", text).rstrip("\n") if record.name == "py.warnings" else text


class JsonFormatter(_Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, then whatever `extra` gave."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; values JSON cannot hold become their text."""
        line: dict[str, Any] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": _AS_IMPORTED.sub(r"\1", record.name),
            "message": self.text(record),
        }
        line.update({name: value for name, value in _fields(record).items() if name not in line})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=words_of).decode()


class TextFormatter(_Formatter):
    """Formats a record for a person: time, level, message, then the extra fields as name=value."""

    has_colors = False

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback below it if there is one."""
        moment = dt.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # noqa: DTZ006 - local, for a person
        said = _SAID.get(record.name, frozenset()) | {"trace"}
        told = {name: value for name, value in _fields(record).items() if name not in said and value is not None}
        fields = [f"{name}={words_of(value)}".translate(_ESCAPED) for name, value in told.items()]
        message = self.text(record)
        message = message.translate(_ESCAPED) if record.name in _OF_CLIENTS else _without_steering(message)
        level = f"{record.levelname.lower():7}"
        if self.has_colors and record.levelno >= logging.ERROR:
            level = red(level)
        text = " ".join([moment, level, message, *fields])
        trace = getattr(record, "trace", "")
        if record.exc_info:
            trace = self.formatException(record.exc_info)
        return f"{text}\n{_without_steering(trace.rstrip())}" if trace else text


def _without_steering(text: str) -> str:
    """Return a text in which a terminal finds nothing but lines, tabs and colors."""
    return _STEERING.sub(lambda found: found[0] if len(found[0]) > 1 else _ESCAPED[ord(found[0])], text)


def configure(level: str, format: LogFormat) -> None:
    """Send forebay's and uvicorn's records to stderr, and what models log and print."""
    stream = _stderr()
    # JSON is UTF-8 whatever a terminal speaks.
    handler = LineHandler(stream, "utf-8" if format == "json" else getattr(stream, "encoding", None) or "utf-8")
    text = TextFormatter()
    text.has_colors = has_colors(stream)
    handler.setFormatter(JsonFormatter() if format == "json" else text)
    model_log.capture(logging.getLevelNamesMapping()[level.upper()], handler)
    for name in ("forebay", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def tell(*lines: str, is_error: bool = False) -> None:
    """Print a message on stderr; a full disk or a closed terminal must not end the program."""
    stream = _stderr()
    if has_colors(stream):
        lines = tuple(colored(line, is_error=is_error) for line in lines)
    text = "".join(f"forebay: {line}\n" for line in lines)
    with contextlib.suppress(OSError, ValueError):
        for handler in logging.getLogger("forebay").handlers:
            if isinstance(handler, LineHandler) and handler.stream is stream:
                handler.write(text)
                return
        stream.write(text)
        stream.flush()


def _stderr() -> Any:
    stream: Any = sys.stderr
    return stream.stream if isinstance(stream, model_log.Printed) else stream
