# SPDX-License-Identifier: Apache-2.0
"""What a thread has made for somebody who has left."""

import asyncio
import time
from types import SimpleNamespace

from tests.waiting import reached

from forebay.server.version_loading import beside


def test_what_is_made_in_the_turn_in_which_its_waiter_is_cancelled_is_unwanted(monkeypatch):
    ends, unwanted = [], []

    def call(make, until, done, unwanted):
        ends.append(done)
        return SimpleNamespace(drop=lambda: None)

    threads = SimpleNamespace(call=call, close=lambda: None)
    monkeypatch.setattr("forebay.server.version_loading.LoopThreads", lambda count: threads)

    async def run():
        for result, error in (("made", None), (None, ValueError("no"))):
            waiting = asyncio.create_task(beside(str, time.monotonic() + 600, "it", unwanted.append))
            await reached(lambda: ends)
            waiting.cancel()
            ends.pop()(result, error)  # the call is dropped in the next turn
            await asyncio.wait([waiting])
            assert waiting.cancelled()

    asyncio.run(run())
    assert unwanted == ["made"]
