# SPDX-License-Identifier: Apache-2.0
"""A loop in a thread of its own, and what is asked of it at the wrong time or place."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.waiting import PATIENCE_S

from forebay.workers.processes.loop_thread import LoopThread


def test_a_loop_that_cannot_be_closed_keeps_nobody_waiting(monkeypatch):
    """Its end was never told, and who joined it waited for ever."""

    async def live(is_up):
        is_up()

    def fail(_runner):
        raise RuntimeError("connections are open")

    monkeypatch.setattr(asyncio.Runner, "close", fail)
    thread = LoopThread("unclosed", live)
    thread.start()
    with pytest.raises(RuntimeError, match="connections are open"):
        thread.join(PATIENCE_S)


class Held:
    """A loop that is up until it is told to end."""

    def __init__(self, at_its_end=lambda: None):
        self._at_its_end = at_its_end
        self._left: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self.thread = LoopThread("held", self._live)

    async def _live(self, is_up):
        self._left = asyncio.ensure_future(self._outlive())
        await asyncio.sleep(0)
        is_up()
        await self._stopped.wait()

    async def _outlive(self):
        try:
            await asyncio.Event().wait()
        finally:
            self._at_its_end()  # the loop is not closed yet, and runs nothing to its end any more

    def stop(self):
        self.thread.call(self._stopped.set)
        self.thread.join(PATIENCE_S)


@contextlib.contextmanager
def running():
    held = Held()
    held.thread.start()
    try:
        yield held.thread
    finally:
        held.stop()


def test_what_would_wait_for_the_loop_on_the_loop_is_refused():
    async def nothing():
        pass

    async def asks():
        thread.run(nothing())

    with running() as thread, pytest.raises(RuntimeError, match="call it in another thread"):
        thread.run(asks())


def test_on_the_loop_its_end_is_asked_for_and_not_waited_for():
    async def stops():
        held.stop()

    held = Held()
    held.thread.start()
    with contextlib.suppress(RuntimeError):  # it may have ended before it answers
        held.thread.run(stops())
    held.thread.join(PATIENCE_S)
    assert not held.thread.is_running


def test_what_is_asked_of_a_loop_that_ends_is_told_so():
    ending, go = threading.Event(), threading.Event()

    def last() -> None:
        ending.set()
        go.wait(PATIENCE_S)

    held = Held(last)
    held.thread.start()
    held.thread.call(held._stopped.set)
    assert ending.wait(PATIENCE_S)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(held.thread.run, asyncio.Event().wait())
        go.set()
        with pytest.raises(RuntimeError, match="it is closed"):
            asked.result(PATIENCE_S)
    held.thread.call(lambda: None)
    held.thread.join(PATIENCE_S)
