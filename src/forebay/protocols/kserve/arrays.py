# SPDX-License-Identifier: Apache-2.0
"""Tensors from and to NumPy arrays. Nothing is copied where the memory is laid out as the protocol wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ValidationError
from forebay.protocols.kserve.calls import Data, Tensor, check_size, elements
from forebay.protocols.kserve.dtypes import BY_NUMPY, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


def from_array(name: str, array: npt.NDArray[Any], datatype: str | None = None) -> Tensor:
    """Make a tensor.

    Args:
        name: Which input it is.
        array: Its elements. Texts, bytes and objects of these become BYTES.
        datatype: What it is sent as, for BF16, which NumPy has no name for; None takes the array's own type.

    Raises:
        ValidationError: If the protocol has no such type.
    """
    import numpy as np

    if array.dtype.kind in "USO":
        return Tensor(name, "BYTES", array.shape, join_elements(name, array.ravel().tolist()))
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)
    if datatype is None:
        known = BY_NUMPY.get(array.dtype.str)
        if known is None:
            msg = f"array '{name}' is of {array.dtype}, which the protocol has no data type for; cast it to one it has"
            raise ValidationError(msg)
        datatype = known.name
    check_size(name, datatype, array.shape, array.nbytes)
    return Tensor(name, datatype, array.shape, array.reshape(-1).view(np.uint8).data)


def to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the tensor as an array that cannot be written to, since it may lie in the message that brought it.

    BF16 comes as its 16 bits; BYTES as an array of `bytes` objects.

    Raises:
        ValidationError: If shape and data do not agree, or the type is not known.
    """
    import numpy as np

    dtype = dtype_of(tensor.datatype)
    check_size(tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
    if dtype.size:
        array = np.frombuffer(tensor.data, dtype.numpy)
    else:
        count = elements(tensor.name, tensor.shape)
        found = list(split_elements(tensor.name, tensor.data, count))
        array = np.empty(count, object)
        array[:] = found
    array = array.reshape(tensor.shape)
    array.flags.writeable = False
    return array


def join_elements(name: str, values: Sequence[object]) -> bytes:
    """Return elements of BYTES, each behind its length; texts as UTF-8.

    Raises:
        ValidationError: If one is neither text nor bytes.
    """
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, str):
            data = value.encode()
        elif isinstance(value, (bytes, bytearray)):
            data = bytes(value)
        else:
            msg = f"array '{name}' holds {type(value).__name__}; elements of BYTES are texts or bytes"
            raise ValidationError(msg)
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)


def split_elements(name: str, data: Data, count: int) -> Iterator[bytes]:
    """Yield elements of BYTES.

    Raises:
        ValidationError: If there are not exactly `count`.
    """
    found = 0
    for element in _lengths_read(name, memoryview(cast("bytes", data))):
        found += 1
        if found > count:
            break
        yield element
    if found != count:
        some = "more" if found > count else str(found)
        msg = f"tensor '{name}' has {count} elements by its shape, and {some} came"
        raise ValidationError(msg)


def _lengths_read(name: str, data: memoryview) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data):
            msg = f"tensor '{name}' ends in the middle of an element at byte {at}"
            raise ValidationError(msg)
        yield bytes(data[at + 4 : end])
        at = end
