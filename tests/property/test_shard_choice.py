# SPDX-License-Identifier: Apache-2.0
"""Which shard a request goes to, which description holds, and which addresses of a name are shards."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import QueueFull
from forebay.owners.owner_pool import OwnerPool, OwnerSlot
from forebay.owners.shards import agreed, shard_hosts
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request

BATCH = 4
"""Samples in a batch: so many may be sent to a shard without room."""


class Link:
    """A link to a shard, without a connection."""

    def __init__(self, loop):
        self.ended = loop.create_future()
        self.sent = []

    def hand_on(self, _slot, _first, entries):
        self.sent.append(list(entries))


async def handed_on(rooms, turns):
    """Hand on what comes in turns of the loop: lists of sizes; returns links, slots, and how many were refused."""
    loop = asyncio.get_running_loop()
    pool = OwnerPool("m", "shards", BATCH, 1000, 60.0)
    links: list[Any] = [Link(loop) for _ in rooms]
    slots = [OwnerSlot(link, 1, pool, room) for link, room in zip(links, rooms, strict=True)]
    pool.ask("shards", slots)
    refused = []

    def done(_batch, outcomes):
        assert all(type(one) is Failure and isinstance(one.error, QueueFull) for one in outcomes)
        refused.extend(outcomes)

    for sizes in turns:
        entries = [Request(body=b"", reply=print, size=size) for size in sizes]
        pool.submit(EntryBatch(entries, None, sum(sizes)), done)
    await asyncio.sleep(0)
    return links, slots, len(refused)


rooms = st.lists(st.integers(0, 100), min_size=1, max_size=5)
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@given(rooms, sizes)
def test_a_bundle_goes_to_the_shard_with_most_room_and_is_divided_only_where_it_does_not_fit(rooms, sizes):
    links, _, refused = asyncio.run(handed_on(rooms, [sizes]))
    bundles = [bundle for link in links for bundle in link.sent]
    assert sum(map(len, bundles)) + refused == len(sizes)
    if sum(sizes) <= max(rooms):
        assert refused == 0
        assert links[rooms.index(max(rooms))].sent == bundles
        assert len(bundles) == 1


@given(rooms, st.lists(sizes, min_size=1, max_size=4))
def test_nothing_is_refused_while_a_shard_has_room_and_no_shard_gets_much_more_than_it_has(rooms, turns):
    links, slots, refused = asyncio.run(handed_on(rooms, turns))
    largest = max(max(sizes) for sizes in turns)
    for room, link in zip(rooms, links, strict=True):
        sent = sum(entry.size for bundle in link.sent for entry in bundle)
        assert sent <= max(room, BATCH + largest)
    if refused:
        assert max(slot.credit for slot in slots) < largest


@given(st.integers(2, 5), st.integers(1, 60))
def test_bundles_of_alike_shards_are_spread(count, turns):
    links, _, _ = asyncio.run(handed_on([1000] * count, [[1]] * turns))
    bundles = [len(link.sent) for link in links]
    assert max(bundles) - min(bundles) <= 1


@given(st.text(max_size=1) | st.none(), st.lists(st.text(max_size=1), min_size=1))
def test_what_is_served_holds_while_a_shard_says_it(current, told):
    holds = agreed(current, told)
    assert holds in told
    assert holds == current or current not in told


def test_the_addresses_of_one_owner_are_no_shards():
    assert shard_hosts([(10, "::1"), (2, "127.0.0.1")]) == ["::1"]
    assert shard_hosts([(2, "10.0.0.2"), (2, "10.0.0.1"), (2, "10.0.0.2")]) == ["10.0.0.1", "10.0.0.2"]
    assert shard_hosts([(10, "fd00::1"), (2, "10.0.0.2"), (2, "10.0.0.1")]) == ["10.0.0.1", "10.0.0.2"]
    assert shard_hosts([]) == []
