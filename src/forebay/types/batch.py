# SPDX-License-Identifier: Apache-2.0
"""A batch: entries with an equal key that run together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import msgspec

from forebay.types.call import Item, Origin, Outcome
from forebay.types.tenant import Tenant


class Entry(Item, Protocol):
    """What the queue and the pools need to know of a request or a slice of one."""

    key: Hashable
    origin: Origin | None
    deadline: float
    arrived: float
    taken: float
    done: bool
    rank: int
    tenant: Tenant | None
    payer: Any
    due: float


class Inside(Protocol):
    """What entries go through once they have left the queue, where that is not a worker."""

    @property
    def row_s(self) -> float:
        """Seconds in which an entry is answered where many wait."""
        ...

    def end(self, entry: Entry, start: float, before: int, now: float) -> float:
        """Return when an entry would be answered that leaves the queue at `start`, after so many others."""
        ...

    def least_s(self) -> float:
        """Return the seconds that it takes at least; 0 if that is unknown."""
        ...


Phase = tuple[str, str, float, float, int]
"""A part of a batch's time in its worker: who says so (may be empty), the phase, its start and end in seconds of
`time.monotonic`, and the number of the sample it was for, -1 for all of them."""


class Noted(msgspec.Struct):
    """Where and when a batch ran; its pool fills it in.

    Attributes:
        taken: When the batch left the queue, in seconds of `time.monotonic`, as all moments here.
        started: When the runner began; 0 where nothing is known of that.
        worker: Which worker of the pool ran it.
        pid: The process of that worker.
        phases: What the runner says of its time.
    """

    taken: float
    started: float = 0.0
    worker: str = ""
    pid: int = 0
    phases: list[Phase] = []


class EntryBatch(msgspec.Struct, eq=False):
    """Entries in arrival order, and what became of them.

    Attributes:
        rows: Samples in all entries together.
        attempts: How many workers were given it; a second time only when the first died.
        unread: How many more died before they had read it.
        model_s: Seconds the runner took, as measured next to it; of a stream, how long it sat.
        busy_s: Seconds that workers were busy with it, crashed runs and its part of shared steps among them; 0 where
            `model_s` says that.
        billed_s: Of these, those that were charged while it streamed.
        own_s: The part of these that each entry needed by itself, if the batch was padded, or ran in parts.
        has_streamed: Whether parts of its answers have left the worker.
        cancelled: True once nobody waits for any of its entries.
        on_cancel: Set by the pool that runs it: tells the worker that nobody waits any more.
        noted: Filled in by the pool while somebody listens to the timeline; None while nobody does.
        on_steps: Called on the loop with steps of a streamed answer (lists as long as `entries`) and a function to call
            once every client has room for as many more.
    """

    entries: list[Any]
    key: Hashable
    rows: int
    attempts: int = 0
    unread: int = 0
    model_s: float = 0.0
    busy_s: float = 0.0
    billed_s: float = 0.0
    own_s: list[float] = []
    has_streamed: bool = False
    cancelled: bool = False
    on_cancel: Callable[[], None] | None = None
    noted: Noted | None = None
    on_steps: Callable[[Sequence[Sequence[Any]], Callable[[], object]], None] | None = None

    @property
    def worker_s(self) -> float:
        """Seconds that workers were busy with it; 0 if nothing is known of that."""
        return self.busy_s if self.busy_s or self.has_streamed else self.model_s


Done = Callable[[EntryBatch, Sequence[Outcome]], None]
