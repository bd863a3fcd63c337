# SPDX-License-Identifier: Apache-2.0
"""The input of a call that another program streams, as it arrives."""

import asyncio
import time

import pytest

from forebay.cluster.call_params import ITEMS_AHEAD
from forebay.cluster.packed_values import pack_value
from forebay.cluster.threaded_call import InputFeed
from forebay.errors import Cancelled, DeadlineExceeded, InvalidRequest
from forebay.types.call import Request


def item(value):
    return Request(body=[bytes(one) for one in pack_value(value, "it", "")], reply=lambda *_: None)


def fed(*values, deadline=float("inf")):
    """Return a feed that was given items, and how many of them were answered."""
    answered = []
    feed = InputFeed(deadline, answered.append)
    for value in values:
        feed.put(item(value), is_last=False)
    return feed, answered


def test_items_come_in_order_until_the_last():
    async def main():
        feed, _ = fed("first")
        feed.put(Request(body=[], reply=lambda *_: None), is_last=True)
        assert await asyncio.to_thread(list, feed) == ["first"]
        assert await asyncio.to_thread(list, feed) == []

    asyncio.run(main())


def test_an_item_is_answered_once_there_is_room_for_the_next():
    async def main():
        feed, answered = fed(*range(ITEMS_AHEAD))
        assert len(answered) == ITEMS_AHEAD - 1
        assert await asyncio.to_thread(next, feed) == 0
        await asyncio.sleep(0)
        assert len(answered) == ITEMS_AHEAD

    asyncio.run(main())


def test_an_item_without_room_is_refused():
    async def main():
        feed, _ = fed(*range(ITEMS_AHEAD))
        with pytest.raises(InvalidRequest, match="for which there is no room"):
            feed.put(item(9), is_last=False)

    asyncio.run(main())


def test_a_call_that_is_over_ends_it_and_answers_what_came():
    async def main():
        feed, answered = fed(*range(ITEMS_AHEAD))
        feed.end()
        assert len(answered) == ITEMS_AHEAD
        taken = []
        with pytest.raises(Cancelled):
            await asyncio.to_thread(lambda: taken.extend(feed))

    asyncio.run(main())


def test_items_are_not_waited_for_beyond_the_deadline():
    async def main():
        feed, _ = fed(deadline=time.monotonic() - 1)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(next, feed)

    asyncio.run(main())
