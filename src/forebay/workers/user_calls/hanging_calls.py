# SPDX-License-Identifier: Apache-2.0
"""Calls of code that may hang, in threads beside the caller: a worker's thread, or a loop.

Nothing can end a thread from outside. So a call that is late is left behind in its thread, and nobody reads what it
returns. The threads are daemons: one that hangs must not keep the server from ending, as it would in an executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from forebay.workers.pool import MAX_LEFT
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.user_code import caught

log = logging.getLogger("forebay.workers")


class Late(Exception):
    """A call was not over in time and has been left behind."""


class _Job(Protocol):
    def run(self) -> None: ...


class BoundedCalls:
    """Makes the calls of one waiting thread in a helper thread; replaces the helper if a call is late."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Call a function.

        Raises:
            Late: If it does not end in time; it goes on, and its result is dropped.
            BaseException: What it raises.
        """
        call = _BoundedCall(function)
        if self._jobs is None:
            self._jobs = SimpleQueue()
            _start(self._jobs, "forebay-bounded-call")
        self._jobs.put(call)
        if not call.done.wait(timeout_s):
            call.leave()
            self.close()
            raise Late
        try:
            if call.error is not None:
                raise call.error
            return call.result
        finally:
            call.error = None  # its traceback refers to this frame, and to that of the thread, which both hold the call

    def close(self) -> None:
        """Let the thread end; it does so once its call is over."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


class _BoundedCall:
    """One call, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._function = function
        self._context = contextvars.copy_context()
        self._asked = probe.get()
        self._lock = threading.Lock()
        self._is_late = False

    def run(self) -> None:
        self.result, self.error = caught(self._context.run, self._probed)  # raised where it was called
        self.done.set()

    def leave(self) -> None:
        """Stop waiting: from now on the call is told, when it asks, that nobody waits for it."""
        with self._lock:
            self._is_late = True

    def _probed(self) -> Any:
        probe.set(self._is_cancelled)
        try:
            return self._function()
        finally:
            probe.set(None)  # the call refers to its context

    def _is_cancelled(self) -> bool:
        with self._lock:
            return self._is_late or (self._asked is not None and self._asked())


class LoopThreads:
    """Up to `count` threads beside a loop, started as they are needed. Used from that loop.

    A thread whose call goes on when nobody waits for it any more has a successor until it comes back.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._taken = 0
        self._left = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def call(
        self,
        function: Callable[[], Any],
        until: float,
        done: Callable[[Any, BaseException | None], object],
        unwanted: Callable[[Any], object] | None = None,
    ) -> LoopCall:
        """Call a function.

        Args:
            function: What is called.
            until: When it counts as late, in seconds of `time.monotonic`.
            done: Called once on the loop, with what it returned and with what it raised; that is `Late` if it is not
                over in time. It is left to end by itself then, and not begun if it was still waiting.
            unwanted: Called on the loop with what it returned after all, when nobody waited for it any more.

        Returns:
            The call, which can be dropped.
        """
        self._taken += 1
        self._grow()
        call = LoopCall(function, until, done, self._leave, self._over, unwanted)
        self._jobs.put(call)
        return call

    @property
    def is_stuck(self) -> bool:
        """Whether all threads hang in calls that do not end: no call begins until one comes back."""
        return self._left >= self._most()

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _grow(self) -> None:
        if self._taken > self._started < self._most():
            self._started += 1
            _start(self._jobs, "forebay-beside-loop")

    def _most(self) -> int:
        return self._count + min(self._left, MAX_LEFT)

    def _leave(self) -> None:
        """A thread goes on with a call that nobody waits for."""
        self._left += 1
        if self._left == MAX_LEFT + 1:
            log.error("%d threads hang in calls that never return; no further one is replaced", MAX_LEFT)
        self._grow()

    def _over(self, call: LoopCall) -> None:
        """A thread is free again."""
        self._taken -= 1
        self._left -= call.is_left
        if self._started > self._most():
            self._started -= 1
            self._jobs.put(None)


class LoopCall:
    """A call that is made beside a loop.

    Attributes:
        is_left: Whether it went on when nobody waited for it any more.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        until: float,
        done: Callable[[Any, BaseException | None], object],
        left: Callable[[], object],
        over: Callable[[LoopCall], object],
        unwanted: Callable[[Any], object] | None,
    ) -> None:
        self._function: Callable[[], Any] | None = function
        self._done: Callable[[Any, BaseException | None], object] | None = done
        self._left = left
        self._over = over
        self._is_running = False
        self.is_left = False
        self._unwanted = unwanted
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(max(until - time.monotonic(), 0.0), self._settle, None, Late())

    def run(self) -> None:
        """Make it, in a thread, unless nobody waits for it any more."""
        self._is_running = True  # before the look at what to do: whoever drops it in between knows of this thread
        function = self._function
        if function is None:
            self._unwanted = None
        result, error = (None, None) if function is None else caught(function)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._ended, result, error)
        del error  # see `BoundedCalls.call`

    def drop(self) -> None:
        """Drop the call: its end is not told."""
        self._timer.cancel()
        self._function = self._done = None
        if self._is_running and not self.is_left:
            self.is_left = True
            self._left()

    def _ended(self, result: Any, error: BaseException | None) -> None:
        self._is_running = False
        self._over(self)
        if self._done is None and error is None and self._unwanted is not None:
            self._unwanted(result)
        self._settle(result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        done = self._done
        if done is not None:
            self.drop()
            done(result, error)


def _start(jobs: SimpleQueue[_Job | None], name: str) -> None:
    threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or its result would live until the next call
