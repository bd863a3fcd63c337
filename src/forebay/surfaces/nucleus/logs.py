# SPDX-License-Identifier: Apache-2.0
"""The logger of a project: one JSON object a line on stdout, as the original writes them.

    {"asctime": "2021-01-19 15:14:05,291", "levelname": "INFO", "message": "loaded", "process": 235, "model": "iris"}

What `extra` holds follows the four fixed keys, one level deep; `exc_info` comes last. A key of `extra` that is taken
by one of these gets an underscore at its end, so that no call of the logger ever raises and no field is lost.

Nothing is written before `configure_logger` ran: in processes forebay starts it has; a script of one's own calls it.
"""

from __future__ import annotations

import http
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

from forebay.types.failures import text_of, trace_of
from forebay.types.user_exceptions import answered

NAME = "cortex"

_FIXED = frozenset({"asctime", "levelname", "message", "process", "exc_info"})
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_EXTRA = "_cortex_extra"
_MAX_DEPTH = 12
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class CortexLogger(logging.Logger):
    """A logger whose `extra` may use any name; the standard one raises for the names of a record's own attributes."""

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Make a record that holds all of `extra`, and as attributes what does not clash."""
        given = list(args)
        extra = kwargs.pop("extra", None)
        if len(given) > 8:  # the ninth argument, as the standard library passes it
            extra, given[8] = given[8], None
        record = super().makeRecord(*given, **kwargs)
        if isinstance(extra, Mapping):
            fields = {str(name): value for name, value in cast("Mapping[Any, Any]", extra).items()}
            vars(record).update({name: value for name, value in fields.items() if name not in _STANDARD})
            vars(record)[_EXTRA] = fields
        return record


class LineFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; it is ASCII, so that no locale can break it."""
        line: dict[str, Any] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": _message(record),
            "process": record.process,
        }
        for name, value in _extra(record).items():
            line[name + "_" if name in _FIXED else name] = _plain(value)
        if record.exc_info:
            line["exc_info"] = trace_of(cast("BaseException", record.exc_info[1])).rstrip("\n")
        if record.stack_info:
            line["stack_info"] = self.formatStack(record.stack_info)
        return json.dumps(line)


class _Stdout(logging.StreamHandler[TextIO]):
    """Our own handler, to be told from those that a project has added."""


def _cortex_logger() -> logging.Logger:
    found = logging.getLogger(NAME)
    if type(found) is logging.Logger:
        # It may have existed before, with handlers and references to it: another object cannot take its place.
        found.__class__ = CortexLogger
    return found


logger = _cortex_logger()


def configure_logger(
    name: str = NAME,
    config_file: str | None = None,  # noqa: ARG001 - handlers pass it, as the original needs it
    *,
    level: str | None = None,
) -> logging.Logger:
    """Make a logger write lines to stdout.

    Args:
        config_file: Where the original keeps handlers and formats; not read, the format is fixed.
        level: debug, info, warning or error; None takes CORTEX_LOG_LEVEL, or info.
    """
    found = logger if name == NAME else logging.getLogger(name)
    wanted = level or os.environ.get("CORTEX_LOG_LEVEL", "")
    found.setLevel(_LEVELS.get(wanted.lower(), logging.INFO))
    found.propagate = False
    for handler in [handler for handler in found.handlers if isinstance(handler, _Stdout)]:
        found.removeHandler(handler)
    handler = _Stdout(sys.stdout)
    handler.setFormatter(LineFormatter())
    found.addHandler(handler)
    return found


def log_access(client: str, method: str, path: str, status: int) -> None:
    """Write the line of a request; `client` has an address and a port."""
    if logger.isEnabledFor(logging.INFO):
        extra = {"method": method, "status_code": _phrase(status), "path": path}
        logger.info('%s - "%s %s HTTP/1.1" %d', client, method, path, status, extra=extra)


def _phrase(status: int) -> str:
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _message(record: logging.LogRecord) -> str:
    # Arguments that do not fit the text must not cost the line.
    return answered(record.getMessage, lambda error: f"{_text(record.msg)} {_text(record.args)} ({text_of(error)})")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    fields = vars(record).get(_EXTRA)
    if fields is not None:
        return fields
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return what JSON holds as it is, and everything else as its text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 1000 else "a very large number"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= _MAX_DEPTH:
        return _text(value)
    if isinstance(value, dict):
        return {_text(key): _plain(item, depth + 1) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return _text(value)


def _text(value: Any) -> str:
    return answered(
        lambda: str(value), lambda error: f"<{type(value).__name__} without a text: {type(error).__name__}>"
    )
