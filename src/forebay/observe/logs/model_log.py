# SPDX-License-Identifier: Apache-2.0
"""What models log and print, as lines of the server's log: with their worker, model and requests.

Theory of operation. A worker sets `origin` around what it runs; a handler of the root logger, and writers in place of
`sys.stdout` and `sys.stderr`, ask it who speaks. Where the worker is a thread of the server, or its loop, the line is
written at once. A worker process sends it over its connection (workers/processes/child.py), and the server, who knows
which requests are in the batch, adds their ids and writes it. What such a process writes past Python comes through its
descriptors 1 and 2 (workers/user_calls/captured_output.py), and is nobody's batch.

All of them have the same bounds: a line is cut at some length, and beyond `LINES` lines or `CHARACTERS` characters in a
second the rest are only counted, and a line tells how many. They hold where lines are made and where they arrive, for
who attached may be any program.

Nothing here happens before `forebay.observe.logs.log.configure` was called: in a program of somebody else's, the log
and the standard streams are that program's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, cast

import msgspec

from forebay.observe.logs.request_ids import id_of
from forebay.types.failures import text_of, trace_of, words_of
from forebay.types.log_line import LogLine
from forebay.types.user_exceptions import answered, caught

if TYPE_CHECKING:
    from forebay.types.batch import EntryBatch

LINES: Final = 1000
"""Lines of one worker that are written in a second; a line costs the server about 30 us."""
CHARACTERS: Final = 1 << 20
"""Characters of the lines of one worker that are written in a second, and those of one line more."""
MAX_TEXT: Final = 8192
"""Characters of a line; what is longer is cut."""
MARK: Final = 50
"""Most characters that say how much was cut; with them, what was cut already is not cut again."""
MAX_TRACE: Final = 65_536
MAX_EXTRA: Final = 32
"""Fields that a record may bring along."""
SHOWN_IDS: Final = 16
"""Requests of a batch that a line names."""

DROPPING: Final = "forebay.models"
"""Logger of the line that says how many are missing."""

STREAM_LEVELS: Final = {"stdout": logging.INFO, "stderr": logging.WARNING}
"""What is printed has no level of its own."""

_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_OURS: Final = frozenset({"model", "worker", "request_ids", "requests", "trace"})

level: int | None = None
"""Lowest level of what is written; None while the lines of models are nobody's business here."""

writers: Final[list[logging.Handler]] = []
"""Handlers that write it: forebay's own, for those of the model's have had the record where it was made."""


class LogOrigin(Protocol):
    """A worker that logs."""

    def say(self, record: logging.LogRecord) -> None:
        """Write a record of the model's, or send it to who does."""
        ...


origin: ContextVar[LogOrigin | None] = ContextVar("forebay_origin", default=None)
"""Set by a worker around what it runs."""

model: ContextVar[str] = ContextVar("forebay_model", default="")
"""Name of the endpoint whose workers are being started."""


@contextlib.contextmanager
def named(name: str) -> Generator[None]:
    """Say whose workers are started in the block."""
    token = model.set(name)
    try:
        yield
    finally:
        model.reset(token)


@contextlib.contextmanager
def speaking(who: LogOrigin | None) -> Generator[None]:
    """Say who speaks in the block."""
    token = origin.set(who)
    try:
        yield
    finally:
        origin.reset(token)


class LineBudget:
    """Lets some lines pass in a second, by their number and length, and tells how many it held back."""

    def __init__(self, tell: Callable[[int], object]) -> None:
        """Make one; `tell` is called from a thread of its own, at most once a second."""
        self._tell = tell
        self._lock = threading.Lock()
        self._until = 0.0
        self._left = self._characters = 0
        self._dropped = 0

    def take(self, lines: int = 1) -> int:
        """Return how many of these lines may pass."""
        now = time.monotonic()
        with self._lock:
            if now >= self._until:
                self._until = now + 1.0
                self._left, self._characters = LINES, CHARACTERS
            passed = min(lines, self._left) if self._characters > 0 else 0
            self._left -= passed
        if passed < lines:
            self.drop(lines - passed)
        return passed

    def spend(self, line: LogLine) -> None:
        """Count how long a line is that passed."""
        size = len(line.text) + len(line.trace) + (len(msgspec.json.encode(line.extra)) if line.extra else 0)
        with self._lock:
            self._characters -= size

    def drop(self, lines: int) -> None:
        """Count lines that did not pass, here or where they came from."""
        with self._lock:
            is_first = not self._dropped
            self._dropped += lines
            wait_s = max(self._until - time.monotonic(), 0.0)
        if is_first:
            timer = threading.Timer(wait_s, self._say)
            timer.daemon = True
            timer.start()

    def _say(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        self._tell(dropped)


def told_dropped(dropped: int) -> LogLine:
    """Return the line that says how many are missing."""
    text = (
        f"{dropped} lines of a worker were dropped: it wrote more than {LINES}, or {CHARACTERS >> 10} KiB, in a second"
    )
    return LogLine(DROPPING, logging.WARNING, time.time(), text, extra={"dropped": dropped})


def _dropped_before(line: LogLine | logging.LogRecord) -> int:
    """Return how many lines this one says are missing."""
    found = line.extra.get("dropped") if isinstance(line, LogLine) and line.logger == DROPPING else None
    return found if type(found) is int and found > 0 else 0


class Voice:
    """Writes what one worker says, within its budget; from any thread."""

    def __init__(self, model: str, worker: str) -> None:
        """Say whose lines they are."""
        self._fields: dict[str, Any] = {"model": model, "worker": worker} if model else {"worker": worker}
        self._budget = LineBudget(lambda dropped: write(told_dropped(dropped), self._fields))

    def say(self, line: LogLine | logging.LogRecord, entries: list[Any] | None = None) -> None:
        """Write a line that was said while these requests ran."""
        if dropped := _dropped_before(line):
            self._budget.drop(dropped)  # told with those that are dropped here, and never dropped itself
            return
        if not self._budget.take():
            return
        fields: dict[str, Any] = self._fields
        if entries:
            # A request without an id gets one: its answer will name it.
            fields = {**fields, "request_ids": [id_of(entry) for entry in entries[:SHOWN_IDS]]}
            if len(entries) > SHOWN_IDS:
                fields["requests"] = len(entries)
        self._write(_bounded(line) if isinstance(line, LogLine) else line_of(line), fields)

    def say_raw(self, stream: str, data: bytes) -> None:
        """Write whole lines that came through a descriptor."""
        passed = self._budget.take(data.count(b"\n"))
        for text in data.split(b"\n", passed)[:passed]:
            if text:
                self._write(printed(stream, text.decode(errors="replace")), self._fields)

    def _write(self, line: LogLine, fields: Mapping[str, Any]) -> None:
        self._budget.spend(line)
        write(line, fields)


class LocalOrigin:
    """A worker of this process: its loop, or one thread of a pool.

    Attributes:
        batch: What it runs.
    """

    __slots__ = ("_voice", "batch")

    def __init__(self, voice: Voice, batch: EntryBatch | None = None) -> None:
        self._voice = voice
        self.batch = batch

    def say(self, record: logging.LogRecord) -> None:
        """Write a record."""
        batch = self.batch
        self._voice.say(record, None if batch is None else batch.entries)


def line_of(record: logging.LogRecord) -> LogLine:
    """Return a record as it travels: its arguments are in its text, and what JSON has no word for has become text."""
    trace = trace_of(record.exc_info[1]) if record.exc_info and record.exc_info[1] else ""
    extra: dict[str, Any] = {}
    for name, value in vars(record).items():
        if name not in _USUAL and len(extra) < MAX_EXTRA:
            extra[_cut(name, 200)] = _as_plain(value)
    text = record.getMessage()
    return LogLine(record.name, record.levelno, record.created, _cut(text, MAX_TEXT), _cut(trace, MAX_TRACE), extra)


def _bounded(line: LogLine) -> LogLine:
    """Return a line that came from elsewhere, no longer than those that are made here."""
    extra = {_cut(name, 200): _as_plain(value) for name, value in itertools.islice(line.extra.items(), MAX_EXTRA)}
    text, trace = _cut(line.text, MAX_TEXT), _cut(line.trace, MAX_TRACE)
    return LogLine(_cut(line.logger, 200), line.level, line.created, text, trace, extra)


_PLAIN: Final = frozenset({float, bool, type(None)})
_LISTED: Final = (list, tuple, dict)


def _as_plain(value: Any) -> Any:
    """Return a field of a record as it travels: what JSON has stays what it is, all else becomes text."""
    if type(value) in _PLAIN:
        return value
    if isinstance(cast("object", value), _LISTED):
        packed = answered(lambda: msgspec.json.encode(value, enc_hook=_number), lambda _: b"")
        return msgspec.json.decode(packed) if 0 < len(packed) <= MAX_TEXT else _text(value)
    return answered(lambda: _number(value), lambda _: _text(value))


def _number(value: Any) -> Any:
    """Return a number of NumPy, or of whatever else counts as one, as JSON has it.

    Raises:
        TypeError, OverflowError: It is none.
    """
    if type(value).__name__ in {"bool", "bool_"} and type(value).__module__ == "numpy":
        return bool(value)
    if isinstance(value, Real) and not isinstance(value, Enum):
        if not isinstance(value, Integral):
            return float(value)
        if int(value).bit_length() < 64:
            return int(value)
    raise TypeError


def _text(value: object) -> str:
    return _cut(words_of(value), MAX_TEXT)


def _cut(text: str, most: int) -> str:
    text = text.encode(errors="replace").decode()  # half of a surrogate pair cannot travel
    return text if len(text) <= most + MARK else f"{text[:most]}... and {len(text) - most} characters more"


def printed(stream: str, text: str) -> LogLine:
    """Return a line that was printed to `stdout` or `stderr`; where text was overwritten, what remained of it."""
    shown = text.rstrip("\r").rpartition("\r")[2]
    return LogLine(stream, STREAM_LEVELS[stream], time.time(), _cut(shown, MAX_TEXT))


def write(line: LogLine, fields: Mapping[str, Any]) -> None:
    """Write what a worker said, adding what the server knows about it."""
    if level is None or line.level < level:
        return
    # No loggers and no factory of records: whoever writes it may be the loop, and these run what users gave them.
    record = logging.LogRecord(line.logger, line.level, "", 0, line.text, (), None)
    record.created = line.created
    vars(record).update({name: value for name, value in line.extra.items() if name not in _USUAL | _OURS})
    if line.trace:
        record.trace = line.trace
    vars(record).update(fields)
    token = origin.set(None)  # whoever writes it does not speak for the model
    try:
        for handler in writers:
            if record.levelno >= handler.level:
                _write_to(handler, record)
    finally:
        origin.reset(token)


def _write_to(handler: logging.Handler, record: logging.LogRecord) -> None:
    try:
        handler.handle(record)
    except Exception:  # noqa: BLE001 - as every handler does: what is wrong with a line stops nobody
        handler.handleError(record)


class ModelHandler(logging.Handler):
    """Hands records of workers to these, and others on."""

    def __init__(self, others: logging.Handler, *, also: bool = False) -> None:
        """Make one; `others` gets what is logged outside of workers, with `also` everything."""
        super().__init__()
        self._others = others
        self._also = also

    def handle(self, record: logging.LogRecord) -> bool:
        """Hand a record over; no lock is held meanwhile, for the text of a record is the user's code."""
        who = origin.get()
        if who is not None:
            _, failed = caught(who.say, record)
            if failed is not None:
                record.msg, record.args = f"a line of the log could not be written: {text_of(failed)}", None
                who.say(record)
        if who is None or self._also:
            self._others.handle(record)
        return True


class Printed:
    """Stands in for `sys.stdout` or `sys.stderr`: what a worker prints becomes lines, anything else is written.

    Attributes:
        stream: What it stands in for.
    """

    def __init__(self, name: str, stream: TextIO, *, also: bool = False) -> None:
        """Stand in for a stream; with `also`, what becomes lines is written there as well."""
        self._name = name
        self.stream = stream
        self._also = also
        self._here = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text, or make the lines of it that are whole."""
        who = origin.get()
        if who is None:
            return self.stream.write(text)
        if self._also:
            self.stream.write(text)
        pending: str = getattr(self._here, "pending", "") + text
        *lines, rest = pending.split("\n")
        if len(rest) > MAX_TEXT:
            lines.append(rest)
            rest = ""
        self._here.pending = rest
        for line in lines:
            if line:
                self._say(who, line)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def release(self) -> None:
        """Write what this thread has begun as a line."""
        self.stream.write(getattr(self._here, "pending", ""))
        self._here.pending = ""

    def _say(self, who: LogOrigin, text: str) -> None:
        line = printed(self._name, text)
        record = logging.makeLogRecord(
            {"name": line.logger, "levelno": line.level, "levelname": logging.getLevelName(line.level)}
        )
        record.msg = line.text
        if level is None or line.level >= level:
            who.say(record)


def capture(lowest: int, others: logging.Handler, *, also: bool = False) -> None:
    """From now on, hand to the current `origin` anything logged or printed in this process.

    Args:
        lowest: Level of what is written.
        others: Takes what is logged outside of workers, and writes what workers of this process say.
        also: Whether what workers log and print is written here, too.
    """
    global level  # noqa: PLW0603 - a process has one log
    level = lowest
    writers[:] = [others]
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, ModelHandler)]:
        root.removeHandler(handler)
    root.addHandler(ModelHandler(others, also=also))
    root.setLevel(lowest)
    logging.captureWarnings(capture=True)
    for name in STREAM_LEVELS:
        stream: Any = getattr(sys, name)
        if not isinstance(stream, Printed):
            setattr(sys, name, Printed(name, stream, also=also))


def release() -> None:
    """From now on, write to the streams of this process what this thread logs and prints: its origin has gone."""
    origin.set(None)
    if level is None:
        return
    for name in STREAM_LEVELS:
        stream: Any = getattr(sys, name)
        if isinstance(stream, Printed):
            stream.release()
    capture(level, logging.StreamHandler())
