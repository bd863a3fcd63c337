# SPDX-License-Identifier: Apache-2.0
"""The worker protocol's frames: whatever way the bytes are cut, the same messages come out."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.workers.wire.frames import SHARED, FrameReader, encode, shared

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(st.lists(plain, max_size=5), max_size=6)


def pieces(stream, cuts):
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@given(messages, st.lists(st.integers(0, 10_000), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_split_of_the_stream_gives_the_same_messages(sent, cuts):
    reader = FrameReader()
    stream = b"".join(encode(message) for message in sent)
    assert [message for piece in pieces(stream, cuts) for message in reader.feed(piece)] == sent


def test_byte_by_byte():
    reader = FrameReader()
    stream = encode(["ready"]) + encode(["batch", 1, [b"x" * 300], None, None])
    found = [message for byte in stream for message in reader.feed(bytes([byte]))]
    assert found == [["ready"], ["batch", 1, [b"x" * 300], None, None]]


def test_a_whole_frame_and_the_start_of_the_next():
    reader = FrameReader()
    first, second = encode([1]), encode([2])
    assert list(reader.feed(first + second[:3])) == [[1]]
    assert list(reader.feed(second[3:])) == [[2]]


@pytest.mark.parametrize("data", [b"", bytearray(encode([1])), memoryview(encode([1]))])
def test_any_buffer_is_read(data):
    assert list(FrameReader().feed(data)) == ([[1]] if data else [])


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
@example(b"\x00\x00\x00\x00", [])
@example(b"\x00\x00\x00\x01\xc1", [])
@example(b"\x00\x00\x00\x05\xdd\xff\xff\xff\xff", [])
@example(b"\x00\x00\x00\x03\x81\x90\xc0", [])
@example(b"\x00\x00\x00\x02\xa1\xff", [])
@example(b"\x00\x00\x00\x03\xd4\xff\x00", [])
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_or_awaited_and_nothing_else(data, cuts):
    """G9: what is read is msgpack or an error; nothing is evaluated or unpickled."""
    reader = FrameReader()
    try:
        for piece in pieces(data, cuts):
            list(reader.feed(piece))
    except InvalidRequest:
        pass


def test_text_that_is_not_utf_8_is_refused():
    with pytest.raises(InvalidRequest):
        list(FrameReader().feed(b"\x00\x00\x00\x02\xa1\xff"))


def test_deep_nesting_is_refused():
    payload = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(InvalidRequest):
        list(FrameReader().feed(len(payload).to_bytes(4, "big") + payload))


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n", b"\x40\x00\x00\x01"])
def test_a_frame_over_the_limit_is_refused_before_it_is_read(header):
    with pytest.raises(InvalidRequest, match="was announced, at most"):
        list(FrameReader().feed(header))


def feed_in_steps(reader, stream, step):
    for start in range(0, len(stream), step):
        list(reader.feed(stream[start : start + step]))


@pytest.mark.parametrize("step", [30, 7])
def test_the_limit_holds_however_the_bytes_come(step):
    reader, frame = FrameReader(max_bytes=10), encode([b"x" * 20])
    with pytest.raises(InvalidRequest):
        feed_in_steps(reader, frame, step)


def test_bytes_in_the_arena_are_looked_up():
    seen = []
    reader = FrameReader(lambda offset, length: seen.append((offset, length)) or b"there")
    assert list(reader.feed(encode(["result", [shared(5, 1 << 40), b"here"]]))) == [["result", [b"there", b"here"]]]
    assert seen == [(5, 1 << 40)]


@pytest.mark.parametrize("code, data", [(SHARED, b"short"), (SHARED, b"x" * 17), (2, b"x" * 16), (-100, b"")])
def test_other_extensions_are_refused(code, data):
    with pytest.raises(InvalidRequest, match="extension"):
        list(FrameReader(lambda *_: b"").feed(encode([msgspec.msgpack.Ext(code, data)])))


def test_an_arena_that_was_never_agreed_on_is_refused():
    with pytest.raises(InvalidRequest):
        list(FrameReader().feed(encode([shared(0, 1)])))
