# SPDX-License-Identifier: Apache-2.0
"""Run batches in worker processes that may die at any time.

Theory of operation. The pool listens on a unix socket in a private folder and starts its workers; each dials in
and speaks first (`frames.py`, `slot.py`, `child.py`). What happens to the batch of a worker that dies stands in
`slots.py`. A worker that ends is replaced at once if it had lived for a second, else after a pause that doubles up to
ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import InvalidRequest, ModelError, revive
from forebay.workers import shm
from forebay.workers.pool import PoolStatistics
from forebay.workers.slot import Slot
from forebay.workers.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.types.batch import Batch, Done
    from forebay.workers.runner import RunnerSpec

log = logging.getLogger("forebay.workers")

LIVED_S = 1.0
"""A worker that lived this long is replaced at once when it dies."""
MAX_PAUSE_S = 10.0
"""Longest pause before a worker that keeps dying is started again."""


class Worker:
    """One worker process and its successors."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.slots: set[Slot] = set()
        self.ready = False
        self.started = 0.0
        self.error: ModelError | None = None


class ProcessPool(SlotPool[Slot]):
    """`workers` processes with `threads` slots each."""

    def __init__(  # noqa: PLR0913 - each is one plain fact about the workers
        self,
        spec: RunnerSpec,
        *,
        workers: int = 1,
        threads: int = 1,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        path: Sequence[str] = (),
        cwd: str | None = None,
        stagger: bool = False,
        stuck_s: float | None = 30.0,
        isolates: bool = False,
        handover_s: float | None = None,
        hands_on: bool = True,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        """Describe the workers; `start` brings them up.

        Args:
            spec: What each worker runs.
            workers: Processes.
            threads: Slots in each.
            python: Their interpreter, which must have forebay; None takes this process's own.
            env: Environment of the workers, all of it; None hands on this process's own.
            path: Folders appended to the workers' `sys.path`.
            cwd: Their working folder.
            stagger: Open one runner after the other instead of all at once.
            stuck_s: A worker that goes on with a batch nobody waits for is replaced after this time; None lets it.
            isolates: Hand on the entries of a batch that lost its worker each alone.
            handover_s: How long what lost its worker waits for another; None lets its own deadline decide.
            hands_on: Whether what lost its worker may be run a second time; else it fails at once.
            on_death: Called with the exit status when a worker dies; None replaces it.
        """
        super().__init__(isolates=isolates, handover_s=handover_s, hands_on=hands_on)
        spec.require_portable()
        self.restarts = 0
        self._spec = spec
        self._threads = threads
        self._python = python or sys.executable
        self._env = env
        self._path = list(path)
        self._cwd = cwd
        self._stuck_s = stuck_s
        self._on_death = on_death
        self._workers = [Worker(index) for index in range(workers)]
        self._opening = asyncio.Semaphore(1 if stagger else workers)
        self._arena_ids = itertools.count()
        self._folder: Path | None = None
        self._lock: int | None = None
        self._server: asyncio.Server | None = None
        self._supervisors: list[asyncio.Task[None]] = []
        self._changed: asyncio.Event = asyncio.Event()
        self._shared = True

    async def start(self) -> None:
        """Start the workers and wait until every one is ready.

        Raises:
            ModelError: If a runner could not be opened.
        """
        self._folder, self._lock, self._shared = shm.private_folder()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Slot(self), str(self._folder / "socket"))
        self._supervisors = [loop.create_task(self._supervise(worker)) for worker in self._workers]
        while not all(worker.ready for worker in self._workers):
            self._changed.clear()
            await self._changed.wait()
            error = next((worker.error for worker in self._workers if worker.error), None)
            if error is not None:
                await self.stop(0.0)
                raise error

    def submit(self, batch: Batch, done: Done) -> None:
        """Give the batch to the worker with the most idle slots, of several to the one that has been idle longest."""
        if self._threads == 1:
            super().submit(batch, done)
            return
        self.idle -= 1
        idle = Counter(slot.worker for slot in self._idle_slots)
        slot = max(self._idle_slots, key=lambda slot: idle[slot.worker])
        self._idle_slots.remove(slot)
        slot.run(batch, done)

    async def stop(self, grace_s: float) -> None:
        """Stop idle workers now, busy ones when their batch has ended or `grace_s` is over."""
        self._stop_slots()
        for worker in self._workers:
            for slot in worker.slots:
                slot.stop()
        processes = [worker.process for worker in self._workers if worker.process is not None]
        if processes:
            _, late = await asyncio.wait([asyncio.ensure_future(p.wait()) for p in processes], timeout=grace_s + 0.5)
            if late:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await asyncio.wait(late)
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        self._fail_orphans()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        alive = sum(worker.ready for worker in self._workers)
        slots = len(self._workers) * self._threads
        return PoolStatistics(slots=slots, idle=self.idle, restarts=self.restarts, alive=alive)

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are up."""
        return [worker.process.pid for worker in self._workers if worker.ready and worker.process is not None]

    def greeted(self, slot: Slot, about: Mapping[str, Any]) -> None:
        """A worker said hello on a new connection: tell it what to run."""
        index: int | None = about["worker"]
        if index is None or not 0 <= index < len(self._workers):
            msg = f"worker {index} was not started by this pool"
            raise InvalidRequest(msg)
        worker = slot.worker = self._workers[index]
        worker.slots.add(slot)
        options: dict[str, Any] = {}
        if about["first"]:
            options = {
                "factory": self._spec.factory,
                "kwargs": dict(self._spec.kwargs),
                "index": index,
                "threads": self._threads,
                "path": self._path,
            }
        slot.open(options)

    def ready(self, slot: Slot, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work; its worker is up."""
        worker: Worker = slot.worker
        if not worker.ready and not self._stopping:
            worker.ready = True
            worker.error = None
            self._changed.set()
        super().ready(slot, before)

    def failed(self, slot: Slot, kind: str, message: str, detail: Any, trace: str) -> None:
        """A worker could not open its runner."""
        assert slot.worker is not None
        error = revive(kind, message, detail, trace)
        slot.worker.error = ModelError(error.message, detail=detail, trace=trace)
        self._changed.set()

    def called_off(self, slot: Slot, batch_id: int) -> None:
        """Nobody waits for what a slot is running: if it does not come back, its worker hangs in user code."""
        if self._stuck_s is not None and slot.worker is not None:
            asyncio.get_running_loop().call_later(self._stuck_s, self._end_stuck, slot, batch_id, slot.worker.process)

    def gone(self, slot: Slot) -> None:
        """A connection closed, and its worker with it."""
        if slot.worker is not None:
            slot.worker.slots.discard(slot)
            slot.worker.ready = False
            # A worker that dies takes its connections along; one that only lost them is of no use either.
            asyncio.get_running_loop().call_later(LIVED_S, _kill, slot.worker.process)
        super().gone(slot)

    def arena_path(self) -> str | None:
        """Return a new name for a slot's two arenas, or None where memory cannot be shared."""
        return f"{self._folder}/{next(self._arena_ids)}" if self._shared else None

    def _end_stuck(self, slot: Slot, batch_id: int, process: asyncio.subprocess.Process | None) -> None:
        if slot.batch is not None and slot.batch_id == batch_id:
            log.warning("a worker did not stop %g s after its batch was called off; it is replaced", self._stuck_s)
            _kill(process)

    async def _supervise(self, worker: Worker) -> None:
        pause_s = 0.1
        while not self._stopping:
            async with self._opening:
                if self._stopping:  # another worker failed while this one waited for its turn
                    return
                await self._spawn(worker)
                while not worker.ready and not worker.error and worker.process and worker.process.returncode is None:
                    self._changed.clear()
                    exited = asyncio.ensure_future(worker.process.wait())
                    changed = asyncio.ensure_future(self._changed.wait())
                    await asyncio.wait([exited, changed], return_when=asyncio.FIRST_COMPLETED)
                    exited.cancel()
                    changed.cancel()
            assert worker.process is not None
            status = await worker.process.wait()
            if self._stopping:
                return
            lived_s = time.monotonic() - worker.started
            self._ended(worker, status, lived_s)
            self.restarts += 1
            if worker.error is not None or lived_s < LIVED_S:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
            else:
                pause_s = 0.1

    async def _spawn(self, worker: Worker) -> None:
        worker.error = None
        worker.started = time.monotonic()
        address = f"unix:{self._folder}/socket"
        arguments = ["-P", "-m", "forebay.workers.child", "--connect", address, "--worker", str(worker.index)]
        env = dict(os.environ if self._env is None else self._env)
        worker.process = await asyncio.create_subprocess_exec(
            self._python, *arguments, env=env, cwd=self._cwd, stdin=asyncio.subprocess.DEVNULL
        )

    def _ended(self, worker: Worker, status: int, lived_s: float) -> None:
        for slot in list(worker.slots):
            slot.hang_up()
        if worker.error is None and not worker.ready and lived_s < LIVED_S:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            worker.error = ModelError(f"worker {worker.index} ended {how} before it was ready")
        self._changed.set()
        log.warning(
            "worker %d (pid %s) ended with status %d", worker.index, getattr(worker.process, "pid", "?"), status
        )
        if self._on_death is not None:
            self._on_death(status)


def _kill(process: asyncio.subprocess.Process | None) -> None:
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
