# SPDX-License-Identifier: Apache-2.0
"""Which callers share a batch in a started serving, and which rows of its results each one gets.

Theory of operation. Every batch that a caller hands in is one `Submission` and one entry of the `BatchQueue`. Where a
call does not fit into the rest of a batch, the queue has it divided: its first rows leave as a `SubmissionPart`, the
others keep their place at the head of their line. A call is over when all of its rows were answered, or at once when
one of its batches failed, when its caller went away, or when the serving was stopped.

A call with more rows than may wait is fed in: its rows enter in parts of a whole batch as there is room, at most half
of it, so that others find some as well. The same goes for the later pieces of an input whose first piece was taken.

Who shares a batch is noted in that batch's `Work` and nowhere else, so outcomes cannot reach the wrong caller however
many batches run at a time.

Sans-I/O: no clock, no thread, no loop. `started.py` drives it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.arrays.array_batch import Batch
from forebay.arrays.tree_rows import concatenate
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import ForebayError, QueueFull, ShareUsed
from forebay.types.call import EMPTY, Origin
from forebay.types.plurals import counted

if TYPE_CHECKING:
    from forebay.arrays.template import Template
    from forebay.serving.nx_serving.execution import Executed
    from forebay.types.batch import Entry, EntryBatch
    from forebay.types.tenant import Tenant

NEVER: Final = float("inf")


class OutputRows:
    """Some rows of what a batch returned."""

    __slots__ = ("executed", "start", "stop")

    def __init__(self, executed: Executed, start: int, stop: int) -> None:
        self.executed = executed
        self.start = start
        self.stop = stop

    def output(self) -> Any:
        """Return these rows."""
        return self.executed.cut(self.start, self.stop)


class Submission:
    """One batch of one caller, from the moment it is handed in until it is over.

    Attributes:
        batch: The rows that no batch has taken yet.
        size: How many those are.
        key: Its batch key.
        waiter: Whatever the driver wakes when the call is over; nothing here looks at it.
        streamed: Whether it is woken for each slice as well.
        divisible: Whether its rows may be spread over several batches.
        deadline: Seconds; past it no row is taken any more.
        taken: When the last of its rows were taken; 0 before that.
        slices: What came back for its rows, in their order; None for what still runs.
        unanswered: Rows without an answer.
        waiting: Its parts in the queue, if it is fed in; its further rows are then in `batch`. None if it is not.
        error: What the call failed with.
        done: Whether it is over.
        tenant: Whose it is, where the serving tells tenants apart.
        payer: The flow that pays for it in the queue.
    """

    __slots__ = (
        "arrived",
        "batch",
        "deadline",
        "divisible",
        "done",
        "error",
        "key",
        "payer",
        "size",
        "slices",
        "streamed",
        "taken",
        "tenant",
        "unanswered",
        "waiter",
        "waiting",
    )

    body: Any = None
    params: Mapping[str, Any] = EMPTY
    origin: Origin | None = None
    rank: int = 0
    due: float = float("inf")

    def __init__(
        self,
        batch: Batch,
        waiter: Any,
        *,
        deadline: float = NEVER,
        divisible: bool = True,
        streamed: bool = False,
        tenant: Tenant | None = None,
    ) -> None:
        self.tenant = tenant
        self.payer: Any = None
        self.batch = batch
        self.size = self.unanswered = batch.size
        self.key: Hashable = batch.batch_key
        self.waiter = waiter
        self.streamed = streamed
        self.divisible = divisible
        self.deadline = deadline
        self.arrived = self.taken = 0.0
        self.slices: list[OutputRows | None] = []
        self.waiting: dict[SubmissionPart, None] | None = None
        self.error: ForebayError | None = None
        self.done = False

    @property
    def call(self) -> Submission:
        """The call the rows belong to, as `SubmissionPart.call`."""
        return self

    def divide(self, rows: int) -> SubmissionPart:
        """Cut off the first `rows` rows, which may be all."""
        head, self.batch = self.batch.split(rows)
        self.size -= rows
        self.slices.append(None)
        return SubmissionPart(self, head, len(self.slices) - 1)

    def keep(self, piece: OutputRows) -> None:
        """Note what came back for the last of its rows."""
        self.slices.append(piece)

    def own_error(self) -> ForebayError:
        """Return the error for this caller to raise: callers of one batch must not share the traceback of one."""
        assert self.error is not None
        return copy.copy(self.error)

    def result(self) -> tuple[Any, Any]:
        """Return all rows of the output in order, and the metadata of the last batch.

        Raises:
            ForebayError: What the call failed with.
        """
        if self.error is not None:
            raise self.own_error() from self.error.__cause__
        slices = [piece for piece in self.slices if piece is not None]
        output = slices[0].output() if len(slices) == 1 else concatenate([piece.output() for piece in slices])
        return output, slices[-1].executed.metadata


class SubmissionPart:
    """The first rows of a call, taken before the others."""

    __slots__ = ("_index", "arrived", "batch", "call", "deadline", "done", "key", "payer", "size", "taken", "tenant")

    body: Any = None
    params: Mapping[str, Any] = EMPTY
    origin: Origin | None = None
    rank: int = 0
    due: float = float("inf")

    def __init__(self, call: Submission, batch: Batch, index: int) -> None:
        self.call = call
        self.tenant = call.tenant
        self.payer: Any = None
        self.batch = batch
        self.size = batch.size
        self.key = call.key
        self.deadline = call.deadline
        self.arrived = call.arrived
        self.taken = 0.0
        self.done = False
        self._index = index

    def keep(self, piece: OutputRows) -> None:
        """Note what came back for these rows."""
        self.call.slices[self._index] = piece


class Work:
    """A batch on its way through a partition: the rows of one or more callers.

    Attributes:
        entries: Whose rows, in order.
        key: Their batch key.
        taken: When they left the queue, in seconds.
        whole: What tenants are charged for, where there are any; None once they were.
        is_last: Whether it is the last part of that.
    """

    __slots__ = ("_over", "entries", "is_last", "key", "rows", "taken", "whole")

    def __init__(
        self, entries: Sequence[Submission | SubmissionPart], key: Hashable, rows: int, whole: EntryBatch | None = None
    ) -> None:
        self._over = 0
        self.whole = whole
        self.is_last = True
        self.entries = entries
        self.key = key
        self.rows = rows
        self.taken = entries[0].taken

    def batch(self) -> Batch:
        """Return the rows of all callers as one batch; nothing is copied before it is realised.

        Raises:
            BatchMismatch: They differ in structure, row shape, dtype, kind or device.
        """
        entries = self.entries
        return entries[0].batch if len(entries) == 1 else Batch.merge([entry.batch for entry in entries])

    def alike(self) -> list[Work]:
        """Return the same rows as one batch for each template."""
        groups: dict[Template | None, list[Submission | SubmissionPart]] = {}
        for entry in self.entries:
            groups.setdefault(entry.batch.template, []).append(entry)
        whole, self.whole = self.whole, None
        works = [Work(group, self.key, sum(entry.size for entry in group), whole) for group in groups.values()]
        for work in works[:-1]:
            work.is_last = False
        return works

    def wanted(self) -> bool:
        """Return whether anybody still waits for any of the rows; from any thread."""
        entries, over = self.entries, self._over
        while over < len(entries) and entries[over].call.done:
            over += 1
        self._over = over  # what is over stays so, so no entry is looked at twice however often this is asked
        return over < len(entries)

    def shares(self) -> Iterator[tuple[Submission, int, int]]:
        """Yield each caller that still waits, with the range of its rows."""
        start = 0
        for entry in self.entries:
            stop = start + entry.size
            if not entry.call.done:
                yield entry.call, start, stop
            start = stop


class Dispatch:
    """The calls of one started serving."""

    def __init__(self, config: BatchConfig, shared_by: int = 0) -> None:
        """Begin without calls.

        Args:
            shared_by: Batches that may run at a time where tenants share them; 0 without tenants.
        """
        self._queue = BatchQueue(config, _divide)
        self.evicted: list[Submission] = []
        """Calls that had to leave the full queue and are to be woken."""
        if shared_by:
            self._queue.slots = shared_by
            eviction = self._queue.share().eviction
            eviction.together, eviction.evict = _together, self._evict
        self._open: dict[Submission, None] = {}
        self._fed: deque[Submission] = deque()
        self._max_size = config.max_size
        self._capacity = config.capacity
        self._is_due_at_once = config.max_wait_s <= 0.0

    @property
    def waiting(self) -> int:
        """Rows that no batch has taken yet."""
        return self._queue.waiting

    @property
    def open(self) -> int:
        """Calls that are not over."""
        return len(self._open)

    @property
    def is_feeding(self) -> bool:
        """Whether rows wait for room in the queue."""
        return bool(self._fed)

    def offer(self, call: Submission, now: float, *, patient: bool = False) -> None:
        """Queue a call; one that is `patient` waits for room.

        Raises:
            QueueFull: There is no room for its rows, or for a first batch of them if they are more than may ever wait;
                nothing was queued.
        """
        size = call.size
        if size <= self._capacity and not (patient and self._queue.waiting + size > self._capacity):
            self._queue.offer(call, now)
        elif patient or self._queue.waiting + self._max_size <= self._capacity:
            call.arrived = now
            call.waiting = {}
            self._fed.append(call)
            self.feed(now)
        else:
            found = counted(self._queue.waiting, "row waits", "rows wait")
            raise QueueFull(f"{found} already, the queue takes {self._capacity}; try again later")
        self._open[call] = None

    def feed(self, now: float) -> None:
        """Let rows that wait for room into the queue: a part of each call in turn."""
        for _ in range(len(self._fed)):
            call = self._fed[0]
            self._fed.rotate(-1)
            self._let_in(call, now)

    def _let_in(self, call: Submission, now: float) -> None:
        assert call.waiting is not None
        while call.size:
            rows = min(call.size, self._max_size)
            waiting = self._queue.waiting + rows
            if waiting > self._capacity or (call.waiting and 2 * waiting > self._capacity):
                return
            part = call.divide(rows)
            self._queue.offer(part, now)
            call.waiting[part] = None

    def cancel(self, call: Submission) -> bool:
        """Forget a call whose caller has gone: no further row of it is taken.

        Returns:
            Whether it was still open; if not, its outcome is there.
        """
        if call not in self._open:  # over, or refused when it was offered
            return False
        self._end(call)
        return True

    def is_pressing(self) -> bool:
        """Return whether a free partition should look at once: a batch is full, or there is nothing to wait for."""
        return self._queue.waiting > 0 and (self._is_due_at_once or self._queue.is_full())

    def next_due(self) -> float | None:
        """Return when an open batch leaves although it is not full."""
        return self._queue.next_due()

    def take(self, now: float) -> Work | None:
        """Hand the next batch to a free partition."""
        if self._fed:
            self.feed(now)
        taken = self._queue.take(now)
        if taken is None:
            return None
        if self._fed:
            self._note_fed(taken.entries, now)
        return Work(taken.entries, taken.key, taken.rows, None if self._queue.fair is None else taken)

    def ran(self, work: Work, seconds: float, now: float) -> None:
        """Charge what a batch has cost to the tenants in it, once."""
        whole, work.whole = work.whole, None
        if whole is not None:
            whole.model_s += seconds
            if work.is_last:
                self._queue.answered(whole, now)

    def _note_fed(self, entries: Sequence[Submission | SubmissionPart], now: float) -> None:
        """Note which parts have left the queue, and let in what there is room for now."""
        for entry in entries:
            call = entry.call
            if call.waiting is not None:
                call.waiting.pop(cast("SubmissionPart", entry), None)
                if not call.waiting and not call.size:
                    call.taken = now
                    call.waiting = None
                    self._fed.remove(call)
        self.feed(now)

    def finish(self, work: Work, executed: Executed) -> list[Submission]:
        """Give every caller its rows.

        Returns:
            The calls to wake: those that are over, and streamed ones that a slice came for.
        """
        reached: list[Submission] = []
        start = 0
        for entry in work.entries:
            stop = start + entry.size
            call = entry.call
            if not call.done:
                entry.keep(OutputRows(executed, start, stop))
                call.unanswered -= stop - start
                if call.unanswered == 0:
                    call.done = True
                    del self._open[call]
                if call.done or call.streamed:
                    reached.append(call)
            start = stop
        return reached

    def fail(self, work: Work, error: ForebayError) -> list[Submission]:
        """End every call that has rows in this batch; what else they wait for is cancelled.

        Returns:
            Those calls.
        """
        return self._fail([entry.call for entry in work.entries if not entry.call.done], error)

    def close(self, error: ForebayError, *, running: bool) -> list[Submission]:
        """End the calls that have rows in the queue, and with `running` all others too.

        Returns:
            Those calls.
        """
        return self._fail([call for call in self._open if running or not call.taken], error)

    def _evict(self, entry: Any, why: str) -> None:
        self.evicted += self._fail([entry], ShareUsed(f"the call {why}"))

    def _fail(self, calls: list[Submission], error: ForebayError) -> list[Submission]:
        for call in calls:
            call.error = error
            self._end(call)
        return calls

    def _end(self, call: Submission) -> None:
        call.done = True
        del self._open[call]
        if call.waiting is None:
            self._queue.cancel(call)
            return
        for part in call.waiting:
            self._queue.cancel(part)
        call.waiting = None
        call.taken = NEVER
        self._fed.remove(call)


def _divide(entry: Entry, rows: int) -> SubmissionPart | None:
    return entry.divide(rows) if type(entry) is Submission and entry.divisible else None


def _together(entry: Any) -> Sequence[Submission]:
    """Return what ends with an entry that has to leave the queue; none if its call was taken in part, or is fed in."""
    return [entry] if type(entry) is Submission and not entry.slices else ()
