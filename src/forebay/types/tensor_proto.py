# SPDX-License-Identifier: Apache-2.0
"""Tensors from and to TensorFlow's `TensorProto`.

What comes may lie in memory as it is (`tensor_content`), or element by element in the field of its type. There the
last element stands for all that are missing, and none for zeros, which is how TensorFlow fills tensors; what is filled
so is bounded, for a message of a few bytes may say any shape. What goes is written element by element, since that is
what clients read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from forebay.errors import ValidationError
from forebay.types.datatypes import BY_TENSORFLOW, DataType, datatype_of
from forebay.types.proto_numbers import array_in_parts, varint
from forebay.types.proto_texts import split_texts
from forebay.types.tensor import Tensor, check_size, element_ends, elements, join_elements, split_elements
from forebay.types.tensorflow_messages import TENSORFLOW, TYPE_NAMES

MAX_FILLED_BYTES: Final = 16 * 1024 * 1024
"""How large tensors may be together of which not all elements came, in one request."""
_TEXT_BYTES: Final = 64
"""What a text counts at least that is filled in: each is an object on its way."""

_FIELDS: Final = {
    "FP32": "float_val",
    "FP64": "double_val",
    **dict.fromkeys(("UINT8", "UINT16", "INT8", "INT16", "INT32"), "int_val"),
    **dict.fromkeys(("FP16", "BF16"), "half_val"),
    "INT64": "int64_val",
    "UINT32": "uint32_val",
    "UINT64": "uint64_val",
    "BOOL": "bool_val",
    "BYTES": "string_val",
}
_TEXTS: Final = 8
"""The number of `string_val`."""
_AS_IN_MEMORY: Final = {"FP32": b"\x2a", "FP64": b"\x32", "BOOL": b"\x5a"}
"""How the fields begin on the wire whose elements lie there as in memory."""


class Room:
    """How many bytes may still be filled in one request."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        """Begin with all of them."""
        self.left = MAX_FILLED_BYTES


class _Texts(msgspec.Struct, frozen=True):
    """Elements of BYTES that were taken out of a message."""

    count: int
    data: bytearray


def tensor_in(name: str, message: bytes, room: Room | None = None) -> Tensor:
    """Return the tensor that a serialized message holds; objects are made of a part of its texts at a time.

    Raises:
        ValidationError: As `tensor_of`, or if it is no such message.
    """
    count, data, rest = split_texts(message, _TEXTS)
    proto = TENSORFLOW.parsed("TensorProto", rest)
    if not count or proto.string_val:  # some were written in a way that nobody writes them
        return tensor_of(name, TENSORFLOW.parsed("TensorProto", message) if count else proto, room)
    proto.string_val.append(b"")  # stands for them
    return tensor_of(name, proto, room, _Texts(count, data))


def tensor_of(name: str, proto: Any, room: Room | None = None, texts: _Texts | None = None) -> Tensor:
    """Return the tensor that a message holds.

    Args:
        room: What is left for it to be filled, if others of its request may be filled as well.
        texts: Its texts, if they were taken out of it.

    Raises:
        ValidationError: If it contradicts itself, or is of a type that we have not.
    """
    datatype = datatype_by_number(name, proto.dtype)
    if proto.tensor_shape.unknown_rank:
        raise ValidationError(f"tensor '{name}' says no shape; a tensor on its way has one")
    shape = tuple(axis.size for axis in proto.tensor_shape.dim)
    field = _FIELDS[datatype.name]
    for other, _ in proto.ListFields():
        if other.name.endswith("_val") and (other.name != field or proto.tensor_content):
            instead = "tensor_content" if proto.tensor_content else field
            raise ValidationError(
                f"tensor '{name}' of {TYPE_NAMES[proto.dtype]} has its elements in {instead}; it came with {other.name}"
            )
    if proto.tensor_content:
        if not datatype.size:
            raise ValidationError(f"tensor '{name}' of DT_STRING has its elements in string_val, not in tensor_content")
        check_size(name, datatype.name, shape, len(proto.tensor_content))
        return Tensor(name, datatype.name, shape, proto.tensor_content)
    values = getattr(proto, field)
    data = _elements(name, datatype, shape, values, room or Room(), texts if field == "string_val" else None)
    return Tensor(name, datatype.name, shape, data)


def put(into: Any, tensor: Tensor) -> None:
    """Write a tensor that lies in memory into a message, element by element."""
    import numpy as np

    datatype = datatype_of(tensor.datatype)
    into.dtype = datatype.tensorflow
    into.tensor_shape.SetInParent()
    for axis in tensor.shape:
        into.tensor_shape.dim.add(size=axis)
    field = _FIELDS[datatype.name]
    if begin := _AS_IN_MEMORY.get(datatype.name):
        into.MergeFromString(b"".join((begin, varint(len(tensor.data)), tensor.data)))
    elif datatype.size:
        bits = "uint16" if field == "half_val" else datatype.numpy
        getattr(into, field).extend(np.frombuffer(tensor.data, bits).tolist())
    else:
        count = elements(tensor.name, tensor.shape)
        into.string_val.extend(split_elements(tensor.name, tensor.data, count))


def datatype_by_number(name: str, number: int) -> DataType:
    """Return the type of a tensor; raises a `ValidationError` if it is none of ours."""
    found = BY_TENSORFLOW.get(number)
    if found is None:
        known = ", ".join(TYPE_NAMES[one] for one in BY_TENSORFLOW)
        msg = f"tensor '{name}' is of {TYPE_NAMES.get(number, number)}, which is not taken here; {known} are"
        raise ValidationError(msg)
    return found


def _elements(
    name: str, datatype: DataType, shape: Sequence[int], values: Any, room: Room, texts: _Texts | None
) -> bytes | memoryview:
    """Return elements that came one by one, as they lie in memory.

    Raises:
        ValidationError: If there are more than the shape says, too few, or some that do not fit the type.
    """
    import numpy as np

    if not datatype.size and texts is None:
        texts = _Texts(len(values), bytearray(join_elements(name, values)))
    count, came = elements(name, shape, datatype.size or 4), len(values) if texts is None else texts.count
    said = f"tensor '{name}' of {TYPE_NAMES[datatype.tensorflow]}{list(shape)}"
    if came > count:
        raise ValidationError(f"{said} has {count} elements by its shape, and {came} came; shape and data must agree")
    longest, last = datatype.size or _TEXT_BYTES, b"\0\0\0\0"
    if came < count:
        if texts is not None:
            at = 0
            for end in element_ends(name, memoryview(texts.data), came):
                longest, last, at = max(longest, end - at), texts.data[at:end], end
        if count * longest > room.left:
            raise ValidationError(
                f"{said} has {count} elements by its shape, and {came} came; up to {MAX_FILLED_BYTES} bytes are filled "
                "in all tensors of a request, and a text counts as 64 at least"
            )
        room.left -= count * longest
    if texts is not None:
        texts.data.extend(last * (count - came))
        return memoryview(texts.data).toreadonly()
    if datatype.name in _AS_IN_MEMORY and came == count:
        return _written(_FIELDS[datatype.name], values)
    is_half = _FIELDS[datatype.name] == "half_val"
    kind = "uint16" if is_half else datatype.numpy
    wide = array_in_parts(values, kind if datatype.size >= 4 else "int64")
    if datatype.size < 4:
        limits = np.iinfo(kind) if kind != "bool" else None
        if limits is not None and came and (wide.min() < limits.min or wide.max() > limits.max):
            raise ValidationError(f"{said} has elements that do not fit its type")
    array = wide.astype(kind, copy=False)
    if came < count:
        array = np.concatenate([array, np.full(count - came, array[-1] if came else 0, kind)])
    return array.view(np.uint8).data


def _written(field: str, values: Any) -> memoryview:
    """Return the elements of a field as they lie on the wire."""
    bare = TENSORFLOW.classes().TensorProto()
    getattr(bare, field).MergeFrom(values)
    data = memoryview(bare.SerializeToString())
    at = 1
    while data and data[at] >= 0x80:  # their length
        at += 1
    return data[at + 1 :]
