# SPDX-License-Identifier: Apache-2.0
"""Run batches in workers that are started elsewhere, and that come and go as they like.

Theory of operation. The pool has no processes; `worker_listener.py` brings it connections. `slot_pool.py` says what
becomes of the batch of a worker that leaves. Two clocks belong to the pool. A worker that owes an answer for too long
is dropped, unless its batch or its answer is still on its way: one timer looks at all that are busy. And when the last
worker has left, requests wait for another one for a grace period; then the pool takes every batch itself and answers
that there is no worker, until one joins again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay.errors import Unavailable
from forebay.observe.logs import model_log
from forebay.observe.logs.refusal_log import RefusalLog
from forebay.workers.pool import PoolStatistics
from forebay.workers.pools.slot_pool import Rebuke, Slot, SlotPool, running

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.memory.shm import Arenas
    from forebay.workers.pools import worker_slot

log = logging.getLogger("forebay.workers")

S = TypeVar("S", bound=Slot)

QUIET_S: Final = 1.0
"""Time after a line about workers that came or left in which further ones are only counted, for the next line."""
LOOKS: Final = 8
"""How often busy workers are looked at in the time after which one hangs: whether bytes move is seen in between."""


class AttachedPool(SlotPool[S]):
    """Slots of workers that dialled in, in any dialect.

    Attributes:
        joined: Workers that ever asked for work.
        left: Those of them that are gone.
        left_at: When the last of them went.
        grace_s: How long requests wait for a worker when there is none before they are answered; None lets their own
            deadlines decide.
        hang_s: A worker that owes an answer for this time is dropped and its batch handed on; None waits.
        more_s: Added to that where a streamed answer has begun: its model may pause.
    """

    def __init__(
        self,
        name: str,
        *,
        grace_s: float | None = 5.0,
        hang_s: float | None = None,
        on_first: Callable[[], None] = lambda: None,
        shared: Callable[[], Arenas | None] = lambda: None,
        isolates: bool = False,
        seats: int = 0,
    ) -> None:
        """Describe the pool.

        Args:
            on_first: Called once, when the first worker asks for work.
            shared: Makes the shared memory of a slot; returns None where memory cannot be shared.
            isolates: Hand on the entries of a batch that lost its worker each alone.
            seats: Rows of streams that may be open in each slot; 0 gives a slot one batch at a time.
        """
        super().__init__(isolates=isolates, seats=seats)
        self.name = self.model = name
        self.log_level = model_log.level
        self.joined = 0
        self.left = 0
        self.left_at = 0.0
        self.grace_s = grace_s
        self.hang_s = hang_s
        self.more_s = 0.0
        self._on_first = on_first
        self.shared = shared
        self._slots: dict[S, Hashable] = {}
        self._greeted: set[worker_slot.WorkerSlot] = set()
        self._vacancy: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._sent: dict[S, tuple[int, float]] = {}
        """What busy ones had not taken when they were looked at, and when it was seen last that they take something."""
        self._rebukes: dict[Rebuke, RefusalLog] = {
            "hung up on": RefusalLog("worker", "hung up on"),
            "ignored": RefusalLog("worker", "ignored"),
        }
        self._left_all: asyncio.Event | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._told = 0, 0
        """How many had joined and left when it was last told."""

    @property
    def alive(self) -> int:
        """Workers that are here."""
        return len(set(self._slots.values()))

    @property
    def is_deserted(self) -> bool:
        """Whether nobody is here, nor on the way: loading its model."""
        return not self._slots and not self._greeted

    async def start(self) -> None:
        """Wait for workers; there may be none for the grace period."""
        if not self._slots:
            self._begin_vacancy()

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Give the batch to the slot that has been idle longest, or answer it if nobody is here."""
        super().submit(batch, done)
        self._watch_over()

    def ready(self, slot: S, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work; its worker is here."""
        if slot not in self._slots and not self._stopping:
            self._admit(slot)
        super().ready(slot, before)
        self._watch_over()

    def gone(self, slot: S) -> None:
        """A connection closed."""
        self._greeted.discard(slot)  # pyright: ignore[reportArgumentType] - in another dialect it is not there
        worker = self._slots.pop(slot, None)
        self._sent.pop(slot, None)
        super().gone(slot)
        if worker is not None and worker not in self._slots.values():
            self.left += 1
            self.left_at = time.monotonic()
            self._tell("left")
        if self._slots:
            return
        if self._left_all is not None:
            self._left_all.set()
        elif worker is not None and not self._stopping:
            self._begin_vacancy()

    async def stop(self, grace_s: float) -> None:
        """Send idle workers away now, busy ones when they have answered or `grace_s` is over."""
        self._stop_slots()
        for timer in (self._vacancy, self._watchdog):
            if timer is not None:
                timer.cancel()
        for slot in list(self._slots):
            slot.stop()
            batches = running(slot)
            if batches and all(batch.cancelled for batch in batches):
                slot.drop("the server stops, and no client waits for its batch")
                self.gone(slot)
        if self._slots:
            self._left_all = asyncio.Event()
            try:
                await asyncio.wait_for(self._left_all.wait(), grace_s)
            except TimeoutError:
                for slot in list(self._slots):
                    slot.drop("the server stops")
                    self.gone(slot)
        self._fail_orphans()
        for rebukes in self._rebukes.values():
            rebukes.close()

    def greeted(self, slot: worker_slot.WorkerSlot, about: Mapping[str, Any]) -> None:
        """A worker that speaks the worker protocol said hello; it knows by itself what to run."""
        slot.worker = str(about["worker"])
        self._greeted.add(slot)
        slot.open(self.options())

    def options(self) -> Mapping[str, Any]:
        """Return what a worker is told in the answer to its hello."""
        return {"beats": True}

    def failed(self, slot: worker_slot.WorkerSlot, kind: str, message: str, detail: Any, trace: str) -> None:
        """Log that a worker could not open its runner; it tells the reason itself where it was started."""
        self.told("hung up on", slot.peer, f"it could not load the model of '{self.name}': {message}")

    def told(self, what: Rebuke, peer: tuple[str, int] | None, reason: str) -> None:
        """Say what was done to a worker, and why, at most once a second for each reason."""
        self._rebukes[what].refused(int(time.monotonic()), peer, reason, reason)

    def drop_worker(self, worker: Hashable, reason: str) -> None:
        """Drop all slots of a worker, those that are idle first: they would only collect the batches of the others."""
        slots = [slot for slot, whose in self._slots.items() if whose == worker]
        for slot in sorted(slots, key=lambda one: len(running(one))):
            slot.drop(reason)
            self.gone(slot)
        for loading in [slot for slot in self._greeted if slot.worker == worker]:
            loading.drop(reason)

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        idle = 0 if self._refusal is not None else self.idle
        slots = len(self._slots) * (self.seats or 1)
        return PoolStatistics(slots=slots, idle=idle, alive=self.alive, joined=self.joined, left=self.left)

    def _admit(self, slot: S) -> None:
        if self._vacancy is not None:
            self._vacancy.cancel()
            self._vacancy = None
        self._admit_again()
        is_new = slot.worker not in self._slots.values()
        self._slots[slot] = slot.worker
        if is_new:
            self.joined += 1
            self._tell("joined")
            if self.joined == 1:
                self._on_first()

    def _tell(self, what: str) -> None:
        """Log that a worker has joined or left, at debug level or if nothing was logged just now."""
        is_quiet = self._quiet is not None
        level = logging.DEBUG if is_quiet else logging.INFO
        log.log(level, "a worker has %s '%s'; %d are here", what, self.name, self.alive)
        if not is_quiet:
            self._be_quiet()

    def _be_quiet(self) -> None:
        self._told = self.joined, self.left
        self._quiet = asyncio.get_running_loop().call_later(QUIET_S, self._tell_rest)

    def _tell_rest(self) -> None:
        self._quiet = None
        joined, left = self.joined - self._told[0], self.left - self._told[1]
        if joined or left:
            text = "workers of '%s' come and go: %d more have joined and %d have left; %d are here"
            log.info(text, self.name, joined, left, self.alive)
            self._be_quiet()

    def _begin_vacancy(self) -> None:
        if self.grace_s is not None and self._vacancy is None:
            self._vacancy = asyncio.get_running_loop().call_later(self.grace_s, self._give_up)

    def _give_up(self) -> None:
        """Answer what waits, and from now on whatever comes: no worker came in time."""
        self._vacancy = None
        if self._slots or self._stopping:
            return
        log.warning("no worker attached for '%s' within %g s; rejecting its requests", self.name, self.grace_s)
        self._refuse(Unavailable(f"no worker of '{self.name}' is attached; try again when one has joined"))

    def _watch_over(self) -> None:
        if self.hang_s is not None and self._watchdog is None and any(map(running, self._slots)):
            self._watchdog = asyncio.get_running_loop().call_later(self.hang_s / LOOKS, self._look)

    def _look(self) -> None:
        """Drop each worker that has owed an answer for too long; look again when the next one may be due."""
        self._watchdog = None
        assert self.hang_s is not None
        now = time.monotonic()
        owed = [(slot, slot.owes_since) for slot in self._slots]
        busy = [
            (slot, max(since, self._took(slot, now)), self._patience_s(slot))
            for slot, since in owed
            if since is not None
        ]
        for slot, since, patience_s in busy:
            if now - since >= patience_s:
                self._drop_hanging(slot, patience_s)
        if any(map(running, self._slots)):  # also who waits for slow clients now may owe something later
            later = [since + patience_s - now for slot, since, patience_s in busy if slot in self._slots]
            wait_s = min([*later, self.hang_s / LOOKS])
            self._watchdog = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._look)

    def _patience_s(self, slot: S) -> float:
        """Return how long a worker may owe an answer."""
        assert self.hang_s is not None
        return self.hang_s + (self.more_s if any(batch.has_streamed for batch in running(slot)) else 0.0)

    def _took(self, slot: S, now: float) -> float:
        """Return when it was seen last that a worker takes what was sent to it; 0 if never."""
        left = slot.untaken_bytes
        before, took = self._sent.get(slot, (0, 0.0))
        self._sent[slot] = left, now if left < before else took
        return self._sent[slot][1]

    def _drop_hanging(self, hanging: S, patience_s: float) -> None:
        """Drop a slot, and with it those of its worker that are idle: they would only collect more batches."""
        mates = [slot for slot, worker in self._slots.items() if worker == self._slots[hanging] and not running(slot)]
        for slot in mates:  # before the batch of the one that hangs is handed on
            slot.drop("another slot of its worker hangs")
            self.gone(slot)
        hanging.drop(f"it owes an answer for {patience_s:g} s")
        self.gone(hanging)
