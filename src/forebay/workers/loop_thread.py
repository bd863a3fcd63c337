# SPDX-License-Identifier: Apache-2.0
"""A loop beside the program: one coroutine in a thread of its own, and callers that wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from forebay.types.caught import caught

T = TypeVar("T")


class LoopThread:
    """Runs one coroutine; others may be run beside it, from any thread, for as long as it does."""

    def __init__(self, name: str, main: Callable[[Callable[[], None]], Coroutine[Any, Any, Any]]) -> None:
        """Describe it; `start` runs it.

        Args:
            name: Of the thread. It is a daemon, so forgetting to stop it does not keep the interpreter from ending.
            main: Makes the coroutine, which calls what it is given once it is up.
        """
        self._main = main
        self._up: Future[None] = Future()
        self._ended: Future[Any] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether the coroutine has not ended yet."""
        return not self._ended.done()

    def start(self) -> None:
        """Return once the coroutine is up; what it raises before that is raised here."""
        self._thread.start()
        self._up.result()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop, if there still is one."""
        if self._loop is not None and self.is_running:
            self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run another coroutine on the loop and return what it returns.

        Raises:
            RuntimeError: If the loop has ended.
        """
        if self._loop is None or not self.is_running:
            coroutine.close()
            raise RuntimeError("it is closed: this works within its `with` only")
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def join(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the coroutine and return what it returned, or raise what it raised.

        Raises:
            TimeoutError: If it has not ended by then.
        """
        result = self._ended.result(timeout_s)
        self._thread.join(timeout_s)
        return result

    def _run(self) -> None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            result, error = caught(runner.run, self._main(self._is_up))
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
