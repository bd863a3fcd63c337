# SPDX-License-Identifier: Apache-2.0
"""Run batches in worker processes that may die at any time.

Theory of operation. The pool listens on a unix socket in a private folder and starts its workers; each dials in
and speaks first (`frames.py`, `child.py`). A connection is a slot. A slot's state is one of

    greeting --hello--> opening --ready--> idle --batch--> busy --result--> idle
                                            (busy --result with work--> finishing --ready--> idle)

and every state ends in *gone* when the connection closes, which the kernel tells at once however the process died.
What a gone slot was running is handed to the next idle slot, once; if that one dies too, every sample of the batch
gets its own error. A batch is therefore answered exactly once, on the loop. A worker that ends is replaced at once if
it had lived for a second, else after a pause that doubles up to ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import shutil
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import InternalError, InvalidRequest, ModelError, Unavailable, revive
from forebay.types.call import Failure
from forebay.workers import frames, shm
from forebay.workers.pool import PoolStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.types.batch import Batch, Done
    from forebay.workers.runner import RunnerSpec

log = logging.getLogger("forebay.workers")

LIVED_S = 1.0
"""A worker that lived this long is replaced at once when it dies."""
MAX_PAUSE_S = 10.0
"""Longest pause before a worker that keeps dying is started again."""
CREDIT_STEP = 8
"""Steps of a streamed answer after which the worker is told to go on."""

_batch_ids = itertools.count(1)


class Worker:
    """One worker process and its successors."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.slots: set[Slot] = set()
        self.ready = False
        self.started = 0.0
        self.error: ModelError | None = None


class Slot(asyncio.Protocol):
    """The server's end of one connection of a worker."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader = frames.FrameReader(self._view)
        self._outgoing: shm.ArenaWriter | None = None
        self._incoming: shm.ArenaReader | None = None
        self._arena: str | None = None
        self._credit = 0
        self._streamed = False
        self.worker: Worker | None = None
        self.batch: Batch | None = None
        self.batch_id = 0
        self.done: Done | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the worker to speak."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Act on each message; a worker that does not keep to the protocol is hung up on."""
        try:
            for message in self._reader.feed(data):
                self._act(message)
        except (InvalidRequest, LookupError, TypeError, ValueError, OSError) as error:
            log.warning("a worker does not speak the protocol and is hung up on: %s", error)
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the pool, which hands the batch on."""
        if self._outgoing is not None:
            self._outgoing.close()
        if self._incoming is not None:
            self._incoming.close()
        self._pool.gone(self, streamed=self._streamed)

    def open(self, options: Mapping[str, Any]) -> None:
        """Answer a hello."""
        self._arena = self._pool.arena_path()
        if self._arena is not None:
            self._outgoing = shm.ArenaWriter(Path(self._arena + ".in"))
        self.send(["open", {**options, "arena": self._arena}])

    def run(self, batch: Batch, done: Done) -> None:
        """Give the worker a batch; one that cannot be sent fails at once and leaves the slot idle."""
        entries = batch.entries
        bodies = [entry.body for entry in entries]
        params: Any = entries[0].params
        for entry in entries:
            if entry.params is not params:
                params = [entry.params for entry in entries]
                break
        sizes = None if batch.rows == len(entries) else [entry.size for entry in entries]
        batch_id = next(_batch_ids)
        try:
            if self._outgoing is not None:
                bodies = self._outgoing.place(bodies)
            frame = frames.encode(["batch", batch_id, bodies, params, sizes])
        except Exception as error:  # noqa: BLE001 - a body that is not plain data
            failure = Failure(InternalError(f"the batch cannot be sent to a worker: {error}"))
            self._pool.ready(self, before=lambda: done(batch, [failure] * len(entries)))
            return
        self.batch, self.done, self.batch_id = batch, done, batch_id
        self._streamed = False
        self._credit = 0
        batch.attempts += 1
        batch.on_cancel = self._cancel
        if self._transport is not None:
            self._transport.write(frame)

    def send(self, message: Sequence[Any]) -> None:
        """Write one frame."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def hang_up(self) -> None:
        """Close the connection; `connection_lost` follows."""
        if self._transport is not None:
            self._transport.abort()

    def _act(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == "result":
            _, batch_id, outcomes, failures, seconds, ready = message
            if batch_id == self.batch_id and self.batch is not None:
                self._finish(outcomes, failures, seconds, ready=ready)
        elif kind == "part":
            _, batch_id, parts, failures = message
            if batch_id == self.batch_id and self.batch is not None and self.batch.on_parts is not None:
                self._streamed = True
                self.batch.on_parts(_with_failures(parts, failures), functools.partial(self._grant, batch_id))
        elif kind == "ready":
            if self._incoming is None and self._arena is not None:
                self._incoming = shm.ArenaReader(self._arena + ".out")
                for suffix in (".in", ".out"):  # both sides have it open: nothing is left behind whatever happens now
                    Path(self._arena + suffix).unlink(missing_ok=True)
            self._pool.ready(self)
        elif kind == "hello":
            _, version, about = message
            if version != frames.VERSION:
                msg = f"it speaks version {version} of the protocol, this server version {frames.VERSION}"
                raise InvalidRequest(msg)
            self._pool.greeted(self, about["worker"], first=about["first"])
        elif kind == "failed":
            self._pool.failed(self, *message[1:])
        else:
            msg = f"{kind!r} is not a message of the protocol"
            raise InvalidRequest(msg)

    def _finish(self, outcomes: list[Any], failures: dict[int, Any] | None, seconds: float, *, ready: bool) -> None:
        batch, done = self.batch, self.done
        assert batch is not None
        assert done is not None
        if len(outcomes) != len(batch.entries):
            msg = f"it answered {len(outcomes)} of {len(batch.entries)} items"
            raise InvalidRequest(msg)
        # What lies in the arena is copied out before the worker may write the next answers over it.
        found = outcomes
        if memoryview in set(map(type, outcomes)):
            found = [bytes(outcome) if type(outcome) is memoryview else outcome for outcome in outcomes]
        self.batch = self.done = None
        batch.on_cancel = None
        batch.model_s = seconds
        if ready:
            self._pool.ready(self, before=lambda: done(batch, _with_failures(found, failures)))
        else:
            done(batch, _with_failures(found, failures))
            self.send(["written", self.batch_id])

    def _grant(self, batch_id: int) -> None:
        if batch_id != self.batch_id:
            return  # a client of an earlier batch has taken its part only now
        self._credit += 1
        if self._credit == CREDIT_STEP:
            self.send(["credit", CREDIT_STEP])
            self._credit = 0

    def _cancel(self) -> None:
        self.send(["cancel", self.batch_id])
        self._pool.called_off(self, self.batch_id)

    def _view(self, offset: int, length: int) -> memoryview:
        if self._incoming is None:
            msg = "it placed bytes in shared memory that was never agreed on"
            raise InvalidRequest(msg)
        return self._incoming.view(offset, length)


class ProcessPool:
    """`workers` processes with `threads` slots each."""

    def __init__(  # noqa: PLR0913 - each is one plain fact about the workers
        self,
        spec: RunnerSpec,
        *,
        workers: int = 1,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        path: Sequence[str] = (),
        cwd: str | None = None,
        stagger: bool = False,
        stuck_s: float | None = 30.0,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        """Describe the workers; `start` brings them up.

        Args:
            spec: What each worker runs.
            workers: Processes.
            threads: Slots in each.
            env: Environment of the workers, all of it; None hands on this process's own.
            path: Folders appended to the workers' `sys.path`.
            cwd: Their working folder.
            stagger: Open one runner after the other instead of all at once.
            stuck_s: A worker that goes on with a batch nobody waits for is replaced after this time; None lets it.
            on_death: Called with the exit status when a worker dies; None replaces it.
        """
        spec.require_portable()
        self.idle = 0
        self._on_idle: Callable[[], None] = lambda: None
        self.restarts = 0
        self._spec = spec
        self._threads = threads
        self._env = env
        self._path = list(path)
        self._cwd = cwd
        self._stuck_s = stuck_s
        self._on_death = on_death
        self._workers = [Worker(index) for index in range(workers)]
        self._idle_slots: deque[Slot] = deque()
        self._orphans: deque[tuple[Batch, Done]] = deque()
        self._opening = asyncio.Semaphore(1 if stagger else workers)
        self._arena_ids = itertools.count()
        self._folder: Path | None = None
        self._lock: int | None = None
        self._server: asyncio.Server | None = None
        self._supervisors: list[asyncio.Task[None]] = []
        self._changed: asyncio.Event = asyncio.Event()
        self._stopping = False
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

    @property
    def blocks(self) -> bool:
        """Whether `submit` runs the batch before it returns."""
        return False

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this whenever a slot became idle by itself."""
        self._on_idle = on_idle

    def submit(self, batch: Batch, done: Done) -> None:
        """Give the batch to the worker with the most idle slots, of several to the one that has been idle longest."""
        self.idle -= 1
        if self._threads == 1:
            self._idle_slots.popleft().run(batch, done)
            return
        idle = Counter(slot.worker for slot in self._idle_slots)
        slot = max(self._idle_slots, key=lambda slot: idle[slot.worker])
        self._idle_slots.remove(slot)
        slot.run(batch, done)

    async def stop(self, grace_s: float) -> None:
        """Stop idle workers now, busy ones when their batch has ended or `grace_s` is over."""
        self._stopping = True
        self.idle = 0
        self._idle_slots.clear()
        for worker in self._workers:
            for slot in worker.slots:
                slot.send(["stop"])
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
        for batch, done in self._orphans:
            done(batch, _lost(batch))
        self._orphans.clear()
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

    def greeted(self, slot: Slot, index: int | None, *, first: bool) -> None:
        """A worker said hello on a new connection: tell it what to run."""
        if index is None or not 0 <= index < len(self._workers):
            msg = f"worker {index} was not started by this pool"
            raise InvalidRequest(msg)
        worker = slot.worker = self._workers[index]
        worker.slots.add(slot)
        options: dict[str, Any] = {}
        if first:
            options = {
                "factory": self._spec.factory,
                "kwargs": dict(self._spec.kwargs),
                "index": index,
                "threads": self._threads,
                "path": self._path,
            }
        slot.open(options)

    def ready(self, slot: Slot, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work: a batch that lost its worker comes first, then whatever the queue has.

        Args:
            slot: The slot.
            before: Run after the slot counts as idle and before anybody is woken: hands over its last answers.
        """
        if self._stopping:
            if before is not None:
                before()
            slot.send(["stop"])
            return
        worker = slot.worker
        assert worker is not None
        if not worker.ready:
            worker.ready = True
            worker.error = None
            self._changed.set()
        while self._orphans:
            batch, done = self._orphans.popleft()
            if batch.cancelled:
                done(batch, _lost(batch))
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

    def gone(self, slot: Slot, *, streamed: bool) -> None:
        """A connection closed: what it was running is handed on, once."""
        if slot.worker is not None:
            slot.worker.slots.discard(slot)
            slot.worker.ready = False
            # A worker that dies takes its connections along; one that only lost them is of no use either.
            asyncio.get_running_loop().call_later(LIVED_S, _kill, slot.worker.process)
        if slot in self._idle_slots:
            self._idle_slots.remove(slot)
            self.idle -= 1
        batch, done = slot.batch, slot.done
        slot.batch = slot.done = None
        if batch is None or done is None:
            return
        batch.on_cancel = None
        if batch.attempts > 1 or streamed or batch.cancelled or self._stopping:
            done(batch, _lost(batch))
        elif self._idle_slots:
            self.submit(batch, done)
        else:
            self._orphans.append((batch, done))

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
            sys.executable, *arguments, env=env, cwd=self._cwd, stdin=asyncio.subprocess.DEVNULL
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


def _with_failures(found: list[Any], failures: dict[int, Any] | None) -> list[Any]:
    if failures:
        for index, (kind, message, detail, trace) in failures.items():
            found[index] = Failure(revive(kind, message, detail, trace))
    return found


def _lost(batch: Batch) -> list[Failure]:
    times = "twice" if batch.attempts > 1 else "once"
    error = Unavailable(f"the worker that held the request died ({times}); try again")
    return [Failure(error)] * len(batch.entries)
