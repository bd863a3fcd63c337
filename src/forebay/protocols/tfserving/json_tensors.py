# SPDX-License-Identifier: Apache-2.0
"""Lists in JSON as tensors: a shape is how long the lists are, and bytes that are not text stand as `{"b64": "..."}`.

A list may be as long as a body, so all is read in steps (`types/element_limits.py`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.arrays.numpy_tensors import raw_in_steps
from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.tfserving.odd_numbers import holds, without_marks
from forebay.types.json_elements import json_elements
from forebay.types.json_segments import (
    STEP_BYTES,
    StepPace,
    elements,
    elements_in_parts,
    joined,
    members,
    text_in_parts,
)
from forebay.types.tensor import Data, Tensor

if TYPE_CHECKING:
    from forebay.serving.tensor_face import TensorFace
    from forebay.types.element_limits import Steps

MAX_TEXTS: Final = 200_000
"""Texts of an input, and lists of them; each is an object on the loop."""
MAX_BYTES: Final = 50_000
"""Values of an input of which one is bytes in base64; each is several steps of Python, on the loop."""
SAMPLE_BYTES: Final = 64 * 1024
"""The beginning of a value, which shows what it is."""

_DEPTH: Final = 32
_NUMBER_BYTES: Final = 1024
_UNSAYABLE: Final = frozenset({"FP16", "BF16"})
"""Numbers that the other protocol does not have in JSON."""


def tensor_in_lists(name: str, data: memoryview, face: TensorFace, *, is_odd: bool = False) -> Steps[Tensor]:
    """Return a tensor in JSON, with the shape that its lists have.

    Args:
        is_odd: Whether numbers in it may be marked.

    Raises:
        InvalidRequest: If it holds bytes that are none.
        TooLarge: If it holds too many.
    """
    if is_odd:
        data = memoryview(without_marks(data))
    try:
        shape, first = yield from _shape(name, data)
        declared = next((one.datatype for one in face.inputs if one.name == name), _kind(first))
        if declared == "BYTES" and (yield from holds(data, b'"b64"')):
            return Tensor(name, "BYTES", shape, (yield from _texts_and_bytes(name, data, shape)))
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"input '{name}' cannot be read: {error}") from None
    tensor = Tensor(name, declared, shape, data if shape else b"[%s]" % data, is_json=True)
    return (yield from raw_in_steps(tensor)) if declared in _UNSAYABLE else tensor


def is_b64(data: bytes | memoryview) -> bool:
    """Tell whether an object stands for bytes."""
    return bytes(data[1:SAMPLE_BYTES]).lstrip().startswith(b'"b64"')


def _shape(name: str, data: memoryview) -> Steps[tuple[tuple[int, ...], bytes]]:
    """Return how long lists in lists are, and the first value in them; who reads all of it holds the others to that."""
    if bytes(data[:1]) != b"[":
        return (), bytes(data[:SAMPLE_BYTES])
    if not (yield from holds(data, b'"', b"{")):
        return (yield from _shape_of_numbers(name, data))
    yield from json_elements(data, MAX_TEXTS, len(data), f"input '{name}'")
    shape: list[int] = []
    while bytes(data[:1]) == b"[":
        if len(shape) == _DEPTH:
            raise _too_deep(name)
        count, whole, data = 0, data, memoryview(b"")
        for part in elements_in_parts(whole):
            data = part[0] if part and not count else data
            count += len(part)
            yield
        shape.append(count)
    return tuple(shape), bytes(data[:SAMPLE_BYTES])


def _shape_of_numbers(name: str, data: memoryview) -> Steps[tuple[tuple[int, ...], bytes]]:
    """Return the shape of lists of numbers, of which nothing has to be made.

    A list of the second level ends where as many brackets come together as are open in it, and so on.
    """
    carry, depth, first = b"", 0, b""
    counts: list[int] = []
    ends: list[bytes] = []
    is_over: list[bool] = []
    for at in range(0, len(data), STEP_BYTES):
        piece = bytes(data[at : at + STEP_BYTES]).translate(None, b" \t\r\n")
        if not counts:
            carry += piece
            depth = len(carry) - len(carry.lstrip(b"["))
            if depth <= _DEPTH and len(carry) < depth + _NUMBER_BYTES and at + STEP_BYTES < len(data):
                continue
            if depth > _DEPTH:
                raise _too_deep(name)
            first = re.split(rb"[\],]", carry[depth : depth + _NUMBER_BYTES], maxsplit=1)[0]
            counts, is_over = [*[1] * (depth - 1), int(bool(first))], [False] * depth
            ends = [b"]" * (depth - level) for level in range(depth)]
            piece, carry = carry, b""
        for level, end in enumerate(ends):
            if is_over[level]:
                continue
            mark = end[1:] + b","
            text = carry[len(carry) - (len(end) - 1) :] + piece if len(end) > 1 else piece
            stop = text.find(end) if level else -1
            is_over[level] = stop >= 0
            counts[level] += text.count(mark, 0, stop + len(end)) if stop >= 0 else text.count(mark)
        carry = (carry + piece)[-_DEPTH:]
        yield
    return tuple(counts), first


def _too_deep(name: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' is deeper than {_DEPTH} lists")


def _kind(value: bytes) -> str:
    """Return the type of a value, for models that do not say one."""
    if value[:1] in {b'"', b"{"}:
        return "BYTES"
    if value in {b"true", b"false"}:
        return "BOOL"
    return "FP64" if set(value) & set(b".eENI") else "INT64"


def _texts_and_bytes(name: str, data: memoryview, shape: Sequence[int]) -> Steps[Data]:
    """Return elements of which some are bytes in base64, as they lie in memory.

    Raises:
        msgspec.DecodeError: If it is malformed, or has lists that are not as deep as the first.
    """
    values, pace = [data], StepPace()
    for _ in shape:
        inner: list[memoryview] = []
        for value in values:
            rows = yield from elements(value, MAX_BYTES - len(inner))
            if rows is None:
                msg = f"input '{name}' has bytes in base64 and more than {MAX_BYTES} values; ask over gRPC"
                raise TooLarge(msg)
            inner += rows
            if pace.is_over(len(value)):
                yield
        values = inner
    parts: list[bytes] = []
    for value in values:
        content = yield from _element(name, value)
        parts += (sum(map(len, content)).to_bytes(4, "little"), *content)
        if pace.is_over(len(value)):
            yield
    return (yield from joined(parts))


def _element(name: str, data: memoryview) -> Steps[list[bytes]]:
    """Return the parts of a text, or of what an object stands for.

    Raises:
        msgspec.DecodeError: If it is malformed.
        InvalidRequest: If it is neither.
    """
    parts: list[bytes] = []
    if bytes(data[:1]) == b"{":
        fields = yield from members(data, 1)
        if fields is None or fields.keys() != {"b64"}:
            raise no_bytes(name, "another object came")
        return (yield from _from_base64(name, fields["b64"]))
    try:
        for part in text_in_parts(data):
            parts.append(part.encode())
            yield
    except msgspec.ValidationError as error:
        raise no_bytes(name, str(error)) from None
    return parts


def _from_base64(name: str, data: memoryview) -> Steps[list[bytes]]:
    parts: list[bytes] = []
    carry = ""
    try:
        for part in text_in_parts(data):
            carry += part
            end = carry.find("=")
            if end >= 0 and carry[end:].strip("="):
                raise binascii.Error("something follows its padding")
            whole = (len(carry) if end < 0 else end) // 4 * 4
            parts.append(unpacked(carry[:whole]))
            carry = carry[whole:].rstrip("=") + "=" * (end >= 0)
            yield
        return [*parts, unpacked(carry)]
    except ValueError as error:  # what is not text is one, what base64 says, and characters beyond ASCII
        raise no_base64(name, error) from None


def unpacked(text: str) -> bytes:
    """Return what is in base64, with padding or without; raise ValueError if nothing is."""
    text = text.rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def no_base64(name: str, why: Exception) -> InvalidRequest:
    """Return the error of bytes that are none."""
    return InvalidRequest(f"input '{name}': expected base64 in b64: {why}")


def no_bytes(name: str, found: str) -> InvalidRequest:
    """Return the error of what is neither a text nor bytes."""
    return InvalidRequest(f'input \'{name}\' takes texts, or bytes as {{"b64": "..."}}; {found}')
