# SPDX-License-Identifier: Apache-2.0
"""Clients that send more than a turn of the event loop should read take turns: a few read on in each, the others wait.

A turn is as long as all that is read in it, and everybody else waits for its end. What one client may send in it is
bounded by its connection; this bounds what all of them send, however many they are. Long bodies are counted in the same
turns, a step in each (`types/element_limits.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakKeyDictionary

from forebay.types.user_exceptions import answered

if TYPE_CHECKING:
    from forebay.types.element_limits import Steps

T = TypeVar("T")

log = logging.getLogger("forebay")

AT_ONCE: Final = 2
"""How many read on in a turn: while the loop reads one, the other one's bytes arrive."""


class ReadingTurns:
    """The readers that have stopped and go on in turn. Lives on one event loop."""

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

    def run(self, steps: Steps[T], done: Callable[[Exception | None, T | None], object]) -> None:
        """Run a step in each turn, and call `done` with the error of one, or with None and the result of all."""
        self.wait(functools.partial(self._step, steps, done))

    def _step(self, steps: Steps[T], done: Callable[[Exception | None, T | None], object]) -> None:
        try:
            next(steps)
        except StopIteration as end:
            done(None, end.value)
        except Exception as error:  # noqa: BLE001 - whoever waits for the steps is told
            done(error, None)
        else:
            self.run(steps, done)

    def _failed(self, error: BaseException) -> None:
        log.error("failed to resume reading from a client; the others continue", exc_info=error)

    def _next(self) -> None:
        waiting = self._waiting
        for _ in range(min(AT_ONCE, len(waiting))):
            answered(waiting.popleft(), self._failed)
        self._is_due = bool(waiting)
        if waiting:
            self._loop.call_soon(self._next)


_turns: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, ReadingTurns]] = WeakKeyDictionary()


def turns_of(loop: asyncio.AbstractEventLoop) -> ReadingTurns:
    """Return the turns of an event loop, which all of its ports share."""
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = ReadingTurns(loop)
    return found


async def in_turns(steps: Steps[T]) -> T:
    """Run a step in each turn; raises what a step raises."""
    loop = asyncio.get_running_loop()
    turns = turns_of(loop)
    while True:
        turn = loop.create_future()
        turns.wait(lambda turn=turn: turn.done() or turn.set_result(None))
        await turn
        try:
            next(steps)
        except StopIteration as end:
            return end.value
