# SPDX-License-Identifier: Apache-2.0
"""The frames of HTTP/2: whatever way the bytes are cut, the same frames come out."""

from __future__ import annotations

import itertools

import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.transports.grpc import frames
from forebay.transports.grpc.frames import ConnectionFault, Http2FrameReader, Reason

plain = st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, frames.MAX_STREAM), st.binary(max_size=300))


def pieces(stream, cuts):
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


def cut(reader, data):
    reader.feed(data)
    return reader.read()


def fault_of(reader, data):
    with pytest.raises(ConnectionFault) as caught:
        list(cut(reader, data))
    return caught.value


@given(st.lists(plain, max_size=8), st.lists(st.integers(0, 10_000), max_size=12))
@settings(max_examples=100, deadline=None)
@example([(frames.DATA, frames.END_STREAM, 1, b"abc")], list(range(12)))
def test_frames_do_not_depend_on_how_they_come(sent, cuts):
    stream = b"".join(frames.frame(*one) for one in sent)
    reader = Http2FrameReader()
    found = [one for piece in pieces(stream, cuts) for one in cut(reader, piece)]
    assert found == sent
    assert not reader.is_inside


def test_half_a_frame_is_waited_for():
    reader = Http2FrameReader()
    data = frames.frame(frames.PING, 0, 0, b"12345678")
    assert list(cut(reader, data[:-1])) == []
    assert reader.is_inside
    assert list(cut(reader, data[-1:])) == [(frames.PING, 0, 0, b"12345678")]
    assert not reader.is_inside


def test_reading_may_stop_at_any_frame():
    sent = [(frames.PING, 0, 0, bytes([number] * 8)) for number in range(4)]
    reader = Http2FrameReader()
    assert next(cut(reader, b"".join(frames.frame(*one) for one in sent[:3]))) == sent[0]
    assert reader.is_inside
    assert list(cut(reader, frames.frame(*sent[3]))) == sent[1:]


def test_what_comes_first_is_skipped_once_it_is_whole():
    reader = Http2FrameReader()
    for byte in b"wor":
        reader.feed(bytes([byte]))
    assert reader.skip(b"word") == b"wor"
    reader.feed(b"d" + frames.SETTINGS_ACK)
    assert reader.skip(b"word") is None
    assert list(reader.read()) == [(frames.SETTINGS, frames.ACK, 0, b"")]


def test_the_highest_bit_of_a_stream_means_nothing():
    data = frames.head(0, frames.DATA, 0, 0x80000005)
    assert list(cut(Http2FrameReader(), data)) == [(frames.DATA, 0, 5, b"")]


def test_a_frame_that_is_too_long_is_refused_by_its_head():
    reader = Http2FrameReader()
    for kind, flags, longest in (
        (frames.DATA, 0, frames.LONG_FRAME_BYTES),
        (frames.DATA, frames.PADDED, frames.PADDED_FRAME_BYTES),  # it is kept until it is whole
        (frames.HEADERS, 0, frames.MIN_FRAME_BYTES),
    ):
        assert len(list(cut(reader, b"".join((frames.head(longest, kind, flags, 1), bytes(longest)))))) == 1
        fault = fault_of(Http2FrameReader(), b"".join((frames.head(longest + 1, kind, flags, 1), b"x")))
        assert fault.reason is Reason.FRAME_SIZE_ERROR


def test_what_came_before_a_frame_that_is_too_long_is_not_lost():
    data = frames.frame(frames.DATA, 0, 1, b"x") + frames.head(frames.MAX_FRAME_BYTES, frames.DATA, 0, 1)
    reading = cut(Http2FrameReader(), data)
    assert next(reading) == (frames.DATA, 0, 1, b"x")
    with pytest.raises(ConnectionFault):
        next(reading)


@given(st.lists(st.binary(max_size=60), max_size=8))
@settings(max_examples=100, deadline=None)
def test_random_bytes_raise_nothing_else(chunks):
    reader = Http2FrameReader()
    try:
        for chunk in chunks:
            list(cut(reader, chunk))
    except ConnectionFault as fault:
        assert fault.reason is Reason.FRAME_SIZE_ERROR  # noqa: PT017 - it may also raise nothing


@pytest.mark.parametrize(
    "flags,payload,left",
    [
        (0, b"abc", b"abc"),
        (frames.PADDED, b"\2abc\0\0", b"abc"),
        (frames.PADDED, b"\0abc", b"abc"),
        (frames.PADDED, b"\3\0\0\0", b""),
        (frames.HAS_PRIORITY, b"\0\0\0\0\x10abc", b"abc"),
        (frames.PADDED | frames.HAS_PRIORITY, b"\1\0\0\0\0\x10abc\0", b"abc"),
    ],
)
def test_padding_and_priority_are_taken_off(flags, payload, left):
    assert frames.unpadded(flags, payload) == left


@pytest.mark.parametrize(
    "flags,payload,reason",
    [
        (frames.PADDED, b"", Reason.FRAME_SIZE_ERROR),
        (frames.PADDED, b"\4abc", Reason.PROTOCOL_ERROR),
        (frames.HAS_PRIORITY, b"\0\0\0\0", Reason.PROTOCOL_ERROR),
        (frames.PADDED | frames.HAS_PRIORITY, b"\2\0\0\0\0\x10a", Reason.PROTOCOL_ERROR),
    ],
)
def test_a_frame_is_not_shorter_than_its_padding_and_priority(flags, payload, reason):
    with pytest.raises(ConnectionFault) as caught:
        frames.unpadded(flags, payload)
    assert caught.value.reason is reason


def read(data):
    """Return the frame as another implementation understands it."""
    frame, length = Frame.parse_frame_header(memoryview(data[:9]))
    assert length == len(data) - 9
    frame.parse_body(memoryview(data[9:]))
    return frame


def test_others_understand_what_is_written():
    data = read(frames.frame(frames.DATA, frames.END_STREAM, 7, b"abc"))
    assert isinstance(data, DataFrame)
    assert (data.stream_id, data.data, set(data.flags)) == (7, b"abc", {"END_STREAM"})
    settings = read(frames.settings([(frames.MAX_CONCURRENT_STREAMS, 100), (frames.INITIAL_WINDOW_SIZE, 1 << 20)]))
    assert isinstance(settings, SettingsFrame)
    assert settings.settings == {3: 100, 4: 1 << 20}
    acknowledged = read(frames.SETTINGS_ACK)
    assert set(acknowledged.flags) == {"ACK"}
    window = read(frames.window_update(3, 70_000))
    assert isinstance(window, WindowUpdateFrame)
    assert (window.stream_id, window.window_increment) == (3, 70_000)
    reset = read(frames.rst_stream(5, Reason.CANCEL))
    assert isinstance(reset, RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (5, 8)
    goaway = read(frames.goaway(9, Reason.ENHANCE_YOUR_CALM, "calm"))
    assert isinstance(goaway, GoAwayFrame)
    assert (goaway.last_stream_id, goaway.error_code, goaway.additional_data) == (9, 11, b"calm")


def test_settings_are_read_in_order():
    data = frames.settings([(4, 1), (4, 2), (0x9999, 3)])
    assert frames.settings_in(data[frames.HEAD_BYTES :]) == [(4, 1), (4, 2), (0x9999, 3)]
