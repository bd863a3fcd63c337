# SPDX-License-Identifier: Apache-2.0
"""What a method may do without harm to others: take messages without a pause, and answer other calls when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import uvloop

from forebay.errors import QueueFull
from forebay.server.config import GrpcConfig
from forebay.transports.grpc import frames
from forebay.transports.grpc.control_frames import GOODBYE
from forebay.transports.grpc.hpack import literal
from forebay.transports.grpc.listener import GrpcListener
from forebay.transports.grpc.messages import prefix
from forebay.transports.grpc.service import GrpcService

OPENING = frames.PREFACE + frames.settings([])
HEAD = (
    b"\x83\x86"  # POST, http
    + literal(b":path", b"/a.B/Method")
    + literal(b"content-type", b"application/grpc")
    + literal(b"te", b"trailers")
)
EMPTY = prefix(0)
OK = literal(b"grpc-status", b"0")


FULL = b"the queue of 'b' is full; try again later"


class Queue:
    name = "b"

    def __init__(self):
        self.has_room = False
        self.counted = 0

    def is_full(self):
        return not self.has_room

    def reject(self, error, times=1, tenant=None):
        assert isinstance(error, QueueFull)
        self.counted += 1
        error.retry_at = time.monotonic() + 1000.0 * self.counted


def opened(stream):
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, HEAD)


def asked(stream):
    return opened(stream) + frames.frame(frames.DATA, frames.END_STREAM, stream, EMPTY)


def wordy(stream):
    """A call with so many fields that no more would be taken, and a head that no other call has."""
    fields = b"".join(literal(b"%x" % number, b"") for number in range(stream << 12, (stream << 12) + 1700))
    head = frames.frame(frames.HEADERS, frames.END_HEADERS, stream, HEAD + fields)
    return head + frames.frame(frames.DATA, frames.END_STREAM, stream, EMPTY)


def rare(stream):
    """A call with a field that is long as it comes, since its bytes are rare, and short once it is unpacked."""
    value = literal(b"x", bytes.fromhex("fffffe2fffffe2") * 4000)  # 8,000 bytes, of 28 bits each
    packed = value.replace(b"\x7f", b"\xff", 1)
    head = frames.header_block(0, stream, HEAD + literal(b"y", b"%d" % stream) + packed)
    return head + frames.frame(frames.DATA, frames.END_STREAM, stream, EMPTY)


async def until(is_so):
    while not is_so():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(service):
    listener = GrpcListener(GrpcConfig(max_metadata_bytes=1 << 16, max_metadata_fields=2000), [service], lambda: True)
    host, port = await listener.start()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(OPENING)
    try:
        assert listener._port is not None
        yield reader, writer, listener._port
    finally:
        writer.close()
        await listener.stop(0.0)


def test_a_method_that_takes_many_messages_leaves_time_to_others():
    count = 100_000
    turns: list[int] = []

    async def run():
        turn = 0
        loop = asyncio.get_running_loop()
        has_all = asyncio.Event()

        def next_turn():
            nonlocal turn
            turn += 1
            loop.call_soon(next_turn)

        async def method(messages, _call) -> AsyncIterator[bytes]:
            await has_all.wait()
            turns.append(turn)
            found = 0
            async for _ in messages:
                found += 1
            turns.append(turn)
            yield b"%d" % found

        async with serving(GrpcService(full_name="a.B", streams={"Method": method})) as (reader, writer, port):
            writer.write(opened(1))
            part = frames.frame(frames.DATA, 0, 1, EMPTY * 3000)
            for _ in range(count // 3000):
                writer.write(part)
            writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, EMPTY * (count % 3000)))
            await until(lambda: port.byte_budget.held_bytes == count * len(EMPTY))
            loop.call_soon(next_turn)
            has_all.set()
            answered = b""
            while b"%d" % count not in answered:
                answered += await reader.read(1 << 16)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    began, ended = turns
    assert ended - began >= count // 100


@pytest.mark.parametrize("call, most", [(asked, 70), (wordy, 2), (rare, 2)])
def test_of_calls_that_come_at_once_few_begin_in_a_turn_and_all_in_the_end(call, most):
    """Of each client all were begun that a read brought: eight of them kept the others waiting for a second."""
    turn, begun = 0, Counter[int]()

    def method(message, call):
        begun[turn] += 1
        call.reply(message)

    async def run():
        loop = asyncio.get_running_loop()

        def next_turn():
            nonlocal turn
            turn += 1
            loop.call_soon(next_turn)

        calls, size = [], 0
        while size < 250_000:
            calls.append(call(2 * len(calls) + 1))
            size += len(calls[-1])
        async with serving(GrpcService(full_name="a.B", direct={"Method": method})) as (reader, writer, port):
            await until(lambda: port.connections)
            loop.call_soon(next_turn)
            writer.write(b"".join(calls))
            answered = b""
            while answered.count(OK) < len(calls):
                answered += await reader.read(1 << 16)
        assert begun.total() == len(calls)

    asyncio.run(run())
    assert max(begun.values()) < most


@pytest.mark.parametrize("is_lost", [True, False])
def test_calls_that_came_and_were_not_read_are_nobodys_once_the_client_has_left_and_answered_while_it_drains(is_lost):
    begun = 0

    def method(message, call):
        nonlocal begun
        begun += 1
        call.reply(message)

    async def run():
        async with serving(GrpcService(full_name="a.B", direct={"Method": method})) as (reader, writer, port):
            writer.write(b"".join(asked(stream) for stream in range(1, 4001, 2)))
            await until(lambda: begun)
            (connection,) = port.connections
            if is_lost:
                connection.abort()
                await until(lambda: not port.connections)
                assert port.calls == 0
            else:
                connection.warn()
                answered = b""
                while answered.count(OK) < 2000:
                    answered += await reader.read(1 << 16)
                writer.write(frames.frame(frames.PING, frames.ACK, 0, GOODBYE))
                await reader.read()

    asyncio.run(run())
    assert begun == 2000 or is_lost


def test_calls_to_a_full_queue_do_not_begin_and_are_counted_also_where_they_are_called_off():
    queue = Queue()
    begun = []

    async def run():
        service = GrpcService(
            full_name="a.B",
            direct={"Method": lambda _message, call: begun.append(call)},
            queues={"Method": cast("Any", queue)},
        )
        async with serving(service) as (reader, writer, port):
            port.refusals._timer = asyncio.get_running_loop().call_later(1e3, lambda: None)  # nobody is told yet
            for stream in range(1, 9, 2):
                writer.write(asked(stream))
            writer.write(frames.rst_stream(3, frames.Reason.CANCEL))
            await until(lambda: len(port.refusals) == 4 and port.calls == 3)
            port.refusals.stop()
            assert queue.counted == 4
            assert port.calls == 0
            refused = literal(b"grpc-status", b"8") + literal(b"grpc-message", FULL)
            answered = b""
            while answered.count(refused) < 3:
                answered += await reader.read(1 << 16)
            told = [int(text) for text in re.findall(rb"grpc-retry-pushback-ms.(\d+)", answered)]
            assert [-(-milliseconds // 1_000_000) for milliseconds in told] == [1, 3, 4]  # the second was called off
            queue.has_room = True
            writer.write(asked(9))
            await until(lambda: begun)

    asyncio.run(run())
    assert len(begun) == 1


def test_a_call_that_is_called_off_may_answer_others():
    held = []
    counts = []

    def method(_message, call):
        held.append(call)
        call.on_cancel = lambda: [other.reply(b"late") for other in held]

    async def run():
        async with serving(GrpcService(full_name="a.B", direct={"Method": method})) as (_reader, writer, port):
            for stream in range(1, 21, 2):
                writer.write(asked(stream))
            await until(lambda: len(held) == 10)
            counts.append(port.calls)
            writer.transport.abort()
            await until(lambda: not port.connections)
            counts.append(port.calls)

    asyncio.run(run())
    assert counts == [10, 0]
