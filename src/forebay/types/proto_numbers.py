# SPDX-License-Identifier: Apache-2.0
"""Numbers of protobuf: varints, and those that repeat as an array, a part at a time, each an object for a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy.typing as npt

    from forebay.types.element_limits import Data

_PART: Final = 16 * 1024


def array_in_parts(values: Sequence[Any], kind: str) -> npt.NDArray[Any]:
    """Return numbers as an array whose dtype, `kind`, can hold all of them."""
    import numpy as np

    array = np.empty(len(values), kind)
    for at in range(0, len(values), _PART):
        array[at : at + _PART] = values[at : at + _PART]
    return array


def read_varint(data: Data, at: int, end: int) -> tuple[int, int]:
    """Read a varint; returns it, and where it ends, which is beyond the end of the data if it breaks off."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, end + 1


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it; one below 0 as its 64 bits."""
    if 0 <= value < 0x80:
        return _SHORT[value]
    found = bytearray()
    value &= 0xFFFFFFFFFFFFFFFF
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_SHORT: Final = [bytes([value]) for value in range(0x80)]
