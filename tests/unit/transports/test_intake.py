# SPDX-License-Identifier: Apache-2.0
"""A transport is read exactly while nothing holds it, acted on in turn only, and closed once its client is quiet."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.test_usual_calls import Transport
from tests.unit.transports.http.driven import Door, request

from forebay.server.config import GrpcConfig
from forebay.transports.grpc import frames
from forebay.transports.grpc.connection import GrpcConnection
from forebay.transports.grpc.heads import HeadReader
from forebay.transports.grpc.port import GrpcPort
from forebay.transports.intake import (
    BEHIND,
    FULL_BUFFER,
    LARGE_READ_BYTES,
    LINGER_S,
    MAX_LINGER_S,
    PIPELINE,
    TURN,
    Intake,
)

HOLDS = [FULL_BUFFER, PIPELINE, BEHIND]


class Turns:
    """Has turns when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def wait(self, read_on: Callable[[], object]) -> None:
        self.waiting.append(read_on)

    def come(self) -> None:
        waiting, self.waiting = self.waiting, []
        for read_on in waiting:
            read_on()


def intake() -> tuple[Any, Turns, Intake]:
    transport: Any = Transport()
    turns: Any = Turns()
    return transport, turns, Intake(transport, turns)


@given(st.lists(st.tuples(st.sampled_from(["hold", "release", "give way", "turn"]), st.sampled_from(HOLDS))))
def test_a_transport_is_read_exactly_while_nothing_holds_it_and_acted_on_in_turn_only(steps):
    transport, turns, reading = intake()
    holds: set[int] = set()
    acted = 0

    def act():
        nonlocal acted
        acted += 1
        assert not {TURN, FULL_BUFFER} & holds

    for what, reason in steps:
        before = acted
        if what == "hold":
            reading.hold(reason)
            holds.add(reason)
        elif what == "release":
            holds.discard(reason)
            reading.release(reason, act)
            assert acted - before == (not {TURN, FULL_BUFFER} & holds)
        elif what == "give way":
            reading.give_way(act)
            holds.add(TURN)
            assert len(turns.waiting) == 1, "a client has one turn, however often it has to wait for it"
        elif turns.waiting:
            holds.discard(TURN)
            turns.come()
            assert acted - before == (FULL_BUFFER not in holds)
        assert transport.is_paused == bool(holds)
        assert reading.holds == sum(holds)


def test_what_has_arrived_is_acted_on_before_more_is_read_and_may_take_another_turn():
    transport, turns, reading = intake()
    seen = []

    def act():
        seen.append(transport.is_paused)
        if len(seen) == 1:
            reading.give_way(act)

    reading.give_way(act)
    turns.come()
    assert (seen, transport.is_paused) == ([True], True)
    turns.come()
    assert (seen, transport.is_paused) == ([True, True], False)


def test_a_closed_transport_is_left_alone():
    transport, turns, reading = intake()
    reading.give_way(lambda: pytest.fail("nobody is there"))
    transport.is_closed = True
    transport.resume_reading = transport.pause_reading = lambda: pytest.fail("it is closed")
    turns.come()
    reading.hold(PIPELINE)
    reading.release(PIPELINE)


def test_where_one_side_cannot_be_ended_alone_all_is_closed():
    transport, _, reading = intake()
    reading.linger(0.0)
    assert transport.is_closed


def test_an_answer_does_not_have_a_client_read_before_its_turn():
    """It had: every answer read on, whatever the reason to wait was."""
    door = Door()
    client = door.connect().send(request("alpha", b"1"))
    client.connection.give_way()
    client.send(request("alpha", b"2"), request("beta", b"3"))
    assert client.statuses == [200] * 3
    assert client.transport.is_paused
    door.turn()
    assert not client.transport.is_paused
    door.close()


class Socket(Transport):
    """Can end one side alone."""

    has_ended = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def get_write_buffer_size(self) -> int:
        return 0


def refused() -> tuple[GrpcPort, GrpcConnection, Any]:
    """A client of gRPC that was refused for what it sent."""
    port = GrpcPort(GrpcConfig(), HeadReader({}, (), 1000), asyncio.get_running_loop())
    port.epoch = 100
    connection, transport = GrpcConnection(port), Socket()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.data_received(frames.PREFACE + frames.settings([]) + frames.frame(frames.DATA, 0, 0, b""))
    assert (transport.has_ended, transport.is_closed) == (True, False)
    return port, connection, transport


@pytest.mark.parametrize("is_quiet, seconds", [(True, LINGER_S + 1), (False, MAX_LINGER_S + 1)])
def test_a_refused_client_of_grpc_is_read_until_it_is_quiet(is_quiet, seconds):
    """It was cut off after a second, and one that read only once it had sent everything lost what it was told."""

    async def run():
        port, connection, transport = refused()
        for second in range(1, int(seconds) + 1):
            assert not transport.is_closed, second
            if not is_quiet:
                connection.data_received(bytes(LARGE_READ_BYTES))
                assert connection.kept_bytes == 0
                assert transport.is_paused, "who sends quickly gives way to others all the same"
                for _ in range(3):
                    await asyncio.sleep(0)
                assert not transport.is_paused
            port.epoch = 100 + second
            connection.sweep(port.epoch)
        assert transport.is_closed
        connection.connection_lost(None)
        port.stop()

    asyncio.run(run())
