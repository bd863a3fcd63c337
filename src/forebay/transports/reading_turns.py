# SPDX-License-Identifier: Apache-2.0
"""Clients that send more than a turn of the event loop should read take turns: a few read on in each, the others wait.

A turn is as long as all that is read in it, and everybody else waits for its end. What one client may send in it is
bounded by its connection; this bounds what all of them send, however many they are.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from forebay.types.caught import answered

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

log = logging.getLogger("forebay")

AT_ONCE: Final = 2
"""How many read on in a turn: while the loop reads one, the other one's bytes arrive."""


class ReadingTurns:
    """Who has stopped reading and goes on in turn. Lives on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_due = False

    def wait(self, read_on: Callable[[], object]) -> None:
        """Call this in a later turn, once those who came before have had theirs."""
        self._waiting.append(read_on)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._next)

    def _failed(self, error: BaseException) -> None:
        log.error("a client's turn to read on has failed; the others have theirs", exc_info=error)

    def _next(self) -> None:
        waiting = self._waiting
        for _ in range(min(AT_ONCE, len(waiting))):
            answered(waiting.popleft(), self._failed)
        self._is_due = bool(waiting)
        if waiting:
            self._loop.call_soon(self._next)
