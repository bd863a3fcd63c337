# SPDX-License-Identifier: Apache-2.0
"""Run batches on the event loop itself: for models that take microseconds, and for `async def predict`."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ModelError, Unavailable
from forebay.types.call import Failure
from forebay.workers.cancel import probe
from forebay.workers.memory import keep_freed_memory
from forebay.workers.phases import Laps, lap, note
from forebay.workers.pool import CREDIT, PoolStatistics, checked, do_after, failure_of, split_after
from forebay.workers.runner import WorkerContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from forebay.types.batch import Batch, Done
    from forebay.workers.runner import Runner, RunnerSpec


class InlinePool:
    """One slot: the loop. A coroutine runs as a task beside other work; anything else blocks the loop while it runs."""

    def __init__(self, spec: RunnerSpec, *, slots: int = 1) -> None:
        self.idle = 0
        self._on_idle: Callable[[], None] = lambda: None
        self._spec = spec
        self._slots = slots
        self._runner: Runner | None = None
        self._run: Callable[[Sequence[Any]], Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    async def start(self) -> None:
        """Open the runner on the loop.

        Raises:
            ModelError: If that fails.
        """
        keep_freed_memory()
        try:
            runner = self._spec.build()
            runner.open(WorkerContext())
        except (Exception, SystemExit) as error:
            failed = failure_of(error).error
            raise ModelError(failed.message, trace=getattr(failed, "trace", "")) from error
        self._runner = runner
        self._run = getattr(runner, "run_async", None) or runner.run
        self.idle = self._slots

    @property
    def blocks(self) -> bool:
        """Whether `submit` runs the batch before it returns."""
        return True

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this whenever a slot became idle by itself."""
        self._on_idle = on_idle

    def submit(self, batch: Batch, done: Done) -> None:
        """Run the batch now, or as a task if the runner's answer is awaitable."""
        self.idle -= 1
        run = self._run
        assert run is not None
        context = contextvars.copy_context()
        laps = None if batch.noted is None else Laps()
        started = time.monotonic()
        try:
            context.run(probe.set, lambda: batch.cancelled)
            context.run(lap.set, laps)
            result = context.run(run, batch.entries)
            if hasattr(result, "__await__") or hasattr(result, "__next__") or hasattr(result, "__anext__"):
                task = asyncio.get_running_loop().create_task(
                    self._finish(batch, done, result, started, laps), context=context
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            outcomes = checked(result, len(batch.entries))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to user code
            outcomes = [failure_of(error)] * len(batch.entries)
        self._answer(batch, done, outcomes, started, laps)

    async def stop(self, grace_s: float) -> None:
        """Wait for tasks, answer what is late as unavailable, close the runner."""
        self._is_stopping = True
        self.idle = 0
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        if self._runner is not None:
            self._runner.close()

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        return PoolStatistics(slots=self._slots, idle=self.idle, alive=int(self._run is not None))

    def _answer(self, batch: Batch, done: Done, outcomes: Sequence[Any], started: float, laps: Laps | None) -> None:
        batch.model_s = time.monotonic() - started
        if batch.noted is not None and laps is not None and self._runner is not None:
            note(batch.noted, self._runner, laps, started, "0")
        outcomes, work = split_after(outcomes)
        if not work:
            self.idle += not self._is_stopping
            done(batch, outcomes)
            return
        done(batch, outcomes)
        do_after(work)
        self.idle += not self._is_stopping
        self._on_idle()

    async def _finish(self, batch: Batch, done: Done, result: Any, started: float, laps: Laps | None) -> None:
        count = len(batch.entries)
        outcomes: Sequence[Any] = [None] * count
        try:
            if hasattr(result, "__await__"):
                result = await cast("Coroutine[Any, Any, Any]", result)
            if hasattr(result, "__next__"):
                result = _steps(cast("Iterator[Any]", result))
            if hasattr(result, "__anext__"):
                await self._stream(batch, cast("AsyncIterator[Any]", result))
            else:
                outcomes = checked(result, count)
        except asyncio.CancelledError:
            outcomes = [Failure(Unavailable("the server stopped before the model answered"))] * count
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to user code
            outcomes = [failure_of(error)] * count
        self._answer(batch, done, outcomes, started, laps)

    async def _stream(self, batch: Batch, steps: AsyncIterator[Sequence[Any]]) -> None:
        credit = asyncio.Semaphore(CREDIT)
        assert batch.on_parts is not None
        batch.on_cancel = credit.release  # who waits for room that nobody will make is woken
        async for parts in steps:
            await credit.acquire()
            if batch.cancelled:
                break
            batch.on_parts(checked(parts, len(batch.entries)), credit.release)
        close = getattr(steps, "aclose", None)
        if close is not None:
            await close()


async def _steps(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    for step in iterator:
        yield step
        await asyncio.sleep(0)
