# SPDX-License-Identifier: Apache-2.0
"""Answers of TensorFlow Serving in JSON: rows (`predictions`), columns (`outputs`), classes and values (`results`).

Bytes that are not text stand as `{"b64": "..."}`, and so does what an output holds whose name ends in `_bytes`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.arrays import json_numbers
from forebay.arrays.numpy_tensors import to_array
from forebay.errors import InvalidRequest
from forebay.serving.models.tensor_codec import plain_array

if TYPE_CHECKING:
    import numpy.typing as npt

    from forebay.types.tensor import Tensor

BYTES_SUFFIX: Final = "_bytes"
"""How outputs are called whose texts are told as bytes."""
_ROWS: Final = 4096
"""Rows that are written at a time."""


def encode_rows(tensors: Sequence[Tensor]) -> bytes:
    """Write outputs as rows along their first axis; a single one goes without its name.

    Raises:
        InvalidRequest: If they have no such axis, or unlike numbers of rows.
    """
    count = tensors[0].shape[0] if tensors[0].shape else 0
    for one in tensors:
        if one.shape[:1] != (count,):
            raise InvalidRequest(
                f"output '{one.name}': expected {count} as the first axis, as in the other outputs, got the shape "
                f"{list(one.shape)}; send `inputs` instead of `instances`"
            )
    if len(tensors) == 1:
        return b'{"predictions":%b}' % _written(tensors[0])
    columns = {one.name: _array(one) for one in tensors}
    parts: list[bytes] = []
    for at in range(0, count, _ROWS):
        listed = [json_numbers.listed(array[at : at + _ROWS]) for array in columns.values()]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*listed, strict=True)]
        parts.append(msgspec.json.encode(rows)[1:-1])
    return b'{"predictions":[%b]}' % b",".join(parts)


def encode_columns(tensors: Sequence[Tensor]) -> bytes:
    """Write outputs as columns; a single one goes without its name."""
    columns = {one.name: msgspec.Raw(_written(one)) for one in tensors}
    return msgspec.json.encode({"outputs": next(iter(columns.values())) if len(columns) == 1 else columns})


def bare(result: bytes, name: str) -> bytes:
    """Return the value of the only field of an object in JSON, or what is none as it is."""
    start = b'{"%s":' % name.encode()
    return result[len(start) : -1] if result.startswith(start) else result


def columns_in_lists(outputs: list[Tensor]) -> list[Tensor]:
    """Write the numbers of a slice as lists in JSON, for `encode_columns`; the form of BYTES depends on all of them."""
    return [
        one if one.datatype == "BYTES" else msgspec.structs.replace(one, data=_written(one), is_json=True)
        for one in outputs
    ]


def rows_in_lists(outputs: list[Tensor]) -> list[Tensor]:
    """Write the numbers of a slice for `encode_rows`, which puts several outputs together row by row."""
    return columns_in_lists(outputs) if len(outputs) == 1 else outputs


def _written(tensor: Tensor) -> bytes:
    """Write a tensor as lists in lists."""
    if tensor.is_json:
        return bytes(tensor.data)
    array = _array(tensor)
    return json_numbers.written(array) if array.dtype.kind != "O" else msgspec.json.encode(array.tolist())


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array: of numbers, of truth values, or of what BYTES are in JSON."""
    import numpy as np

    if tensor.datatype != "BYTES":
        return plain_array(tensor)
    found = to_array(tensor)
    if tensor.name.endswith(BYTES_SUFFIX) or not all(map(_is_text, found.ravel())):
        told: list[Any] = [{"b64": base64.b64encode(value).decode()} for value in found.ravel()]
    else:
        told = [value.decode() for value in found.ravel()]
    flat = np.empty(len(told), object)
    flat[:] = told
    return flat.reshape(found.shape)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def encode_classes(rows: Sequence[Sequence[tuple[str, float]]]) -> bytes:
    """Write what `classify` answers."""
    scores = iter(_scores([score for row in rows for _, score in row]))
    return msgspec.json.encode({"results": [[(label, next(scores)) for label, _ in row] for row in rows]})


def encode_values(values: Sequence[float]) -> bytes:
    """Write what `regress` answers."""
    return msgspec.json.encode({"results": _scores(values)})


def _scores(values: Sequence[float]) -> list[Any]:
    """Return numbers as the protocol has them, of 32 bits, and as they are written."""
    import numpy as np

    with np.errstate(over="ignore"):
        return json_numbers.listed(np.array(values, np.float32))
