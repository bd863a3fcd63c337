# SPDX-License-Identifier: Apache-2.0
"""A serving that was started: what `Serving.start` returns."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

import msgspec

from forebay.arrays.array_batch import Batch
from forebay.arrays.tree_rows import concatenate
from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, DeadlineExceeded, InvalidRequest
from forebay.observe.metrics.serving_metrics import KeyMetrics, ServingReading
from forebay.serving.nx_serving import caller, registry
from forebay.serving.nx_serving.dispatch import NEVER, Submission
from forebay.serving.nx_serving.partitions import Partitions, ThreadPartitions
from forebay.serving.nx_serving.serving_options import ServingSettings, options_of, partitions_of, tenants_of
from forebay.serving.nx_serving.stream import AHEAD, stream, stream_async
from forebay.types.did_you_mean import listed
from forebay.types.tenant import ALL, Tenant

if TYPE_CHECKING:
    from forebay.serving.nx_serving.definition import Serving

MakeCall: TypeAlias = "Callable[..., Submission]"
"""Makes a call of a batch, a waiter and a deadline."""

In = TypeVar("In")
Out = TypeVar("Out")

_numbers = itertools.count(1)


class KeyStatistics(msgspec.Struct, frozen=True):
    """What was executed under one batch key.

    Attributes:
        rows: Rows executed.
        batches: Batches executed, the failed ones included.
        crashes: Batches that failed.
        mean_batch_size: Rows in a batch on average, without padding; 0 before the first.
        mean_queue_ms: Time from a call's arrival until its rows were taken, on average.
        mean_execute_ms: Time of a batch, on average.
        padding_share: Share of the executed rows that belonged to nobody.
    """

    rows: int
    batches: int
    crashes: int
    mean_batch_size: float
    mean_queue_ms: float
    mean_execute_ms: float
    padding_share: float


class Statistics(msgspec.Struct, frozen=True):
    """What a started serving tells about itself.

    Attributes:
        name: What it was started as.
        partitions: Batches that may run at a time.
        idle: Partitions that wait for work.
        waiting_rows: Rows that no batch has taken yet.
        in_flight: Calls that are not over.
        by_key: The numbers of each batch key that was used.
    """

    name: str
    partitions: int
    idle: int
    waiting_rows: int
    in_flight: int
    by_key: dict[Hashable, KeyStatistics]


class ServingProcess(Generic[In, Out]):
    """A serving that runs until it is stopped; `Serving.start` makes it.

    Use it as a context manager (`with` or `async with`), or call `stop`. Everything here may be called from any thread
    and any event loop.
    """

    def __init__(self, serving: Serving[In, Out], name: str | None, given: Mapping[str, Any]) -> None:
        """Start a serving; see `Serving.start`.

        Raises:
            ConfigError: The name is taken, or an option is wrong.
            ModelError: The module could not be initialised.
        """
        if name is not None and (type(name) is not str or not name):
            raise ConfigError(f"name of a serving: expected a string, got {name!r}")
        settings = self._settings = serving.settings
        options = self.options = options_of(settings, given)
        if options.distribution_weight != 1:
            registry.require_joined(f"distribution_weight={options.distribution_weight}")
        if settings.distributed_postprocessing is not None:
            registry.require_joined("distributed_postprocessing")
        self.name = f"serving-{next(_numbers)}" if name is None else name
        self._limit = options.batch_size
        self._keys = frozenset(options.batch_keys)
        self._tenants = tenants_of(options)
        self._stop_once = threading.Lock()
        if name is None:
            self._partitions = self._started(serving)
            return
        with registry.taking(name):
            self._partitions = self._started(serving)
            registry.register(self)

    def batched_run(self, given: In, *, timeout_s: float | None = None, tenant: str | None = None) -> Out:
        """Execute an input in batches with what other callers hand in, and wait for it.

        Args:
            given: What the client preprocessing takes.
            timeout_s: Time after which the answer is of no use; None waits for it.
            tenant: Whose call it is, of those that `tenants` names; they share the partitions by their weights. None
                is one more.

        Returns:
            The client postprocessing's result; without one, the output. A streaming serving returns an iterator, which
            hands in its rows when it is consumed.

        Raises:
            InvalidRequest: There is nothing to execute, it is not a batch, or its key or its tenant is unknown.
            QueueFull: As many rows wait as may wait; an input that is larger than that by itself is fed in. It is
                `ShareUsed` if the call had to leave the queue for a tenant that has less in it.
            DeadlineExceeded: `timeout_s` was over.
            ServingCrashed: The function raised on a batch with rows of this input; the exception is the cause.
            BadOutcome: The module returned something other than it should.
            ServingStopped: The serving was stopped meanwhile.
            ServingNotFound: It was stopped before.
        """
        settings = self._settings
        deadline, make = _deadline(timeout_s), self._calls_of(tenant)
        prepared, info = caller.prepare(settings, given)
        if isinstance(prepared, Batch):
            caller.whole(settings, prepared, self._limit)
            self._check_key(prepared)
            if settings.streaming is None:
                return caller.finish(settings, self._execute(make, prepared, deadline), info)
            batches = caller.cut(prepared, self._limit)
            make = functools.partial(make, whole_size=prepared.size)
            events = stream(self._partitions, batches, make, AHEAD, deadline)
        else:
            batches = caller.each(settings, prepared, self._limit)
            if settings.streaming is None:
                results = [
                    self._execute(make, self._check_key(batch), deadline, patient=number > 0)
                    for number, batch in enumerate(batches)
                ]
                return caller.finish(settings, _joined(results), info)
            events = stream(self._partitions, map(self._check_key, batches), make, 1, deadline)
        return caller.finish_stream(settings, events, info)

    async def batched_run_async(self, given: In, *, timeout_s: float | None = None, tenant: str | None = None) -> Out:
        """Execute an input as `batched_run` does, in a task; a task that is cancelled withdraws its rows.

        The client pre- and postprocessing may be coroutine functions, and the input an async iterator of batches. A
        streaming serving returns an async iterator.

        Raises:
            ConfigError: Where no loop of asyncio runs.
            ForebayError: See `batched_run`.
        """
        _require_asyncio("batched_run_async")
        settings = self._settings
        deadline, make = _deadline(timeout_s), self._calls_of(tenant)
        prepared, info = await caller.prepare_async(settings, given)
        if isinstance(prepared, Batch):
            caller.whole(settings, prepared, self._limit)
            self._check_key(prepared)
            if settings.streaming is None:
                executed = await self._execute_async(make, prepared, deadline)
                return await caller.finish_async(settings, executed, info)
            batches = _asynchronous(caller.cut(prepared, self._limit))
            make = functools.partial(make, whole_size=prepared.size)
            events = stream_async(self._partitions, batches, make, AHEAD, deadline)
        else:
            batches = caller.each_async(settings, prepared, self._limit)
            if settings.streaming is None:
                results: list[tuple[Any, Any]] = []
                async for batch in batches:
                    self._check_key(batch)
                    results.append(await self._execute_async(make, batch, deadline, patient=bool(results)))
                return await caller.finish_async(settings, _joined(results), info)
            checked = (self._check_key(batch) async for batch in batches)
            events = stream_async(self._partitions, checked, make, 1, deadline)
        return await caller.finish_stream_async(settings, events, info)

    def stop(self) -> None:
        """Stop: rows that wait fail with `ServingStopped` at once, batches that run have `shutdown_ms` to end.

        The serving's own function may call it; its batch then goes on to its end.
        """
        if self._partitions.is_inside or self._partitions.is_forked:
            registry.forget(self)
            self._partitions.stop(0.0)
            return
        with self._stop_once:
            registry.forget(self)
            self._partitions.stop(self.options.shutdown_ms / 1000)

    @property
    def settings(self) -> ServingSettings:
        """The serving that it runs."""
        return self._settings

    @property
    def weight(self) -> int:
        """Its part of the calls of other programs: `distribution_weight` x partitions."""
        return self.options.distribution_weight * self._partitions.count

    def with_hooks_elsewhere(self, moved: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the same process for `batched_run_async`, whose client pre- and postprocessing do not run in the task.

        Args:
            moved: Given one of them, returns a coroutine function that runs it elsewhere.
        """
        settings = self._settings
        before, after = settings.client_preprocessing, settings.client_postprocessing
        if before is None and after is None:
            return self
        other = copy.copy(self)
        other._settings = replace(  # noqa: SLF001 - of the same class
            settings,
            client_preprocessing=None if before is None else moved(before),
            client_postprocessing=None if after is None else moved(after),
        )
        return other

    @property
    def is_forked(self) -> bool:
        """Whether it runs in the process from which this one was forked, and not here."""
        return self._partitions.is_forked

    def statistics(self) -> Statistics:
        """Return a snapshot of its numbers."""
        partitions = self._partitions
        return Statistics(
            name=self.name,
            partitions=partitions.count,
            idle=partitions.idle,
            waiting_rows=partitions.waiting,
            in_flight=partitions.in_flight,
            by_key={key: _summed_up(metrics) for key, metrics in partitions.metrics.copy().items()},
        )

    def describe(self) -> dict[str, Any]:
        """Return what the list of models of a server in this program tells about it."""
        partitions, options = self._partitions, self.options
        batches = sum(metrics.batch_size.count for metrics in partitions.metrics.copy().values())
        rows = sum(metrics.rows for metrics in partitions.metrics.copy().values())
        return {
            "name": self.name,
            "kind": "serving",
            "ready": True,
            "streams": self._settings.streaming is not None,
            "batching": {
                "max_batch_size": options.batch_size,
                "idle": "wait",
                "max_wait_ms": options.batch_timeout_ms,
                "max_queue": options.capacity,
                "batch_keys": [str(key) for key in options.batch_keys],
                "batches": batches,
                "mean_batch_size": round(rows / batches, 2) if batches else None,
            },
            "workers": {"slots": partitions.count, "idle": partitions.idle},
            "in_flight": partitions.in_flight,
            "waiting": partitions.waiting,
        }

    def reading(self) -> ServingReading:
        """Return its numbers for the page of metrics."""
        partitions = self._partitions
        by_key = {str(key): metrics for key, metrics in partitions.metrics.copy().items()}
        return ServingReading(self.name, partitions.waiting, partitions.in_flight, by_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        try:
            _require_asyncio("`async with` of a serving")
        except ConfigError:
            self.stop()  # nobody else will
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def __repr__(self) -> str:
        return f"ServingProcess({self.name!r}, {self._partitions.count} partitions, {self.options})"

    def _started(self, serving: Serving[In, Out]) -> Partitions:
        options = self.options
        config = BatchConfig(
            max_size=options.batch_size,
            max_wait_s=options.batch_timeout_ms / 1000,
            capacity=max(options.capacity, options.batch_size),
            idle="wait",
        )
        partitions = partitions_of(self._settings, options)
        if options.worker_kind == "process":
            from forebay.serving.nx_serving.process_partitions import ProcessPartitions

            return ProcessPartitions(self.name, config, serving, options, len(partitions))
        pad_to = options.batch_size if options.pad_to_batch_size else None
        execution = serving.initialise("process", partitions, pad_to)
        has_hooks = bool(self._settings.streaming)
        is_shared = options.tenants is not None
        return ThreadPartitions(self.name, config, execution, len(partitions), has_hooks=has_hooks, is_shared=is_shared)

    def _check_key(self, batch: Batch) -> Batch:
        if batch.batch_key not in self._keys:
            known = list(self.options.batch_keys)
            raise InvalidRequest(f"unknown batch key: {batch.batch_key!r} (expected one of {known!r})")
        return batch

    def _calls_of(self, name: Any) -> MakeCall:
        """Return what makes the calls of a tenant.

        Raises:
            InvalidRequest: The serving does not know the tenant.
        """
        tenants, told = self._tenants, self.options.tenants
        if tenants is None or told is None:
            if name is None:
                return self._call
            msg = f"tenant is {name!r}, and the serving {self.name!r} has no tenants: start it with tenants={{...}}"
            raise InvalidRequest(msg)
        if name is None:
            return self._call
        if not isinstance(name, str) or (name not in told and ALL not in told):
            raise InvalidRequest(f"tenant is {name!r:.100}; the serving {self.name!r} has {listed(list(told))}")
        return functools.partial(self._call, tenant=tenants.of(name))

    def _call(
        self, batch: Batch, waiter: Any, deadline: float, whole_size: int | None = None, tenant: Tenant | None = None
    ) -> Submission:
        """Return a call; `whole_size` is the size of the input that `batch` is a piece of."""
        # An input that is a full batch is executed alone, and hooks belong to whole batches.
        divisible = (whole_size or batch.size) != self._limit and not self._settings.streaming
        streamed = self._settings.streaming is not None
        return Submission(batch, waiter, deadline=deadline, divisible=divisible, streamed=streamed, tenant=tenant)

    def _execute(self, make: MakeCall, batch: Batch, deadline: float, *, patient: bool = False) -> tuple[Any, Any]:
        lock = _borrow_lock()
        call = make(batch, lock, deadline)
        try:
            self._partitions.submit(call, patient=patient)
            if deadline == NEVER:
                lock.acquire()
            elif not lock.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
                if self._partitions.cancel(call):
                    raise _too_late()
                lock.acquire()  # the answer came at the same moment
        except BaseException:
            self._partitions.cancel(call)
            raise
        _own.lock = (
            lock  # not after an error: whether it will still be released is not known then, after Ctrl+C for one
        )
        return call.result()

    async def _execute_async(
        self, make: MakeCall, batch: Batch, deadline: float, *, patient: bool = False
    ) -> tuple[Any, Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        call = make(batch, future, deadline)
        timer: asyncio.TimerHandle | None = None
        self._partitions.submit(call, patient=patient)
        if deadline != NEVER:
            timer = loop.call_later(max(deadline - time.monotonic(), 0.0), self._expire, call, future)
        try:
            await future
        except BaseException:
            self._partitions.cancel(call)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return call.result()

    def _expire(self, call: Submission, future: asyncio.Future[None]) -> None:
        if self._partitions.cancel(call) and not future.done():
            call.error = _too_late()  # not the future's: raised by it, it would hold the frame that holds the future
            future.set_result(None)


class _Own(threading.local):
    """A thread's own lock to wait on, kept between calls: making one for each call would cost more."""

    lock: threading.Lock | None = None


_own = _Own()


def _borrow_lock() -> threading.Lock:
    lock, _own.lock = _own.lock, None  # a signal handler that calls meanwhile must not find it
    if lock is None:
        lock = threading.Lock()
        lock.acquire()
    return lock


def _require_asyncio(what: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            f"{what} runs on asyncio, and this task on another library, such as trio; a thread of its own may call "
            "batched_run, for example by `trio.to_thread.run_sync(serving.batched_run, given)`"
        ) from None


def _deadline(timeout_s: float | None) -> float:
    return NEVER if timeout_s is None else time.monotonic() + timeout_s


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the time of the call was over before its rows were executed")


async def _asynchronous(batches: Any) -> AsyncIterator[Batch]:
    for batch in batches:
        yield batch


def _joined(results: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return concatenate([output for output, _ in results]), results[-1][1]


def _summed_up(metrics: KeyMetrics) -> KeyStatistics:
    batches = metrics.batch_size.count
    calls = metrics.queue_s.count
    executed = metrics.rows + metrics.padding_rows
    return KeyStatistics(
        rows=metrics.rows,
        batches=batches,
        crashes=metrics.crashes,
        mean_batch_size=metrics.rows / batches if batches else 0.0,
        mean_queue_ms=1000 * metrics.queue_s.total / calls if calls else 0.0,
        mean_execute_ms=1000 * metrics.execute_s.total / batches if batches else 0.0,
        padding_share=metrics.padding_rows / executed if executed else 0.0,
    )
