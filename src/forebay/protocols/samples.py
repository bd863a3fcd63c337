# SPDX-License-Identifier: Apache-2.0
"""Arrays of samples, cut into the bodies of their elements; what is in these is for the worker to read."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ForebayError, TooLarge, ValidationError
from forebay.serving.models.sample_errors import refusal
from forebay.types.first_use import known
from forebay.types.json_segments import elements
from forebay.types.msgpack_elements import msgpack_ends

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.types.element_limits import Data, Steps

MAX_SAMPLES: Final = 16_384
"""Samples in the array of one request, whatever the queue may hold."""

_json_rows = msgspec.json.Decoder(list[msgspec.Raw])
_msgpack_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])


def samples_of(body: bytes, params: Mapping[str, str], limit: int = MAX_SAMPLES) -> list[memoryview]:
    """Cut an array of samples into its elements without decoding them.

    Args:
        params: The formats.
        limit: The most elements that are wanted: an array of more costs next to nothing.

    Raises:
        InvalidRequest: If it is malformed, ValidationError if it is no array or an empty one.
        TooLarge: If it has too many elements.
    """
    limit = min(limit, MAX_SAMPLES)
    try:
        rows = (_json_elements if params["in"] == "json" else _msgpack_elements)(body, limit)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(error, body) from error
    if not rows:
        raise _is_empty()
    return [memoryview(row) for row in rows]


def samples_in_steps(body: Data, params: Mapping[str, str], limit: int, values: int) -> Steps[list[memoryview]]:
    """Do the same with a long body, in steps.

    Args:
        values: The most elements that samples in msgpack may have together; those of JSON were counted.

    Raises:
        InvalidRequest, ValidationError, TooLarge: As `samples_of`.
    """
    limit = min(limit, MAX_SAMPLES)
    try:
        rows = yield from elements(body, limit) if params["in"] == "json" else _long_msgpack(body, limit, values)
    except msgspec.DecodeError as error:
        raise _refusal(error, body) from error
    if rows is None:
        raise _too_many(limit)
    if not rows:
        raise _is_empty()
    return rows


def _refusal(error: Exception, body: Data) -> ForebayError:
    if isinstance(error, msgspec.ValidationError):
        return ValidationError(f"the body must be an array of samples: {error}", detail={"path": "$"})
    return refusal(error, body)


def _is_empty() -> ValidationError:
    return ValidationError("the array of samples is empty", detail={"path": "$"})


def _json_elements(body: bytes, limit: int) -> list[msgspec.Raw]:
    """Read the elements, or give up at the first one that is too many."""
    if body.count(b",") < limit:
        return _json_rows.decode(body)  # there cannot be more elements than that
    try:
        found = _json_reader(limit).decode(body)
    except msgspec.ValidationError:
        if body.lstrip()[:1] == b"[":
            raise _too_many(limit) from None
        raise
    return elements_in(found)


@cache
def _json_reader(limit: int) -> msgspec.json.Decoder[msgspec.Struct]:
    return msgspec.json.Decoder(known(elements_up_to(limit)))


@cache
def elements_up_to(limit: int) -> type[msgspec.Struct]:
    """Make a type that stops a decoder one element after those wanted; one of a list would make all of them first."""
    fields = [(f"e{number}", msgspec.Raw, msgspec.Raw()) for number in range(limit)]
    return msgspec.defstruct("Elements", fields, array_like=True, forbid_unknown_fields=True, gc=False)


def elements_in(found: msgspec.Struct) -> list[msgspec.Raw]:
    """Return what such a type holds."""
    rows = list(msgspec.structs.astuple(found))
    while rows and not len(rows[-1]):
        rows.pop()
    return rows


_STEP_ROWS: Final = 1024
_MSGPACK_LENGTHS: Final = {0xDC: 2, 0xDD: 4}
_SHORT: Final = 0x90
_SHORT_MASK: Final = 0xF0
"""An array of up to 15 has its length in its first byte."""


def _msgpack_elements(body: bytes, limit: int) -> list[msgspec.Raw]:
    """Read the elements; their number comes first."""
    if limit < _msgpack_head(body)[1] <= len(body):  # one that cannot be is told as malformed
        raise _too_many(limit)
    return _msgpack_rows.decode(body)


def _long_msgpack(body: Data, limit: int, values: int) -> Steps[list[memoryview] | None]:
    """Return the elements unread, or None if there are more than the limit.

    Raises:
        msgspec.DecodeError: If they do not end where the body does, msgspec.ValidationError if it is no array.
        TooLarge: If there are more values in them than possible.
    """
    start, count = _msgpack_head(body)
    if not count:
        return [*map(memoryview, _msgpack_rows.decode(body))]  # which tells at once why it is no array, or too long
    if count > limit:
        return None
    ends = yield from msgpack_ends(body, start, count, values)
    if len(ends) < count or ends[-1] > len(body):
        raise msgspec.DecodeError("Input data was truncated")
    if ends[-1] < len(body):
        raise msgspec.DecodeError(f"MessagePack data is malformed: trailing characters (byte {ends[-1]})")
    view, rows = memoryview(body), list[memoryview]()
    for begin, end in pairwise((start, *ends)):
        rows.append(view[begin:end])
        if len(rows) % _STEP_ROWS == 0:
            yield
    return rows


def _msgpack_head(body: Data) -> tuple[int, int]:
    """Return how long the head of an array is, and how many elements follow; none if it is no array."""
    first = body[0] if body else 0
    if first & _SHORT_MASK == _SHORT:
        return 1, first - _SHORT
    size = 1 + _MSGPACK_LENGTHS.get(first, 0)
    return size, int.from_bytes(body[1:size], "big")


def _too_many(limit: int) -> TooLarge:
    return TooLarge(f"the array has more than {limit} samples, which is as many as may wait here")
