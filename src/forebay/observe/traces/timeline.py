# SPDX-License-Identifier: Apache-2.0
"""The timeline: when each batch waited, ran and was answered, for listeners.

Theory of operation. A listener is called on the loop with one `BatchRecord` for each batch that was answered. The
batcher looks whether anybody listens when a batch leaves its queue; only then the batch carries a `Noted`, in which
the pool writes where and when it ran, and which the endpoint hands over when the batch is answered. While nobody
listens, a batch costs one look at `told` and two at `noted`.

All moments are seconds of `time.monotonic`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, Self

import msgspec

from forebay.observe.listeners import Listeners
from forebay.observe.logs.request_ids import id_of, next_id
from forebay.types.batch import EntryBatch, Noted, Phase
from forebay.types.server_state import here

if TYPE_CHECKING:
    from forebay.types.call import Request, Slice

MAX_PARTS: Final = 200_000
"""Requests and phases that a recording keeps, together."""


class WatchedEndpoint(Protocol):
    """What the timeline tells of an endpoint."""

    @property
    def name(self) -> str:
        """What it is called; nodes of a graph are called `graph/node`."""
        ...

    @property
    def slots(self) -> int:
        """Batches it can run at a time."""
        ...

    @property
    def waiting(self) -> int:
        """Samples in its queue."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests without an outcome."""
        ...


class Step(msgspec.Struct, frozen=True, gc=False):
    """The part of one request in a batch.

    Attributes:
        id: The request's; equal in all nodes of a graph that it came through.
        arrived: When it was submitted to the endpoint.
        size: Its samples.
        run_id: As `id`, but the server's own, so that no two requests have the same.
    """

    id: str
    arrived: float
    size: int
    run_id: str


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch that was answered.

    Attributes:
        endpoint: Whose it was.
        steps: The requests in it.
        taken: When it left the queue.
        started: When the runner began; 0 where nothing is known of that, as for the requests inside of a graph.
        ended: When the runner ended; 0 where that is not known.
        done: When its outcomes were on the loop.
        worker: Which worker of the endpoint ran it.
        pid: The process of that worker.
        phases: What the runner says of its time.
        waiting: Samples in the endpoint's queue when it was done.
        in_flight: Requests of the endpoint without an outcome when it was done.
    """

    endpoint: WatchedEndpoint
    steps: tuple[Step, ...]
    taken: float
    started: float
    ended: float
    done: float
    worker: str
    pid: int
    phases: list[Phase]
    waiting: int
    in_flight: int


class Timeline(Listeners[BatchRecord]):
    """The listeners that are told of each batch that was answered, on the loop; a server has one of these."""

    subject = "the timeline"

    def end(self, endpoint: WatchedEndpoint, batch: EntryBatch, noted: Noted, now: float) -> None:
        """Tell of a batch that was noted and is answered now."""
        self.tell(
            BatchRecord(
                endpoint=endpoint,
                steps=tuple(
                    Step(id_of(entry), entry.arrived, entry.size, entry.root().run_id) for entry in batch.entries
                ),
                taken=noted.taken,
                started=noted.started,
                ended=noted.started and noted.started + batch.model_s,
                done=now,
                worker=noted.worker,
                pid=noted.pid,
                phases=noted.phases,
                waiting=endpoint.waiting,
                in_flight=endpoint.in_flight,
            )
        )


class BatchListener:
    """Hears of the batches that are answered while it is open: a context manager, on the loop.

    Attributes:
        timeline: What it listens to; None for that of the server in which it is opened.
    """

    timeline: Timeline | None = None

    def __enter__(self) -> Self:
        self._listening = (self.timeline or here(Timeline)).listening(self.hear)
        self._listening.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listening.__exit__(None, None, None)

    def hear(self, record: BatchRecord) -> None:
        """Record a batch; must not block."""
        raise NotImplementedError


def begin(batch: EntryBatch, now: float) -> None:
    """Begin to record a batch that leaves its queue now."""
    batch.noted = Noted(taken=now)
    for entry in batch.entries:
        name(entry)  # before it is answered, so that the answer has its id


def name(entry: Request | Slice) -> None:
    """Give a request the ids by which the listeners know it."""
    request = entry.root()
    request.run_id = request.run_id or next_id()
    id_of(request)


class Recording(BatchListener):
    """Keeps what happens while it is open, the newest if that is too much.

    Attributes:
        records: The batches, in the order in which they were answered.
        dropped: Batches for which there was no room.
        started: When it was opened; 0 before.
        ended: When it was closed; 0 before.
    """

    def __init__(self, max_parts: int = MAX_PARTS, timeline: Timeline | None = None) -> None:
        """Make one; as a context manager it records.

        Args:
            timeline: What is recorded; None for that of the server in which it is opened.
            max_parts: Requests and phases that are kept, together.
        """
        self.timeline = timeline
        self.records: deque[BatchRecord] = deque()
        self.dropped = 0
        self.started = 0.0
        self.ended = 0.0
        self._room = max_parts

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.ended = time.monotonic()

    def hear(self, record: BatchRecord) -> None:
        """Keep what it did."""
        self.records.append(record)
        self._room -= _parts(record)
        while self._room < 0:
            self._room += _parts(self.records.popleft())
            self.dropped += 1


def _parts(record: BatchRecord) -> int:
    return len(record.steps) + len(record.phases)
