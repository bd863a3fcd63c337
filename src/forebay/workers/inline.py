# SPDX-License-Identifier: Apache-2.0
"""Run batches on the event loop itself: for models that take microseconds, and for `async def predict`."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ModelError
from forebay.types.call import Failure
from forebay.workers.cancel import probe
from forebay.workers.pool import CREDIT, PoolStatistics, checked, failure_of
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

    async def start(self) -> None:
        """Open the runner on the loop.

        Raises:
            ModelError: If that fails.
        """
        runner = self._spec.build()
        try:
            runner.open(WorkerContext())
        except Exception as error:
            failed = failure_of(error).error
            raise ModelError(failed.message, trace=getattr(failed, "trace", "")) from error
        self._runner = runner
        self._run = getattr(runner, "run_async", None) or runner.run
        self.idle = self._slots

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this whenever a slot became idle by itself."""
        self._on_idle = on_idle

    def submit(self, batch: Batch, done: Done) -> None:
        """Run the batch now, or as a task if the runner's answer is awaitable."""
        self.idle -= 1
        run = self._run
        assert run is not None
        context = contextvars.copy_context()
        started = time.perf_counter()
        try:
            context.run(probe.set, lambda: batch.cancelled)
            result = context.run(run, batch.entries)
            if hasattr(result, "__await__") or hasattr(result, "__next__") or hasattr(result, "__anext__"):
                task = asyncio.get_running_loop().create_task(
                    self._finish(batch, done, result, started), context=context
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            outcomes = checked(result, len(batch.entries))
        except Exception as error:  # noqa: BLE001 - the boundary to user code
            outcomes = [failure_of(error)] * len(batch.entries)
        batch.model_s = time.perf_counter() - started
        self.idle += 1
        done(batch, outcomes)

    async def stop(self, grace_s: float) -> None:
        """Wait for tasks, then close the runner."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_s)
            for task in late:
                task.cancel()
        self.idle = 0
        if self._runner is not None:
            self._runner.close()

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        return PoolStatistics(slots=self._slots, idle=self.idle, alive=int(self._run is not None))

    async def _finish(self, batch: Batch, done: Done, result: Any, started: float) -> None:
        count = len(batch.entries)
        try:
            if hasattr(result, "__await__"):
                result = await cast("Coroutine[Any, Any, Any]", result)
            if hasattr(result, "__next__"):
                result = _steps(cast("Iterator[Any]", result))
            if hasattr(result, "__anext__"):
                await self._stream(batch, cast("AsyncIterator[Any]", result))
                outcomes: Sequence[Any] = [None] * count
            else:
                outcomes = checked(result, count)
        except Exception as error:  # noqa: BLE001 - the boundary to user code
            outcomes = [failure_of(error)] * count
        except asyncio.CancelledError as error:
            outcomes = [Failure(failure_of(error).error)] * count
        batch.model_s = time.perf_counter() - started
        self.idle += 1
        done(batch, outcomes)

    async def _stream(self, batch: Batch, steps: AsyncIterator[Sequence[Any]]) -> None:
        credit = asyncio.Semaphore(CREDIT)
        assert batch.on_parts is not None
        async for parts in steps:
            if batch.cancelled:
                break
            await credit.acquire()
            batch.on_parts(checked(parts, len(batch.entries)), credit.release)
        close = getattr(steps, "aclose", None)
        if close is not None:
            await close()


async def _steps(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    for step in iterator:
        yield step
        await asyncio.sleep(0)
