# SPDX-License-Identifier: Apache-2.0
"""What pools whose workers dial in have in common: idle slots, and batches that lost their worker.

Theory of operation. A connection is a slot. What a slot was running when its connection closed is handed to the next
idle slot, once; if that one is lost too, every sample of the batch gets its own error. Where the pool isolates, each
sample is handed on alone, so that the one at fault ends one more worker and nobody else's request. Where batches may
have effects, the pool hands nothing on. A batch is therefore answered exactly once, on the loop, however its workers
end.

Where answers are streamed, a slot may have seats, and runs as many batches side by side as find room in it. Each of
them is handed on for itself, if none of its parts have left.

A pool that has no worker and no hope of one refuses: it offers a slot that answers every batch with the reason, so that
requests that wait or arrive are told at once instead of at their deadlines.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from forebay.errors import ForebayError, Unavailable, WorkerLost
from forebay.observe.metrics.author_metrics import MetricStore
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.types.batch import Done, Entry, EntryBatch
from forebay.types.call import Failure
from forebay.types.server_state import here
from forebay.workers.pool import Pool
from forebay.workers.wire.address import peer_of
from forebay.workers.wire.unsent_bytes import untaken_bytes

if TYPE_CHECKING:
    from forebay.workers.memory.shm import Arenas
    from forebay.workers.pools.seating import Seating


class Slot(Protocol):
    """One connection of a worker, whatever protocol it speaks.

    Attributes:
        worker: Whose it is: slots of one worker have equal ones.
    """

    worker: Any

    @property
    def seating(self) -> Seating:
        """The batches that run there: one, or as many as have seats."""
        ...

    @property
    def owes_since(self) -> float | None:
        """Since when, in the loop's clock, the worker owes the next sign of life; None if it is not its turn."""
        ...

    @property
    def untaken_bytes(self) -> int:
        """How much the worker has not taken of what was sent."""
        ...

    def run(self, batch: EntryBatch, done: Done) -> None:
        """Give the worker a batch."""
        ...

    def stop(self) -> None:
        """Tell the worker to end once it has answered."""
        ...

    def drop(self, reason: str) -> None:
        """Close the connection, with the reason in the log."""
        ...


S = TypeVar("S", bound=Slot)

Rebuke: TypeAlias = Literal["hung up on", "ignored"]
"""What is done to a worker that does not do as it should."""


class DialledSlot(asyncio.Protocol):
    """A slot whose worker has dialled in, whatever protocol it speaks."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None

    @property
    def untaken_bytes(self) -> int:
        """How much the worker has not taken of what was sent."""
        return 0 if self._transport is None else untaken_bytes(self._transport)

    @property
    def peer(self) -> tuple[str, int] | None:
        """Where the worker is; for a unix socket that is nowhere in particular."""
        return peer_of(self._transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the worker to speak."""
        self._transport = cast("asyncio.Transport", transport)


class SlotPool(Pool, Generic[S]):
    """Slots that come and go."""

    model: str
    """What the lines of its workers call what they run."""
    labels: Mapping[str, str]
    """What gauges of its workers are labelled with, beside the worker."""
    metrics: MetricStore
    """Keeps what its workers tell of them."""
    log_level: int | None
    """Lowest level of the lines that its workers send; None if they keep them."""
    seats: int
    """Rows of streams that may be open in each slot; 0 gives a slot one batch at a time."""
    holder: str = "worker"
    """What its errors call the other side of a slot."""
    ahead: int
    """Further rows that a slot is given, which wait there until seats are free; `idle` counts them as well."""
    shared: Callable[[], Arenas | None]
    """Makes the shared memory of a slot; returns None where memory cannot be shared."""

    def __init__(
        self,
        *,
        isolates: bool = False,
        handover_s: float | None = None,
        hands_on: bool = True,
        seats: int = 0,
        ahead: int = 0,
    ) -> None:
        """Begin without slots.

        Args:
            isolates: Whether the entries of a batch that lost its worker are handed on each alone.
            handover_s: How long what lost its worker waits for another; None lets its own deadline decide.
            hands_on: Whether what lost its worker may be run a second time; else it fails at once.
            ahead: See the attribute; only where there is one slot, or a seat of another might be free before.
        """
        super().__init__()
        self.seats = seats
        self.ahead = ahead
        self._seated: dict[S, Seating] = {}
        self.model = ""
        self.labels = {}
        self.metrics = here(MetricStore)
        self.accounts = here(Accounts)  # its workers may come before it is started
        self.log_level = None
        self._hands_on = hands_on
        self._isolates = isolates
        self._handover_s = handover_s
        self._idle_slots: deque[S] = deque()
        self._orphans: deque[tuple[EntryBatch, Done]] = deque()
        self._stopping = False
        self._refusal: ForebayError | None = None

    @property
    def room(self) -> int | None:
        """Rows that a batch may have to join the streams that run; None where none do."""
        places = self.seats + self.ahead
        free = max((seating.free for seating in self._seated.values()), default=places)
        return None if free == places or self._idle_slots or self._refusal is not None else free

    @property
    def standing(self) -> int:
        """Rows that wait in workers for a seat."""
        return sum(max(self.ahead - seating.free, 0) for seating in self._seated.values())

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Give the batch to the slot that has been idle longest or has most seats, or answer it if the pool refuses."""
        if self._refusal is not None:
            outcomes = [Failure(self._refusal)] * len(batch.entries)
            asyncio.get_running_loop().call_soon(done, batch, outcomes)
            return
        if self._seated and not self._idle_slots:
            self.idle -= batch.rows
            max(self._seated, key=lambda slot: self._seated[slot].free).run(batch, done)
            return
        self.idle -= 1
        self._idle_slots.popleft().run(batch, done)

    def ready(self, slot: S, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work: a batch that lost its worker comes first, then whatever the queue has.

        `before` hands over its last answers: it runs after the slot counts as idle, before anything else is woken.
        """
        if self._stopping:
            if before is not None:
                before()
            slot.stop()
            return
        if slot.seating.seats:
            self._seated[slot] = slot.seating
            self.freed(slot, slot.seating.free)
            self._on_idle()
            return
        if (orphan := self._first_orphan()) is not None:
            self._orphans.popleft()
            slot.run(*orphan)
            if before is not None:
                before()
            return
        self._idle_slots.append(slot)
        self.idle += 1
        self._is_free(slot)
        if before is not None:
            before()
        else:
            self._on_idle()

    def freed(self, slot: S, rows: int) -> None:
        """Seats of a slot became free: a batch that lost its worker comes first, then whatever the queue has."""
        if slot not in self._seated:
            return
        self.idle += rows
        while self._orphans and (orphan := self._first_orphan()) is not None:
            batch, done = orphan
            if batch.rows > (self.seats if self.room is None else self.room):
                break
            self._orphans.popleft()
            self.submit(batch, done)
        self._is_free(slot)

    def _is_free(self, slot: S) -> None:
        if self.health is not None:
            self.health.freed(slot.worker.index)

    def greeted(self, slot: Any, about: Mapping[str, Any]) -> None:
        """A worker said hello: answer with `slot.open`, or raise `InvalidRequest` to refuse it."""
        raise NotImplementedError

    def failed(self, slot: Any, kind: str, message: str, detail: Any, trace: str) -> None:
        """A worker could not open its runner."""
        raise NotImplementedError

    def called_off(self, slot: Any, batch_id: int) -> None:
        """Note that no client waits any more for what a slot is running; if it hangs, it is dropped like any other."""

    def told(self, what: Rebuke, peer: tuple[str, int] | None, reason: str) -> None:
        """Say what was done to a worker, and why."""
        raise NotImplementedError

    def _first_orphan(self) -> tuple[EntryBatch, Done] | None:
        """Return what is to be handed on first; what nobody waits for any more is answered instead."""
        while self._orphans:
            batch, done = self._orphans[0]
            # Of a batch that was taken apart only the whole is told that nobody waits, once that is so of all entries.
            if not batch.cancelled and not all(entry.done for entry in batch.entries):
                return batch, done
            self._orphans.popleft()
            done(batch, lost(batch, holder=self.holder))
        return None

    def _refuse(self, why: ForebayError) -> None:
        """Answer what waits, and from now on whatever comes."""
        self._refusal = why
        self.idle = 1
        self._fail_orphans()
        self._on_idle()

    def _admit_again(self) -> None:
        """Go on with slots, of which there is none yet."""
        if self._refusal is not None:
            self._refusal = None
            self.idle = 0

    def whereabouts(self, entry: Entry) -> str:
        """Tell, as an end of the sentence that its time was over, that an entry waits again; empty if it runs."""
        is_orphan = any(entry in batch.entries for batch, _ in self._orphans)
        return "before another worker took it; the one that held it was gone" if is_orphan else ""

    def retire(self, slot: S) -> None:
        """A slot takes no more work; it may still be busy."""
        if slot in self._idle_slots:
            self._idle_slots.remove(slot)
            self.idle -= 1
        elif (seating := self._seated.pop(slot, None)) is not None:
            self.idle -= seating.free

    @property
    def is_refusing(self) -> bool:
        """Whether no worker is left and none can be had, so that everything is answered with the reason."""
        return self._refusal is not None

    def gone(self, slot: S) -> None:
        """A connection closed: what it was running is handed on, once."""
        self._drop(slot, "the worker that held the request died")

    def _drop(self, slot: S, how: str) -> None:
        """Hand on what a slot was running whose worker is gone, or tell how that ended."""
        self.retire(slot)
        for sitting in slot.seating.clear():
            self._lost(sitting.batch, sitting.done, how)

    def _lost(self, batch: EntryBatch, done: Done, how: str) -> None:
        if not self._hands_on or batch.has_streamed or batch.cancelled or self._stopping or batch.attempts > 1:
            done(batch, lost(batch, None if self._hands_on else how, self.holder))
            return
        isolates = self._isolates and len(batch.entries) > 1 and batch.attempts > 0
        orphans = apart(batch, done) if isolates else [(batch, done)]
        self._orphans.extend(orphans)
        while (orphan := self._first_orphan()) is not None and self._idle_slots:
            self._orphans.popleft()
            self.submit(*orphan)
        for slot in list(self._seated):
            self.freed(slot, 0)
        if self._orphans and self._handover_s is not None:
            asyncio.get_running_loop().call_later(self._handover_s, self._fail_untaken, orphans)

    def _fail_untaken(self, orphans: Sequence[tuple[EntryBatch, Done]]) -> None:
        """Answer those that no worker has taken."""
        for orphan in orphans:
            if orphan in self._orphans:
                self._orphans.remove(orphan)
                batch, done = orphan
                done(batch, lost(batch, holder=self.holder))

    def _stop_slots(self) -> None:
        """Take no more work."""
        self._stopping = True
        self._refusal = None
        self.idle = 0
        self._idle_slots.clear()
        self._seated.clear()

    def _fail_orphans(self) -> None:
        """Answer what nobody will run any more."""
        while self._orphans:
            batch, done = self._orphans.popleft()
            refused = None if self._refusal is None else [Failure(self._refusal)] * len(batch.entries)
            done(batch, refused or lost(batch, holder=self.holder))


def running(slot: Slot) -> list[EntryBatch]:
    """Return what a slot runs."""
    return [sitting.batch for sitting in slot.seating.open.values()]


def apart(batch: EntryBatch, done: Done) -> list[tuple[EntryBatch, Done]]:
    """Make a batch into batches of one entry each, so that one that ends its worker ends it for itself only.

    What comes of them is handed over together. None of them is handed on once more: one entry costs one more worker.
    """
    singles = [EntryBatch([entry], batch.key, entry.size, attempts=1, unread=batch.unread) for entry in batch.entries]
    outcomes: dict[EntryBatch, Any] = {}
    batch.own_s = [0.0] * len(singles)
    batch.attempts += 1

    def one_done(single: EntryBatch, found: Sequence[Any]) -> None:
        outcomes[single] = found[0]
        batch.model_s += single.model_s
        batch.busy_s += single.worker_s
        batch.own_s[singles.index(single)] = single.worker_s
        if len(outcomes) == len(singles):
            batch.on_cancel = None
            done(batch, [outcomes[single] for single in singles])

    def call_off() -> None:
        for single in singles:
            single.cancelled = True
            if single.on_cancel is not None:
                single.on_cancel()

    batch.on_cancel = call_off
    return [(single, one_done) for single in singles]


def lost(batch: EntryBatch, how: str | None = None, holder: str = "worker") -> list[Any]:
    """Return the outcomes of a batch whose worker is gone; the detail of one not handed on is how that ended."""
    deaths = batch.attempts + batch.unread
    times = f"{deaths} times" if deaths > 2 else "twice" if deaths > 1 else "once"
    error: Unavailable
    if how is None:
        error = Unavailable(f"the {holder} that held the request died ({times}); try again")
    else:
        error = WorkerLost(f"the {holder} that held the request died; what it had begun is not run again", detail=how)
    return [Failure(error)] * len(batch.entries)
