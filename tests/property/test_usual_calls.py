# SPDX-License-Identifier: Apache-2.0
"""A call that comes as one segment, as one did before, means what its frames mean when they are read one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.server.config import GrpcConfig
from forebay.transports.grpc import frames, receiving
from forebay.transports.grpc.connection import GrpcConnection
from forebay.transports.grpc.heads import HeadReader
from forebay.transports.grpc.hpack import literal
from forebay.transports.grpc.messages import prefix
from forebay.transports.grpc.methods import by_path
from forebay.transports.grpc.port import GrpcPort
from forebay.transports.grpc.service import GrpcService

PLAIN = (
    b"\x83\x86" + literal(b":path", b"/a.B/Echo") + literal(b"content-type", b"application/grpc")
    + literal(b"te", b"trailers")
)  # fmt: skip
INDEXING = PLAIN + b"\x40\x01a\x01b"
"""Adds a field to the table of the connection, so that no block means for certain what it meant before."""
OTHER = PLAIN + literal(b"x-other", b"1")
ELSEWHERE = PLAIN.replace(b"Echo", b"None")
"""As long as a plain one, for a method that is not there."""
LATE = PLAIN + literal(b"grpc-timeout", b"1H")
BLOCKS = {
    "plain": PLAIN,
    "indexing": INDEXING,
    "other": OTHER,
    "elsewhere": ELSEWHERE,
    "late": LATE,
    "from the table": PLAIN + b"\xbe",
}


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else ("127.0.0.1", 1)

    def setsockopt(self, *args: Any) -> None: ...

    def set_write_buffer_limits(self, **limits: Any) -> None: ...

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True

    abort = close


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Segments of a client that mostly asks as before, and sometimes in another way or wrongly."""
    segments, stream = [], 1
    for _ in range(draw(st.integers(2, 12))):
        block = BLOCKS[draw(st.sampled_from(["plain"] * 6 + list(BLOCKS)))]
        message = bytes([draw(st.integers(0, 255))]) * draw(st.sampled_from([4, 4, 4, 5, 0]))
        what = draw(
            st.sampled_from(["usual"] * 8 + ["padded", "open", "two", "skip", "again", "flag", "length", "ping"])
        )
        stream += {"skip": 4, "again": -2}.get(what, 0)
        data = prefix(len(message)) + message
        if what == "flag":
            data = b"\x01" + data[1:]
        if what == "length":
            data = prefix(len(message) + 1) + message
        flags = 0 if what == "open" else frames.END_STREAM
        if what == "padded":
            flags, data = flags | frames.PADDED, b"\x02" + data + b"\0\0"
        segment = b""
        for number in [stream, stream + 2] if what == "two" else [stream & frames.MAX_STREAM]:
            segment += frames.frame(frames.HEADERS, frames.END_HEADERS, number, block)
            segment += frames.frame(frames.DATA, flags, number, data)
        stream += 2 * (what == "two")
        segments.append(segment)
        if what == "ping":
            segments.append(frames.frame(frames.PING, 0, 0, bytes(8)))
        stream += 2
    return segments


def talk(segments: list[list[bytes]], *, later: bool) -> tuple[bytes, list[bytes]]:
    """Return what a connection answers to segments in pieces, and which messages its method got."""
    seen: list[bytes] = []

    async def run() -> bytes:
        loop = asyncio.get_running_loop()

        def echo(message: bytes, call: Any) -> None:
            seen.append(message)
            if later:
                loop.call_soon(call.reply, message)
            else:
                call.reply(message)

        config = GrpcConfig(max_streams=3)
        methods = by_path([GrpcService(full_name="a.B", direct={"Echo": echo})])
        port = GrpcPort(config, HeadReader(methods, (), config.max_metadata_bytes), loop)
        connection, transport = GrpcConnection(port), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        for pieces in [[frames.PREFACE + frames.settings([])], *segments]:
            for piece in pieces:
                connection.data_received(piece)
            for _ in range(3):
                await asyncio.sleep(0)
            while transport.is_paused and not transport.is_closed:  # noqa: ASYNC110 - its turn has no event
                await asyncio.sleep(0)
        connection.connection_lost(None)
        assert port.calls == 0
        port.stop()
        return transport.written

    return asyncio.run(run()), seen


@given(conversations(), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_call_in_one_segment_is_what_it_is_in_pieces(segments, later, data):
    cuts = [data.draw(st.integers(1, len(segment) - 1)) for segment in segments]
    pieces = [[segment[:cut], segment[cut:]] for segment, cut in zip(segments, cuts, strict=True)]
    whole, seen = talk([[segment] for segment in segments], later=later)
    slow, told = talk(pieces, later=later)
    assert seen == told
    assert whole == slow


@given(conversations(), st.integers(1, 7), st.data())
@settings(max_examples=100, deadline=None)
def test_calls_that_come_at_once_are_the_same_however_few_are_read_in_a_turn(segments, few, data):
    said = b"".join(segments)
    cut = data.draw(st.integers(1, len(said) - 1))
    together = talk([[said[:cut]], [said[cut:]]], later=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiving, "MAX_AT_ONCE", few)
        in_turns = talk([[said[:cut]], [said[cut:]]], later=False)
        fed = talk([[said[:cut], said[cut:]]], later=False)  # the rest comes before the turn does, as with TLS
    assert in_turns == together
    assert fed == together


def test_a_usual_call_beyond_those_that_a_client_may_have_is_refused_as_any_other():
    def begun(stream: int, flags: int) -> bytes:
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, stream, PLAIN)
        return head + frames.frame(frames.DATA, flags, stream, prefix(4) + b"four")

    segments = [begun(1, frames.END_STREAM), *(begun(stream, 0) for stream in (3, 5, 7)), begun(9, frames.END_STREAM)]
    whole, seen = talk([[segment] for segment in segments], later=False)
    assert seen == [b"four"]
    assert (whole, seen) == talk([[segment[:20], segment[20:]] for segment in segments], later=False)
