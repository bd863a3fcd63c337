# SPDX-License-Identifier: Apache-2.0
"""The head of a request that is handed on is its own, whatever heads came before it on the same link."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from forebay.owners.owner_link import OwnerLink
from forebay.types.call import Request
from forebay.workers.wire import frames


class Kept:
    """A transport that keeps what is written."""

    def __init__(self):
        self.frames: list[bytes] = []

    def is_closing(self):
        return False

    def write(self, data):
        self.frames.append(bytes(data))


class Slot:
    """A model at the owner, as far as it is written to."""

    number = 1

    def __init__(self):
        self.joins, self.bodies, self.following, self.leaves, self.allows = [], [], [], [], []
        self.tokens = {}


def ignored(*_: Any):
    return None


def heads_in(frame: bytes):
    """Return the params of each request in a frame, read by a decoder that remembers nothing."""
    _, bundles, *_ = msgspec.msgpack.decode(frame[frames.HEADER :])
    return [msgspec.msgpack.decode(join[1]) for bundle in bundles for join in bundle[1]]


@pytest.mark.parametrize("seed", range(20))
def test_each_request_has_the_head_that_it_came_with(seed):
    async def main():
        chance, kept = random.Random(seed), Kept()
        link: Any = OwnerLink("x" * 16, None, ignored, ignored, ignored)
        link._transport = kept
        link._conversation.max_body_bytes = 1 << 20
        slot: Any = Slot()
        common = [{"in": "json"}, {"in": "json"}, {"in": "raw", "n": 1}, {}]
        sent = []
        for first in range(0, 300, 10):
            requests = []
            for _ in range(chance.randint(1, 10)):
                if chance.random() < 0.2:
                    common[chance.randrange(len(common))] = {"in": chance.choice("abc"), "n": chance.randrange(3)}
                head = chance.choice(common)
                requests.append(Request(b"1", ignored, dict(head) if chance.random() < 0.2 else head))
            link.hand_on(slot, first, requests)
            sent += [dict(request.params) for request in requests]
        assert [head for frame in kept.frames for head in heads_in(frame)] == sent

    asyncio.run(main())
