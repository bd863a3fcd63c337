# SPDX-License-Identifier: Apache-2.0
"""A clock for coroutines under test: when nothing is left to do it jumps to the next timer, so no test ever sleeps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Final, TypeVar
from unittest import mock

T = TypeVar("T")

MAX_TURNS: Final = 20_000
"""Turns of the loop without time passing after which a test is told that something spins."""


class Spinning(AssertionError):
    """The loop turned and turned but never came to rest: a timer fires again and again, or a task polls."""


class FakeClock:
    """Runs a coroutine on a loop whose time, and `time.monotonic()`, pass only while everybody waits.

    Example:
        >>> async def minute():
        ...     await asyncio.sleep(60)
        ...     return "done at once"
        >>> FakeClock().run(minute())
        'done at once'
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now: float = now
        self.turns = 0
        """Times the loop has turned."""

    def advance(self, seconds: float) -> None:
        """Let time pass while nobody looks: the loop was blocked."""
        self.now += seconds

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end.

        Raises:
            Spinning: If the loop never comes to rest.
            RuntimeError: If everybody waits for something that cannot come.
        """
        with mock.patch("time.monotonic", self.monotonic), asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(coroutine)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: FakeClock) -> None:
        self._fake = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self._fake.now


class _Selector(selectors.DefaultSelector):
    """Waits by moving the clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self._still = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._clock.turns += 1
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("everybody waits, and no timer is set")
        if timeout > 0.0:
            self._clock.now += timeout
            self._still = 0
            return []
        self._still += 1
        if self._still > MAX_TURNS:
            self._still = 0
            raise Spinning(f"{MAX_TURNS} turns of the loop without time passing")
        return []
