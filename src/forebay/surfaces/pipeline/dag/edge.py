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

from forebay.types.call import Failure
from forebay.workers.user_code import attempt

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
            result = attempt(work)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result)
        del job, work, future  # or the last request would live until the next one


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if type(result) is Failure:
        future.set_exception(result.error)
    else:
        future.set_result(result)
