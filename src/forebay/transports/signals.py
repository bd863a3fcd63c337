# SPDX-License-Identifier: Apache-2.0
"""Signals that end a server, and a thread that makes sure they do; and SIGHUP, which makes it reload.

Theory of operation. The first signal asks the loop to drain, the second to hurry. Neither helps while a model's `load`
blocks the loop, or while the process waits for a user's thread after the last answer. So the signals also reach a
thread beside the loop. It waits as long as a drain may take, and then ends the process as it is; a second signal makes
that wait short, a third ends it. Whoever was started for the server ends with it.

SIGHUP means two things: somebody sent it, so the server is to reload; or the terminal was closed, so it is to end. In
the second case there is no terminal any more. One that comes while files are still imported is kept until there is a
server; SIGTERM and SIGINT end the process then, as they do any other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from forebay.workers.processes import sigterm

if TYPE_CHECKING:
    import asyncio

LAST_S: Final = 2.0
"""How long a server may take to end after its drain, or when it is told to hurry."""


class _Hangup:
    """A handler of SIGHUP that remembers it, unless the terminal was closed: that ends the process as ever."""

    def __init__(self) -> None:
        self.came = False
        self._had_terminal = _has_terminal()

    def __call__(self, number: int, _frame: object) -> None:
        if self._had_terminal and not _has_terminal():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.came = True


def _end(number: int, _frame: object) -> None:
    """End the process as an unhandled signal does; the kernel spares the first process of a container from those."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)


@contextlib.contextmanager
def early_hangup() -> Generator[None]:
    """Keep a SIGHUP for the `Signals` within: a process that is going to be a server may be asked to reload already."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, _Hangup())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Signals:
    """SIGTERM, SIGINT and SIGHUP, from its `with` to the end of the process."""

    def __init__(
        self,
        act: Callable[[int], None],
        patience_s: Callable[[], float],
        status: Callable[[], int],
        reload: Callable[[], None] | None = None,
    ) -> None:
        """Describe what they lead to.

        Args:
            act: Called on the loop with the number of each signal.
            patience_s: Returns how long the server may take from the first signal on.
            status: Returns the exit status of a process that did not end in that time.
            reload: Called on the loop for a SIGHUP that does not end the server; None has all of them end it.
        """
        self._reload = reload
        self._had_terminal = _has_terminal()
        self._on_terminal = [stream for stream in range(3) if os.isatty(stream)]
        self._act = act
        self._patience_s = patience_s
        self._status = status
        self._came: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # may be put to within a signal handler
        self._before: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` means it
                self._handlers[number] = signal.signal(number, self._signalled)
        sigterm.keep_from_children(self._signalled)
        threading.Thread(target=self._watch, name="forebay-signals", daemon=True).start()
        earlier = self._handlers.get(signal.SIGHUP)
        if isinstance(earlier, _Hangup) and earlier.came:
            self._signalled(signal.SIGHUP, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._came.put(None)

    def attend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Act on this loop, also on what came before it ran."""
        self._loop = loop
        for act in self._before:
            act()

    def _signalled(self, number: int, _frame: object) -> None:
        act: Callable[[], None] = functools.partial(self._act, number)
        if number == signal.SIGHUP and self._reload is not None and not (self._had_terminal and not _has_terminal()):
            act = self._reload
        else:
            self._came.put(number)
            if number == signal.SIGHUP:
                self._leave_terminal()
        if self._loop is None:
            self._before.append(act)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: what is left to end is not its business
            self._loop.call_soon_threadsafe(act)

    def _leave_terminal(self) -> None:
        """Write nowhere from now on if the terminal is gone; a failing last write would change the exit status."""
        if self._had_terminal and not _has_terminal():
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in self._on_terminal:
                os.dup2(nowhere, stream)
            os.close(nowhere)

    def _watch(self) -> None:
        if self._came.get() is None:
            return  # the server has ended by itself
        with contextlib.suppress(queue.Empty):
            self._next(self._patience_s())
            self._next(LAST_S)
        names = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
        _last_word(f"forebay: it did not end in time (threads: {names}) and is ended now\n")
        os._exit(self._status())

    def _next(self, within_s: float) -> None:
        """Wait for the next signal; raises queue.Empty if none came in time."""
        until = time.monotonic() + within_s
        while self._came.get(timeout=max(until - time.monotonic(), 0.0)) is None:
            pass  # the server has ended, but the process has not


def _last_word(text: str) -> None:
    """Write to stderr what can be written at once: that nobody reads it may be why the server does not end."""
    stderr = select.poll()
    stderr.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):  # not through the log, whose lock may be what is waited for
        if stderr.poll(0):
            os.write(2, text.encode()[: select.PIPE_BUF])


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
