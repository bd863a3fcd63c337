# SPDX-License-Identifier: Apache-2.0
"""The frames of HTTP/2 (RFC 9113): cuts a stream of bytes into them, and writes them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import Any, Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first."""

HEAD_BYTES: Final = 9
MIN_FRAME_BYTES: Final = 1 << 14
"""Every client takes frames of this length, and sends no longer ones unless it is told that it may."""
LONG_FRAME_BYTES: Final = 1 << 20
"""Longest frame that is taken here."""
PADDED_FRAME_BYTES: Final = MIN_FRAME_BYTES + 256
"""Longest frame of data with padding that is taken: it is kept until it is whole."""
VIEWED_BYTES: Final = 4 * 1024
"""Data of this length is not cut out of what has come, but seen where it lies, and is read as it comes."""
MAX_FRAME_BYTES: Final = (1 << 24) - 1
MAX_WINDOW: Final = (1 << 31) - 1
FIRST_WINDOW: Final = (1 << 16) - 1
"""Every window before anything was said about it."""
STREAM_WINDOW: Final = 4 * 1024 * 1024
"""How much a client may send of one call before it was taken."""
CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""The same of all calls of a connection."""
MAX_STREAM: Final = (1 << 31) - 1

# Kinds of frames. Plain numbers: comparing members of an enumeration would cost more than the frame.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

END_FLAGS: Final = END_HEADERS | END_STREAM
"""Those of a header block that is the last frame of its stream."""

# Settings.
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

Frame = tuple[int, int, int, Any]
"""Kind, flags, stream, payload: bytes, or a view of them where it is long data."""

_HEAD: Final = Struct(">HBBBI")
_SETTING: Final = Struct(">HI")
_NUMBER: Final = Struct(">I")


class Reason(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The client broke a rule, so nothing more from it can be trusted; this ends the connection."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StreamFault(Exception):
    """The client broke a rule of one stream; it ends that stream."""

    def __init__(self, stream: int, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.stream = stream
        self.reason = reason


class Http2FrameReader:
    """Cuts the bytes of a connection into frames; a long one of data becomes several, as it comes.

    Attributes:
        rest_bytes: Of the data of a long frame, what has not come yet.
        rest_of: Its flags and stream.
        long_of: Length and stream of the last long frame of data, as far as it has come.
        has_cut: Whether the last look at what had come found something to take.
    """

    def __init__(self, max_other_bytes: int = MIN_FRAME_BYTES) -> None:
        """Begin.

        Args:
            max_other_bytes: Longest frame of anything but data.
        """
        self._data = b""
        self._at = 0
        self._max_other_bytes = max_other_bytes
        self.rest_bytes: int = 0
        self.rest_of: tuple[int, int] = (0, 0)
        self.long_of: tuple[int, int] = (0, 0)
        self.has_cut: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether there is more than was read, such as a part of a frame."""
        return self._at < len(self._data) or self.rest_bytes > 0

    @property
    def has_unread(self) -> bool:
        """Whether something that has come was not read."""
        return self._at < len(self._data)

    @property
    def unread_bytes(self) -> int:
        """How much has come that was not read."""
        return len(self._data) - self._at

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def skip_rest(self, size: int) -> int:
        """Skip so much of the rest of a long frame, read elsewhere; returns the flags of that piece."""
        self.rest_bytes -= size
        return self.rest_of[0] & ~END_STREAM if self.rest_bytes else self.rest_of[0]

    def begin_inside(self, length: int, rest_bytes: int, flags: int, stream: int) -> None:
        """Go on in a long frame of data of which all but the rest was read elsewhere; nothing else may be unread."""
        self.long_of, self.rest_bytes, self.rest_of = (length, stream), rest_bytes, (flags, stream)

    def go_on(self, rest_bytes: int, flags: int) -> None:
        """Go on in a frame as long as the last one and of its stream, of which all but the rest was read elsewhere."""
        self.rest_bytes, self.rest_of = rest_bytes, (flags, self.long_of[1])

    def skip(self, expected: bytes) -> bytes | None:
        """Skip these bytes if they come first; otherwise returns what came instead, or what has come so far."""
        found = self._data[: len(expected)]
        if found != expected:
            return found
        self._at = len(expected)
        return None

    def read(self) -> Iterator[Frame]:
        """Yield the frames that are complete now; a caller that stops before the last one can go on later.

        Raises:
            ConnectionFault: At a frame that is too long.
        """
        data, at, end = self._data, self._at, len(self._data)
        read = _HEAD.unpack_from
        if self.rest_bytes and at < end:
            start, self._at = at, min(at + self.rest_bytes, end)
            at = self._at
            yield DATA, self.skip_rest(at - start), self.rest_of[1], memoryview(data)[start:at]
        while at + HEAD_BYTES <= end:
            high, low, kind, flags, stream = read(data, at)
            start = at + HEAD_BYTES
            length = high << 8 | low
            if length >= VIEWED_BYTES:
                if length > MIN_FRAME_BYTES:
                    self._check_length(kind, flags, length)
                if kind == DATA and not flags & PADDED:
                    stream &= MAX_STREAM
                    self.long_of = length, stream
                    if start + length > end:
                        self.rest_bytes, self.rest_of = start + length - end, (flags, stream)
                        self._at = at = end
                        if start < end:
                            yield kind, flags & ~END_STREAM, stream, memoryview(data)[start:]
                        break
                    self._at = at = start + length
                    yield kind, flags, stream, memoryview(data)[start:at]
                    continue
            if start + length > end:
                break
            self._at = at = start + length
            yield kind, flags, stream & MAX_STREAM, data[start:at]
        self.has_cut = at > 0
        self._data, self._at = data[at:], 0  # idle connections should hold nothing

    def _check_length(self, kind: int, flags: int, length: int) -> None:
        """Refuse a frame that nobody here may send; raises ConnectionFault if it is one."""
        if length > LONG_FRAME_BYTES:
            msg = f"a frame of {length} bytes is longer than the {LONG_FRAME_BYTES} that may be sent here"
            raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)
        if kind == DATA:
            if flags & PADDED and length > PADDED_FRAME_BYTES:
                msg = f"a padded frame of {length} bytes is longer than the {PADDED_FRAME_BYTES} that are taken"
                raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)
        elif length > self._max_other_bytes:
            msg = f"a frame of kind {kind} with {length} bytes is far too long"
            raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)


def unpadded(flags: int, payload: Any) -> Any:
    """Return the payload of a HEADERS or DATA frame without padding and priority.

    Raises:
        ConnectionFault: If there is less than the flags say.
    """
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            msg = "a padded frame does not say how much padding it has"
            raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        msg = "a frame is shorter than its padding or priority"
        raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
    return payload[start:end]


def head_at(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Read what stands before a payload: its length, and the kind, the flags and the stream of the frame."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream


def number(payload: bytes) -> int:
    """Read the payload of an RST_STREAM or WINDOW_UPDATE frame."""
    return _NUMBER.unpack(payload)[0]


def settings_in(payload: bytes) -> list[tuple[int, int]]:
    """Read the payload of a SETTINGS frame: names and values."""
    return list(_SETTING.iter_unpack(payload))


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Write what stands before a payload of `length` bytes."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a frame."""
    return head(len(payload), kind, flags, stream) + payload


def header_block(flags: int, stream: int, block: bytes) -> bytes:
    """Write a header block; one that is longer than a frame goes on in others."""
    if len(block) <= MIN_FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    first, *middle, last = (block[at : at + MIN_FRAME_BYTES] for at in range(0, len(block), MIN_FRAME_BYTES))
    parts = [frame(HEADERS, flags & ~END_HEADERS, stream, first)]
    parts += [frame(CONTINUATION, 0, stream, one) for one in middle]
    return b"".join([*parts, frame(CONTINUATION, END_HEADERS, stream, last)])


def settings(values: list[tuple[int, int]]) -> bytes:
    """Write a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values))


def window_update(stream: int, more: int) -> bytes:
    """Give a client room for more bytes; stream 0 is the whole connection."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(more))


def rst_stream(stream: int, reason: Reason) -> bytes:
    """End a stream."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(reason))


def goaway(last_stream: int, reason: Reason, message: str = "") -> bytes:
    """Say that streams after `last_stream` are not answered any more, and why."""
    return frame(GOAWAY, 0, 0, _NUMBER.pack(last_stream) + _NUMBER.pack(reason) + message.encode())


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)
