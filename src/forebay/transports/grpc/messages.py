# SPDX-License-Identifier: Apache-2.0
"""The messages of a call: each has a prefix of five bytes before it, and may be compressed."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Final

from forebay.transports.grpc.statuses import Status
from forebay.workers.memory.landing import LANDING_BYTES, Landing, Places

if TYPE_CHECKING:
    PlacesOf = Callable[[memoryview], Places]

PREFIX_BYTES: Final = 5

ENCODINGS: Final[Mapping[bytes, int]] = {b"gzip": 31, b"deflate": 15}
"""Ways to compress, with zlib's name for them; `identity` is none."""

STEP_BYTES: Final = 4 * 1024 * 1024
"""How far a message is unpacked before its limits are looked at again."""
_PART_BYTES: Final = 64 * 1024
"""How much of a packed message is looked at at once: what is left over of a part is copied each time."""
_OUTPUT_BYTES: Final = 1024 * 1024
"""How much is unpacked at once."""

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


class MessageBuffer:
    """The bytes of one call that have come and were not taken yet.

    Attributes:
        missing_bytes: What has not come of a message that lands.
    """

    def __init__(self, encoding: bytes, max_bytes: int, lands: PlacesOf | None = None) -> None:
        """Begin with nothing.

        Args:
            encoding: How messages are compressed, if they say that they are.
            max_bytes: Longest message, whether packed or unpacked.
            lands: Says from its beginning where a long message lands, if it is not packed; None if none does.
        """
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._lands = lands
        self._data: bytearray = bytearray()
        self._landing: Landing | None = None
        self._size = self.missing_bytes = 0

    @property
    def has_landed(self) -> bool:
        """Whether the next message lands, and all of it is there."""
        return self._landing is not None and not self.missing_bytes

    def __len__(self) -> int:
        landed = 0 if self._landing is None else PREFIX_BYTES + self._size - self.missing_bytes
        return landed + len(self._data)

    def add(self, data: bytes | memoryview) -> None:
        """Keep what has come."""
        if self._landing is None and len(self._data) < PREFIX_BYTES:
            data, self._data = bytes(self._data) + data if self._data else data, bytearray()
            if (size := self._long_size(data)) > 0:
                assert self._lands is not None
                data = memoryview(data)[PREFIX_BYTES:]
                self._landing, self._size, self.missing_bytes = Landing(size, self._lands(data)), size, size
        missing = self.missing_bytes
        if missing:
            assert self._landing is not None
            size = len(data)
            if size <= missing:
                self._landing.write(data)
                self.missing_bytes = missing - size
                return
            self._landing.write(data[:missing])
            self.missing_bytes = 0
            data = data[missing:]
        if data:
            self._data += data

    def _long_size(self, data: bytes | bytearray | memoryview) -> int:
        """Return how long a message is that begins here and shall land; 0 if none does."""
        if self._lands is None or len(data) < PREFIX_BYTES:
            return 0
        flag, size = _PREFIX.unpack_from(data)
        return size if not flag and LANDING_BYTES <= size <= self._max_bytes else 0

    def room(self, longest: int) -> memoryview | None:
        """Return where so much of what comes next may be put, or less; None if it has to be added.

        It may be one byte longer than what is missing of the message if more is asked for; see `byte_after`.
        """
        return self._landing.room(longest) if self._landing is not None and self.missing_bytes else None

    def advance(self, size: int) -> None:
        """Count so much as put there."""
        assert self._landing is not None
        self._landing.advance(size)
        self.missing_bytes -= size

    def byte_after(self) -> bytes:
        """Return what was put there after the message."""
        assert self._landing is not None
        return self._landing.byte_after()

    def _look(self) -> None:
        """Have the next message land if it is long and has begun to come."""
        if self._long_size(self._data):
            rest, self._data = bytes(self._data), bytearray()
            self.add(rest)

    def is_overfull(self) -> bool:
        """Whether there is more than one message."""
        if self._landing is not None:
            return bool(self._data)
        data = self._data
        return len(data) > PREFIX_BYTES and len(data) > PREFIX_BYTES + _PREFIX.unpack_from(data)[1]

    def check(self) -> None:
        """Look at the prefix of the next message as soon as it is there.

        Raises:
            BadMessage: If the message will not be taken.
        """
        if self._landing is None and len(self._data) >= PREFIX_BYTES:
            flag, size = _PREFIX.unpack_from(self._data)
            if size > self._max_bytes:
                raise _too_long(size, self._max_bytes)
            if flag > 1:
                msg = f"a message begins with {flag}; it is 1 if it is compressed, and else 0"
                raise BadMessage(Status.INTERNAL, msg)
            if flag and self._encoding not in ENCODINGS:
                msg = "a message says that it is compressed, and the call does not say how"
                raise BadMessage(Status.INTERNAL, msg)

    def take(self) -> bytes | memoryview | Unpacking | None:
        """Take the next message, or an `Unpacking` that yields it; None if it is not complete yet.

        Raises:
            BadMessage: If it will not be taken.
        """
        if self._landing is not None:
            if self.missing_bytes:
                return None
            landed, self._landing = self._landing.getvalue(), None
            self._look()
            return landed
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
        self._look()
        return Unpacking(message, self._encoding, self._max_bytes) if flag else message


class Unpacking:
    """A message that is being decompressed, a step at a time and never further than allowed.

    Attributes:
        size: How long it is so far.
    """

    def __init__(self, message: bytes, encoding: bytes, max_bytes: int) -> None:
        self.size = 0
        self.packed_bytes = len(message)
        self._packed = memoryview(message)
        self._rest = b""
        self._encoding = encoding.decode()
        self._max_bytes = max_bytes
        self._unpacker = zlib.decompressobj(ENCODINGS[encoding])
        self._found = io.BytesIO()  # it grows without being copied, and gives its bytes away

    def step(self, max_bytes: int) -> bytes | None:
        """Go on for up to so many bytes; returns the message once it is whole.

        Raises:
            BadMessage: If it cannot be unpacked, or is too long.
        """
        unpacker = self._unpacker
        while max_bytes > 0:
            part = self._rest or self._packed[:_PART_BYTES]
            if not self._rest:
                self._packed = self._packed[_PART_BYTES:]
            try:
                found = unpacker.decompress(part, min(max_bytes, _OUTPUT_BYTES))
            except zlib.error as error:
                msg = f"a message cannot be unpacked with {self._encoding}: {error}"
                raise BadMessage(Status.INTERNAL, msg) from None
            self._rest = unpacker.unconsumed_tail
            self._found.write(found)
            self.size += len(found)
            max_bytes -= len(found)
            if self.size > self._max_bytes:
                raise _too_long(None, self._max_bytes)
            is_last = not self._rest and not self._packed
            if unpacker.eof and is_last and not unpacker.unused_data:
                return self._found.getvalue()
            if unpacker.eof or (is_last and not found):
                msg = f"a message is not exactly what {self._encoding} gives"
                raise BadMessage(Status.INTERNAL, msg)
        return None


def _too_long(size: int | None, max_bytes: int) -> BadMessage:
    found = f"{size} bytes" if size is not None else "more than that once it is unpacked"
    return BadMessage(Status.RESOURCE_EXHAUSTED, f"a message may have {max_bytes} bytes, this one has {found}")
