# SPDX-License-Identifier: Apache-2.0
"""Calls beside a loop: told once, late ones left behind, dropped ones not begun."""

import asyncio
import threading
import time

import pytest
from tests.waiting import PATIENCE_S

from forebay.workers.hanging_calls import Late, LoopThreads


class Told:
    """What a call told."""

    def __init__(self):
        self.found = []
        self._is_there = asyncio.Event()

    def __call__(self, result, error):
        self.found.append((result, error))
        self._is_there.set()

    async def wait(self):
        await asyncio.wait_for(self._is_there.wait(), PATIENCE_S)
        return self.found


def later():
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def gate():
    """What calls hang at."""
    event = threading.Event()
    yield event
    event.set()


def test_what_a_call_returns_or_raises_is_told_on_the_loop():
    async def main():
        threads, told, failed = LoopThreads(2), Told(), Told()
        odd = ValueError("odd")

        def fail():
            raise odd

        threads.call(lambda: threading.current_thread().name, later(), told)
        threads.call(fail, later(), failed)
        assert await told.wait() == [("forebay-beside-loop", None)]
        assert await failed.wait() == [(None, odd)]
        threads.close()

    asyncio.run(main())


def test_a_late_call_is_left_behind_and_the_next_one_has_another_thread(gate):
    async def main():
        threads, told, other = LoopThreads(2), Told(), Told()
        threads.call(lambda: gate.wait(PATIENCE_S), time.monotonic() + 0.01, told)
        ((result, error),) = await told.wait()
        assert (result, type(error)) == (None, Late)
        threads.call(lambda: "other", later(), other)
        assert await other.wait() == [("other", None)]
        gate.set()
        threads.close()
        assert len(told.found) == 1, "that it ended after all is told to nobody"

    asyncio.run(main())


def test_a_dropped_call_is_told_to_nobody_and_not_begun_if_it_waits(gate):
    async def main():
        threads, told, last, begun = LoopThreads(1), Told(), Told(), []
        hanging = threads.call(lambda: gate.wait(PATIENCE_S), later(), told)
        waiting = threads.call(lambda: begun.append(1), later(), told)
        hanging.drop()
        waiting.drop()
        gate.set()
        threads.call(lambda: "last", later(), last)
        assert await last.wait() == [("last", None)]
        assert (told.found, begun) == ([], [])

    asyncio.run(main())
