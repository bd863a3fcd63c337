# SPDX-License-Identifier: Apache-2.0
"""The data types of tensors: their names, how they lie in memory, and where protobuf's typed contents hold them."""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.errors import ValidationError, nearest


class DType(msgspec.Struct, frozen=True):
    """One data type.

    Attributes:
        name: What the protocol calls it.
        numpy: NumPy's name of it, little-endian. BF16 is held as its 16 bits; elements of BYTES are objects.
        size: Bytes of an element; 0 for BYTES, whose elements tell their own length.
        contents: Field of the typed contents; empty where only raw contents exist.
    """

    name: str
    numpy: str
    size: int
    contents: str


DTYPES: Final = {
    dtype.name: dtype
    for dtype in (
        DType("BOOL", "|b1", 1, "bool_contents"),
        DType("UINT8", "|u1", 1, "uint_contents"),
        DType("UINT16", "<u2", 2, "uint_contents"),
        DType("UINT32", "<u4", 4, "uint_contents"),
        DType("UINT64", "<u8", 8, "uint64_contents"),
        DType("INT8", "|i1", 1, "int_contents"),
        DType("INT16", "<i2", 2, "int_contents"),
        DType("INT32", "<i4", 4, "int_contents"),
        DType("INT64", "<i8", 8, "int64_contents"),
        DType("FP16", "<f2", 2, ""),
        DType("BF16", "<u2", 2, ""),
        DType("FP32", "<f4", 4, "fp32_contents"),
        DType("FP64", "<f8", 8, "fp64_contents"),
        DType("BYTES", "|O", 0, "bytes_contents"),
    )
}
"""By their names."""

BY_NUMPY: Final = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype.name != "BF16"}
"""By NumPy's names, as `numpy.dtype.str` gives them on a little-endian machine."""


def dtype_of(name: str) -> DType:
    """Return a data type by its name.

    Raises:
        ValidationError: If the protocol has none of this name.
    """
    found = DTYPES.get(name)
    if found is None:
        hint = nearest(name, [known.lower() for known in DTYPES])
        did_you_mean = f"; did you mean '{hint.upper()}'?" if hint else ""
        msg = f"'{name}' is no data type of the protocol, which has {', '.join(DTYPES)}{did_you_mean}"
        raise ValidationError(msg)
    return found
