# SPDX-License-Identifier: Apache-2.0
"""How calls end: status numbers, and the header blocks that carry them."""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final
from urllib.parse import quote

from forebay.errors import Code, ForebayError, NotFound, Unavailable, UserCodeError
from forebay.transports.grpc.hpack import literal

MAX_TEXT_BYTES: Final = 2000
"""Longest text of a status; clients refuse metadata of more than 8 KiB, and each byte may become three."""

_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class Status(IntEnum):
    """How a call may end, under the numbers of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class NotOffered(NotFound):
    """A method that is known and does nothing here."""


class MayNotManage(Unavailable):
    """A method that loads or unloads models, where clients may not."""


OF_CODE: Final = {code: Status[code.name] for code in Code}

NONE: Final[Mapping[type[ForebayError], Status]] = {}

HEADERS: Final = b"\x88" + literal(b"content-type", b"application/grpc")
"""The header block before an answer; it says 200."""
OK: Final = literal(b"grpc-status", b"0")
"""The trailers of an answer."""
ACCEPTED_ENCODINGS: Final = literal(b"grpc-accept-encoding", b"identity, deflate, gzip")


@functools.lru_cache(16)  # a flood is refused in one sentence
def trailers(status: Status, text: str, fields: bytes = b"") -> bytes:
    """Return the header block that ends a call, with further fields."""
    if status is Status.OK and not text:
        return OK + fields if fields else OK
    shown = text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
    inner = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    after = len(shown) - len(inner) - before
    # A field of HTTP/2 neither begins nor ends with a space.
    message = "%20" * before + quote(inner, safe=_PLAIN) + "%20" * after
    return literal(b"grpc-status", b"%d" % status) + literal(b"grpc-message", message.encode()) + fields


def metadata(pairs: Sequence[tuple[str, str | bytes]]) -> bytes:
    """Return what a server says beside its messages, as fields of a header block."""
    return b"".join(
        literal(name.encode(), base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode())
        for name, value in pairs
    )


def http_refusal(status: int, *fields: tuple[bytes, bytes]) -> bytes:
    """Return the header block of an answer to what is not a call."""
    return literal(b":status", b"%d" % status) + b"".join(literal(*field) for field in fields)


def of_error(error: ForebayError, own: Mapping[type[ForebayError], Status] = NONE) -> tuple[Status, str]:
    """Return what a client is told of an error; what it is not told was logged where the user's code ran.

    Args:
        own: What a service says differently.
    """
    if isinstance(error, UserCodeError):
        return Status.INTERNAL, "the model failed; the server's log says why"
    if isinstance(error, NotOffered):
        return Status.UNIMPLEMENTED, error.message
    if isinstance(error, MayNotManage):
        return Status.PERMISSION_DENIED, error.message
    for kind, status in own.items():
        if isinstance(error, kind):
            return status, error.message
    return OF_CODE[error.code], error.message
