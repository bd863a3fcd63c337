# SPDX-License-Identifier: Apache-2.0
"""A pool whose batches the test ends by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forebay.errors import Unavailable
from forebay.types.call import Failure
from forebay.types.failures import failure_of
from forebay.workers.pool import Pool, PoolStatistics

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch


class MemoryOrigin:
    """A client that exists in a test only; the gather rule notes in it which release answered it last."""

    def __init__(self) -> None:
        self.release = 0


class ManualPool(Pool):
    """A pool that runs nothing: the test completes, fails and kills its batches.

    Example:
        >>> pool = ManualPool(slots=2)
        >>> # endpoint.submit(...), a turn of the loop later:
        >>> # pool.running[0].entries; pool.complete(); pool.fail(ValueError()); pool.die()
    """

    def __init__(self, slots: int = 1) -> None:
        super().__init__()
        self.slots = slots
        self.running: list[EntryBatch] = []
        """Batches without an answer, oldest first."""
        self.seen: list[EntryBatch] = []
        """Every batch ever submitted."""
        self.lost: int = 0
        """Slots that are gone."""
        self._stopped = False
        self._done: dict[EntryBatch, Done] = {}

    async def start(self) -> None:
        """Make all slots idle."""
        self.idle: int = self.slots

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Take a batch and do nothing.

        Raises:
            AssertionError: If no slot is idle, or the pool was stopped.
        """
        if self.idle < 1:
            raise AssertionError("a batch was submitted to a pool without an idle slot")
        if self._stopped:
            raise AssertionError("a batch was submitted to a stopped pool")
        self.idle -= 1
        batch.attempts += 1
        self.running.append(batch)
        self.seen.append(batch)
        self._done[batch] = done

    def complete(
        self, batch: EntryBatch | None = None, outcomes: Sequence[Any] | None = None, model_s: float = 0.001
    ) -> None:
        """Answer a batch, the oldest if none is given; every item's outcome is its own body if none are given."""
        batch = self._take(batch)
        batch.model_s = model_s
        self.idle += 1
        self._done.pop(batch)(batch, [entry.body for entry in batch.entries] if outcomes is None else outcomes)

    def fail(self, error: BaseException, batch: EntryBatch | None = None) -> None:
        """Answer a batch as if the model had raised."""
        batch = batch or self.running[0]
        self.complete(batch, [failure_of(error)] * len(batch.entries))

    def die(self, batch: EntryBatch | None = None) -> None:
        """Answer a batch as if its worker had died; its slot is gone until `revive`."""
        batch = self._take(batch)
        self.lost += 1
        error = Unavailable("the worker that held the request died (once); try again")
        self._done.pop(batch)(batch, [Failure(error)] * len(batch.entries))

    def revive(self) -> None:
        """Bring back a slot that died."""
        if self.lost < 1:
            raise AssertionError("no slot is gone")
        self.lost -= 1
        self.idle += 1
        self._on_idle()

    def part(self, parts: Sequence[Any], release: Callable[[], object], batch: EntryBatch | None = None) -> None:
        """Send one step of a streamed answer."""
        batch = batch or self.running[0]
        if batch.on_steps is None:
            raise AssertionError("the endpoint does not stream")
        batch.on_steps([parts], release)

    async def stop(self, grace_s: float) -> None:
        """Answer every batch that is left as unavailable once `grace_s` is over."""
        self._stopped = True
        self.idle = 0
        if self.running:
            await asyncio.sleep(grace_s)
        for batch in list(self.running):
            self.die(batch)

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        return PoolStatistics(slots=self.slots, idle=self.idle, alive=self.slots - self.lost)

    def _take(self, batch: EntryBatch | None) -> EntryBatch:
        batch = batch or self.running[0]
        self.running.remove(batch)
        return batch
