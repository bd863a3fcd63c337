# SPDX-License-Identifier: Apache-2.0
"""A recording as Chrome trace events, which Perfetto and chrome://tracing show.

Each endpoint is a process of the trace. Its workers are threads with a slice for each batch, in it one for each phase.
Its requests are on threads as well, one for each that was open at the same time: waiting, running, being answered.
Arrows lead each request from node to node of a graph, and from the queue into its batch. Two counters show the queue
and what is in flight.

An arrow belongs to the innermost slice that is open at its event, and Perfetto draws it from the end of that slice to
the beginning of the other: it comes from `queue` or from the last part of a request, and leads to `queue` or a batch.

Times are microseconds since the first event, as the format has them, exact to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from forebay.observe.metrics.capacity import NodeCost
from forebay.observe.traces.trace_arrows import Visit, arrows
from forebay.observe.traces.trace_lanes import lanes

if TYPE_CHECKING:
    from forebay.observe.traces.timeline import BatchRecord, Recording, Step, WatchedEndpoint
    from forebay.types.batch import Phase

PRE: Final = frozenset({"preprocess", "prep"})
POST: Final = frozenset({"postprocess", "postp"})
"""Names of the phases before and after the model; all others are the model's."""

REQUEST: Final = "request"
BATCH: Final = "batch"
"""Categories of the slices that are a whole request at an endpoint, and a whole batch in a worker."""

_WORKERS: Final = 1000
_LANES: Final = 2000
"""Where the numbers of these threads begin. One numbered as its process would be called its main one."""
_NAMED: Final = 20
"""Ids of a batch's requests that are written beside it."""


def chrome_trace(recording: Recording) -> bytes:
    """Return a recording in the JSON object format of Chrome trace events.

    `otherData` holds what has no place in events: `seconds`, `dropped_batches`, and for each endpoint its `slots`.
    """
    records = list(recording.records)
    endpoints = _in_order(records)
    writer = _Writer(min((step.arrived for record in records for step in record.steps), default=0.0), records)
    for number, (name, endpoint) in enumerate(endpoints.items(), 1):
        writer.endpoint(number, name, [record for record in records if record.endpoint is endpoint])
    return msgspec.json.encode(
        {
            "traceEvents": writer.metadata + sorted(writer.events, key=attrgetter("ts")),
            "displayTimeUnit": "ms",
            "otherData": {
                "seconds": round(recording.ended - recording.started, 6),
                "dropped_batches": recording.dropped,
                "endpoints": {name: {"slots": endpoint.slots} for name, endpoint in endpoints.items()},
            },
        }
    )


def _in_order(records: Sequence[BatchRecord]) -> dict[str, WatchedEndpoint]:
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


class _Event(msgspec.Struct, gc=False):
    """One event, in the format's own names; there may be a million, which the garbage collector need not look at."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    args: dict[str, Any] | UnsetType = UNSET
    cat: str | UnsetType = UNSET
    dur: float | UnsetType = UNSET
    id: int | UnsetType = UNSET
    bp: str | UnsetType = UNSET


class _Writer:
    """Collects events."""

    def __init__(self, base_s: float, records: Iterable[BatchRecord]) -> None:
        self.metadata: list[_Event] = []
        self.events: list[_Event] = []
        self._base_s = base_s
        self._numbers = count(1)
        # Numbers of the arrows: from a graph's request to its first steps, from a step to the next ones, into a step.
        self._into_graph: dict[Visit, list[int]] = {}
        self._leaving: dict[Visit, list[int]] = {}
        self._coming: dict[Visit, list[int]] = {}
        for before, after in arrows({_visit(step, record) for record in records for step in record.steps}):
            number = next(self._numbers)
            leaving = self._into_graph if after.graph == before.endpoint else self._leaving
            leaving.setdefault(before, []).append(number)
            self._coming.setdefault(after, []).append(number)

    def endpoint(self, pid: int, name: str, records: Sequence[BatchRecord]) -> None:
        """Write everything of one endpoint."""
        self._name(pid, 0, "process_name", name)
        self.metadata.append(_metadata(pid, 0, "process_sort_index", {"sort_index": pid}))
        into = self._requests(pid, records)
        self._workers(pid, [record for record in records if record.started], into)
        pairs = [(step, record) for record in records for step in record.steps]
        open_ = [(step.arrived, 1) for step, _ in pairs] + [(record.done, -1) for _, record in pairs]
        queued = [(step.arrived, step.size) for step, _ in pairs]
        queued += [(max(record.taken, step.arrived), -step.size) for step, record in pairs]
        self._counter(pid, "in flight", "requests", _levels(open_, [(one.done, one.in_flight) for one in records]))
        self._counter(pid, "queue length", "samples", _levels(queued, [(one.done, one.waiting) for one in records]))

    def _workers(self, pid: int, records: Sequence[BatchRecord], into: Mapping[int, Iterable[int]]) -> None:
        by_worker: dict[tuple[str, int], list[BatchRecord]] = {}
        for record in records:
            by_worker.setdefault((record.worker, record.pid), []).append(record)
        tid = _WORKERS
        for (worker, process), own in sorted(by_worker.items()):
            laid = list(lanes(own, lambda record: (record.started, _end_of_run(record))))
            for lane in range(1 + max(lane for lane, _ in laid)):
                suffix = f", slot {lane}" if lane else ""
                self._name(pid, tid + lane, "thread_name", f"worker {worker}{suffix} (pid {process})")
            for lane, record in laid:
                self._batch(pid, tid + lane, record, into.get(id(record), ()))
            tid += 1 + max(lane for lane, _ in laid)

    def _batch(self, pid: int, tid: int, record: BatchRecord, arrows_in: Iterable[int]) -> None:
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
        self._arrows("f", arrows_in, pid, tid, started)
        since = started
        for (name, phase, phase_started, phase_ended), samples in _together(record.phases):
            begun = min(max(phase_started, since), ended)
            since = min(max(phase_ended, begun), ended)
            about = ({"by": name} if name else {}) | ({"samples": samples} if samples else {})
            self._slice(pid, tid, phase, "phase", begun, since, about)

    def _requests(self, pid: int, records: Sequence[BatchRecord]) -> dict[int, list[int]]:
        """Write the requests; return the numbers of the arrows into each batch."""
        into: dict[int, list[int]] = {}
        pairs = [(step, record) for record in records for step in record.steps]
        seen: set[int] = set()
        for lane, (step, record) in lanes(pairs, lambda pair: (pair[0].arrived, pair[1].done)):
            tid = _LANES + lane
            if lane not in seen:
                seen.add(lane)
                self._name(pid, tid, "thread_name", "requests" if lane == 0 else f"requests, {lane + 1} at a time")
            taken = max(record.taken, step.arrived)
            args = {"id": step.id, "samples": step.size, "queue_ms": round((taken - step.arrived) * 1000, 6)}
            self._slice(pid, tid, "request", REQUEST, step.arrived, record.done, args)
            self._slice(pid, tid, "queue", "part", step.arrived, taken, {})
            visit = _visit(step, record)
            self._arrows("f", self._coming.pop(visit, ()), pid, tid, step.arrived)
            self._arrows("s", self._into_graph.pop(visit, ()), pid, tid, step.arrived)
            last = taken
            if record.started:
                if record.started >= step.arrived:
                    number = next(self._numbers)
                    into.setdefault(id(record), []).append(number)
                    self._arrows("s", [number], pid, tid, step.arrived)
                started, last = max(record.started, taken), _end_of_run(record)
                self._slice(pid, tid, "to worker", "part", taken, started, {})
                self._slice(pid, tid, "run", "part", started, last, {})
                self._slice(pid, tid, "from worker", "part", last, record.done, {})
            else:
                self._slice(pid, tid, "run", "part", taken, record.done, {})
            self._arrows("s", self._leaving.pop(visit, ()), pid, tid, last)
        return into

    def _ns(self, moment_s: float) -> int:
        return round((moment_s - self._base_s) * 1e9)

    def _slice(
        self, pid: int, tid: int, name: str, category: str, begun: float, over: float, args: dict[str, Any]
    ) -> None:
        begun_ns = self._ns(begun)
        duration_ns = max(self._ns(over) - begun_ns, 0)
        self.events.append(_Event(name, "X", pid, tid, begun_ns / 1000, args, category, duration_ns / 1000))

    def _arrows(self, phase: str, numbers: Iterable[int], pid: int, tid: int, moment: float) -> None:
        ts = self._ns(moment) / 1000
        bound = "e" if phase == "f" else UNSET
        for number in numbers:
            self.events.append(_Event("leads to", phase, pid, tid, ts, cat="flow", id=number, bp=bound))

    def _counter(self, pid: int, name: str, unit: str, levels: Iterable[tuple[float, int]]) -> None:
        for moment, level in levels:
            self.events.append(_Event(name, "C", pid, 0, self._ns(moment) / 1000, {unit: level}))

    def _name(self, pid: int, tid: int, kind: str, name: str) -> None:
        self.metadata.append(_metadata(pid, tid, kind, {"name": name}))
        if kind == "thread_name":
            self.metadata.append(_metadata(pid, tid, "thread_sort_index", {"sort_index": tid}))


def _visit(step: Step, record: BatchRecord) -> Visit:
    return Visit(step.id, record.endpoint.name, step.arrived, record.done)


def _levels(changes: Iterable[tuple[float, int]], counts: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Yield the moments at which a level changed, and the level from then on.

    Args:
        changes: Moments at which something came or went that was recorded, and how much.
        counts: Moments at which everything was counted, including what is in no record because it has not ended.
    """
    known = beside = 0
    level = -1
    events = sorted([(at, False, by) for at, by in changes] + [(at, True, number) for at, number in counts])
    for moment, together in groupby(events, key=itemgetter(0)):
        for _, is_count, value in together:
            if is_count:
                beside = max(value - known, 0)
            else:
                known += value
        if known + beside != level:
            level = known + beside
            yield moment, level


def cost_of(record: BatchRecord) -> NodeCost:
    """Return what a batch cost its worker; time that is neither before nor after the model counts as the model's."""
    pre = _sum(record.phases, PRE)
    post = _sum(record.phases, POST)
    return NodeCost(pre, max(record.ended - record.started - pre - post, 0.0), post)


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


def _metadata(pid: int, tid: int, name: str, args: dict[str, Any]) -> _Event:
    return _Event(name, "M", pid, tid, 0, args)
