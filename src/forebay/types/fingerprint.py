# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, as flat bytes: two requests with equal content ask for the same.

The content is a copy of everything that may change later, so it stays what came. A digest with a secret key finds the
content that may be equal; clients who do not know the key cannot choose contents that collide. What is long, deep, or
of a type that is not known here has no content, and is equal to nothing.
"""

from __future__ import annotations

import os
import struct
import sys
from hashlib import blake2b
from typing import Any, Final, cast

MAX_BYTES: Final = 1 << 20
"""Longest content. To digest it takes about a millisecond."""

MAX_PARTS: Final = 2048
"""Most values in a content."""

MAX_DEPTH: Final = 16

Content = list[bytes]

_KEY: Final = os.urandom(16)
_NUMBERS: Final = "biufcSUMm"
"""Kinds of arrays whose bytes say all of their elements."""


class _Unknown(Exception):
    """A value without content."""


def content_of(*values: Any) -> Content | None:
    """Return the content of values; None if they have none."""
    reader = _Reader()
    try:
        for value in values:
            reader.read(value, 0)
    except _Unknown:
        return None
    return reader.parts


def digest_of(content: Content) -> bytes:
    """Return 16 bytes that are equal for equal contents, and for no others that a client could find."""
    digest = blake2b(key=_KEY, digest_size=16)
    for part in content:
        digest.update(part)
    return digest.digest()


class _Reader:
    """Writes down values one after the other."""

    def __init__(self) -> None:
        self.parts: Content = []
        self._left = MAX_BYTES

    def read(self, value: Any, depth: int) -> None:
        kind = cast("type[Any]", type(value))
        if kind is bytes:
            self._add_bytes(b"b", value)
        elif kind is str:
            self._add_bytes(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind is list or kind is tuple or kind is dict:
            if depth >= MAX_DEPTH:
                raise _Unknown
            self._add(b"%b%d" % (kind.__name__.encode(), len(value)))
            for one in value:
                self.read(one, depth + 1)
                if kind is dict:
                    self.read(value[one], depth + 1)
        elif value is None or kind is bool:
            self._add(b"%d" % (2 if value is None else value))
        elif kind is int and value.bit_length() <= MAX_DEPTH * 8:
            self._add(b"i%d;" % value)
        elif kind is float:
            self._add(b"f" + struct.pack("<d", value))
        else:
            self._read_buffer(value, kind)

    def _read_buffer(self, value: Any, kind: type[Any]) -> None:
        numpy: Any = sys.modules.get("numpy")
        if kind is bytearray or kind is memoryview:
            view = memoryview(cast("bytes", value))
            if view.format != "B" or view.ndim != 1:
                raise _Unknown
            self._require(view.nbytes)
            self._add_bytes(b"b", view.tobytes())
        elif numpy is not None and kind is numpy.ndarray and value.dtype.kind in _NUMBERS:
            self._require(value.nbytes)
            self._add(f"a{value.dtype.str}{value.shape}".encode())
            self._add_bytes(b"b", value.tobytes())
        else:
            raise _Unknown

    def _add_bytes(self, tag: bytes, data: bytes) -> None:
        self._add(b"%b%d;" % (tag, len(data)))
        self._add(data)

    def _add(self, part: bytes) -> None:
        self._require(len(part))
        self._left -= len(part)
        if len(self.parts) >= 2 * MAX_PARTS:
            raise _Unknown
        self.parts.append(part)

    def _require(self, size: int) -> None:
        if size > self._left:
            raise _Unknown
