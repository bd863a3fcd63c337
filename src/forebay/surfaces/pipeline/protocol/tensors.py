# SPDX-License-Identifier: Apache-2.0
"""Arrays in Tensor messages.

    elem_type  0      1     2      3     4      5     6       7      8     9     12    13
    dtype      int64  f32   int32  f64   int16  f16   uint16  uint8  int8  bool  text  .npy bytes

A Tensor has no field for narrow types: they travel in that of a wider one. Type 6 is bfloat16, which NumPy lacks;
its bits are a uint16.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection
from typing import Any, Final

from forebay.errors import InvalidRequest
from forebay.types.datatypes import BY_PADDLE

RPC_PACKAGE_ERROR: Final = 8000
"""The code of a request that cannot be unpacked."""

MAX_TENSORS: Final = 1_024
"""Tensors of a request, however little there is in them."""

STRING: Final = 12
BYTES: Final = 13

FIELDS: Final = {
    number: (BY_PADDLE[number].numpy, f"{kind}_data")
    for number, kind in enumerate(
        ("int64", "float", "int", "float64", "int", "float", "uint32", "uint32", "int", "bool")
    )
}
"""The type of each number, and the field that its elements are in."""
_TYPES: Final = {dtype: elem_type for elem_type, (dtype, _) in FIELDS.items()}
_UNSUPPORTED: Final = {10: "complex64", 11: "complex128"}

_NPY_MAGIC: Final = b"\x93NUMPY"
_MAX_NPY_HEADER: Final = 10_000


def unpack_all(tensors: Collection[Any]) -> dict[str, Any]:
    """Return the arrays and texts of Tensors by name, and their levels of detail as `<name>.lod`.

    Raises:
        InvalidRequest: If one cannot be read, or there are too many; its detail has the number of the error.
    """
    if len(tensors) > MAX_TENSORS:
        msg = f"the request has {len(tensors)} tensors; at most {MAX_TENSORS} are read"
        raise InvalidRequest(msg, detail={"err_no": RPC_PACKAGE_ERROR, "product": False})
    values: dict[str, Any] = {}
    for tensor in tensors:
        values[tensor.name], lod = unpack(tensor)
        if lod is not None:
            values[f"{tensor.name}.lod"] = lod
    return values


def unpack(tensor: Any) -> tuple[Any, Any]:
    """Return the array or text of one Tensor, and its levels of detail or None.

    Raises:
        InvalidRequest: If it cannot be read; its detail has the number of the error.
    """
    return _value(tensor), _lod(tensor) if tensor.lod else None


def pack(tensor: Any, name: str, value: Any, *, lod: Any = None, as_npy: bool = False) -> None:
    """Fill a Tensor with an array, with what NumPy makes one of, or with a text.

    Args:
        tensor: The message, empty.
        as_npy: Write the array as the bytes of an `.npy` file.

    Raises:
        TypeError: If there is no type for its elements.
    """
    import numpy as np

    tensor.name = name
    if isinstance(value, str):
        tensor.elem_type = STRING
        tensor.shape.append(1)
        tensor.str_data.append(value)
    else:
        array = np.asarray(value)
        elem_type = _TYPES.get(array.dtype.name)
        if elem_type is None:
            raise TypeError(f"'{name}' is an array of {array.dtype}; {', '.join(_TYPES)} and texts can be sent")
        tensor.shape.extend(array.shape)
        if as_npy:
            tensor.elem_type = BYTES
            tensor.byte_data = _npy(array)
        else:
            tensor.elem_type = elem_type
            getattr(tensor, FIELDS[elem_type][1]).extend(array.ravel().tolist())
    if lod is not None:
        tensor.lod.extend(np.asarray(lod, dtype=np.int32).ravel().tolist())


def _value(tensor: Any) -> Any:
    elem_type: int = tensor.elem_type
    if elem_type == STRING:
        return "".join(tensor.str_data)
    if elem_type == BYTES:
        return _from_npy(tensor)
    found = FIELDS.get(elem_type)
    if found is None:
        kind = _UNSUPPORTED.get(elem_type, f"type {elem_type}")
        raise _refused(tensor, f"is of {kind}, which is not supported; {', '.join(_TYPES)}, texts and .npy bytes are")
    return _array(tensor, *found)


def _array(tensor: Any, dtype: str, field: str) -> Any:
    import numpy as np

    given = np.array(getattr(tensor, field))
    target = np.dtype(dtype)
    if target.kind in "iu" and given.size:
        bounds = np.iinfo(target)
        lowest, highest = int(given.min()), int(given.max())
        if lowest < bounds.min or highest > bounds.max:
            raise _refused(
                tensor, f"holds {lowest if lowest < bounds.min else highest}, which is out of range for {dtype}"
            )
    with np.errstate(over="ignore"):
        array = given.astype(target, copy=False)
    shape = _shape(tensor, array.size)
    if not shape and array.size != 1:
        return array
    if math.prod(shape) != array.size:
        raise _refused(tensor, f"has {array.size} elements, its shape {shape} needs {math.prod(shape)}")
    return array.reshape(shape)


def _shape(tensor: Any, elements: int) -> tuple[int, ...]:
    """Return a shape; one size may be -1 and follows from the number of elements."""
    shape = tuple(tensor.shape)
    if len(shape) > 32 or any(size < -1 for size in shape) or shape.count(-1) > 1:
        allowed = "a shape has at most 32 sizes >= 0, one of which may be -1"
        raise _refused(tensor, f"has the shape {shape[:33]}; {allowed}")
    if -1 in shape:
        others = -math.prod(shape)
        if not others or elements % others:
            raise _refused(tensor, f"has {elements} elements, which its shape {shape} cannot hold")
        shape = tuple(elements // others if size == -1 else size for size in shape)
    return shape


def _lod(tensor: Any) -> Any:
    import numpy as np

    lod = np.array(tensor.lod, dtype=np.int32)
    if lod.size % 2:
        raise _refused(tensor, f"has a lod of {lod.size} numbers; they stand in two rows of equal length")
    return lod.reshape(2, -1)


def _npy(array: Any) -> bytes:
    import numpy as np

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _from_npy(tensor: Any) -> Any:
    """Read an `.npy` file without unpickling, and without making room for more than it holds."""
    import numpy as np

    data: bytes = tensor.byte_data
    head = _npy_head(data)
    if head is None:
        raise _refused(tensor, "has bytes that are not an .npy file")
    dtype, shape, is_fortran, start = head
    if dtype.hasobject:
        raise _refused(tensor, "holds pickled objects, which are never read")
    if dtype.kind not in "biufcUS" or not dtype.itemsize:
        raise _refused(tensor, f"is of {dtype}; numbers, booleans and texts are read")
    needed, there = math.prod(shape) * dtype.itemsize, len(data) - start
    if needed != there:
        raise _refused(tensor, f"has the shape {shape}, which takes {needed} bytes, and {there} bytes")
    array = np.frombuffer(data, dtype=dtype, offset=start) if there else np.zeros(0, dtype=dtype)
    return array.reshape(shape, order="F" if is_fortran else "C").copy()


def _npy_head(data: bytes) -> tuple[Any, tuple[int, ...], bool, int] | None:
    """Return dtype, shape, order and where the elements start."""
    from numpy.lib import format as npy

    if not data.startswith(_NPY_MAGIC) or len(data) < 12:
        return None
    version = data[6], data[7]
    size = 2 if version == (1, 0) else 4
    length = int.from_bytes(data[8 : 8 + size], "little")
    start = 8 + size + length
    if length > _MAX_NPY_HEADER or start > len(data):
        return None
    file = io.BytesIO(data[8:start])
    try:
        if version == (1, 0):
            shape, is_fortran, dtype = npy.read_array_header_1_0(file, max_header_size=_MAX_NPY_HEADER)
        elif version == (2, 0):
            shape, is_fortran, dtype = npy.read_array_header_2_0(file, max_header_size=_MAX_NPY_HEADER)
        else:
            return None
    except Exception:  # noqa: BLE001 - the header is parsed as a literal, which fails in every way there is
        return None
    return (dtype, shape, is_fortran, start) if len(shape) <= 32 and min(shape, default=0) >= 0 else None


def _refused(tensor: Any, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the tensor '{tensor.name[:100]}' {why}", detail={"err_no": RPC_PACKAGE_ERROR, "product": False}
    )
