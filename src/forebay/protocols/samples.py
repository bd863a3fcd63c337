# SPDX-License-Identifier: Apache-2.0
"""Arrays of samples, cut into the bodies of their elements; what is in these is for the worker to read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import msgspec

from forebay.errors import ForebayError, TooLarge, ValidationError
from forebay.serving.models.sample_errors import refusal
from forebay.types.element_limits import MAX_TENSOR_ELEMENTS, Data, Steps, at_once
from forebay.types.json_segments import LONG_BYTES, elements
from forebay.types.msgpack_elements import msgpack_ends

MAX_SAMPLES: Final = 16_384
"""Samples in the array of one request, whatever the queue may hold."""

_msgpack_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])


def samples_of(body: Data, params: Mapping[str, str], limit: int = MAX_SAMPLES) -> list[memoryview]:
    """Cut an array of samples into its elements without decoding them.

    Raises:
        InvalidRequest, ValidationError, TooLarge: As `samples_in_steps`.
    """
    return at_once(samples_in_steps(body, params, limit))


def samples_in_steps(
    body: Data, params: Mapping[str, str], limit: int, values: int = MAX_TENSOR_ELEMENTS
) -> Steps[list[memoryview]]:
    """Cut a body that may be long into samples, in steps.

    Args:
        params: The formats.
        limit: The most elements that are wanted.
        values: The most elements that samples of a long body in msgpack may have together; those of JSON were counted.

    Raises:
        InvalidRequest: If it is malformed, ValidationError if it is not an array or an empty one.
        TooLarge: If it has too many elements.
    """
    limit = min(limit, MAX_SAMPLES)
    try:
        rows = yield from elements(body, limit) if params["in"] == "json" else _in_msgpack(body, limit, values)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(error, body) from error
    if rows is None:
        raise TooLarge(f"the array has more than {limit} samples, which is as many as may wait here")
    if not rows:
        raise ValidationError("the array of samples is empty", detail={"path": "$"})
    return rows


def _refusal(error: Exception, body: Data) -> ForebayError:
    if isinstance(error, msgspec.ValidationError):
        return ValidationError(f"the body must be an array of samples: {error}", detail={"path": "$"})
    return refusal(error, body)


_STEP_ROWS: Final = 1024
_MSGPACK_LENGTHS: Final = {0xDC: 2, 0xDD: 4}
_SHORT: Final = 0x90
_SHORT_MASK: Final = 0xF0
"""An array of up to 15 has its length in its first byte."""


def _in_msgpack(body: Data, limit: int, values: int) -> Steps[list[memoryview] | None]:
    """Return the elements unread, or None if there are more than the limit.

    Raises:
        msgspec.DecodeError: If they do not end where the body does, msgspec.ValidationError if it is not an array.
        TooLarge: If there are more values in them than possible.
    """
    start, count = _msgpack_head(body)  # their number comes first
    if limit < count <= len(body):  # one that cannot be is told as malformed
        return None
    if not count or len(body) <= LONG_BYTES:
        return [*map(memoryview, _msgpack_rows.decode(body))]
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
    """Return how long the head of an array is, and how many elements follow; none if it is not an array."""
    first = body[0] if body else 0
    if first & _SHORT_MASK == _SHORT:
        return 1, first - _SHORT
    size = 1 + _MSGPACK_LENGTHS.get(first, 0)
    return size, int.from_bytes(body[1:size], "big")
