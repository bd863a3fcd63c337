# SPDX-License-Identifier: Apache-2.0
"""Typed contents: elements one by one in a message of protobuf, of those who do not send memory as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from forebay.errors import ValidationError
from forebay.protocols.kserve.messages import parsed
from forebay.types.datatypes import datatype_of
from forebay.types.proto_numbers import array_in_parts
from forebay.types.proto_texts import split_texts
from forebay.types.tensor import Data, elements, join_elements

_TEXTS: Final = 8
"""The number of `bytes_contents`."""
FIELDS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Fields of the typed contents; types without one exist as raw contents only."""


def field_of(name: str, datatype: str) -> str:
    """Return the field that holds elements of a type; raises ValidationError if there is none."""
    field = FIELDS.get(datatype)
    if field is None:
        raise ValidationError(f"tensor '{name}' is {datatype[:80]}, which has no typed contents; send raw contents")
    return field


def taken_texts(name: str, shape: Sequence[int], contents: bytes) -> Data:
    """Return the elements that a serialized `InferTensorContents` holds as BYTES.

    Objects are made of a part of them at a time.

    Raises:
        ValidationError: If they are of another type or number than the tensor.
    """
    count, texts, rest = split_texts(contents, _TEXTS)
    beside = parsed("InferTensorContents", rest)
    if beside.bytes_contents:  # some were written in a way that nobody writes them
        return taken(name, "BYTES", shape, parsed("InferTensorContents", contents))
    _require_only(name, "BYTES", beside)
    _require_count(name, "BYTES", shape, count)
    return memoryview(texts).toreadonly()


def taken(name: str, datatype: str, shape: Sequence[int], contents: Any) -> bytes | memoryview:
    """Return the elements that an `InferTensorContents` holds, as they lie in memory.

    Raises:
        ValidationError: If they are of another type or number than the tensor, or do not fit into it.
    """
    import numpy as np

    _require_only(name, datatype, contents)
    values = getattr(contents, field_of(name, datatype))
    _require_count(name, datatype, shape, len(values))
    known = datatype_of(datatype, name)
    if not known.size:
        return join_elements(name, values)
    # NumPy would cast what does not fit into a shorter integer, and the longer one is made only for a moment.
    wide = array_in_parts(values, known.numpy if known.size >= 4 else "int64")
    array = wide.astype(known.numpy)
    if known.size < 4 and not np.array_equal(wide, array):
        raise ValidationError(f"tensor '{name}' has elements that do not fit in {datatype}")
    return array.view(np.uint8).data


def _require_only(name: str, datatype: str, contents: Any) -> None:
    """Refuse elements of another type; raises ValidationError if there are some."""
    field = field_of(name, datatype)
    for other, _ in contents.ListFields():
        if other.name != field:
            msg = f"tensor '{name}' is {datatype}: expected its elements in {field}, got {other.name}"
            raise ValidationError(msg)


def _require_count(name: str, datatype: str, shape: Sequence[int], count: int) -> None:
    """Hold the number of elements to the shape; raises ValidationError if they do not agree."""
    expected = elements(name, shape)
    if count != expected:
        raise ValidationError(
            f"tensor '{name}' of {datatype}{list(shape)}: expected {expected} elements, got {count}; "
            "shape and data must agree"
        )
