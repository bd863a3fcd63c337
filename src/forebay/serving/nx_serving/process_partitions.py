# SPDX-License-Identifier: Apache-2.0
"""Partitions in processes of their own: the workers of a process pool, given batches by a loop in a thread.

Theory of operation. Callers hand in calls under the lock (`partitions.py`), and have the loop look when a worker could
take something. The loop takes what is due under the same lock and gives it to an idle worker as one packed entry, with
the rows in shared memory if they are large. A worker that dies fails the batch it was running; the pool replaces it at
once, whether or not there is work, and meanwhile the others take the calls.

Callers who do not take the values of hooks may make their batch wait, and the loop cannot; so these are handed over by
a thread for each batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from forebay.errors import BatchMismatch, ConfigError, ForebayError, RunnerFailed, ServingCrashed, WorkerLost
from forebay.observe.metrics.author_metrics import workers_of
from forebay.serving.nx_serving.execution import Executed
from forebay.serving.nx_serving.packed_trees import pack, unpack
from forebay.serving.nx_serving.partition_worker import place_of
from forebay.serving.nx_serving.partitions import Partitions
from forebay.serving.nx_serving.waiters import wake
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.processes.loop_thread import LoopThread
from forebay.workers.runner import RunnerSpec
from forebay.workers.user_calls.os_threads import require_os_threads, require_os_waits
from forebay.workers.user_calls.user_code import attempt

if TYPE_CHECKING:
    from forebay.arrays.array_batch import Batch
    from forebay.batching.queue import BatchConfig
    from forebay.serving.nx_serving.definition import Serving
    from forebay.serving.nx_serving.dispatch import Submission, Work
    from forebay.serving.nx_serving.execution import Sink
    from forebay.serving.nx_serving.serving_options import ProcessOptions


class ProcessPartitions(Partitions):
    """Partitions in processes of their own."""

    def __init__(
        self, name: str, config: BatchConfig, serving: Serving[Any, Any], options: ProcessOptions, count: int
    ) -> None:
        """Start the processes of a serving and wait until its module is initialised in each.

        Raises:
            ConfigError: Another process cannot find the serving, an option cannot travel to it, or threads were
                replaced.
            ModelError: The module could not be initialised.
        """
        is_shared = options.tenants is not None
        super().__init__(name, config, count, has_hooks=bool(serving.settings.streaming), is_shared=is_shared)
        require_os_threads("a serving in processes")
        require_os_waits("a serving in processes")
        factory, kwargs = place_of(serving)
        given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
        self.pool = ProcessPool(
            RunnerSpec(factory, {**kwargs, "options": _plain(given)}),
            workers=count,
            path=[str(Path(path).resolve()) for path in sys.path],
            stuck_s=self.stuck_s,
            hands_on=False,
            called="the process of partition",
        )
        self._keys = {key: number for number, key in enumerate(options.batch_keys)}
        self._rest: deque[Work] = deque()
        self._running: dict[EntryBatch, Work] = {}
        self._is_roused = False
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending = asyncio.Event()
        self._grace_s = 0.0
        with workers_of(serving=name):
            self._context = contextvars.copy_context()
        self._loop = LoopThread(name, self._serve)
        self._loop.start()

    @property
    def idle(self) -> int:
        """Processes that wait for work."""
        return self.pool.statistics().idle

    async def _serve(self, is_up: Callable[[], None]) -> None:
        self.pool.watch(self._look)
        await asyncio.get_running_loop().create_task(self.pool.start(), context=self._context)
        is_up()
        await self._ending.wait()
        await self.pool.stop(self._grace_s)

    @property
    def _is_watched(self) -> bool:
        return self._due is not None

    def _stir(self) -> None:
        if self.pool.idle and not self._is_roused and self._is_watch_needed():
            self._is_roused = True
            self._loop.call(self._look)

    def _let_end(self, grace_s: float) -> bool:
        self._grace_s = grace_s
        self._loop.call(self._ending.set)
        self._loop.join()
        return True

    def _look_for_called_off(self) -> None:
        for batch, work in list(self._running.items()):
            if not batch.cancelled and not work.wanted():
                batch.cancelled = True
                self._loop.call(_call_off, batch)

    def _look(self) -> None:
        """Give idle workers what they may take; on the loop, as what follows."""
        if self.pool.is_refusing or self._refusal is not None:
            self._note_refusal()
        while (work := self._taken()) is not None:
            self._guard(work, self._run, work)
        if self._timer is not None:
            self._timer.cancel()
        due = self._due
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_later(max(due - time.monotonic(), 0.0), self._look)

    def _taken(self) -> Work | None:
        """Return what an idle worker is to run; if there is nothing, note when to look again."""
        with self._lock:
            work = self._next(self._rest) if self.pool.idle else None
            if work is None:
                self._is_roused = False
                self._due = self._dispatch.next_due() if self.pool.idle else None
            return work

    def _note_refusal(self) -> None:
        """No worker is left and none can be had, or there is one again: if not, nobody should wait."""
        calls: list[Submission] = []
        with self._lock:
            self._refusal = None
            if self.pool.is_refusing:
                problem = self.pool.statistics().problem
                self._refusal = ServingCrashed(f"the serving {self._name!r} has no process: {problem}")
                calls = self._dispatch.close(self._refusal, running=False)
        wake(calls)

    def _run(self, work: Work) -> None:
        try:
            rows = work.batch()
        except BatchMismatch:
            # Callers whose rows do not fit together get batches of their own instead of each other's error.
            self._rest.extend(work.alike())
            return
        answer: Callable[[Any], object] = partial(self._guard, work, self._answer, work, time.perf_counter())
        packed = attempt(self._packed, rows)
        if type(packed) is Failure:
            answer(packed)
            return
        batch = EntryBatch([Request(body=packed, reply=_unheard)], work.key, 1)
        if self._has_hooks:
            came: _Came = SimpleQueue()
            threading.Thread(target=self._hand_over, args=(work, came, answer), name=self._name, daemon=True).start()
            batch.on_steps = lambda steps, release: came.put((steps, release))
            answer = partial(_end, came)
        self._running[batch] = work
        self.pool.submit(batch, partial(self._done, answer))
        if not work.wanted():  # they left before this could be called off
            with self._lock:
                self._look_for_called_off()

    def _packed(self, rows: Batch) -> bytearray:
        return pack(rows.pad(0).realize(), [self._keys[rows.batch_key], rows.size, rows.padding])

    def _hand_over(self, work: Work, came: _Came, answer: Callable[[Any], object]) -> None:
        """Hand over the values of hooks as they come, and the output, which comes last; in a thread of the batch."""
        sink = self._sink(work)
        output: Any = None
        while True:
            found, release = came.get()
            if release is None:
                answer(found or output)
                return
            for (part,) in found:
                output = output or attempt(_handed_over, part, sink)
            self._loop.call(release)

    def _done(self, answer: Callable[[Any], object], batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        del self._running[batch]
        if self.waiting or self._rest:
            self._look()  # the worker begins with the next batch before this one is answered
        answer(*outcomes)

    def _answer(self, work: Work, started: float, outcome: Any) -> None:
        found: Any = outcome if type(outcome) is Failure else attempt(_executed, outcome, work.rows)
        executed: Executed | None = None if type(found) is Failure else found
        error: ForebayError | None = found.error if type(found) is Failure else None
        if isinstance(error, WorkerLost):
            error = self._stopped() if self._is_stopping else RunnerFailed(str(error.detail))
        with self._lock:
            calls = self._settle(work, executed, error, time.perf_counter() - started)
        wake(calls)


_Came: TypeAlias = "SimpleQueue[tuple[Any, Callable[[], object] | None]]"
"""Steps of a streamed answer, each with what makes room for the next; at the end the outcome, with None."""


def _handed_over(part: Any, sink: Sink) -> Any:
    """Hand over the value of a hook; the output is returned."""
    value, (what, name) = unpack(part)
    if what == "batch":
        return part
    sink(name, value)
    return None


def _end(came: _Came, outcome: Any) -> None:
    came.put((outcome, None))


def _executed(packed: Any, rows: int) -> Executed:
    output, (_, metadata) = unpack(packed)
    return Executed(output, metadata, rows).own()  # the arrays lie in what came, and cannot be written to


def _call_off(batch: EntryBatch) -> None:
    if batch.on_cancel is not None:
        batch.on_cancel()


def _unheard(_request: Request, _outcome: Any) -> None:
    """Answer nobody: who waits is told by the partitions."""


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in options.items():
        try:
            arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except TypeError:
            arrived = None
        plain[name] = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
        if arrived != plain[name]:
            raise ConfigError(f"{name}: expected a string or a number with worker_kind='process', got {value!r}")
    return plain
