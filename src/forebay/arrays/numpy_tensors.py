# SPDX-License-Identifier: Apache-2.0
"""Tensors from and to NumPy arrays. Nothing is copied where the memory is laid out as tensors want it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.arrays.json_lists import values_in_parts
from forebay.errors import InvalidRequest, NotPrepared, ValidationError
from forebay.types.datatypes import BY_NUMPY, DataType, datatype_of
from forebay.types.element_limits import at_once
from forebay.types.json_segments import joined
from forebay.types.tensor import Data, Tensor, check_size, elements, join_elements, split_elements

if TYPE_CHECKING:
    import numpy as np
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
        NotPrepared: If NumPy is not installed.
    """
    try:
        import numpy as np
    except ImportError:  # forebay itself does without
        msg = "tensors need NumPy, which is not installed where the model runs: pip install numpy"
        raise NotPrepared(msg) from None
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


def texts_or_bytes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of objects with those `bytes` as texts that are UTF-8: a file's strings hold either."""
    import numpy as np

    found = np.empty(array.size, object)
    found[:] = [_text_or_bytes(one) for one in array.flat]
    return found.reshape(array.shape)


def _text_or_bytes(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def as_raw(tensor: Tensor) -> Tensor:
    """Read a list in JSON, flat or nested; a tensor that is no such list is returned as it is.

    Raises:
        ValidationError: If it is none of the tensor's type and shape.
    """
    return at_once(raw_in_steps(tensor))


def raw_in_steps(tensor: Tensor) -> Generator[None, None, Tensor]:
    """Convert a tensor in steps of a millisecond or so; raises as `as_raw` does."""
    if not tensor.is_json:
        return tensor
    datatype = datatype_of(tensor.datatype)
    count = elements(tensor.name, tensor.shape, datatype.size or 4)
    parts: list[Data] = []
    found = 0
    for flat in values_in_parts(tensor, _kind_of(datatype)):
        if parts:
            yield
        found += len(flat)
        parts.append(_packed(tensor, datatype, flat) if datatype.size else join_elements(tensor.name, flat))
    if found != count:
        raise ValidationError(
            f"tensor '{tensor.name}' of the shape {list(tensor.shape)}: expected {count} elements, got {found}"
        )
    data = parts[0] if len(parts) == 1 else (yield from joined(parts))
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _packed(tensor: Tensor, datatype: DataType, flat: list[Any]) -> Data:
    """Return numbers as they lie in memory; raises a `ValidationError` if one is none of the type."""
    import numpy as np

    try:
        with np.errstate(over="raise"):
            data = np.array(flat, np.float64 if _kind_of(datatype) is float else datatype.numpy)
            if datatype.name == "BF16":
                data = bits_of(data.astype(np.float32))
            return data.astype(datatype.numpy, copy=False).data.cast("B")
    except (OverflowError, FloatingPointError):
        raise ValidationError(f"tensor '{tensor.name}' holds a number that does not fit {datatype.name}") from None


def _kind_of(datatype: DataType) -> type:
    return _KINDS[datatype.name.rstrip("0123456789")]


def numbers_of(array: npt.NDArray[Any], datatype: str) -> npt.NDArray[Any]:
    """Return the numbers that the bits of BF16 mean; everything else means itself."""
    import numpy as np

    return (array.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else array


def bits_of(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return numbers as the bits of BF16."""
    import numpy as np

    return (array.view(np.uint32) >> 16).astype(np.uint16)


def as_json(tensor: Tensor) -> Tensor:
    """Write a tensor as a flat list in JSON; raises an `InvalidRequest` if JSON cannot say it."""
    array = to_array(tensor)
    if tensor.datatype in {"FP16", "BF16"}:
        raise _unsayable(tensor, f"is {tensor.datatype}")
    values: list[Any] = array.ravel().tolist()
    if array.dtype.kind == "f":
        import numpy as np

        if not np.isfinite(array).all():
            raise _unsayable(tensor, "holds NaN or an infinity")
    elif array.dtype.kind == "O":
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError:
            raise _unsayable(tensor, "holds bytes that are not UTF-8") from None
    return Tensor(tensor.name, tensor.datatype, tensor.shape, msgspec.json.encode(values), is_json=True)


_KINDS: Final = {"BOOL": bool, "UINT": int, "INT": int, "FP": float, "BF": float, "BYTES": str}


def _unsayable(tensor: Tensor, why: str) -> InvalidRequest:
    return InvalidRequest(f"output '{tensor.name}' {why}, which JSON cannot express; ask for it as binary")
