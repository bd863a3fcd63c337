# SPDX-License-Identifier: Apache-2.0
"""Run batches on the event loop itself: for models that take microseconds, and for `async def predict`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.errors import ForebayError, Unavailable
from forebay.observe.logs import model_log
from forebay.observe.logs.model_log import LocalOrigin, Voice, origin
from forebay.types.call import Failure
from forebay.types.failures import failure_of
from forebay.workers.memory.freed_memory import keep_freed_memory
from forebay.workers.memory.landing import HERE
from forebay.workers.pool import Pool, PoolStatistics, not_opened
from forebay.workers.pools.inline_streams import CANCEL_S, MAX_LEFT, InlineStreams, has_begun
from forebay.workers.runner import Runner, RunnerSpec, WorkerContext
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.phases import Laps, lap, needed, note
from forebay.workers.user_calls.user_code import (
    attempt,
    attempt_async,
    close,
    close_runner_async,
    do_after,
    settled,
    user_code,
)

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch
    from forebay.types.devices import Device


log = logging.getLogger("forebay.workers")

Settled: TypeAlias = "tuple[Sequence[Any], list[Callable[[], object]]]"


class InlinePool(Pool):
    """The loop as a worker. Coroutines run as tasks beside other work, one a slot; anything else blocks the loop.

    A coroutine is cancelled once nobody waits for its batch. With seats for streams, one task steps them all.
    """

    places = HERE

    def __init__(self, spec: RunnerSpec, *, slots: int = 1, devices: Sequence[Device] = (), seats: int = 0) -> None:
        """Describe the worker; `start` opens its runner.

        Args:
            slots: Coroutines at a time.
            devices: What it runs on: the first of them.
            seats: Rows of streams that may be open; 0 runs a batch, or a coroutine, a slot, and no streams.
        """
        super().__init__()
        self._seats = seats
        self._streams: InlineStreams | None = None
        self._spec = spec
        self._slots = slots
        self._devices = devices[:1]
        self._runner: Runner | None = None
        self._run: Callable[[Sequence[Any]], Any] | None = None
        self._tasks: dict[EntryBatch, tuple[asyncio.Task[None], Done]] = {}
        self._left: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._voice: Voice | None = None

    async def start(self) -> None:
        """Open the runner on the loop; raises a `ModelError` if that fails."""
        keep_freed_memory()
        if model_log.level is not None:
            self._voice = Voice(model_log.model.get(), "0")
        speaker = None if self._voice is None else LocalOrigin(self._voice)
        ctx = WorkerContext(device=self._devices[0].name) if self._devices else WorkerContext()
        try:
            with model_log.speaking(speaker), user_code():
                runner = self._spec.build()
                await runner.open_async(ctx)
        except ForebayError as error:
            raise not_opened(error) from error
        self._runner = runner
        self._run = run = runner.run_async
        self.idle = self._seats or self._slots
        if self._seats:
            self._streams = InlineStreams(self._seats, run, self._voice, self._add_idle, self.accounts)

    @property
    def room(self) -> int | None:
        """Rows that a batch may have to join the streams that run; None where none do."""
        free = self._seats if self._streams is None else self._streams.seating.free
        return None if free == self._seats else free

    def _add_idle(self, slots: int = 1) -> None:
        self.idle += slots * (not self._is_stopping)
        if self.health is not None:
            self.health.freed(0)

    def check(self, worker: int, batch: EntryBatch, done: Done) -> bool:
        """Run a check if there is a slot, and no stream."""
        if not self.idle or self.room is not None:
            return False
        self.submit(batch, done)
        return True

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Run the batch now, or as a task if the runner's answer is awaitable."""
        if self._streams is not None:
            self.idle -= batch.rows
            self._streams.submit(batch, done)
            return
        self.idle -= 1
        run = self._run
        assert run is not None
        context = contextvars.copy_context()
        started = time.monotonic()
        laps = None if batch.noted is None else Laps(started)
        batch.own_s = []
        context.run(self._enter, batch, laps)
        result = attempt(context.run, run, batch.entries)
        if hasattr(result, "__await__"):
            work = self._finish(batch, done, result, started, laps)
            self._tasks[batch] = asyncio.get_running_loop().create_task(work, context=context), done
            batch.on_cancel = lambda: self._called_off(batch)
            return
        self._answer(batch, done, _settled(result, len(batch.entries)), started, laps)

    def _enter(self, batch: EntryBatch, laps: Laps | None) -> None:
        """Tell what runs in this context which batch it belongs to."""
        probe.set(lambda: batch.cancelled)
        lap.set(laps)
        needed.set(batch.own_s if self.accounts is not None and self.accounts.are_kept else None)
        if self._voice is not None:
            origin.set(LocalOrigin(self._voice, batch))

    async def stop(self, grace_s: float) -> None:
        """Wait for tasks, answer what is late as unavailable, close the runner."""
        self._is_stopping = True
        self.idle = 0
        if self._streams is not None:
            await self._streams.stop(grace_s)
        if self._tasks:
            _, late = await asyncio.wait([task for task, _ in self._tasks.values()], timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CANCEL_S)
            for batch in list(self._tasks):
                self._leave_behind(batch, "the server stopped before the model answered")
        if self._runner is not None:
            await close_runner_async(self._runner.close_async)

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        devices = tuple(map(str, self._devices))
        slots = self._seats or self._slots
        told = PoolStatistics(slots=slots, idle=self.idle, alive=int(self._run is not None), devices=devices)
        return self._with_health(told, (0,))

    def _answer(self, batch: EntryBatch, done: Done, settled: Settled, started: float, laps: Laps | None) -> None:
        batch.model_s = time.monotonic() - started
        if batch.noted is not None and laps is not None and self._runner is not None:
            note(batch.noted, self._runner, laps, started, "0")
        outcomes, work = settled
        if not work:
            self._add_idle()
            done(batch, outcomes)
            return
        done(batch, outcomes)
        do_after(work)
        self._freed()

    def _freed(self) -> None:
        self._add_idle()
        self._on_idle()

    def _called_off(self, batch: EntryBatch) -> None:
        """Cancel the coroutine of a batch that no client waits for, and give it some time to end."""
        task, _ = self._tasks[batch]
        if not has_begun(task):
            return  # it will see that nobody waits
        task.cancel()
        task.get_loop().call_later(CANCEL_S, self._has_ended, batch)

    def _has_ended(self, batch: EntryBatch) -> None:
        if batch in self._tasks and len(self._left) < MAX_LEFT:
            self._leave_behind(batch, "the request was cancelled")

    def _leave_behind(self, batch: EntryBatch, why: str) -> None:
        task, done = self._tasks.pop(batch)
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        batch.on_cancel = None
        log.warning("a coroutine did not stop %g s after it was cancelled; abandoning it", CANCEL_S)
        self._add_idle()
        done(batch, [Failure(Unavailable(why))] * len(batch.entries))

    async def _finish(self, batch: EntryBatch, done: Done, result: Any, started: float, laps: Laps | None) -> None:
        count = len(batch.entries)
        try:
            result = await attempt_async(self._outcomes, batch, result)
        except asyncio.CancelledError as error:
            if batch.cancelled:
                result = Failure(Unavailable("the request was cancelled"))
            elif self._is_stopping:
                result = Failure(Unavailable("the server stopped before the model answered"))
            else:  # it cancelled itself
                result = failure_of(error)
        if self._tasks.pop(batch, None) is not None:  # or it was left behind, and is answered
            batch.on_cancel = None
            self._answer(batch, done, _settled(result, count), started, laps)

    async def _outcomes(self, batch: EntryBatch, result: Awaitable[Any]) -> Any:
        if batch.cancelled:
            close(result)
            return Failure(Unavailable("the request was cancelled"))
        return await result


def _settled(result: Any, count: int) -> Settled:
    found: Any = result if type(result) is Failure else attempt(settled, result, count)
    return ([found] * count, []) if type(found) is Failure else found
