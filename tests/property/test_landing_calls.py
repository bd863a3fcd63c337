# SPDX-License-Identifier: Apache-2.0
"""A long message of gRPC that lands as it comes is the message that is joined from its frames."""  # F72

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_usual_calls import BLOCKS, PLAIN, Transport

from forebay.server.config import GrpcConfig
from forebay.transports.body_reader import SHORT_BYTES, read_bodies
from forebay.transports.grpc import frames
from forebay.transports.grpc.connection import GrpcConnection
from forebay.transports.grpc.heads import HeadReader
from forebay.transports.grpc.hpack import literal
from forebay.transports.grpc.messages import PREFIX_BYTES, prefix
from forebay.transports.grpc.methods import by_path
from forebay.transports.grpc.port import GrpcPort
from forebay.transports.grpc.remembered_calls import UsualCalls
from forebay.transports.grpc.service import GrpcService
from forebay.workers.memory.landing import HERE, LANDING_BYTES, Landing, landed_in

SIZES = st.sampled_from([0, 5, 20_000, LANDING_BYTES - 1, LANDING_BYTES + 1, 150_000, 150_000, 300_000, 300_000])
STREAMED = PLAIN.replace(literal(b":path", b"/a.B/Echo"), literal(b":path", b"/a.B/Each"))


class Reading(Transport):
    """Hands on what has come, as a transport does: where its protocol wants it, if that says so.

    What has come lies in a file, so that it can be read elsewhere as well.
    """

    protocol: Any = None
    is_paused = False
    looks = 0

    def __init__(self) -> None:
        super().__init__()
        self.file = os.memfd_create("socket")

    def fileno(self) -> int:
        return self.file

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return None if name == "sslcontext" else super().get_extra_info(name, default)

    def put(self, data: bytes) -> None:
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, data, 0)
        os.lseek(self.file, 0, os.SEEK_SET)

    async def read(self) -> None:
        """Have everything read."""
        while True:
            await self.goes_on()
            room = self.protocol.get_buffer(-1)
            longest, size = len(room), os.readv(self.file, [room])
            del room
            if not size:
                self.looks += 1
                return
            self.protocol.buffer_updated(size)
            if size < longest:  # this was all
                return

    def is_reading(self) -> bool:
        return not self.is_paused

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    async def goes_on(self) -> None:
        while self.is_paused and not self.is_closed:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


def strays(stream: int) -> list[bytes]:
    """Frames that may come in the middle of a message, and mean little there."""
    return [frames.window_update(0, 1), frames.window_update(stream, 1), frames.frame(frames.DATA, 0, stream)]


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What a client sends: frames of up to five calls that take turns, most of them whole."""
    calls = []
    for number in range(draw(st.integers(1, 5))):
        stream, is_stream = 2 * number + 1, draw(st.booleans())
        messages = [
            bytes([number, at, 7]) * (draw(SIZES) // 3) for at in range(draw(st.integers(1, 3)) if is_stream else 1)
        ]
        said = b"".join(prefix(len(one)) + one for one in messages)
        if draw(st.integers(0, 9)) == 0:
            said = said[: draw(st.integers(0, len(said)))]
        length = max(draw(st.sampled_from([16_384, 16_384, 4_096, 5_000, 100_000, 1 << 20, 1])), len(said) // 20)
        block = STREAMED if is_stream else PLAIN
        if not is_stream and draw(st.integers(0, 5)) == 0:  # what a stream gets before it fails is a matter of time
            block += literal(b"content-length", str(len(said) + draw(st.integers(-1, 1))).encode())
        sent = [frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)]
        for at in range(0, len(said), length):
            piece, flags = said[at : at + length], frames.END_STREAM if at + length >= len(said) else 0
            kind = draw(st.integers(0, 49))
            # Longer ones end the connection, and what a stream gets before that is a matter of time.
            if kind < 2 and len(piece) + 4 <= frames.PADDED_FRAME_BYTES:
                flags, piece = flags | frames.PADDED, b"\x03" + piece + bytes(3)
            elif kind == 2:
                sent.append(draw(st.sampled_from([frames.frame(frames.PING, 0, 0, bytes(8)), *strays(stream)])))
            elif kind == 3 and flags:  # the end comes by itself
                sent.append(frames.frame(frames.DATA, 0, stream, piece))
                piece = b""
            elif kind == 4 and not is_stream:
                sent.append(frames.rst_stream(stream, frames.Reason.CANCEL))
                break
            sent.append(frames.frame(frames.DATA, flags, stream, piece))
        calls.append(sent[: draw(st.integers(1, len(sent))) if draw(st.integers(0, 9)) == 0 else None])
    found, begun = [], 0
    while calls:
        at = draw(st.integers(0, min(begun, len(calls) - 1)))  # streams begin in order
        begun += at == begun
        found.append(calls[at].pop(0))
        if not calls[at]:
            del calls[at]
            begun -= 1
    return found


class Talk(NamedTuple):
    """What came of a conversation.

    Attributes:
        seen: What the methods got.
        held: How many bytes of messages are held in the end.
        landed: Whether what came as a view has landed.
        written: What was answered.
        looks: How often the transport looked for more and found nothing.
    """

    seen: list[tuple[str, bytes]]
    held: int
    landed: list[bool]
    written: bytes
    looks: int


def talk(pieces: list[bytes], *, lands: bool, at_once: bool = False) -> Talk:
    """Return what comes of it when a client sends this."""
    seen: list[tuple[str, bytes]] = []
    landed: list[bool] = []

    def note(name: str, message: Any) -> bytes:
        seen.append((name, bytes(message)))
        if type(message) is memoryview:
            landed.append(landed_in(message) is not None)
        return bytes(message[:50])

    async def each(messages: Any, _call: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield note("each", message)

    async def run() -> tuple[int, bytes, int]:
        loop = asyncio.get_running_loop()
        names = {name: lambda _: HERE for name in (("Echo", "Each") if lands else ())}
        echo = lambda message, call: call.reply(note("echo", message))  # noqa: E731
        methods = by_path([GrpcService(full_name="a.B", direct={"Echo": echo}, streams={"Each": each}, lands=names)])
        config = GrpcConfig(max_message_bytes=1 << 20)
        port = GrpcPort(config, HeadReader(methods, (), config.max_metadata_bytes), loop)
        connection, transport = GrpcConnection(port), Reading()
        connection.connection_made(transport)  # type: ignore[arg-type]
        if at_once:
            read_bodies(transport, connection, scatters=connection)  # type: ignore[arg-type]
        for data in [frames.PREFACE + frames.settings([]), *pieces]:
            if transport.protocol is None or not lands:
                connection.data_received(data)
            else:
                transport.put(data)
                await transport.read()
            await transport.goes_on()
        for _ in range(20):
            await asyncio.sleep(0)
        held = port.byte_budget.held_bytes
        connection.connection_lost(None)
        os.close(transport.file)
        assert port.calls == 0
        assert port.byte_budget.held_bytes == 0
        port.stop()
        return held, transport.written, transport.looks

    held, written, looks = asyncio.run(run())
    return Talk(sorted(seen), held, landed, written, looks)


@given(conversations(), st.data())
@settings(max_examples=120, deadline=None)
def test_a_message_that_lands_is_the_one_that_is_joined(sent, data):
    whole = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    pieces = [piece for piece in pieces if piece]
    at_once = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patched:  # nor is a beginning remembered there
        patched.setattr(UsualCalls, "learn_long", lambda *_: None)
        joined = talk(pieces, lands=False)
    found = talk(pieces, lands=True, at_once=at_once)
    assert found[:2] == joined[:2]
    assert len(found.landed) == sum(len(message) >= LANDING_BYTES for _, message in found.seen)
    assert all(found.landed)


@pytest.mark.parametrize("lengths", [(167_936, 434_064), (100_000, 100_000, 402_000), (602_000,), (16_384,) * 37])
def test_of_a_long_message_no_more_is_copied_than_came_with_its_head(monkeypatch, lengths):  # F72
    copied = []
    write = Landing.write
    monkeypatch.setattr(Landing, "write", lambda self, piece: (copied.append(len(piece)), write(self, piece))[1])
    said = os.urandom(sum(lengths))
    said = prefix(len(said) - PREFIX_BYTES) + said[PREFIX_BYTES:]
    sent = [frames.frame(frames.HEADERS, frames.END_HEADERS, 1, PLAIN)]
    for length in lengths:
        sent.append(frames.frame(frames.DATA, frames.END_STREAM * (length == len(said)), 1, said[:length]))
        said = said[length:]
    found = talk([b"".join(sent)], lands=True, at_once=True)
    assert found.landed == [True]
    ((_, message),) = found.seen
    assert len(message) == sum(lengths) - PREFIX_BYTES
    assert sum(copied) <= SHORT_BYTES


@st.composite
def alike(draw: st.DrawFn) -> list[list[bytes]]:
    """Calls of which most begin as those before, each in pieces of which the first ends within its data."""
    calls, stream = [], 1
    for _ in range(draw(st.integers(2, 8))):
        block = BLOCKS[draw(st.sampled_from(["plain"] * 30 + list(BLOCKS)))]
        size = draw(st.sampled_from([150_000, 150_000, 150_001, 70_000, 9_000, 4_000, (1 << 20) + 9]))
        others = ["padded", "open", "again", "skip", "flag", "other", "other", "ahead", "kind", "ping", "quoted"]
        what = draw(st.sampled_from(["usual"] * 10 + others))
        quoted = frames.frame(frames.HEADERS, frames.END_HEADERS, stream + 2, PLAIN)
        quoted += frames.head(size, frames.DATA, 0, stream + 2)
        message = quoted * 400 if what == "quoted" else bytes([draw(st.integers(0, 255))]) * size
        stream += {"skip": 4, "again": -2}.get(what, 0)
        stream = max(stream, 1)
        data = prefix(len(message)) + message
        if what == "flag":
            data = b"\x01" + data[1:]
        flags = 0 if what == "open" else frames.END_STREAM
        if what == "padded":
            flags, data = flags | frames.PADDED, b"\x02" + data + b"\0\0"
        longest = draw(st.sampled_from([1 << 20, 1 << 20, 16_384, 100_000, 2 << 20]))
        sent = frames.frame(frames.HEADERS, frames.END_HEADERS, stream + 2 * (what == "ahead"), block)
        kind = frames.PING if what == "kind" else frames.DATA
        for at in range(0, len(data), longest):
            piece = data[at : at + longest]
            is_last = at + longest >= len(data)
            sent += frames.frame(kind, flags * is_last, stream + 2 * (what == "other"), piece)
        if what == "ping":
            sent += frames.frame(frames.PING, 0, 0, bytes(8))
        cut = draw(st.sampled_from([SHORT_BYTES, SHORT_BYTES, SHORT_BYTES, 40, 100, 5_000, 100_000]))
        if what == "quoted":  # what comes next looks like the beginning of a call, and is the middle of a message
            cut = sent.find(quoted, 5_000)
        calls.append([sent[:cut], sent[cut:]])
        stream += 2
    return calls


@given(alike(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_long_call_that_begins_as_one_before_is_what_its_frames_mean(calls, at_once):
    pieces = [piece for call in calls for piece in call if piece]
    known = talk(pieces, lands=True, at_once=at_once)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(UsualCalls, "learn_long", lambda *_: None)
        read = talk(pieces, lands=True, at_once=at_once)
    assert known[:-1] == read[:-1]
    assert known.looks <= read.looks


def test_a_call_that_ends_with_its_head_is_not_as_one_before_whatever_comes_behind_it():
    pieces = list[bytes]()
    for stream, end in ((1, 0), (3, frames.END_STREAM)):
        said = frames.frame(frames.DATA, frames.END_STREAM, stream, prefix(150_000) + bytes(150_000))
        whole = frames.frame(frames.HEADERS, frames.END_HEADERS | end, stream, PLAIN) + said
        pieces += [whole[:SHORT_BYTES], whole[SHORT_BYTES:]]
    assert [len(message) for _, message in talk(pieces, lands=True).seen] == [150_000]


def test_nothing_is_looked_for_once_a_message_has_come():  # F72
    said = prefix(600_000) + os.urandom(600_000)
    calls = [
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, PLAIN)
        + frames.frame(frames.DATA, frames.END_STREAM, stream, said)
        for stream in (1, 3, 5)
    ]
    apart, behind = (talk(sent, lands=True, at_once=True) for sent in (calls, [b"".join(calls)]))
    assert len(apart.seen) == 3
    assert apart.looks == behind.looks == 0
    assert apart[:3] == behind[:3]


def test_calls_whose_messages_land_in_one_turn_begin_together_and_none_that_was_called_off():
    begun: list[bytes] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def echo(message: Any, call: Any) -> None:
            begun.append(bytes(message[:1]))
            call.reply(b"")

        methods = by_path([GrpcService(full_name="a.B", direct={"Echo": echo}, lands={"Echo": lambda _: HERE})])
        config = GrpcConfig()
        port = GrpcPort(config, HeadReader(methods, (), config.max_metadata_bytes), loop)
        connections, transports = [GrpcConnection(port) for _ in range(4)], [Reading() for _ in range(4)]
        for number, connection in enumerate(connections):
            said = bytes([number]) * 100_000
            connection.connection_made(transports[number])  # type: ignore[arg-type]
            connection.data_received(frames.PREFACE + frames.settings([]))
            connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, PLAIN))
            connection.data_received(frames.frame(frames.DATA, frames.END_STREAM, 1, prefix(len(said)) + said))
        connections[1].data_received(frames.rst_stream(1, frames.Reason.CANCEL))
        connections[2].connection_lost(None)
        assert not begun
        await asyncio.sleep(0)
        assert begun == [b"\0", b"\3"]
        assert port.calls == port.byte_budget.held_bytes == 0
        port.stop()
        for transport in transports:
            os.close(transport.file)

    asyncio.run(run())


def test_a_message_whose_end_comes_by_itself_begins_its_call_once():
    """Its last frame says that nothing follows, and comes in the turn in which the message has landed."""
    begun: list[int] = []

    async def run() -> bytes:
        loop = asyncio.get_running_loop()

        def later(message: Any, call: Any) -> None:
            begun.append(len(message))
            loop.call_soon(call.reply, b"done")

        methods = by_path([GrpcService(full_name="a.B", direct={"Echo": later}, lands={"Echo": lambda _: HERE})])
        config = GrpcConfig()
        port = GrpcPort(config, HeadReader(methods, (), config.max_metadata_bytes), loop)
        connection, transport = GrpcConnection(port), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(frames.PREFACE + frames.settings([]))
        connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, PLAIN))
        connection.data_received(frames.frame(frames.DATA, 0, 1, prefix(100_000) + bytes(100_000)))
        connection.data_received(frames.frame(frames.DATA, frames.END_STREAM, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        port.stop()
        return transport.written

    written = asyncio.run(run())
    assert begun == [100_000]
    assert written.count(prefix(4) + b"done") == 1


def test_frames_of_a_message_whose_call_was_called_off_are_passed_over():
    said = prefix(600_000) + bytes(600_000)
    sent = [
        frames.frame(frames.DATA, 0, 1, said[at : at + frames.MIN_FRAME_BYTES])
        for at in range(0, len(said), frames.MIN_FRAME_BYTES)
    ]
    begun = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, PLAIN) + b"".join(sent[:10])
    pieces = [begun, b"".join(sent[10:20]), frames.rst_stream(1, frames.Reason.CANCEL), b"".join(sent[20:30])]
    pieces.append(
        frames.frame(frames.HEADERS, frames.END_HEADERS, 3, PLAIN)
        + frames.frame(frames.DATA, frames.END_STREAM, 3, prefix(4) + b"four")
    )
    assert talk(pieces, lands=True, at_once=True).seen == [("echo", b"four")]
