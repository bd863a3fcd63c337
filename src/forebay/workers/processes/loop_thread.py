# SPDX-License-Identifier: Apache-2.0
"""A loop beside the program: one coroutine in a thread of its own, and callers that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, TypeVar

from forebay.types.user_exceptions import caught
from forebay.workers.user_calls.os_threads import require_os_threads

T = TypeVar("T")

_CLOSED: Final = "it is closed: this works within its `with` only"


class LoopThread:
    """Runs one coroutine; others may be run beside it, from any thread, for as long as it does.

    Threads do not follow a fork: in a child of the process that started it there is nothing to call and to wait for.
    """

    def __init__(self, name: str, main: Callable[[Callable[[], None]], Coroutine[Any, Any, Any]]) -> None:
        """Describe it; `start` runs it.

        Args:
            name: Of the thread. It is a daemon, so forgetting to stop it does not keep the interpreter from ending.
            main: Makes the coroutine, which calls what it is given once it is up.
        """
        self._main = main
        self._up: Future[None] = Future()
        self._ended: Future[Any] = Future()
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether the coroutine has not ended yet."""
        return not self._is_forked and not self._ended.done()

    @property
    def _is_forked(self) -> bool:
        return self._pid != os.getpid()

    @property
    def _is_here(self) -> bool:
        """Whether this is called on the loop, which cannot wait for itself."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Return once the coroutine is up; what it raises before that is raised here.

        Raises:
            ConfigError: If threads of this program were replaced by tasks of one thread, which the loop would stop.
        """
        require_os_threads("a server beside a program")
        self._pid = os.getpid()
        self._thread.start()
        self._up.result()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop, if there still is one."""
        if self._loop is not None and self.is_running:
            with contextlib.suppress(RuntimeError):  # it was closed in between
                self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run another coroutine on the loop and return what it returns.

        Raises:
            RuntimeError: If the loop has ended, if it is called on the loop, or in a process that was forked.
        """
        if why_not := self._why_not():
            coroutine.close()
            raise RuntimeError(why_not)
        assert self._loop is not None
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # it was closed in between
            coroutine.close()
            raise RuntimeError(_CLOSED) from None
        try:
            wait((running, self._ended), return_when=FIRST_COMPLETED)  # at its end the loop may leave it as it is
        except BaseException:
            running.cancel()
            raise
        if running.cancelled() or not running.done():
            coroutine.close()
            raise RuntimeError(_CLOSED)
        return running.result()

    def join(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the coroutine and return what it returned, or raise what it raised.

        On the loop, and in a process that was forked, there is nothing to wait for, and it returns None.

        Raises:
            TimeoutError: If it has not ended by then.
        """
        if self._is_forked or self._is_here:
            return None
        result = self._ended.result(timeout_s)
        self._thread.join(timeout_s)
        return result

    def _why_not(self) -> str:
        """Return why nothing can be run and waited for now; empty if it can."""
        if self._is_forked:
            return "it runs in the process that this one was forked from, and its thread stayed there; start one here"
        if self._loop is None or not self.is_running:
            return _CLOSED
        if self._is_here:
            return "this would wait for the loop that it is called on, for ever; call it in another thread"
        return ""

    def _live(self) -> Any:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            return runner.run(self._main(self._is_up))

    def _run(self) -> None:
        result, error = caught(self._live)
        if error is None:
            self._ended.set_result(result)
            self._is_up()
            return
        self._ended.set_exception(error)
        if not self._up.done():
            self._up.set_exception(error)

    def _is_up(self) -> None:
        if not self._up.done():
            self._up.set_result(None)
