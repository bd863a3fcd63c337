# SPDX-License-Identifier: Apache-2.0
"""The owner's end of a link: a front that does not read, and what it holds; and whose requests it brings."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from tests.waiting import reached

from forebay.owners import caller_link, stepwise_reader
from forebay.owners.caller_link import Callee, CallerLink
from forebay.owners.owner_link import client_of
from forebay.owners.stepwise_reader import InSteps
from forebay.server.byte_budget import ByteBudget
from forebay.testing import MemoryOrigin
from forebay.workers.wire import frames


class Owner:
    """What a link asks of its server."""

    is_up = True
    max_frame_bytes = 1 << 20
    max_elements = 1000
    callers_count = True

    def __init__(self, described: bytes) -> None:
        self.budget = ByteBudget(1 << 20)
        self.links: set[Any] = set()
        self.described_on_wire = [described]
        self.reasons: list[str] = []

    def require_params(self, _params: Any) -> None:
        """Take any."""

    def told(self, _peer: Any, reason: str) -> None:
        self.reasons.append(reason)


async def linked(owner: Any) -> tuple[CallerLink, socket.socket]:
    """Return a link, and the front's end of its socket."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, link = await asyncio.get_running_loop().create_unix_connection(lambda: CallerLink(owner, {}), sock=ours)
    return link, theirs


def test_a_front_that_never_reads_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept up to 16 MiB of its owner's memory for as long as it liked."""
    monkeypatch.setattr(caller_link, "UNREAD_S", 0.05)
    monkeypatch.setattr(caller_link, "LOOK_S", 0.01)

    async def run() -> None:
        owner = Owner(bytes(4 << 20))
        _, theirs = await linked(owner)
        with theirs:
            await reached(lambda: not owner.links)
        assert owner.reasons == ["it has read nothing of its answers for 0.05 s"]
        assert (owner.budget.held_bytes, owner.budget.unread_bytes) == (0, 0)

    asyncio.run(run())


def test_a_front_that_reads_slowly_is_left_alone_until_others_need_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_link, "STALL_S", 0.05)
    monkeypatch.setattr(caller_link, "LOOK_S", 0.01)

    async def run() -> None:
        owner = Owner(bytes(4 << 20))
        owner.budget.call_soon = asyncio.get_running_loop().call_soon
        owner.budget.max_bytes = 1 << 23
        link, theirs = await linked(owner)
        loop = asyncio.get_running_loop()
        with theirs:
            link.count_unread()
            assert owner.budget.held_bytes > 1 << 21
            assert not owner.budget.unread_bytes
            await reached(lambda: owner.budget.unread_bytes)  # it has read nothing for a while
            await loop.sock_recv(theirs, 1 << 20)
            assert owner.links
            owner.budget.max_bytes = 1 << 20
            await reached(lambda: not owner.links or not owner.budget.unread_bytes)
            while owner.links:
                owner.budget.make_room()
                await asyncio.sleep(0.01)
        assert "--max-buffered-bytes" in owner.reasons[0]
        assert (owner.budget.held_bytes, owner.budget.unread_bytes) == (0, 0)

    asyncio.run(run())


def test_what_has_come_is_read_in_steps_and_others_have_their_turns() -> None:
    """A frame with very many requests held the loop for seconds."""

    class Transport:
        reads = True

        def pause_reading(self) -> None:
            self.reads = False

        def resume_reading(self) -> None:
            self.reads = True

        def is_closing(self) -> bool:
            return False

    async def run() -> None:
        done: list[Any] = []

        def read(data: bytes) -> Any:
            for _ in range(1000):
                done.append(data)
                yield 1

        transport: Any = Transport()
        reading = InSteps(transport, read)
        reading.take(b"a")
        assert len(done) == stepwise_reader.TURN
        assert not transport.reads
        reading.take(b"b")  # a loop may have read it already
        assert len(done) == stepwise_reader.TURN
        turns = 0
        while len(done) < 2000:
            before = len(done)
            await asyncio.sleep(0)
            assert len(done) - before <= 2 * stepwise_reader.TURN
            turns += 1
        assert turns >= 3
        await reached(lambda: transport.reads)
        assert done == [b"a"] * 1000 + [b"b"] * 1000

    asyncio.run(run())


def test_clients_of_a_front_are_told_apart() -> None:
    """So the owner's queue waits for those that come back, as for clients of its own."""
    arrived: list[Any] = []

    async def run() -> None:
        owner: Any = Owner(b"")
        owner.described_on_wire, owner.is_private = [frames.encode(["models", []])], False
        callee = Callee(8, False, lambda: None, lambda some, _: arrived.extend(some), lambda _: None, lambda *_: None)
        owner.has_named, owner.callee, owner.room = lambda _: True, lambda _: callee, lambda _: 8
        _, theirs = await linked(owner)
        params = frames.encode_part({"in": "json", "out": "json"})
        more = [("", 7), ("", 8), ("", 7), ("", 0), ()]  # traces and clients
        seats = [[seat, params, 1, 9.0, "", *its] for seat, its in enumerate(more, 1)]
        for message in (
            ["hello", frames.VERSION, {"role": "caller", "worker": "x" * 16}],
            ["requests", [[1, seats, [], []]], 0, [b"1"] * len(seats)],
        ):
            theirs.sendall(frames.encode(message))
        await reached(lambda: len(arrived) == len(seats))
        theirs.close()

    asyncio.run(run())
    first, second, third, *others = [request.origin for request in arrived]
    assert first is third
    assert first is not second
    assert others == [None, None]


def test_a_connection_is_called_alike_on_its_way_to_an_owner() -> None:
    one, other = MemoryOrigin(), MemoryOrigin()
    assert client_of(one) == client_of(one) != client_of(other)
    assert client_of(None) == 0 != client_of(one)
