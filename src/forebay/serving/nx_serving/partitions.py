# SPDX-License-Identifier: Apache-2.0
"""What runs the calls of a started serving, and its partitions in threads; `process_partitions.py` has the others.

Theory of operation. Callers, threads or tasks, hand in calls under one lock, and each partition is a thread that takes
batches under the same lock whenever it is free, runs them, and wakes the callers. There is no loop and no thread in
between, so a call costs two switches: caller to partition, partition to caller. With a loop in between it costs four,
which a single caller would see as nearly twice the time.

A partition that finds nothing to take parks on a lock of its own. One of the parked partitions is the watcher: it wakes
by itself when the queue's next moment is due. A caller rouses a partition only if there is something it could take now,
or if there is no watcher yet; a partition that takes a batch rouses the next one if there is more to do. So a thread is
woken for a reason or not at all, and nobody polls.

Callers never run batches themselves, though that would save switches: a caller would then hold up its own deadline for
the rows of others, and code that is bound to one thread (a device context, an open file of a library) would be called
from many.

A batch that nobody waits for any more has some time to end. A thread cannot be ended, so it is left behind then, and
another one takes its place.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.arrays.tree_rows import copy_rows
from forebay.errors import (
    BadOutcome,
    BatchMismatch,
    ForebayError,
    InternalError,
    InvalidRequest,
    ServingCrashed,
    ServingNotFound,
    ServingStopped,
)
from forebay.observe.metrics.serving_metrics import KeyMetrics
from forebay.serving.nx_serving.dispatch import Dispatch, Submission, Work
from forebay.serving.nx_serving.waiters import wake
from forebay.types.failures import text_of
from forebay.workers.pool import MAX_LEFT, STUCK_S
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.arrays.array_batch import Batch
    from forebay.batching.queue import BatchConfig
    from forebay.serving.nx_serving.execution import Executed, Execution, Sink


log = logging.getLogger("forebay.workers")


class _Nested:
    """What the function that a partition runs has handed in itself: the last of its calls."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: Submission | None = None


_all: weakref.WeakSet[Partitions] = weakref.WeakSet()


def _leave_all_behind() -> None:
    for partitions in list(_all):
        partitions.leave_behind()


os.register_at_fork(after_in_child=_leave_all_behind)


class Partitions(ABC):
    """Runs the calls of one started serving.

    Attributes:
        count: Batches that may run at a time.
        metrics: What was executed, by batch key.
        stuck_s: How long a batch may go on that nobody waits for.
    """

    def __init__(
        self, name: str, config: BatchConfig, count: int, *, has_hooks: bool = False, is_shared: bool = False
    ) -> None:
        """Describe the partitions.

        Args:
            name: Of the serving, for messages and threads.
            count: How many there are.
            has_hooks: Whether the waiters of all calls take the values of hooks, with `put((name, rows))`.
            is_shared: Whether tenants share them.
        """
        self.count = count
        self.metrics: dict[Hashable, KeyMetrics] = defaultdict(KeyMetrics)
        self.stuck_s = STUCK_S
        self._has_hooks = has_hooks
        self._name = name
        self._dispatch = Dispatch(config, count if is_shared else 0)
        self._lock = threading.Lock()
        self._is_stopping = False
        self._is_forked = False
        self._inside: dict[int, _Nested] = {}
        self._refusal: ServingCrashed | None = None
        _all.add(self)

    @property
    @abstractmethod
    def idle(self) -> int:
        """Partitions that wait for work."""

    @property
    def waiting(self) -> int:
        """Rows that no batch has taken yet."""
        return self._dispatch.waiting

    @property
    def in_flight(self) -> int:
        """Calls that are not over."""
        return self._dispatch.open

    def submit(self, call: Submission, *, patient: bool = False) -> None:
        """Hand in a call; its waiter is woken when it is over.

        A waiter is a future of a running loop, or anything with a `release()`.

        Args:
            patient: Whether they wait for room if there is none; for the later pieces of an input that was let in.

        Raises:
            QueueFull: There is no room for its rows; `ShareUsed` if its tenant holds too much of it.
            InvalidRequest: The function of the serving itself asks, and nothing is left that could run it.
            ServingNotFound: The serving was stopped, or is that of the process this one was forked from.
            ServingStopped: It was stopped after the first piece of the input.
            ServingCrashed: No partition is left, and none can be had.
        """
        with self._lock:
            if self._is_stopping:
                if patient and not self._is_forked:
                    raise self._stopped()
                raise self._forked() if self._is_forked else missing(self._name)
            if self._refusal is not None:
                raise copy.copy(self._refusal)
            nested = self._inside.get(threading.get_ident())
            if nested is not None:
                self._check_nesting()
            self._dispatch.offer(call, time.monotonic(), patient=patient)
            if nested is not None:
                nested.call = call
            self._stir()
            evicted, self._dispatch.evicted = self._dispatch.evicted, []
        wake(evicted)

    def cancel(self, call: Submission) -> bool:
        """Forget a call; returns False if it is over already and its waiter was or will be woken."""
        with self._lock:
            was_open = self._dispatch.cancel(call)
            if was_open and (call.taken or call.slices) and not self._is_stopping:
                self._look_for_called_off()
            if self._dispatch.is_feeding:
                self._dispatch.feed(time.monotonic())
                self._stir()
            return was_open

    def stop(self, grace_s: float) -> None:
        """Fail what waits, let running batches end within `grace_s` seconds, then fail those too.

        Called by the function of the serving itself, it returns at once, and the batch goes on to its end.
        """
        if self._is_forked:
            return  # what runs is the parent's
        with self._lock:
            self._is_stopping = True
            calls = self._dispatch.close(self._stopped(), running=False)
        wake(calls)
        if self._let_end(grace_s):
            with self._lock:
                calls = self._dispatch.close(self._stopped(), running=True)
            wake(calls)

    @property
    def is_inside(self) -> bool:
        """Whether it is the function of the serving that asks this."""
        return threading.get_ident() in self._inside

    @property
    def is_forked(self) -> bool:
        """Whether it is the parent of this process that it runs in."""
        return self._is_forked

    def leave_behind(self) -> None:
        """Refuse everything: this process was forked, and the threads stayed with its parent."""
        self._lock = threading.Lock()  # a thread that is not here may have held it
        self._is_forked = self._is_stopping = True

    def _stopped(self) -> ServingStopped:
        return ServingStopped(f"the serving {self._name!r} was stopped")

    def _forked(self) -> ServingNotFound:
        return ServingNotFound(
            f"the serving {self._name!r} runs in the process that this one was forked from, and its threads stayed "
            "there; start it here, in the child"
        )

    def _check_nesting(self) -> None:
        """Refuse a call of the function's own serving that no partition would be left to run.

        Raises:
            InvalidRequest: All others wait for calls of their own, too.
        """
        me, count = threading.get_ident(), self.count
        calls = [nested.call for thread, nested in list(self._inside.items()) if thread != me]
        if sum(call is not None and not call.done for call in calls) + 1 >= count:
            which = "its only partition" if count == 1 else f"each of its {count} partitions"
            raise InvalidRequest(
                f"the function of the serving {self._name!r} calls that serving itself, and {which} would wait for "
                "that: give it more partitions, or call the function"
            )

    @property
    @abstractmethod
    def _is_watched(self) -> bool:
        """Whether a thread will look again by itself when the queue's next moment is due."""

    @abstractmethod
    def _stir(self) -> None:
        """Have a free partition look for work, if it could take some or has to watch; the caller holds the lock."""

    @abstractmethod
    def _let_end(self, grace_s: float) -> bool:
        """Let what runs end within the time; returns whether it has, or was given up."""

    @abstractmethod
    def _look_for_called_off(self) -> None:
        """Note which partitions run batches that nobody waits for any more; the caller holds the lock."""

    def _is_watch_needed(self) -> bool:
        return self._dispatch.is_pressing() or (not self._is_watched and self._dispatch.next_due() is not None)

    def _next(self, rest: deque[Work]) -> Work | None:
        """Return what is to run now: of the rest, or of what waits; the caller holds the lock."""
        while rest:
            work = rest.popleft()
            if work.wanted():
                return work
            self._dispatch.ran(work, 0.0, time.monotonic())
        return self._dispatch.take(time.monotonic())

    def _settle(
        self, work: Work, executed: Executed | None, raised: BaseException | None, seconds: float
    ) -> list[Submission]:
        """Count a batch that has run, and give its callers their rows, or an error; the caller holds the lock.

        Returns:
            The calls to wake.
        """
        self._dispatch.ran(work, seconds, time.monotonic())
        metrics = self.metrics[work.key]
        metrics.took(work.rows, work.taken, [entry.arrived for entry in work.entries], seconds)
        if executed is not None:
            metrics.padding_rows += executed.rows - work.rows
            return self._dispatch.finish(work, executed)
        assert raised is not None
        metrics.crashes += 1
        if isinstance(raised, BadOutcome | ServingStopped):
            error: ForebayError = raised
        else:
            error = ServingCrashed(f"the serving {self._name!r} crashed: {text_of(raised)}")
            error.__cause__ = raised
        calls = self._dispatch.fail(work, error)
        self._look_for_called_off()  # whoever has rows in other batches does not wait for those either
        return calls

    def _guard(self, work: Work, act: Callable[..., object], *what: Any) -> None:
        """Do something with a batch; a defect of ours must not leave its callers without an answer."""
        try:
            act(*what)
        except Exception as error:
            log.exception("a partition of %r failed to run a batch", self._name)
            with self._lock:
                self._dispatch.ran(work, 0.0, time.monotonic())
                calls = self._dispatch.fail(work, InternalError(f"the batch could not be run: {error}"))
            wake(calls)
        finally:
            del work, what  # what a batch has raised refers to this frame

    def _sink(self, work: Work) -> Callable[[str, Any], None]:
        def others_wait() -> bool:
            """Return whether a caller that does not take its values would hold up anybody."""
            is_pressed = self._dispatch.waiting > 0 and not self.idle
            return is_pressed or self._is_stopping or sum(1 for _ in work.shares()) > 1

        def sink(name: str, value: Any) -> None:
            for call, start, stop in work.shares():
                call.waiter.put((name, copy_rows(value, start, stop)), others_wait)

        return sink


class _Seat:
    """Where the thread of one partition waits, and what it runs.

    Attributes:
        partition: Its number.
        work: What it runs.
        rest: What it is to run next, before it takes anything else.
        timer: Gives the partition up; None while somebody waits for what it runs.
        is_left: Whether it was left behind with that.
    """

    __slots__ = ("is_left", "is_roused", "lock", "partition", "rest", "thread", "timer", "work")

    def __init__(self, partition: int, rest: deque[Work]) -> None:
        self.partition = partition
        self.rest = rest
        self.thread = threading.current_thread()
        self.lock = threading.Lock()
        self.lock.acquire()
        self.is_roused = False
        self.work: Work | None = None
        self.timer: threading.Timer | None = None
        self.is_left = False

    def turn_to(self, work: Work | None) -> None:
        """Note what is run from now on."""
        self.work = work
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


_LEFT_BEHIND: Final = "a thread of %r did not stop %g s after its batch was cancelled; abandoning it"


class ThreadPartitions(Partitions):
    """Partitions in threads of this program."""

    def __init__(self, name: str, config: BatchConfig, execution: Execution, count: int, **more: bool) -> None:
        """Start the threads, which run the batches with `execution`; see `Partitions` for the rest."""
        super().__init__(name, config, count, **more)
        self._execution = execution
        self._parked: list[_Seat] = []
        self._watcher: _Seat | None = None
        self._roused = 0
        self._seats: dict[_Seat, None] = {}
        self._left = 0
        self.replaced = 0
        """Threads that were left behind, with others in their places."""
        self._held: dict[_Seat, None] = {}
        self._threads = [self._thread(partition, deque(), partition) for partition in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def idle(self) -> int:
        """Partitions that wait for work."""
        return len(self._parked)

    @property
    def _is_watched(self) -> bool:
        return self._watcher is not None

    def _stir(self) -> None:
        if self._parked and not self._roused and self._is_watch_needed():
            self._rouse()

    def _let_end(self, grace_s: float) -> bool:
        with self._lock:
            while self._parked:
                self._rouse()
        if self.is_inside:
            return False
        patience = time.monotonic() + grace_s
        for thread in list(self._threads):
            thread.join(max(patience - time.monotonic(), 0.0))
        return True

    def _rouse(self) -> None:
        seat = self._parked.pop()
        seat.is_roused = True
        self._roused += 1
        if seat is self._watcher:
            self._watcher = None
        seat.lock.release()

    def _thread(self, partition: int, rest: deque[Work], number: int) -> threading.Thread:
        return threading.Thread(target=self._serve, args=(partition, rest), name=f"{self._name}-{number}", daemon=True)

    def _serve(self, partition: int, rest: deque[Work]) -> None:
        seat = _Seat(partition, rest)
        self._seats[seat] = None
        nested = self._inside[threading.get_ident()] = _Nested()
        try:
            self._serve_on(seat, nested)
        finally:
            if not seat.is_left:
                del self._seats[seat], self._inside[threading.get_ident()]

    def _look_for_called_off(self) -> None:
        for seat in list(self._seats):
            if seat.timer is None and seat.work is not None and not seat.work.wanted():
                timer = threading.Timer(self.stuck_s, self._give_up, (seat, seat.work))
                timer.daemon = True
                try:
                    timer.start()
                except RuntimeError as error:  # there can be no further thread; the next one who leaves tries again
                    log.warning("cannot watch %r for hanging calls: %s", self._name, error)
                else:
                    seat.timer = timer

    def _give_up(self, seat: _Seat, work: Work) -> None:
        """Leave the thread behind that goes on with a batch nobody waits for."""
        calls: list[Submission] = []
        with self._lock:
            if seat.work is not work or self._is_stopping:
                return
            if self._left < MAX_LEFT:
                self._leave(seat)
            else:
                calls = self._hold(seat)
        wake(calls)

    def _leave(self, seat: _Seat) -> None:
        """Have another thread take the place of one that hangs; the caller holds the lock."""
        thread = self._thread(seat.partition, seat.rest, self.count + self.replaced)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("a thread of %r hangs in its function and cannot be replaced: %s", self._name, error)
            return
        log.warning(_LEFT_BEHIND, self._name, self.stuck_s)
        self._left += 1
        self.replaced += 1
        if seat.work is not None:
            self._dispatch.ran(seat.work, self.stuck_s, time.monotonic())
        self._threads[self._threads.index(seat.thread)] = thread
        seat.is_left = True
        del self._seats[seat]
        assert seat.thread.ident is not None
        del self._inside[seat.thread.ident]

    def _hold(self, seat: _Seat) -> list[Submission]:
        """Leave a thread that hangs in its place until one comes back; returns whom to tell if it is the last."""
        self._held[seat] = None
        msg = (
            f"{MAX_LEFT} threads of the serving {self._name!r} hang in its function, and no further one is replaced "
            "until one comes back"
        )
        log.error("%s", msg)
        if len(self._held) < self.count:
            return []
        self._refusal = ServingCrashed(msg)
        return self._dispatch.close(self._refusal, running=False)

    def _came_back(self, seat: _Seat) -> None:
        """A thread has ended what nobody waited for; below the lock."""
        self._refusal = None
        if not seat.is_left:
            del self._held[seat]
            return
        self._left -= 1
        if self._held and not self._is_stopping:
            other, _ = self._held.popitem()
            self._leave(other)

    def _serve_on(self, seat: _Seat, nested: _Nested) -> None:
        while True:
            timeout_s = -1.0
            with self._lock:
                work = self._next(seat.rest)
                if work is not None:
                    seat.turn_to(work)
                    self._stir()
                elif self._is_stopping:
                    return
                else:
                    timeout_s = self._park(seat)
            if work is None:
                self._wait(seat, timeout_s)
                continue
            self._guard(work, self._run, seat, work)
            if seat.work is not None:
                with self._lock:
                    self._end(seat)
            nested.call = work = None  # or its rows would stay in memory until the next batch
            if seat.is_left:
                return

    def _park(self, seat: _Seat) -> float:
        """Note that a partition waits; returns how many seconds it may wait, or -1 to wait until it is roused."""
        self._parked.append(seat)
        if self._watcher is not None:
            return -1.0
        due = self._dispatch.next_due()
        if due is None:
            return -1.0
        self._watcher = seat
        return min(max(due - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def _wait(self, seat: _Seat, timeout_s: float) -> None:
        woken = seat.lock.acquire(timeout=timeout_s)
        with self._lock:
            if seat.is_roused:
                seat.is_roused = False
                self._roused -= 1
                if not woken:  # both at the same moment
                    seat.lock.acquire()
            else:
                self._parked.remove(seat)
                self._watcher = None

    def _end(self, seat: _Seat) -> None:
        """A partition has ended what it ran; below the lock."""
        seat.turn_to(None)
        if seat.is_left or seat in self._held:
            self._came_back(seat)

    def _run(self, seat: _Seat, work: Work) -> None:
        try:
            batch = work.batch()
        except BatchMismatch:
            # Callers whose rows do not fit together get batches of their own instead of each other's error.
            seat.rest.extend(work.alike())
            return
        probe.set(partial(_is_unwanted, work))
        started = time.perf_counter()
        sink = self._sink(work) if self._has_hooks else None
        executed, raised = caught(self._execute, batch, seat.partition, sink)
        seconds = time.perf_counter() - started
        probe.set(None)  # or the rows would stay in memory until the next batch
        with self._lock:
            self._end(seat)
            calls = self._settle(work, executed, raised, seconds)
        wake(calls)
        del raised, work, calls  # what was raised refers to this frame, and the calls to that

    def _execute(self, batch: Batch, partition: int, sink: Sink | None) -> Executed:
        return self._execution.run(batch, partition, sink).own()


def missing(name: str) -> ServingNotFound:
    """Return the error for a name under which nothing runs."""
    return ServingNotFound(
        f"could not find a serving named {name!r}. Make sure it is started, with serving.start(name={name!r}), "
        "and was not stopped"
    )


def _is_unwanted(work: Work) -> bool:
    return not work.wanted()
