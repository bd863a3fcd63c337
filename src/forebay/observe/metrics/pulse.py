# SPDX-License-Identifier: Apache-2.0
"""What the endpoints did since the last look, for people who watch a server at work.

Theory of operation. Nothing is counted for this: a beat is the difference between the counters of now and copies of
them that were made at the beat before, so there is no cost while nobody asks for beats. Endpoints that did nothing are
left out. As on the page of metrics, `beat` is a generator that stops after every few endpoints.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Generator, Iterable
from operator import attrgetter
from typing import Final, Generic, TypeVar

import msgspec

from forebay.observe.metrics.endpoint_metrics import EndpointMetrics, FailureReason
from forebay.observe.metrics.exposition import SLICE, Reading, Source
from forebay.observe.metrics.histograms import ROWS, SECONDS, Histogram

MAX_FAULTS = 50
"""Errors that are told to who begins to watch, the newest."""
_MESSAGE_CHARS = 600
_TRACE_CHARS = 6000

S = TypeVar("S", bound=Source)
_state: Final = attrgetter("in_flight", "waiting", "workers_alive", "idle", "slots", "worker_restarts", "problem")
Counts = list[tuple[int, int]]
"""Which bucket of a histogram got how many values more; buckets that got none are left out."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last error of one code.

    Attributes:
        endpoint: Whose it is.
        count: How many there were since the server started.
        at: When, in seconds since 1970.
        kind: The class of the error.
        message: What happened; empty if it may not be told.
        trace: Where in the user's code, if it was there.
        request_id: Of the request, if it had one.
        is_users: Whether the user's code raised it.
    """

    endpoint: str
    code: str
    count: int
    at: float
    kind: str
    is_users: bool = False
    message: str = ""
    trace: str = ""
    request_id: str = ""


class Beat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one endpoint did.

    Attributes:
        endpoint: Its name; nodes of a graph are called `graph/node`.
        in_flight: Requests without an answer now.
        waiting: Samples in the queue now.
        alive: Workers that are up now.
        idle: Slots that could take a batch now.
        slots: Slots there are.
        restarts: Workers that were replaced, ever.
        totals: Requests by outcome, ever.
        codes: Requests by outcome, in this beat.
        request: Their times, from submission to outcome.
        queue: Times in the queue.
        sizes: Sizes of the batches.
        batches: How many batches there were.
        rows: Samples in them.
        model_s: How long workers ran them, in total.
        parts: Parts of streamed answers.
        faults: The newest error of each code that came.
        problem: Why a worker cannot be replaced.
        devices: What each worker runs on, as a person wrote it.
    """

    endpoint: str
    version: str
    in_flight: int
    waiting: int
    alive: int
    idle: int
    slots: int
    restarts: int
    totals: dict[str, int]
    codes: dict[str, int] = {}
    request: Counts = []
    queue: Counts = []
    sizes: Counts = []
    batches: int = 0
    rows: float = 0.0
    model_s: float = 0.0
    parts: int = 0
    faults: list[Fault] = []
    problem: str = ""
    devices: tuple[str, ...] = ()


class Bounds(msgspec.Struct, frozen=True):
    """The upper bounds of the buckets that `Counts` count in; what lies above the last one has a bucket, too."""

    seconds: tuple[float, ...] = SECONDS
    rows: tuple[float, ...] = ROWS


class Pulse(Generic[S]):
    """Tells what endpoints did from one beat to the next."""

    def __init__(self, sources: Callable[[], Iterable[S]], read: Callable[[S], Reading]) -> None:
        """Watch what `sources` returns, each read by `read`."""
        self._sources = sources
        self._read = read
        self._seen: dict[EndpointMetrics, _Seen] | None = None

    def stop(self) -> None:
        """Forget what was seen; the next beat begins anew."""
        self._seen = None

    def beat(self, *, is_noted: bool = True) -> Generator[None, None, list[Beat]]:
        """Return what each endpoint did since the last beat that was noted, in turns; the first one only looks."""
        before = self._seen
        seen: dict[EndpointMetrics, _Seen] = {}
        beats: list[Beat] = []
        for number, source in enumerate(list(self._sources()), 1):
            reading, metrics = self._read(source), source.metrics
            last = None if before is None else before.get(metrics) or _Seen(EndpointMetrics())
            if last is not None and last.is_as(reading):
                seen[metrics] = last
            else:
                seen[metrics] = _Seen(reading.metrics, reading)
                if last is not None:
                    beats.append(last.beat(reading))
            if number % SLICE == 0:
                yield
        if is_noted:
            self._seen = seen
        return beats

    def standing(self) -> Generator[None, None, list[Beat]]:
        """Return how each endpoint stands and what it has counted so far, in turns, for who begins to watch."""
        found: list[Beat] = []
        for number, source in enumerate(list(self._sources()), 1):
            reading = self._read(source)
            found.append(_Seen(reading.metrics).beat(reading))
            if number % SLICE == 0:
                yield
        return found

    def faults(self) -> list[Fault]:
        """Return the newest errors of all endpoints, the newest first."""
        found = (
            (reason.at, number, reading, code)
            for number, reading in enumerate(map(self._read, self._sources()))
            for code, reason in reading.metrics.reasons.items()
        )
        newest = heapq.nlargest(MAX_FAULTS, found, key=lambda one: one[:2])
        return [_fault(reading, code) for _, _, reading, code in newest]


class _Seen:
    """The numbers of an endpoint as they were."""

    __slots__ = ("_batch_size", "_codes", "_model_s", "_parts", "_queue_s", "_request_s", "_rows", "_state")

    def __init__(self, metrics: EndpointMetrics, reading: Reading | None = None) -> None:
        self._codes = metrics.codes.copy()
        self._parts = metrics.parts
        # Arrays: unlike that of lists, their size does not grow with the counts.
        self._request_s = array("q", metrics.request_s.counts)
        self._queue_s = array("q", metrics.queue_s.counts)
        self._batch_size = array("q", metrics.batch_size.counts)
        self._rows = metrics.batch_size.total
        self._model_s = metrics.model_s.total
        self._state = None if reading is None else _state(reading)

    def is_as(self, reading: Reading) -> bool:
        """Tell whether nothing has happened since."""
        metrics = reading.metrics
        return (
            metrics.codes == self._codes
            and metrics.parts == self._parts
            and metrics.batch_size.total == self._rows
            and _state(reading) == self._state
        )

    def beat(self, reading: Reading) -> Beat:
        """Return what has happened since."""
        metrics = reading.metrics
        codes = {code: more for code, n in metrics.codes.items() if (more := n - self._codes.get(code, 0))}
        sizes = _more(metrics.batch_size, self._batch_size)
        return Beat(
            endpoint=reading.endpoint,
            version=reading.version,
            in_flight=reading.in_flight,
            waiting=reading.waiting,
            alive=reading.workers_alive,
            idle=reading.idle,
            slots=reading.slots,
            restarts=reading.worker_restarts,
            totals=metrics.codes.copy(),
            codes=codes,
            request=_more(metrics.request_s, self._request_s),
            queue=_more(metrics.queue_s, self._queue_s),
            sizes=sizes,
            batches=sum(count for _, count in sizes),
            rows=metrics.batch_size.total - self._rows,
            model_s=round(metrics.model_s.total - self._model_s, 6),
            parts=metrics.parts - self._parts,
            faults=[_fault(reading, code) for code in codes if code in metrics.reasons],
            problem=shown(reading.problem, _MESSAGE_CHARS),
            devices=reading.devices,
        )


def _more(histogram: Histogram, before: array[int]) -> Counts:
    pairs = enumerate(zip(histogram.counts, before, strict=True))
    return [(bucket, now - then) for bucket, (now, then) in pairs if now != then]


def _fault(reading: Reading, code: str) -> Fault:
    reason: FailureReason = reading.metrics.reasons[code]
    return Fault(
        endpoint=reading.endpoint,
        code=code,
        count=reading.metrics.codes.get(code, 0),
        at=round(reason.at, 3),
        kind=reason.kind,
        is_users=reason.is_users,
        message=shown(reason.message, _MESSAGE_CHARS),
        trace=shown(reason.trace, _TRACE_CHARS),
        request_id=reason.request_id,
    )


def for_strangers(faults: Iterable[Fault]) -> list[Fault]:
    """Leave out what the user's code raised, as answers do."""
    return [msgspec.structs.replace(fault, message="", trace="") if fault.is_users else fault for fault in faults]


def shown(text: str, limit: int) -> str:
    """Return a text that JSON can carry; only the end of a long one, as that says most in a traceback."""
    cut = text if len(text) <= limit else "… " + text[-limit:]
    return cut.encode("utf-8", "replace").decode()
