# SPDX-License-Identifier: Apache-2.0
"""A header block means what `hpack` reads in it, however often the same bytes came before on the connection."""

from __future__ import annotations

import asyncio
from typing import Any

import hpack
import hpack.exceptions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.property.test_usual_calls import Transport

from forebay.server.config import GrpcConfig
from forebay.transports.grpc import frames
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
KEPT = b"\x40\x03x-%c\x01%c"
"""Adds a field to the table of the connection."""
REFERENCES = [b"\xbe", b"\xbf", b"\xc0"]
"""The newest field of the table, the second and the third."""
NO_TABLE, SOME_TABLE = b"\x20", b"\x3f\x45"
"""Table sizes of 0 and 100 bytes; only the beginning of a block may set one."""

kept = st.sampled_from([KEPT % (ord(name), ord(value)) for name in "ab" for value in "12"])
tails = st.lists(kept | st.sampled_from(REFERENCES), max_size=3).map(b"".join)
starts = st.sampled_from([b""] * 8 + [NO_TABLE, SOME_TABLE])
blocks = st.builds(lambda start, tail: start + PLAIN + tail, starts, tails)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Header blocks of one client, out of a few that come again and again."""
    few = draw(st.lists(blocks, min_size=1, max_size=4, unique=True))
    return draw(st.lists(st.sampled_from(few), min_size=2, max_size=12))


def talk(sent: list[bytes]) -> list[list[tuple[str, str]]]:
    """Return the `x-` fields of each call that began, in order."""
    seen: list[list[tuple[str, str]]] = []

    async def run() -> None:
        def echo(message: bytes, call: Any) -> None:
            seen.append([field for field in call.head.metadata if field[0].startswith("x-")])
            call.reply(message)

        config = GrpcConfig(max_streams=3)
        methods = by_path([GrpcService(full_name="a.B", direct={"Echo": echo})])
        port = GrpcPort(config, HeadReader(methods, (), config.max_metadata_bytes), asyncio.get_running_loop())
        connection, transport = GrpcConnection(port), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(frames.PREFACE + frames.settings([]))
        for number, block in enumerate(sent):
            stream = 2 * number + 1
            head = frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)
            connection.data_received(head + frames.frame(frames.DATA, frames.END_STREAM, stream, prefix(0)))
            await asyncio.sleep(0)
        connection.connection_lost(None)
        port.stop()

    asyncio.run(run())
    return seen


def expected(sent: list[bytes]) -> list[list[tuple[str, str]]]:
    """Return what `hpack` reads in the blocks, up to the first that breaks its rules."""
    decoder, seen = hpack.Decoder(), list[list[tuple[str, str]]]()
    for block in sent:
        try:
            fields = decoder.decode(block)
        except hpack.exceptions.HPACKDecodingError:
            break
        seen.append([(f"{name}", f"{value}") for name, value in fields if f"{name}".startswith("x-")])
    return seen


@given(conversations())
@example([PLAIN + KEPT % (ord("a"), ord("1"))] * 2 + [PLAIN + REFERENCES[1]])  # F118
@example([PLAIN, PLAIN, SOME_TABLE + PLAIN, PLAIN])
@settings(max_examples=300, deadline=None)
def test_a_block_means_what_another_reader_finds_in_it(sent):  # F118
    assert talk(sent) == expected(sent)
