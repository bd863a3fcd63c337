# SPDX-License-Identifier: Apache-2.0
"""The data types of tensors, and what everybody calls them.

A row for each type. Memory is little-endian everywhere: on the wire, and on the machines that forebay runs on.
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.errors import ValidationError
from forebay.types.did_you_mean import nearest


class DataType(msgspec.Struct, frozen=True):
    """One data type.

    Attributes:
        name: What the Open Inference Protocol calls it, and we do.
        size: Bytes of an element; 0 for BYTES, whose elements tell their own length.
        struct: Its letter in `struct` and in the formats of buffers; empty if it has none.
        numpy: NumPy's name of it. BF16 is held as its 16 bits; for BYTES it is "str", and arrays hold objects.
        openvino: What OpenVINO calls it.
        onnx: What ONNX calls it.
        tensorflow: Its number in TensorFlow.
        tensorflow_name: Its name there, without `DT_`.
        paddle: Its number in Paddle Serving; None if it has none. NumPy's uint16 is sent there as bits of a BF16.
    """

    name: str
    size: int
    struct: str
    numpy: str
    openvino: str
    onnx: str
    tensorflow: int
    tensorflow_name: str
    paddle: int | None


DATATYPES: Final = {
    row.name: row
    for row in (
        DataType("BOOL", 1, "?", "bool", "boolean", "bool", 10, "BOOL", 9),
        DataType("UINT8", 1, "B", "uint8", "u8", "uint8", 4, "UINT8", 7),
        DataType("UINT16", 2, "H", "uint16", "u16", "uint16", 17, "UINT16", None),
        DataType("UINT32", 4, "I", "uint32", "u32", "uint32", 22, "UINT32", None),
        DataType("UINT64", 8, "Q", "uint64", "u64", "uint64", 23, "UINT64", None),
        DataType("INT8", 1, "b", "int8", "i8", "int8", 6, "INT8", 8),
        DataType("INT16", 2, "h", "int16", "i16", "int16", 5, "INT16", 4),
        DataType("INT32", 4, "i", "int32", "i32", "int32", 3, "INT32", 2),
        DataType("INT64", 8, "q", "int64", "i64", "int64", 9, "INT64", 0),
        DataType("FP16", 2, "e", "float16", "f16", "float16", 19, "HALF", 5),
        DataType("BF16", 2, "", "uint16", "bf16", "bfloat16", 14, "BFLOAT16", 6),
        DataType("FP32", 4, "f", "float32", "f32", "float", 1, "FLOAT", 1),
        DataType("FP64", 8, "d", "float64", "f64", "double", 2, "DOUBLE", 3),
        DataType("BYTES", 0, "", "str", "string", "string", 7, "STRING", 20),
    )
}
"""By their names."""

BY_NUMPY: Final = {row.numpy: row for row in DATATYPES.values() if row.name != "BF16"}
BY_OPENVINO: Final = {row.openvino: row for row in DATATYPES.values()}
BY_ONNX: Final = {row.onnx: row for row in DATATYPES.values()}
BY_TENSORFLOW: Final = {row.tensorflow: row for row in DATATYPES.values()}
BY_PADDLE: Final = {row.paddle: row for row in DATATYPES.values() if row.paddle is not None}


def datatype_of(name: str, tensor: str = "", expected: str = "") -> DataType:
    """Return a data type by its name.

    Args:
        tensor: Whose it is said to be, for the message.
        expected: What it should be, where only one is possible.

    Raises:
        ValidationError: If there is none of this name.
    """
    found = DATATYPES.get(name)
    if found is None:
        hint = nearest(name, [known.lower() for known in DATATYPES])
        did_you_mean = f"; did you mean '{hint.upper()}'?" if hint else ""
        what = f"tensor '{tensor[:80]}': " if tensor else ""
        known = expected or f"a data type ({', '.join(DATATYPES)})"
        raise ValidationError(f"{what}expected {known}, got '{name[:80]}'{'' if expected else did_you_mean}")
    return found


def holds(wide: DataType, narrow: DataType) -> bool:
    """Tell whether every value of one type is one of another, so that it can be cast in silence."""
    if wide is narrow:
        return True
    to, of = (row.name.rstrip("0123456789") for row in (wide, narrow))
    if {to, of} & {"BOOL", "BYTES"} or wide.name == "BF16":
        return False
    if of == "FP" or narrow.name == "BF16":
        return to == "FP" and wide.size > narrow.size
    return (to == of or (of, to) == ("UINT", "INT") or to == "FP") and wide.size > narrow.size
