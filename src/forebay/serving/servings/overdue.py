# SPDX-License-Identifier: Apache-2.0
"""Acts on things that have had enough time; for drivers without a loop.

What those things are, and what becomes of them, is the caller's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("forebay.workers")

T = TypeVar("T")


class Overdue(Generic[T]):
    """Waits in a thread of its own, which is there only while there is something to wait for."""

    def __init__(self, name: str, after_s: float, act: Callable[[T, int], None]) -> None:
        """Begin with nothing.

        Args:
            name: For the thread.
            after_s: How long each has.
            act: Called in the thread with what was noted.
        """
        self.after_s = after_s
        self._name = name
        self._act = act
        self._noted: dict[T, tuple[int, float]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def note(self, what: T, turn: int) -> None:
        """Note something that is to be looked at after the time; this replaces an earlier note about it."""
        with self._changed:
            self._noted[what] = turn, time.monotonic() + self.after_s
            self._changed.notify()
            if self._thread is None and not self._is_stopped:
                thread = threading.Thread(target=self._watch, name=f"{self._name}-overdue", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there can be no further thread; the next turn tries again
                    log.warning("what hangs in %r goes unnoticed: %s", self._name, error)
                else:
                    self._thread = thread

    def stop(self) -> None:
        """Look at nothing any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_stopped or not self._noted:
                    self._thread = None
                    return
                now = time.monotonic()
                late = {what: turn for what, (turn, due) in self._noted.items() if due <= now}
                if not late:
                    self._changed.wait(min(due for _, due in self._noted.values()) - now)
                    continue
                for what in late:
                    del self._noted[what]
            for what, turn in late.items():
                self._act(what, turn)
