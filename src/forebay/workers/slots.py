# SPDX-License-Identifier: Apache-2.0
"""What pools whose workers dial in have in common: idle slots, and batches that lost their worker.

Theory of operation. A connection is a slot. What a slot was running when its connection closed is handed to the next
idle slot, once; if that one is lost too, every sample of the batch gets its own error. A batch is therefore answered
exactly once, on the loop, however its workers end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from forebay.errors import Unavailable
from forebay.types.call import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.types.batch import Batch, Done


class Slot(Protocol):
    """One connection of a worker, whatever protocol it speaks.

    Attributes:
        batch: What it is running; None while it is idle.
        done: Whom to tell.
        streamed: Whether parts of the running batch's answer have left already, so that it cannot be run again.
    """

    batch: Batch | None
    done: Done | None
    streamed: bool

    def run(self, batch: Batch, done: Done) -> None:
        """Give the worker a batch."""
        ...

    def stop(self) -> None:
        """Tell the worker to end once it has answered."""
        ...


S = TypeVar("S", bound=Slot)


class SlotPool(Generic[S]):
    """Slots that come and go."""

    idle: int
    """Slots that could take a batch now."""

    def __init__(self) -> None:
        self.idle = 0
        self._on_idle: Callable[[], None] = lambda: None
        self._idle_slots: deque[S] = deque()
        self._orphans: deque[tuple[Batch, Done]] = deque()
        self._stopping = False

    @property
    def blocks(self) -> bool:
        """Whether `submit` runs the batch before it returns."""
        return False

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this whenever a slot became idle by itself."""
        self._on_idle = on_idle

    def submit(self, batch: Batch, done: Done) -> None:
        """Give the batch to the slot that has been idle longest."""
        self.idle -= 1
        self._idle_slots.popleft().run(batch, done)

    def ready(self, slot: S, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work: a batch that lost its worker comes first, then whatever the queue has.

        Args:
            slot: The slot.
            before: Run after the slot counts as idle and before anybody is woken: hands over its last answers.
        """
        if self._stopping:
            if before is not None:
                before()
            slot.stop()
            return
        while self._orphans:
            batch, done = self._orphans.popleft()
            if batch.cancelled:
                done(batch, lost(batch))
                continue
            slot.run(batch, done)
            if before is not None:
                before()
            return
        self._idle_slots.append(slot)
        self.idle += 1
        if before is not None:
            before()
        else:
            self._on_idle()

    def gone(self, slot: S) -> None:
        """A connection closed: what it was running is handed on, once."""
        if slot in self._idle_slots:
            self._idle_slots.remove(slot)
            self.idle -= 1
        batch, done = slot.batch, slot.done
        slot.batch = slot.done = None
        if batch is None or done is None:
            return
        batch.on_cancel = None
        if batch.attempts > 1 or slot.streamed or batch.cancelled or self._stopping:
            done(batch, lost(batch))
        elif self._idle_slots:
            self.submit(batch, done)
        else:
            self._orphans.append((batch, done))

    def _stop_slots(self) -> None:
        """Take no more work."""
        self._stopping = True
        self.idle = 0
        self._idle_slots.clear()

    def _fail_orphans(self) -> None:
        """Answer what nobody will run any more."""
        while self._orphans:
            batch, done = self._orphans.popleft()
            done(batch, lost(batch))


def lost(batch: Batch) -> list[Any]:
    """Return the outcomes of a batch whose worker is gone."""
    times = "twice" if batch.attempts > 1 else "once"
    error = Unavailable(f"the worker that held the request died ({times}); try again")
    return [Failure(error)] * len(batch.entries)
