# SPDX-License-Identifier: Apache-2.0
"""The worker protocol's wire format: four bytes of length, then one msgpack array.

Sans-I/O: bytes in, messages out. The messages and their order are in docs/reference/worker-protocol.md; who sends
which is `processes.py` (server) and `child.py` (worker).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Final, cast

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.types.element_limits import at_once
from forebay.types.first_use import known
from forebay.types.msgpack_elements import msgpack_elements

CALLER: Final = "caller"
"""The role in the hello of a front; a worker says `worker`, or nothing."""
MEMBER: Final = "member"
"""The role of a program that runs servings for others."""
PEER: Final = "peer"
"""The role of a server that asks another one for the servings of its members."""
VERSION = 2
"""Version of the protocol, said in the first frame; the server refuses any other."""

MAX_FRAME_BYTES = 1 << 30
"""Longest frame that is read; a longer length means that the other side does not speak this protocol."""

SHARED = 1
"""Code of the msgpack extension that stands for bytes in the shared arena: offset and length, 8 bytes each."""

LANDED = 2
"""Code of the extension for bytes in a file of their own: offset, length and inode, 8 bytes each, and its path."""

_PLACE: Final = Struct(">QQQ")

HEADER = 4
"""Bytes of the length before each message."""

FOLLOWS: Final = 3
"""Code of the extension for bytes that follow the frame: their length, 8 bytes."""

PACKED: Final = 4
"""Code of the extension for an array that follows the frame as msgpack: the length of that, 8 bytes."""

LONG_BYTES: Final = 1 << 16
"""Bytes that are written as they are, after what announces them, from this length on."""


def encode(message: Any) -> bytes:
    """Return one frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(HEADER, "big") + payload


def encode_part(value: Any) -> bytes:
    """Return what stands in a frame for a value, to be put into one as `msgspec.Raw`."""
    return _encoder.encode(value)


_encoder = msgspec.msgpack.Encoder()


def told_in_hello(message: list[Any]) -> dict[str, Any]:
    """Return what a worker says about itself in its first message.

    Raises:
        InvalidRequest: If it speaks another version of the protocol, or says nothing.
    """
    _, version, about = message
    require_version(version)
    if not isinstance(about, dict):
        raise InvalidRequest("its hello says nothing about it")
    return cast("dict[str, Any]", about)


def require_version(version: Any) -> None:
    """Check which version of the protocol a worker speaks; raises an `InvalidRequest` if it is another one."""
    if version != VERSION:
        raise InvalidRequest(
            f"it speaks version {str(version)[:40]} of the worker protocol, this server version {VERSION}; "
            "run the same version of forebay on both sides"
        )


def require_few(frame: bytes | memoryview, most: int) -> None:
    """Count the values in a frame before any is made; raises an `InvalidRequest` if there are more than that."""
    try:
        at_once(msgpack_elements(frame, most, "a frame"))
    except TooLarge as error:
        raise InvalidRequest(error.message) from None


class FrameReader:
    """Cuts a stream of bytes into messages.

    Args:
        view: Turns offset and length in the shared arena into a buffer.
        view_landed: Turns path and inode of a file, an offset and a length into a buffer.
        max_elements: The most values in a frame; None where the other side is forebay's own.
    """

    def __init__(
        self,
        view: Callable[[int, int], Any] | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
        view_landed: Callable[[str, int, int, int], Any] | None = None,
        max_elements: int | None = None,
        kind: Any = Any,
    ) -> None:
        self._buffer = bytearray()
        self._view = view
        self._view_landed = view_landed
        self._max_bytes = max_bytes
        self._max_elements = max_elements
        self._decoder = msgspec.msgpack.Decoder(known(kind), ext_hook=self._extension)

    @property
    def is_inside(self) -> bool:
        """Whether a message has come in part."""
        return bool(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Any]:
        """Add bytes and yield every message that is complete.

        Raises:
            InvalidRequest: If a frame is too long, has too many values or is not msgpack; the connection is of no use
                after that.
        """
        buffer = self._buffer
        size = len(data) - HEADER
        if not buffer and 0 <= size <= self._max_bytes and int.from_bytes(data[:HEADER], "big") == size:
            yield self._decode(memoryview(data)[HEADER:])  # one whole frame, as nearly always
            return
        buffer += data
        while len(buffer) >= HEADER:
            length = int.from_bytes(buffer[:HEADER], "big")
            if length > self._max_bytes:
                raise InvalidRequest(f"a frame of {length} bytes was announced, at most {self._max_bytes} are read")
            end = HEADER + length
            if len(buffer) < end:
                return
            frame = bytes(memoryview(buffer)[HEADER:end])
            del buffer[:end]
            yield self._decode(frame)

    def _decode(self, frame: bytes | memoryview) -> Any:
        if self._max_elements is not None and len(frame) > self._max_elements:
            require_few(frame, self._max_elements)
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"a frame is not msgpack: {error}") from error

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == LANDED and self._view_landed is not None:
            return self._view_landed(*read_landed(data))
        if code != SHARED or self._view is None or len(data) != 16:
            raise InvalidRequest(f"msgpack extension {code} is not part of the protocol")
        return self._view(int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big"))


def shared(offset: int, length: int) -> msgspec.msgpack.Ext:
    """Return what represents bytes in a frame when they lie in the arena."""
    return msgspec.msgpack.Ext(SHARED, offset.to_bytes(8, "big") + length.to_bytes(8, "big"))


def read_landed(data: bytes | memoryview) -> tuple[str, int, int, int]:
    """Return path and inode of a file, an offset and a length.

    Raises:
        InvalidRequest: If that is not what the extension has.
    """
    if len(data) <= _PLACE.size:
        raise InvalidRequest("bytes in a file are announced without its name")
    offset, length, inode = _PLACE.unpack_from(data)
    return str(data[_PLACE.size :], "utf-8"), inode, offset, length


def landed(path: str, inode: int, offset: int, length: int) -> msgspec.msgpack.Ext:
    """Return what represents bytes in a frame when they lie in a file of their own."""
    return msgspec.msgpack.Ext(LANDED, _PLACE.pack(offset, length, inode) + path.encode())
