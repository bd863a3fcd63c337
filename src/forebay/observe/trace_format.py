# SPDX-License-Identifier: Apache-2.0
"""A recording as Chrome trace events, which Perfetto and chrome://tracing show.

Each endpoint is a process of the trace. Its workers are threads with a slice for each batch, in it one for each phase.
Its requests are on threads as well, one for each that was open at the same time: waiting, running, being answered. An
arrow leads each request through all endpoints of a graph. Two counters show the queue and what is in flight.

Times are microseconds since the first event, as the format has them, exact to the nanosecond.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from forebay.observe.capacity import Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from forebay.observe.timeline import BatchRecord, Recording, Step, Watched
    from forebay.types.batch import Phase

PRE: Final = frozenset({"preprocess", "prep"})
POST: Final = frozenset({"postprocess", "postp"})
"""Names of the phases before and after the model; all others are the model's."""

REQUEST: Final = "request"
BATCH: Final = "batch"
"""Categories of the slices that are a whole request at an endpoint, and a whole batch in a worker."""

_LANES: Final = 1000
"""Thread numbers of requests begin here, those of workers at 1."""
_NAMED: Final = 20
"""Ids of a batch's requests that are written beside it."""

T = TypeVar("T")


def chrome_trace(recording: Recording) -> bytes:
    """Return a recording in the JSON object format of Chrome trace events.

    `otherData` holds what has no place in events: `seconds`, `dropped_batches`, and for each endpoint its `slots`.
    """
    records = list(recording.records)
    endpoints = _in_order(records)
    writer = _Writer(min((step.arrived for record in records for step in record.steps), default=0.0))
    for number, (name, endpoint) in enumerate(endpoints.items(), 1):
        writer.endpoint(number, name, [record for record in records if record.endpoint is endpoint])
    writer.flows()
    return msgspec.json.encode(
        {
            "traceEvents": writer.metadata + sorted(writer.events, key=itemgetter("ts")),
            "displayTimeUnit": "ms",
            "otherData": {
                "seconds": round(recording.ended - recording.started, 6),
                "dropped_batches": recording.dropped,
                "endpoints": {name: _about(endpoint) for name, endpoint in endpoints.items()},
            },
        }
    )


def _in_order(records: Sequence[BatchRecord]) -> dict[str, Watched]:
    """Return the endpoints by name: those of one graph together, each after those that it gets its requests from."""
    steps = [(step, record.endpoint) for record in records for step in record.steps]
    began: dict[str, float] = {}
    for step, _ in steps:
        began[step.id] = min(began.get(step.id, step.arrived), step.arrived)
    late: dict[str, float] = {}
    for step, endpoint in steps:
        late[endpoint.name] = max(late.get(endpoint.name, 0.0), step.arrived - began[step.id] if step.id else 0.0)
    by_name = {endpoint.name: endpoint for _, endpoint in steps}
    return {name: by_name[name] for name in sorted(late, key=lambda name: (name.partition("/")[0], late[name], name))}


def _about(endpoint: Watched) -> dict[str, Any]:
    return {"slots": endpoint.slots}


class _Writer:
    """Collects events."""

    def __init__(self, base_s: float) -> None:
        self.metadata: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._base_s = base_s
        self._points: dict[str, list[tuple[int, int, int]]] = {}

    def endpoint(self, pid: int, name: str, records: Sequence[BatchRecord]) -> None:
        """Write everything of one endpoint."""
        self._name(pid, 0, "process_name", name)
        self.metadata.append(_metadata(pid, 0, "process_sort_index", {"sort_index": pid}))
        self._workers(pid, [record for record in records if record.started])
        self._requests(pid, records)
        for record in sorted(records, key=lambda record: record.done):
            self._counter(pid, "queue length", record.done, record.waiting)
            self._counter(pid, "in flight", record.done, record.in_flight)

    def flows(self) -> None:
        """Write the arrows of all requests."""
        for number, points in enumerate(self._points.values(), 1):
            points.sort()
            last = len(points) - 1
            for index, (ns, pid, tid) in enumerate(points if last else ()):
                event = {"name": "request", "cat": "flow", "id": number, "pid": pid, "tid": tid, "ts": ns / 1000}
                event |= {"ph": "s"} if index == 0 else {"ph": "f" if index == last else "t", "bp": "e"}
                self.events.append(event)

    def _workers(self, pid: int, records: Sequence[BatchRecord]) -> None:
        by_worker: dict[tuple[str, int], list[BatchRecord]] = {}
        for record in records:
            by_worker.setdefault((record.worker, record.pid), []).append(record)
        tid = 0
        for (worker, process), own in sorted(by_worker.items()):
            lanes = list(_lanes(own, lambda record: (record.started, _end_of_run(record))))
            for lane in range(1 + max(lane for lane, _ in lanes)):
                suffix = f", slot {lane}" if lane else ""
                self._name(pid, tid + 1 + lane, "thread_name", f"worker {worker}{suffix} (pid {process})")
            for lane, record in lanes:
                self._batch(pid, tid + 1 + lane, record)
            tid += 1 + max(lane for lane, _ in lanes)

    def _batch(self, pid: int, tid: int, record: BatchRecord) -> None:
        started, ended = record.started, _end_of_run(record)
        cost = cost_of(record)
        args = {
            "requests": len(record.steps),
            "samples": sum(step.size for step in record.steps),
            "pre_ms": round(cost.pre_s * 1000, 6),
            "process_ms": round(cost.process_s * 1000, 6),
            "post_ms": round(cost.post_s * 1000, 6),
            "ids": [step.id for step in record.steps[:_NAMED]],
        }
        self._slice(pid, tid, f"batch of {args['samples']}", BATCH, started, ended, args)
        since = started
        for (name, phase, phase_started, phase_ended), samples in _together(record.phases):
            begun = min(max(phase_started, since), ended)
            since = min(max(phase_ended, begun), ended)
            about = ({"by": name} if name else {}) | ({"samples": samples} if samples else {})
            self._slice(pid, tid, phase, "phase", begun, since, about)
        for step in record.steps:
            self._point(step, started, pid, tid)

    def _requests(self, pid: int, records: Sequence[BatchRecord]) -> None:
        pairs = [(step, record) for record in records for step in record.steps]
        seen: set[int] = set()
        for lane, (step, record) in _lanes(pairs, lambda pair: (pair[0].arrived, pair[1].done)):
            tid = _LANES + lane
            if lane not in seen:
                seen.add(lane)
                self._name(pid, tid, "thread_name", "requests" if lane == 0 else f"requests, {lane + 1} at a time")
            taken = max(record.taken, step.arrived)
            args = {"id": step.id, "samples": step.size, "queue_ms": round((taken - step.arrived) * 1000, 6)}
            self._slice(pid, tid, "request", REQUEST, step.arrived, record.done, args)
            self._slice(pid, tid, "queue", "part", step.arrived, taken, {})
            self._point(step, step.arrived, pid, tid)
            if record.started:
                started, ended = max(record.started, taken), _end_of_run(record)
                self._slice(pid, tid, "to worker", "part", taken, started, {})
                self._slice(pid, tid, "run", "part", started, ended, {})
                self._slice(pid, tid, "from worker", "part", ended, record.done, {})
                self._point(step, ended, pid, tid)
            else:
                self._slice(pid, tid, "run", "part", taken, record.done, {})

    def _ns(self, moment_s: float) -> int:
        return round((moment_s - self._base_s) * 1e9)

    def _slice(
        self, pid: int, tid: int, name: str, category: str, begun: float, over: float, args: dict[str, Any]
    ) -> None:
        begun_ns = self._ns(begun)
        duration_ns = max(self._ns(over) - begun_ns, 0)
        event = {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid}
        self.events.append({**event, "ts": begun_ns / 1000, "dur": duration_ns / 1000, "args": args})

    def _counter(self, pid: int, name: str, moment: float, value: int) -> None:
        event = {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": self._ns(moment) / 1000}
        self.events.append({**event, "args": {"value": value}})

    def _name(self, pid: int, tid: int, kind: str, name: str) -> None:
        self.metadata.append(_metadata(pid, tid, kind, {"name": name}))
        if kind == "thread_name":
            self.metadata.append(_metadata(pid, tid, "thread_sort_index", {"sort_index": tid}))

    def _point(self, step: Step, moment: float, pid: int, tid: int) -> None:
        if step.id:
            self._points.setdefault(step.id, []).append((self._ns(moment), pid, tid))


def cost_of(record: BatchRecord) -> Cost:
    """Return what a batch cost its worker; what is neither before nor after the model is the model's."""
    pre = _sum(record.phases, PRE)
    post = _sum(record.phases, POST)
    return Cost(pre, max(record.ended - record.started - pre - post, 0.0), post)


def _sum(phases: Iterable[Phase], names: frozenset[str]) -> float:
    return sum(over - begun for _, phase, begun, over, _ in phases if phase in names)


def _together(phases: Iterable[Phase]) -> list[tuple[tuple[str, str, float, float], list[int]]]:
    """Return the phases in order of beginning with the samples of each; samples that share one name it once each."""
    found: dict[tuple[str, str, float, float], list[int]] = {}
    for name, phase, started, ended, sample in phases:
        samples = found.setdefault((name, phase, started, ended), [])
        if sample >= 0:
            samples.append(sample)
    return sorted(found.items(), key=lambda item: item[0][2])


def _end_of_run(record: BatchRecord) -> float:
    return min(max(record.ended, record.started), max(record.done, record.started))


def _lanes(items: Iterable[T], times: Callable[[T], tuple[float, float]]) -> Iterator[tuple[int, T]]:
    """Give each item the lowest lane on which nothing else happens meanwhile; yields in order of beginning."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    count = 0
    for item in sorted(items, key=times):
        begun, over = times(item)
        while busy and busy[0][0] <= begun:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, count)
            count += 1
        lane = heappop(free)
        heappush(busy, (over, lane))
        yield lane, item


def _metadata(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}
