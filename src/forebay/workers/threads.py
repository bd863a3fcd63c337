# SPDX-License-Identifier: Apache-2.0
"""Run batches in threads of this process: one slot a thread, two switches a batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ModelError, Unavailable
from forebay.types.call import Failure
from forebay.workers.cancel import probe
from forebay.workers.memory import keep_freed_memory
from forebay.workers.phases import Laps, lap, note
from forebay.workers.pool import CREDIT, PoolStatistics, checked, do_after, failure_of, split_after
from forebay.workers.runner import WorkerContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.types.batch import Batch, Done
    from forebay.workers.runner import Runner, RunnerSpec


JOIN_S = 0.5
"""How long the threads of a stopped pool are waited for, all together."""


class _Worker:
    """One runner and the threads that call it; the first one opens it, the last one closes it."""

    def __init__(self, spec: RunnerSpec, ctx: WorkerContext) -> None:
        self.spec = spec
        self.ctx = ctx
        self.runner: Runner | None = None
        self.opened = threading.Event()
        self.has_opened = asyncio.Event()
        self.error: BaseException | None = None
        self._inside = ctx.threads
        self._lock = threading.Lock()

    def leave(self) -> None:
        """One thread has ended; the last one closes the runner."""
        with self._lock:
            self._inside -= 1
            is_last = self._inside == 0
        if is_last and self.runner is not None:
            self.runner.close()


class ThreadPool:
    """`workers` runners, each called by `threads` threads.

    A batch that hangs in user code holds its thread for ever: nothing can end a thread from outside. Models that may
    hang or crash belong into processes.
    """

    def __init__(self, spec: RunnerSpec, *, workers: int = 1, threads: int = 1) -> None:
        self.idle = 0
        self._on_idle: Callable[[], None] = lambda: None
        self._workers = [_Worker(spec, WorkerContext(index, threads)) for index in range(workers)]
        self._threads_per_worker = threads
        self._inbox: SimpleQueue[tuple[Batch, Done] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[Batch, Done] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drained: asyncio.Event | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Start the threads and open the runners in them, one worker after the other.

        Raises:
            ModelError: If a runner could not be opened.
        """
        self._loop = asyncio.get_running_loop()
        keep_freed_memory()
        for worker in self._workers:
            for number in range(self._threads_per_worker):
                name = f"forebay-worker-{worker.ctx.index}-{number}"
                thread = threading.Thread(
                    target=self._serve, args=(worker,), kwargs={"first": number == 0}, name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
            await (
                worker.has_opened.wait()
            )  # not in an executor: a load that hangs must not keep the server from stopping
            if worker.error is not None:
                failed = failure_of(worker.error).error
                raise ModelError(failed.message, trace=getattr(failed, "trace", "")) from worker.error
        self.idle = len(self._threads)

    @property
    def blocks(self) -> bool:
        """Whether `submit` runs the batch before it returns."""
        return False

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this whenever a slot became idle by itself."""
        self._on_idle = on_idle

    def submit(self, batch: Batch, done: Done) -> None:
        """Hand the batch to whichever thread is free."""
        self.idle -= 1
        self._running[batch] = done
        self._inbox.put((batch, done))

    async def stop(self, grace_s: float) -> None:
        """Wait for running batches up to `grace_s`, answer what is late as unavailable, end the idle threads."""
        self._is_stopping = True
        self.idle = 0
        for _ in self._threads:
            self._inbox.put(None)
        if self._running:
            self._drained = asyncio.Event()
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s)
            except TimeoutError:
                late = Failure(Unavailable("the server stopped before the model answered"))
                for batch, done in list(self._running.items()):
                    self._finish(batch, done, [late] * len(batch.entries))
        patience = time.monotonic() + JOIN_S
        for thread in self._threads:  # one that hangs in user code is left to end with the process
            thread.join(max(patience - time.monotonic(), 0.0))

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        alive = sum(thread.is_alive() for thread in self._threads)
        slots = len(self._workers) * self._threads_per_worker
        return PoolStatistics(slots=slots, idle=self.idle, alive=alive)

    def _finish(
        self, batch: Batch, done: Done, outcomes: Sequence[Any], written: threading.Event | None = None
    ) -> None:
        if self._running.pop(batch, None) is None:
            if written is not None:
                written.set()
            return
        if written is None:
            self.idle += not self._is_stopping
        done(batch, outcomes)
        if written is not None:
            written.set()
        if self._drained is not None and not self._running:
            self._drained.set()

    def _freed(self) -> None:
        self.idle += not self._is_stopping
        self._on_idle()

    def _serve(self, worker: _Worker, *, first: bool) -> None:
        assert self._loop is not None
        if first:
            try:
                worker.runner = worker.spec.build()
                worker.runner.open(worker.ctx)
            except BaseException as error:  # noqa: BLE001 - reported by start()
                worker.error = error
            finally:
                worker.opened.set()
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                    self._loop.call_soon_threadsafe(worker.has_opened.set)
        else:
            worker.opened.wait()
        runner = worker.runner
        if worker.error is not None or runner is None:
            return
        while (work := self._inbox.get()) is not None:
            batch, done = work
            outcomes, work = split_after(self._run(runner, batch, worker.ctx.index))
            try:
                if work:
                    written = threading.Event()
                    self._loop.call_soon_threadsafe(self._finish, batch, done, outcomes, written)
                    written.wait()
                    do_after(work)
                    self._loop.call_soon_threadsafe(self._freed)
                else:
                    self._loop.call_soon_threadsafe(self._finish, batch, done, outcomes)
            except RuntimeError:  # the loop is closed: nobody is left to answer
                return
        worker.leave()

    def _run(self, runner: Runner, batch: Batch, worker: int) -> Sequence[Any]:
        entries = batch.entries
        probe.set(lambda: batch.cancelled)
        laps = None if batch.noted is None else Laps()
        lap.set(laps)
        started = time.monotonic()
        try:
            result = runner.run(entries)
            if hasattr(result, "__next__"):
                self._stream(batch, cast("Iterator[Sequence[Any]]", result))
                outcomes: Sequence[Any] = [None] * len(entries)
            else:
                outcomes = checked(result, len(entries))
        except BaseException as error:  # noqa: BLE001 - the boundary to user code; SystemExit must not end the thread
            outcomes = [failure_of(error)] * len(entries)
        batch.model_s = time.monotonic() - started
        if batch.noted is not None and laps is not None:
            note(batch.noted, runner, laps, started, str(worker))
        return outcomes

    def _stream(self, batch: Batch, steps: Iterator[Sequence[Any]]) -> None:
        assert self._loop is not None
        assert batch.on_parts is not None
        credit = threading.Semaphore(CREDIT)
        batch.on_cancel = credit.release  # who waits for room that nobody will make is woken
        for parts in steps:
            credit.acquire()  # bounded: a client that takes nothing is cut off by its connection's write timeout
            if batch.cancelled:
                break
            self._loop.call_soon_threadsafe(batch.on_parts, checked(parts, len(batch.entries)), credit.release)
        close = getattr(steps, "close", None)
        if close is not None:
            close()
