# SPDX-License-Identifier: Apache-2.0
"""Threads for the hooks that read requests and write answers.

They are daemons: a hook that hangs must not keep the server from ending, as it would in an executor's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from forebay.errors import ForebayError
from forebay.workers.user_code import caught

T = TypeVar("T")

_Job = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class EdgeThreads:
    """Up to `count` threads, started as they are needed. Used from one loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = 0
        self._open = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function; cancelled, it is left to end by itself, and not begun if it was still waiting."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._open += 1
        if self._open > self._threads < self._count:
            self._threads += 1
            threading.Thread(target=_serve, args=(self._jobs,), name="forebay-edge", daemon=True).start()
        self._jobs.put((work, future, loop))
        try:
            return await future
        finally:
            self._open -= 1

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self._threads):
            self._jobs.put(None)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        work, future, loop = job
        if not future.cancelled():
            result, error = caught(work)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)
            del result, error
        del job, work, future  # or the last request would live until the next one


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, ForebayError):
        future.set_exception(error.with_traceback(None))  # its frames hold the request
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)  # a defect: hooks of the project's raise errors of ours
    else:  # a future refuses it, or it would end the loop
        defect = RuntimeError(f"{type(error).__name__} was raised")
        defect.__cause__ = error
        future.set_exception(defect)
