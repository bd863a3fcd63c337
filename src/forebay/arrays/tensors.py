# SPDX-License-Identifier: Apache-2.0
"""Tensors from and to NumPy arrays. Nothing is copied where the memory is laid out as tensors want it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.errors import ValidationError
from forebay.types.datatypes import BY_NUMPY, datatype_of
from forebay.types.tensor import Tensor, check_size, elements, join_elements, split_elements

if TYPE_CHECKING:
    import numpy.typing as npt


def from_array(name: str, array: npt.NDArray[Any], datatype: str | None = None) -> Tensor:
    """Make a tensor.

    Args:
        name: Which input or output it is.
        array: Its elements. Texts, bytes and objects of these become BYTES.
        datatype: What it is sent as, for BF16, which NumPy has no name for; None takes the array's own type.

    Raises:
        ValidationError: If there is no such type.
    """
    import numpy as np

    if array.dtype.kind in "USO":
        return Tensor(name, "BYTES", array.shape, join_elements(name, array.ravel().tolist()))
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)
    if datatype is None:
        known = BY_NUMPY.get(array.dtype.name)
        if known is None:
            msg = f"array '{name}' is of {array.dtype}, which tensors have no data type for; cast it to one they have"
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

    datatype = datatype_of(tensor.datatype)
    check_size(tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
    if datatype.size:
        array = np.frombuffer(tensor.data, datatype.numpy)
    else:
        count = elements(tensor.name, tensor.shape)
        found = list(split_elements(tensor.name, tensor.data, count))
        array = np.empty(count, object)
        array[:] = found
    array = array.reshape(tensor.shape)
    array.flags.writeable = False
    return array
