# SPDX-License-Identifier: Apache-2.0
"""Calls that may take so long and no longer.

Nothing can end a thread from outside. So a call with a time limit runs in a thread beside its worker; one that is late
is left behind there, nobody reads what it returns, and the next call gets another thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from forebay.workers.cancel import probe
from forebay.workers.user_code import caught


class Late(Exception):
    """A call was not over in time and has been left behind."""


class _Job:
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
        """Nobody waits any more: a call that asks is told so, and no longer asks on the worker's behalf."""
        with self._lock:
            self._is_late = True

    def _probed(self) -> Any:
        probe.set(self._is_cancelled)
        return self._function()

    def _is_cancelled(self) -> bool:
        with self._lock:
            return self._is_late or (self._asked is not None and self._asked())


class BoundedCalls:
    """Makes one call after the other, for one thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Call a function.

        Raises:
            Late: If it is not over in time; it goes on, and its result is dropped.
            BaseException: What it raises.
        """
        job = _Job(function)
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="forebay-bounded-call", daemon=True).start()
        self._jobs.put(job)
        if not job.done.wait(timeout_s):
            job.leave()
            self.close()
            raise Late
        try:
            if job.error is not None:
                raise job.error
            return job.result
        finally:
            del job  # its error's traceback refers to this frame

    def close(self) -> None:
        """Let the thread end; it does so once its call is over."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or its result would live until the next call
