# SPDX-License-Identifier: Apache-2.0
"""What a connection does of itself: it gathers what it writes, and reads nothing once its client is gone."""

import asyncio
import gzip

import pytest
from tests.property.test_usual_calls import PLAIN, Transport

from forebay.server.config import GrpcConfig
from forebay.transports.grpc import frames
from forebay.transports.grpc.connection import LARGE_READ_BYTES, GrpcConnection
from forebay.transports.grpc.heads import HeadReader
from forebay.transports.grpc.listener import GrpcListener, not_installed
from forebay.transports.grpc.messages import Unpacking, prefix
from forebay.transports.grpc.methods import by_path
from forebay.transports.grpc.port import GrpcPort
from forebay.transports.grpc.service import GrpcService

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


async def test_a_message_is_late_only_by_the_time_in_which_the_server_reads():
    methods = by_path([GrpcService(full_name="a.B", direct={"Echo": lambda message, call: call.reply(message)})])
    config = GrpcConfig(read_timeout_s=10, write_timeout_s=1000)
    port = GrpcPort(config, HeadReader(methods, (), 1000), asyncio.get_running_loop())
    connection, transport = GrpcConnection(port), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    opening = frames.PREFACE + frames.settings([]) + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, PLAIN)
    connection.data_received(opening + frames.frame(frames.DATA, 0, 1, prefix(5) + b"ab"))
    await asyncio.sleep(0)

    async def ends_at(epoch):
        before, port.epoch = len(transport.written), epoch
        connection.sweep(epoch)
        await asyncio.sleep(0)
        return len(transport.written) > before

    connection.pause_writing()
    assert not await ends_at(15)
    connection.resume_writing()
    assert not await ends_at(20)
    assert await ends_at(26)
    connection.connection_lost(None)
    port.stop()


def test_a_long_name_before_what_is_packed_gives_nothing_and_is_passed_over():
    packed = bytearray(gzip.compress(b"message"))
    packed[3] |= 8  # the name of a file comes behind the head
    packed[10:10] = b"n" * 100_000 + b"\0"
    assert Unpacking(bytes(packed), b"gzip", 1000).step(1000) == b"message"


async def test_a_missing_package_is_named_as_pip_knows_it():
    for module, package in (("google", "protobuf"), ("google.protobuf", "protobuf"), ("grpc", "grpcio"), ("h", "h")):
        told = not_installed(ModuleNotFoundError(f"No module named '{module}'", name=module)).message
        assert told == f"the gRPC port needs {package}, which is not installed: pip install 'forebay[grpc]'"


async def test_a_listener_that_never_listened_can_be_stopped():
    await GrpcListener(GrpcConfig(), [], lambda: True).stop(0.0)
