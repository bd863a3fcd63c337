# SPDX-License-Identifier: Apache-2.0
"""What a handler gives `tensorflow_client.predict` and gets from it: arrays of what it says, and flat lists of results.

The lists are what protobuf writes of tensors as JSON, without their shape: whole numbers of 64 bits are texts, and
texts are base64. Handlers rely on that.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from forebay.surfaces.nucleus.shim import UserException
from forebay.types.did_you_mean import listed
from forebay.types.user_exceptions import answered

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array, Signature, Var


def arrays_of(
    signature: Signature, shapes: Mapping[str, Sequence[int] | None], given: Any, model: str, version: str
) -> dict[str, Array]:
    """Return what a model is given.

    Args:
        shapes: Of its inputs, -1 for any length; None for any shape.

    Raises:
        UserException: If an input is missing, unknown, or no array of its type and shape.
    """
    if not isinstance(given, Mapping):
        raise UserException(f"model_input is a mapping from names to values, and {type(given).__name__} came")
    values = cast("Mapping[str, Any]", given)
    names = [var.name for var in signature.feeds]
    for name in names:
        if name not in values:
            raise UserException(f"missing key '{name}' for model '{model}' of version '{version}'")
    if unknown := [str(name) for name in values if name not in names]:
        raise UserException(
            f"unknown key {listed(unknown)} for model '{model}' of version '{version}'; it takes {listed(names)}"
        )
    return {var.name: _array(var, shapes[var.name], values[var.name]) for var in signature.feeds}


def flat(array: Array) -> list[Any]:
    """Return what a handler gets of an output."""
    values: list[Any] = array.ravel().tolist()
    if array.dtype.kind in "OSU":
        return [base64.b64encode(one.encode() if isinstance(one, str) else one).decode() for one in values]
    if array.dtype.name in {"int64", "uint64"}:
        return list(map(str, values))
    return values


def _array(var: Var, shape: Sequence[int] | None, value: Any) -> Array:
    import numpy as np

    if shape:
        expected = f"expected shape {list(shape)}"
    elif shape is None:
        expected = "can be of any rank and shape"
    else:
        expected = "expected to be a scalar"

    def refuse(error: BaseException) -> NoReturn:
        raise UserException(f'key "{var.name}": {expected}', str(error)) from error

    array = answered(lambda: _cast(var, value), refuse)
    found = list(np.shape(array))
    fits = shape is None or (
        len(found) == len(shape) and all(want in {-1, axis} for axis, want in zip(found, shape, strict=True))
    )
    if not fits:
        raise UserException(f'key "{var.name}": {expected}', f"found shape {found}")
    return array


def _cast(var: Var, value: Any) -> Array:
    import numpy as np

    if var.dtype != "str":
        is_array = isinstance(value, np.ndarray)  # whose type may be wider, as that of Python's numbers is
        return cast("Any", value).astype(var.dtype) if is_array else np.array(value, var.dtype)
    array = np.array(value, object)
    for one in array.ravel():
        if not isinstance(one, str | bytes):
            raise TypeError(f"expected strings or bytes, got {type(one).__name__}")
    return array
