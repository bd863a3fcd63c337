# SPDX-License-Identifier: Apache-2.0
"""Runs the user's coroutines in whichever worker thread they turn up in; the inline pool uses the server's own loop.

While a coroutine takes long, its thread looks now and then whether anybody still waits for the batch. If nobody does,
the coroutine is cancelled, so one that awaits for ever blocks its thread no longer than its clients wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

from forebay.workers.user_calls.cancel import probe

T = TypeVar("T")

ASK_S: Final = 0.1
"""Seconds between two questions whether anybody still waits; what is done sooner is never asked about."""


class Coroutines:
    """One event loop a thread, made when first needed and kept: what user code leaves on it stays valid."""

    def __init__(self, *, asks: bool = True) -> None:
        """Make none yet; `asks` says whether a coroutine is cancelled once nobody waits for it."""
        self._asks = asks
        self._here = threading.local()
        self._all: list[asyncio.Runner] = []

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable on this thread's loop.

        Raises:
            BaseException: What it raises; CancelledError if nobody waits for the batch any more.
        """
        # The caller's context goes along, so that `forebay.is_cancelled()` works in coroutines as well.
        context = contextvars.copy_context()
        failures: list[Exception] = []
        found = self._runner().run(_bounded(awaitable, failures, asks=self._asks), context=context)
        if failures:
            raise failures.pop()  # its traceback refers to this frame, which must not refer to it
        return cast("T", found)

    def waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits for what this one returns; where a loop runs, one of its tasks has to."""

        def call(*arguments: Any, **named: Any) -> Any:
            made = function(*arguments, **named)
            return self.run(made) if inspect.isawaitable(made) and not is_on_loop() else made

        return call

    def close(self) -> None:
        """Close the loops of all threads, once none of them runs anything."""
        while self._all:
            self._all.pop().close()

    def _runner(self) -> asyncio.Runner:
        runner: asyncio.Runner | None = getattr(self._here, "runner", None)
        if runner is None:
            runner = self._here.runner = asyncio.Runner()
            self._all.append(runner)
        return runner


def is_on_loop() -> bool:
    """Tell whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _bounded(awaitable: Awaitable[T], failures: list[Exception], *, asks: bool) -> T | None:
    """Return what an awaitable gives, or put there what it raises: the task must not hold what refers to it."""
    asked = probe.get() if asks else None
    question = None if asked is None else _Question(asked)
    try:
        return await awaitable
    except Exception as error:  # noqa: BLE001 - raised again by who waits for it
        failures.append(error)
        return None
    finally:
        if question is not None:
            question.stop()
        del question  # it refers to the task


class _Question:
    """Asks now and then whether anybody still waits, and cancels the running task if nobody does."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def stop(self) -> None:
        self._timer.cancel()

    def _ask(self) -> None:
        if self._asked():
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(ASK_S, self._ask)
