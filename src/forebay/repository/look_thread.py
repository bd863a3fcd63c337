# SPDX-License-Identifier: Apache-2.0
"""A thread that looks at something again and again, and how long it rests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

SECOND_LOOK_S: Final = 1.0
"""Pause before the look that settles what the last one has found, if looks are further apart."""
MAX_PAUSE_S: Final = 60.0
_PATIENCE: Final = 5
"""A look that takes long is followed by a pause so many times as long."""


def pause_after(
    took_s: float, poll_s: float, *, is_moving: bool = False, max_pause_s: float = MAX_PAUSE_S
) -> float | None:
    """Return how long to rest after a look; None rests until the next one is asked for.

    Args:
        poll_s: Seconds between two looks; 0 looks only when told to.
        is_moving: Whether it found something that the next look has to find as well.
        max_pause_s: The longest pause that a look earns by taking long.
    """
    if not poll_s and not is_moving:
        return None
    pause_s = min(poll_s or SECOND_LOOK_S, SECOND_LOOK_S) if is_moving else poll_s
    return max(pause_s, min(took_s * _PATIENCE, max_pause_s))


class Looking:
    """Looks in a thread until it is stopped; can be started again."""

    def __init__(self, name: str, look: Callable[[], object], pause_s: Callable[[float], float | None]) -> None:
        """Describe it.

        Args:
            look: Looks once; must not raise.
            pause_s: Says how long to rest before the next look, after one that took so long.
        """
        self._name = name
        self._look = look
        self._pause_s = pause_s
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, after a first pause."""
        assert self._thread is None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(self._wake,), name=self._name, daemon=True)
        self._thread.start()

    def soon(self) -> None:
        """Look at once."""
        self._wake.set()

    def stop(self, wait_s: float = 0.0) -> None:
        """Look no more; waits at most so long for a look that is under way."""
        thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None and wait_s:
            thread.join(wait_s)

    def _work(self, wake: threading.Event) -> None:
        took_s = 0.0
        while True:
            wake.wait(self._pause_s(took_s))
            if self._thread is not threading.current_thread():
                return
            wake.clear()
            started = time.monotonic()
            self._look()
            took_s = time.monotonic() - started
