# SPDX-License-Identifier: Apache-2.0
"""Calls beside a loop: told once, late ones left behind, dropped ones not begun."""

import asyncio
import threading
import time

import pytest
from tests.waiting import PATIENCE_S, reached

from forebay.workers.pool import MAX_LEFT
from forebay.workers.user_calls.hanging_calls import Late, LoopThreads


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


def threads_of(threads):
    """How many threads take the jobs of these."""
    return sum(
        one.name == "forebay-beside-loop" and getattr(one, "_args", ()) == (threads._jobs,)
        for one in threading.enumerate()
    )


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


async def hung(threads, gate, until, unwanted=None):
    """A call that has begun and hangs at the gate."""
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def hang():
        loop.call_soon_threadsafe(begun.set)
        gate.wait(PATIENCE_S)

    call = threads.call(hang, until, Told(), unwanted)
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    return call


@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_that_hangs_has_a_successor_until_it_ends(gate, is_late, clock):
    async def main():
        threads, other, last = LoopThreads(1), Told(), Told()
        call = await hung(threads, gate, later())
        threads.call(lambda: "other", later() + PATIENCE_S, other)
        if is_late:
            clock.forward(PATIENCE_S)
        else:
            call.drop()
        assert await other.wait() == [("other", None)]
        assert threads_of(threads) == 2
        gate.set()
        await reached(lambda: threads_of(threads) == 1)
        threads.call(lambda: "last", later(), last)
        assert await last.wait() == [("last", None)]
        threads.close()
        await reached(lambda: threads_of(threads) == 0)

    asyncio.run(main())


def test_a_limited_number_of_calls_that_hang_have_successors(gate, caplog):
    async def main():
        threads, waiting = LoopThreads(1), Told()
        for _ in range(MAX_LEFT + 1):
            (await hung(threads, gate, later())).drop()
        threads.call(lambda: "waited", later(), waiting)
        assert threads_of(threads) == MAX_LEFT + 1
        assert f"{MAX_LEFT} threads hang" in caplog.text
        assert threads.is_stuck
        assert waiting.found == []
        gate.set()
        assert await waiting.wait() == [("waited", None)]
        assert not threads.is_stuck
        await reached(lambda: threads_of(threads) == 1)
        threads.close()

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
