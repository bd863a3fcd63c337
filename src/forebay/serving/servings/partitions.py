# SPDX-License-Identifier: Apache-2.0
"""The threads of a started serving: the second driver of the batch queue, for callers that are threads or tasks.

Theory of operation. Callers hand in calls under one lock, and each partition is a thread that takes batches under the
same lock whenever it is free, runs them, and wakes the callers. There is no loop and no thread in between, so a call
costs two switches: caller to partition, partition to caller.

A partition that finds nothing to take parks on a lock of its own. One of the parked partitions is the watcher: it wakes
by itself when the queue's next moment is due. A caller rouses a partition only if there is something it could take now,
or if there is no watcher yet; a partition that takes a batch rouses the next one if there is more to do. So a thread is
woken for a reason or not at all, and nobody polls.

Callers never run batches themselves, though that would save switches: a caller would then hold up its own deadline for
the rows of others, and code that is bound to one thread (a device context, an open file of a library) would be called
from many.

A batch that nobody waits for any more has some time to end. Then its partition is given up: a process is killed and
comes back. A thread cannot be ended, so it is left behind, and another one goes on with the same runner.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.arrays.trees import copy_rows
from forebay.errors import (
    BadOutcome,
    BatchMismatch,
    InternalError,
    InvalidRequest,
    ServingCrashed,
    ServingNotFound,
    ServingStopped,
)
from forebay.observe.serving_metrics import KeyMetrics
from forebay.serving.servings.dispatch import Dispatch
from forebay.serving.servings.waiters import wake
from forebay.types.failures import text_of
from forebay.workers.cancel import probe
from forebay.workers.pool import MAX_LEFT, STUCK_S
from forebay.workers.user_code import caught

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from forebay.batching.queue import BatchConfig
    from forebay.errors import ForebayError
    from forebay.serving.servings.batch_executor import BatchExecutor
    from forebay.serving.servings.dispatch import Submission, Work
    from forebay.serving.servings.execution import Executed


log = logging.getLogger("forebay.workers")


class _Seat:
    """Where the thread of one partition waits, and what it runs.

    Attributes:
        work: What it runs.
        rest: What it is to run next, before it takes anything else.
        timer: Gives the partition up; None while somebody waits for what it runs.
        is_left: Whether it was left behind with that.
    """

    __slots__ = ("is_left", "is_roused", "lock", "rest", "runner", "thread", "timer", "work")

    def __init__(self, runner: BatchExecutor, rest: deque[Work]) -> None:
        self.runner = runner
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


_REPLACED: Final = "a process of %r did not stop %g s after its batch was called off; it is replaced"
_LEFT_BEHIND: Final = "a thread of %r did not stop %g s after its batch was called off; it is left behind"


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


class Partitions:
    """Runs the calls of one started serving."""

    def __init__(
        self, name: str, config: BatchConfig, runners: Sequence[BatchExecutor], *, has_hooks: bool = False
    ) -> None:
        """Describe the partitions; `start` starts their threads.

        Args:
            name: Of the serving, for messages and threads.
            config: How rows are batched.
            runners: One for each partition.
            has_hooks: Whether the waiters of all calls take the values of hooks, with `put((name, rows))`.
        """
        self._has_hooks = has_hooks
        self.metrics: dict[Hashable, KeyMetrics] = defaultdict(KeyMetrics)
        self.runners = runners
        self._name = name
        self._dispatch = Dispatch(config)
        self._lock = threading.Lock()
        self._parked: list[_Seat] = []
        self._watcher: _Seat | None = None
        self._roused = 0
        self._is_stopping = False
        self._is_forked = False
        self._inside: dict[int, _Nested] = {}
        self._refusal: ServingCrashed | None = None
        self._seats: dict[_Seat, None] = {}
        self.stuck_s = STUCK_S
        self._left = 0
        self._held: dict[_Seat, None] = {}
        self.replaced = 0
        for runner in runners:
            runner.watch(self._changed)
        self._threads = [self._thread(runner, deque(), index) for index, runner in enumerate(runners)]
        _all.add(self)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    @property
    def idle(self) -> int:
        """Partitions that wait for work."""
        return len(self._parked)

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
            QueueFull: There is no room for its rows.
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
            if self._parked and not self._roused and (self._watcher is None or self._dispatch.is_pressing()):
                self._rouse()

    def cancel(self, call: Submission) -> bool:
        """Forget a call; returns False if it is over already and its waiter was or will be woken."""
        with self._lock:
            was_open = self._dispatch.cancel(call)
            if was_open and (call.taken or call.slices) and not self._is_stopping:
                self._look_for_called_off()
            if self._dispatch.is_feeding:
                self._dispatch.feed(time.monotonic())
                if self._parked and not self._roused and self._is_watch_needed():
                    self._rouse()
            return was_open

    def stop(self, grace_s: float) -> None:
        """Fail what waits, let running batches end within `grace_s` seconds, then fail those too.

        Called by the function of the serving itself, it returns at once, and the batch goes on to its end.
        """
        if self._is_forked:
            return  # what runs is the parent's
        stopped = self._stopped()
        with self._lock:
            self._is_stopping = True
            calls = self._dispatch.close(stopped, running=False)
            while self._parked:
                self._rouse()
        wake(calls)
        for runner in self.runners:
            if not runner.is_ready:
                runner.close()  # or its thread would wait for it
        if self.is_inside:
            return
        patience = time.monotonic() + grace_s
        for thread in list(self._threads):
            thread.join(max(patience - time.monotonic(), 0.0))
        with self._lock:
            calls = self._dispatch.close(stopped, running=True)
        wake(calls)
        for runner in self.runners:
            runner.close()

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
        me, count = threading.get_ident(), len(self.runners)
        calls = [nested.call for thread, nested in list(self._inside.items()) if thread != me]
        if sum(call is not None and not call.done for call in calls) + 1 >= count:
            which = "its only partition" if count == 1 else f"each of its {count} partitions"
            raise InvalidRequest(
                f"the function of the serving {self._name!r} calls that serving itself, and {which} would wait for "
                "that: give it more partitions, or call the function"
            )

    def _changed(self) -> None:
        """A partition is gone or back; if none is left that could come back soon, nobody should wait."""
        problems = [runner.problem for runner in self.runners if not runner.is_ready]
        problem = problems[0] if problems else None
        calls: list[Submission] = []
        with self._lock:
            self._refusal = None
            if problem is not None and len(problems) == len(self.runners) and all(problems):
                self._refusal = ServingCrashed(f"the serving {self._name!r} has no process: {problem.message}")
                calls = self._dispatch.close(self._refusal, running=False)
        wake(calls)

    def _rouse(self) -> None:
        seat = self._parked.pop()
        seat.is_roused = True
        self._roused += 1
        if seat is self._watcher:
            self._watcher = None
        seat.lock.release()

    def _thread(self, runner: BatchExecutor, rest: deque[Work], number: int) -> threading.Thread:
        return threading.Thread(target=self._serve, args=(runner, rest), name=f"{self._name}-{number}", daemon=True)

    def _serve(self, runner: BatchExecutor, rest: deque[Work]) -> None:
        seat = _Seat(runner, rest)
        self._seats[seat] = None
        nested = self._inside[threading.get_ident()] = _Nested()
        try:
            self._serve_on(runner, seat, nested)
        finally:
            if not seat.is_left:
                del self._seats[seat], self._inside[threading.get_ident()]

    def _look_for_called_off(self) -> None:
        """Note which partitions run batches that nobody waits for any more; the caller holds the lock."""
        for seat in list(self._seats):
            if seat.timer is None and seat.work is not None and not seat.work.wanted():
                timer = threading.Timer(self.stuck_s, self._give_up, (seat, seat.work))
                timer.daemon = True
                try:
                    timer.start()
                except RuntimeError as error:  # there can be no further thread; the next one who leaves tries again
                    log.warning("what hangs in %r goes unnoticed: %s", self._name, error)
                else:
                    seat.timer = timer

    def _give_up(self, seat: _Seat, work: Work) -> None:
        """Stop a partition that goes on with a batch nobody waits for: end the batch, or leave the thread behind."""
        calls: list[Submission] = []
        with self._lock:
            if seat.work is not work or self._is_stopping:
                return
            if seat.runner.end_run():
                log.warning(_REPLACED, self._name, self.stuck_s)
            elif self._left < MAX_LEFT:
                self._leave(seat)
            else:
                calls = self._hold(seat)
        wake(calls)

    def _leave(self, seat: _Seat) -> None:
        """Have another thread take the place of one that hangs; the caller holds the lock."""
        thread = self._thread(seat.runner, seat.rest, len(self.runners) + self.replaced)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("a thread of %r hangs in its function, and there can be no other: %s", self._name, error)
            return
        log.warning(_LEFT_BEHIND, self._name, self.stuck_s)
        self._left += 1
        self.replaced += 1
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
        if len(self._held) < len(self.runners):
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

    def _serve_on(self, runner: BatchExecutor, seat: _Seat, nested: _Nested) -> None:
        while True:
            if not runner.is_ready:
                self._pass_on()
                if not runner.ready():
                    return
            timeout_s = -1.0
            with self._lock:
                work = self._next_of(seat)
                if work is not None:
                    seat.turn_to(work)
                    if self._parked and not self._roused and self._is_watch_needed():
                        self._rouse()
                elif self._is_stopping:
                    return
                else:
                    timeout_s = self._park(seat)
            if work is None:
                self._wait(seat, timeout_s)
                continue
            try:
                self._run(runner, seat, work)
            except Exception as error:
                log.exception("a partition of %r failed to run a batch", self._name)
                with self._lock:
                    self._end(seat)
                    calls = self._dispatch.fail(work, InternalError(f"the batch could not be run: {error}"))
                wake(calls)
            nested.call = work = None  # or its rows would stay in memory until the next batch
            if seat.is_left:
                return

    def _next_of(self, seat: _Seat) -> Work | None:
        """Return what a partition is to run now; below the lock."""
        while seat.rest:
            work = seat.rest.popleft()
            if work.wanted():
                return work
        return self._dispatch.take(time.monotonic())

    def _pass_on(self) -> None:
        """Rouse another partition in place of one that was roused but has lost its process."""
        with self._lock:
            if self._parked and not self._roused and self._is_watch_needed():
                self._rouse()

    def _is_watch_needed(self) -> bool:
        return self._dispatch.is_pressing() or (self._watcher is None and self._dispatch.next_due() is not None)

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

    def _run(self, runner: BatchExecutor, seat: _Seat, work: Work) -> None:
        try:
            batch = work.batch()
        except BatchMismatch:
            # Callers whose rows do not fit together get batches of their own instead of each other's error.
            seat.rest.extend(work.alike())
            return
        probe.set(partial(_is_unwanted, work))
        started = time.perf_counter()
        error: ForebayError | None = None
        executed: Executed | None
        executed, raised = caught(runner.run, batch, self._sink(work) if self._has_hooks else None)
        if isinstance(raised, BadOutcome):
            error = raised
        elif raised is not None:
            error = ServingCrashed(f"the serving {self._name!r} crashed: {text_of(raised)}")
            error.__cause__ = raised
        seconds = time.perf_counter() - started
        probe.set(None)  # or the rows would stay in memory until the next batch
        with self._lock:
            self._end(seat)
            metrics = self.metrics[work.key]
            metrics.took(work.rows, work.taken, [entry.arrived for entry in work.entries], seconds)
            if executed is not None:
                metrics.padding_rows += executed.rows - work.rows
                calls = self._dispatch.finish(work, executed)
            else:
                assert error is not None
                metrics.crashes += 1
                calls = self._dispatch.fail(work, error)
                self._look_for_called_off()  # whoever has rows in other batches does not wait for those either
        wake(calls)
        del error, raised, work, calls  # what was raised refers to this frame, and the calls to that

    def _sink(self, work: Work) -> Callable[[str, Any], None]:
        def others_wait() -> bool:
            """Return whether a caller that does not take its values would hold up anybody."""
            is_pressed = self._dispatch.waiting > 0 and not self._parked
            return is_pressed or self._is_stopping or sum(1 for _ in work.shares()) > 1

        def sink(name: str, value: Any) -> None:
            for call, start, stop in work.shares():
                call.waiter.put((name, copy_rows(value, start, stop)), others_wait)

        return sink


def missing(name: str) -> ServingNotFound:
    """Return the error for a name under which nothing runs."""
    return ServingNotFound(
        f"could not find a serving named {name!r}. Make sure it is started, with serving.start(name={name!r}), "
        "and was not stopped"
    )


def _is_unwanted(work: Work) -> bool:
    return not work.wanted()
