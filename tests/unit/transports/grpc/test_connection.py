# SPDX-License-Identifier: Apache-2.0
"""What a connection does of itself: it gathers what it writes, and reads nothing once its client is gone."""

import asyncio

import pytest
from tests.property.test_usual_calls import Transport

from forebay.server.config import GrpcConfig
from forebay.transports.grpc import frames
from forebay.transports.grpc.connection import LARGE_READ_BYTES, GrpcConnection
from forebay.transports.grpc.heads import HeadReader
from forebay.transports.grpc.listener import GrpcListener
from forebay.transports.grpc.port import GrpcPort

pytestmark = pytest.mark.anyio

PING = frames.frame(frames.PING, 0, 0, bytes(8))


class Counting(Transport):
    """Counts how often something is written."""

    writes = 0

    def write(self, data):
        self.writes += 1
        super().write(data)


def connected():
    port = GrpcPort(GrpcConfig(), HeadReader({}, (), 1000), asyncio.get_running_loop())
    connection, transport = GrpcConnection(port), Counting()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.data_received(frames.PREFACE + frames.settings([]))
    return port, connection, transport


async def test_short_answers_to_what_came_together_are_written_together():
    port, connection, transport = connected()
    transport.writes = 0
    connection.data_received(PING * 30)
    await asyncio.sleep(0)
    assert transport.written.count(frames.frame(frames.PING, 1, 0, bytes(8))) == 30
    assert transport.writes == 1
    connection.connection_lost(None)
    port.stop()


async def test_a_client_that_is_gone_before_its_next_turn_is_not_read(caplog):
    port, connection, transport = connected()
    connection.data_received(PING * (LARGE_READ_BYTES // len(PING) + 1))
    assert transport.is_paused  # until others had their turn
    connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not caplog.records
    port.stop()


async def test_a_listener_that_never_listened_can_be_stopped():
    await GrpcListener(GrpcConfig(), [], lambda: True).stop(0.0)
