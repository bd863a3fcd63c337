# SPDX-License-Identifier: Apache-2.0
"""The messages of a call: each has a prefix of five bytes before it, and may be compressed."""

from __future__ import annotations

import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

from forebay.transports.grpc.statuses import Status

PREFIX_BYTES: Final = 5

ENCODINGS: Final[Mapping[bytes, int]] = {b"gzip": 31, b"deflate": 15}
"""Ways to compress, with zlib's name for them; `identity` is none."""

_PREFIX: Final = Struct(">BI")


class BadMessage(Exception):
    """A message that cannot be taken; it ends its call."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def prefix(size: int) -> bytes:
    """Write what stands before a message that is not compressed."""
    return _PREFIX.pack(0, size)


class Inbox:
    """The bytes of one call that have come and were not taken yet."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        """Begin with nothing.

        Args:
            encoding: How messages are compressed, if they say that they are.
            max_bytes: Longest message, also once unpacked.
        """
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes) -> None:
        """Keep what has come."""
        self._data += data

    def is_overfull(self) -> bool:
        """Whether there is more than one message."""
        data = self._data
        return len(data) > PREFIX_BYTES and len(data) > PREFIX_BYTES + _PREFIX.unpack_from(data)[1]

    def check(self) -> None:
        """Look at the prefix of the next message as soon as it is there.

        Raises:
            BadMessage: If the message will not be taken.
        """
        if len(self._data) >= PREFIX_BYTES:
            flag, size = _PREFIX.unpack_from(self._data)
            if size > self._max_bytes:
                raise _too_long(size, self._max_bytes)
            if flag > 1 or (flag and self._encoding not in ENCODINGS):
                msg = "a message says that it is compressed, and the call does not say how"
                raise BadMessage(Status.INTERNAL, msg)

    def take(self) -> bytes | None:
        """Take the next message; None if it has not come whole.

        Raises:
            BadMessage: If it cannot be unpacked, or is too long.
        """
        data = self._data
        if len(data) < PREFIX_BYTES:
            return None
        self.check()
        flag, size = _PREFIX.unpack_from(data)
        end = PREFIX_BYTES + size
        if len(data) < end:
            return None
        with memoryview(data) as view:
            message = bytes(view[PREFIX_BYTES:end])
        del data[:end]
        return unpack(message, self._encoding, self._max_bytes) if flag else message


def unpack(message: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """Decompress a message, never further than allowed.

    Raises:
        BadMessage: If it cannot be unpacked, or is too long.
    """
    unpacker = zlib.decompressobj(ENCODINGS[encoding])
    try:
        found = unpacker.decompress(message, max_bytes + 1)
    except zlib.error as error:
        msg = f"a message cannot be unpacked with {encoding.decode()}: {error}"
        raise BadMessage(Status.INTERNAL, msg) from None
    if len(found) > max_bytes:
        raise _too_long(None, max_bytes)
    if not unpacker.eof or unpacker.unused_data:
        msg = f"a message is not exactly what {encoding.decode()} gives"
        raise BadMessage(Status.INTERNAL, msg)
    return found


def _too_long(size: int | None, max_bytes: int) -> BadMessage:
    found = f"{size} bytes" if size is not None else "more than that once it is unpacked"
    return BadMessage(Status.RESOURCE_EXHAUSTED, f"a message may have {max_bytes} bytes, this one has {found}")
