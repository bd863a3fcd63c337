# SPDX-License-Identifier: Apache-2.0
"""An array on its way: named bytes with a type and a shape; `arrays.tensors` makes NumPy arrays of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, cast

import msgspec

from forebay.errors import ValidationError
from forebay.types.datatypes import datatype_of

Data = bytes | bytearray | memoryview

MAX_AXES: Final = 32
"""Axes of a tensor; no library has more."""
_MAX_BYTES: Final = 2**63 - 1
_LENGTH: Final = Struct("<I")


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """An array on its way.

    Attributes:
        name: Which input or output it is.
        datatype: One of `datatypes.DATATYPES`.
        shape: Its axes, the first one outermost.
        data: Its elements, row by row and little-endian. Each element of BYTES follows its length in 4 bytes.
        is_json: Whether `data` is the text of a list in JSON instead, flat or nested, that nobody has read yet.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Data
    is_json: bool = False


class TensorMetadata(msgspec.Struct, frozen=True):
    """What one input or output of a model looks like; an axis of -1 has any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def elements(name: str, shape: Sequence[int], size: int = 1) -> int:
    """Return how many elements a tensor has.

    Args:
        name: Which tensor it is, for messages.
        size: Bytes of an element.

    Raises:
        ValidationError: If no tensor has such a shape: an axis is negative, there are too many, no memory is as large.
    """
    if len(shape) > MAX_AXES:
        raise ValidationError(f"tensor '{name}': expected at most {MAX_AXES} axes, got {len(shape)}")
    smallest = min(shape, default=1)
    # Empty axes are left out, since libraries multiply the others all the same.
    count = math.prod(shape if smallest else [axis for axis in shape if axis])
    if smallest < 0 or count * size > _MAX_BYTES:
        found = str(list(shape))[:200]
        raise ValidationError(
            f"tensor '{name}' has the shape {found}; every axis must be 0 or more, all within 2^63 bytes"
        )
    return count if smallest else 0


def check_size(name: str, datatype: str, shape: Sequence[int], length_bytes: int) -> None:
    """Check that raw data is as long as its shape says; what BYTES holds is known only when it is read.

    Raises:
        ValidationError: With both lengths.
    """
    size = datatype_of(datatype, name).size
    expected = elements(name, shape, size or 4) * size
    if size and length_bytes != expected:
        raise ValidationError(
            f"tensor '{name}' of {datatype}{list(shape)}: expected {expected} bytes of data, got {length_bytes}; "
            "shape and data must agree"
        )


def join_elements(name: str, values: Iterable[object]) -> bytes:
    """Return elements of BYTES, each behind its length; texts as UTF-8.

    Raises:
        ValidationError: If one is neither text nor bytes.
    """
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, str):
            data = value.encode()
        elif isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(cast("bytes", value))
        else:
            raise ValidationError(f"tensor '{name}' holds {type(value).__name__}; elements of BYTES are texts or bytes")
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)


def split_elements(name: str, data: Data, count: int) -> Iterator[bytes]:
    """Yield elements of BYTES; raises a `ValidationError` if there are not exactly `count`."""
    view = memoryview(cast("bytes", data))
    at = 0
    for end in element_ends(name, view, count):
        yield bytes(view[at + 4 : end])
        at = end


def element_ends(name: str, data: memoryview, count: int) -> Iterator[int]:
    """Yield where each element of BYTES ends; raises a `ValidationError` if there are not exactly `count`."""
    at = found = 0
    size = len(data)
    length_at = _LENGTH.unpack_from
    while at < size:
        end = at + 4 + length_at(data, at)[0] if size - at >= _LENGTH.size else size + 1
        if end > size:
            raise ValidationError(f"tensor '{name}' ends in the middle of an element at byte {at}")
        found += 1
        if found > count:
            break
        at = end
        yield at
    if found != count:
        some = "more" if found > count else str(found)
        raise ValidationError(f"tensor '{name}' has {count} elements by its shape, and {some} came")
