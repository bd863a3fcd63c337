# SPDX-License-Identifier: Apache-2.0
"""What a trace says in a few lines: where the time goes, which node limits the others, how many workers are needed.

Theory of operation. A node that runs batches of several requests costs each of them its share of the batch. The
critical path of a request is found in the trace itself: a node starts when the last of its inputs is there, so the
step before it is the one that ended last before it arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from forebay.errors import InvalidRequest
from forebay.observe.metrics import capacity
from forebay.observe.traces.trace_format import BATCH, REQUEST
from forebay.types.first_use import known


class Times(msgspec.Struct, frozen=True):
    """Some durations, in milliseconds."""

    mean: float
    p95: float


class NodeSummary(msgspec.Struct, frozen=True):
    """What a trace says of one endpoint that runs batches.

    Attributes:
        name: The endpoint's.
        slots: Batches it can run at a time.
        requests: Requests in its batches.
        queue: How long requests waited for a worker.
        pre: How long batches were prepared.
        process: How long the model took for a batch.
        post: How long results were made ready.
        cost_s: What one request takes of a worker's time: its share of a batch.
        busy: Share of the slots' time in which they ran.
    """

    name: str
    slots: int
    requests: int
    batches: int
    queue: Times
    pre: Times
    process: Times
    post: Times
    cost_s: float
    busy: float


class Whole(msgspec.Struct, frozen=True):
    """A graph's own requests, from door to door.

    Attributes:
        name: The endpoint's.
        requests: How many there were.
        latency: How long they took.
    """

    name: str
    requests: int
    latency: Times


class Summary(msgspec.Struct, frozen=True):
    """What a trace says.

    Attributes:
        seconds: How long was recorded.
        dropped: Batches that found no room in the recording.
        nodes: Endpoints that run batches.
        wholes: Endpoints whose requests run through others.
        bottleneck: The node that limits all, empty if nothing ran.
        throughput: Requests a second it lets through.
        critical_path: The nodes that most requests wait for, in order.
        average_cost_s: What a request takes on that path when it waits nowhere.
    """

    seconds: float
    dropped: int
    nodes: list[NodeSummary]
    wholes: list[Whole]
    bottleneck: str
    throughput: float
    critical_path: list[str]
    average_cost_s: float


class _Event(msgspec.Struct, frozen=True):
    name: str
    ph: str
    pid: int
    ts: float
    cat: str = ""
    dur: float = 0.0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        return self.ts + self.dur


class _Endpoint(msgspec.Struct, frozen=True):
    slots: int


class _Other(msgspec.Struct, frozen=True):
    seconds: float
    dropped_batches: int
    endpoints: dict[str, _Endpoint]


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - the format's own names
    otherData: _Other  # noqa: N815


def summarise(trace: bytes) -> Summary:
    """Read a trace that forebay has written; raises an `InvalidRequest` if it is something else."""
    try:
        read = msgspec.json.decode(trace, type=known(_Trace))
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"expected a trace that forebay wrote: {error}") from error
    events = read.traceEvents
    names = {event.pid: str(event.args["name"]) for event in events if event.name == "process_name"}
    batches = _by_name(names, (event for event in events if event.cat == BATCH))
    requests = _by_name(names, (event for event in events if event.cat == REQUEST))
    about = read.otherData
    nodes = [
        _node(name, about.endpoints[name].slots, ran, requests.get(name, []), about.seconds)
        for name, ran in sorted(batches.items(), key=lambda item: item[1][0].pid)
    ]
    # How long a batch runs, and with it each of its requests.
    runs = {node.name: (node.pre.mean + node.process.mean + node.post.mean) / 1000 for node in nodes}
    limits = {node.name: (node.cost_s, node.slots) for node in nodes if node.cost_s > 0 and node.slots > 0}
    bottleneck, throughput = capacity.throughput(limits) if limits else ("", 0.0)
    whole = {event.args["id"] for name, own in requests.items() if name not in batches for event in own}
    path = _critical_path({name: requests.get(name, []) for name in runs}, whole)
    return Summary(
        seconds=about.seconds,
        dropped=about.dropped_batches,
        nodes=nodes,
        wholes=[
            Whole(name, len(own), _times([event.dur / 1000 for event in own]))
            for name, own in requests.items()
            if name not in batches
        ],
        bottleneck=bottleneck,
        throughput=throughput,
        critical_path=path,
        average_cost_s=sum(runs[name] for name in path),
    )


def _by_name(names: Mapping[int, str], events: Iterable[_Event]) -> dict[str, list[_Event]]:
    found: dict[str, list[_Event]] = {}
    for event in events:
        found.setdefault(names[event.pid], []).append(event)
    return found


def _node(name: str, slots: int, ran: Sequence[_Event], asked: Sequence[_Event], seconds: float) -> NodeSummary:
    requests = sum(batch.args["requests"] for batch in ran)
    busy_s = sum(batch.dur for batch in ran) / 1e6
    return NodeSummary(
        name=name,
        slots=slots,
        requests=requests,
        batches=len(ran),
        queue=_times([event.args["queue_ms"] for event in asked]),
        pre=_times([batch.args["pre_ms"] for batch in ran]),
        process=_times([batch.args["process_ms"] for batch in ran]),
        post=_times([batch.args["post_ms"] for batch in ran]),
        cost_s=busy_s / requests if requests else 0.0,
        busy=min(busy_s / (slots * seconds), 1.0) if slots and seconds else 0.0,
    )


def _times(durations_ms: list[float]) -> Times:
    if not durations_ms:
        return Times(0.0, 0.0)
    durations_ms = sorted(durations_ms)
    nearest = max(-(-len(durations_ms) * 95 // 100), 1) - 1
    return Times(sum(durations_ms) / len(durations_ms), durations_ms[nearest])


def _critical_path(requests: Mapping[str, Sequence[_Event]], whole: Collection[str]) -> list[str]:
    """Return the path that most requests took.

    Args:
        requests: The steps of requests at each node.
        whole: Requests to graphs that were recorded from beginning to end; others may lack some steps.
    """
    steps: dict[str, list[tuple[float, float, str]]] = {}
    for name, events in requests.items():
        for event in events:
            if not whole or event.args["id"] in whole:
                steps.setdefault(event.args["id"], []).append((event.end, event.ts, name))
    paths = Counter(tuple(_backwards(own))[::-1] for own in steps.values())
    return list(max(paths, key=lambda path: paths[path])) if paths else []


def _backwards(steps: list[tuple[float, float, str]]) -> Iterator[str]:
    """Walk from the step that ended last to the one before it, and so on."""
    arrived = float("inf")
    for end, start, name in sorted(steps, reverse=True):
        if end <= arrived:
            yield name
            arrived = start
