# SPDX-License-Identifier: Apache-2.0
"""Requests of two layouts on one port: the present one, and the one in use before requests could carry tensors.

    field     present           old
    3         tensors           name
    4         name              method
    5         method            logid, a varint
    6         logid, a varint   clientip
    7         clientip          -

Most frames tell by the wire type of a field. One with nothing but a field 3 in question is of the present layout if
that field is a Tensor. Frames are looked at before they are parsed, because a parser would drop what does not fit.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError

from forebay.errors import InvalidRequest
from forebay.surfaces.pipeline.protocol.messages import OldRequest, Request
from forebay.types.proto_numbers import read_varint

MAX_FIELDS: Final = 50_000
"""Fields that are looked at; a frame that has not told by then is of the present layout."""

LARGE_BYTES: Final = 16 * 1024
"""The fields of a longer frame are counted before it is parsed."""
MAX_ALL_FIELDS: Final = 200_000
"""Fields of a request and of its tensors, which may be as short as two bytes."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

_ELEM_TYPE: Final = 20
_TEXTS: Final = frozenset({9, 10, 23})
_REPEATED: Final = {
    **dict.fromkeys((1, 3, 5, 6, 21, 22), _VARINT),
    **dict.fromkeys((2, 7), _FIXED32),
    **dict.fromkeys((4, 8), _FIXED64),
}
"""Fields of a Tensor with numbers, by the wire type of one that is not packed."""

_SOME_FIELDS: Final = 64
_SAMPLE_BYTES: Final = 256


def request_of(data: bytes) -> Any:
    """Parse a request of either layout into a `Request`.

    Raises:
        InvalidRequest: If it is of neither, or has too many fields.
    """
    if len(data) > LARGE_BYTES and _fields_in(data, 0, len(data), MAX_ALL_FIELDS, inside=True) < 0:
        raise InvalidRequest(f"the request has too many fields; at most {MAX_ALL_FIELDS} are read")
    try:
        if not is_old(data):
            return Request.FromString(data)
        old = OldRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"expected a {Request.DESCRIPTOR.full_name} message: {error}") from error
    return Request(
        key=old.key, value=old.value, name=old.name, method=old.method, logid=old.logid, clientip=old.clientip
    )


def is_old(data: bytes) -> bool:
    """Tell whether a request is of the old layout; of bytes that are not a message at all the answer means nothing."""
    third: tuple[int, int] | None = None
    position = 0
    try:
        for _ in range(MAX_FIELDS):
            if position >= len(data):
                break
            field, kind, start, position = _field(data, position, len(data))
            if field <= 2:
                continue
            if (field, kind) in {(5, _VARINT), (6, _LENGTH)}:
                return True
            if (field, kind) in {(5, _LENGTH), (6, _VARINT), (7, _LENGTH)}:
                return False
            if field == 3:
                if third is not None:  # a name comes once
                    return False
                third = start, position
    except _Malformed:
        return False
    return third is not None and not _is_tensor(data, *third)


def _fields_in(data: bytes, position: int, end: int, left: int, *, inside: bool) -> int:
    """Count fields, and those of tensors; returns how many more there may be, and something negative if too many."""
    try:
        while position < end and left >= 0:
            field, kind, start, position = _field(data, position, end)
            left -= 1
            if inside and field == 3 and kind == _LENGTH:
                left = _fields_in(data, start, position, left, inside=False)
    except _Malformed:
        pass  # the parser will say so
    return left


class _Malformed(Exception):
    """These bytes are not a message."""


def _field(data: bytes, position: int, limit: int) -> tuple[int, int, int, int]:
    """Return number and wire type of the field at a position, and where its content starts and ends."""
    tag, position = read_varint(data, position, limit)
    kind = tag & 7
    if kind == _LENGTH:
        length, position = read_varint(data, position, limit)
        end = position + length
    elif kind == _VARINT:
        _, end = read_varint(data, position, limit)
    elif kind == _FIXED64:
        end = position + 8
    elif kind == _FIXED32:
        end = position + 4
    else:
        raise _Malformed
    if end > limit or not tag >> 3:
        raise _Malformed
    return tag >> 3, kind, position, end


def _is_tensor(data: bytes, start: int, end: int) -> bool:
    """Tell whether a part of the data is a Tensor and not a name."""
    # Numbers may stand one by one instead of packed, but so they seem to in a name such as "ADetector". A Tensor with
    # a name, a shape or a type has a control character in the tag of it, and no name has one.
    is_text = min(data[start : min(end, start + _SAMPLE_BYTES)], default=0) >= 0x20
    position = start
    try:
        for _ in range(_SOME_FIELDS):
            if position >= end:
                break
            field, kind, _, position = _field(data, position, end)
            if kind == _LENGTH:
                fits = field in _TEXTS or field in _REPEATED
            else:
                fits = (field == _ELEM_TYPE and kind == _VARINT) or (not is_text and _REPEATED.get(field) == kind)
            if not fits:
                return False
    except _Malformed:
        return False
    return True
