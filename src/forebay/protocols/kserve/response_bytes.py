# SPDX-License-Identifier: Apache-2.0
"""Responses of `ModelInfer` written as bytes, without objects of protobuf; what is large stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from forebay.types.proto_numbers import varint
from forebay.types.tensor import Data

if TYPE_CHECKING:
    from forebay.protocols.kserve.infer_calls import InferResponse
    from forebay.protocols.kserve.places import Parameter

JOINED_BYTES: Final = 16 * 1024
"""A response up to this is one piece: copying it costs less than writing several."""
MAX_HEADS: Final = 256
"""What is remembered of heads that were written before."""

Written = bytes | list[Data]
"""A message, whole or in pieces that nobody writes to any more."""

_DOUBLE: Final = Struct("<d")
_NONE: Final[Mapping[str, Any]] = {}


def response(said: InferResponse, places: Mapping[str, Mapping[str, Parameter]] = _NONE) -> Written:
    """Write a response with raw contents: its bytes, or its pieces if there are many.

    Args:
        places: What is said of single outputs, by name.
    """
    outputs = said.outputs
    head = bytearray(_titled(said.model, said.version))
    if said.id:
        _put(head, 3, said.id.encode())
    for name, value in said.parameters.items():
        _put_parameter(head, 4, name, value)
    size = 0
    for tensor in outputs:
        head += _announced(tensor.name, tensor.datatype, tensor.shape, places.get(tensor.name))
        size += len(tensor.data)
    if size <= JOINED_BYTES:
        for tensor in outputs:
            head += b"\x32" + varint(len(tensor.data))
            head += tensor.data
        return bytes(head)
    pieces: list[Data] = []
    for tensor in outputs:
        head += b"\x32" + varint(len(tensor.data))
        if len(tensor.data) <= JOINED_BYTES:
            head += tensor.data
        else:
            pieces += (bytes(head), tensor.data)
            head = bytearray()
    if head:
        pieces.append(bytes(head))
    return pieces


def stream_response(pieces: Written) -> Written:
    """Write a response as one of `ModelStreamInfer`."""
    if isinstance(pieces, bytes):
        return b"\x12" + varint(len(pieces)) + pieces
    return [b"\x12" + varint(sum(map(len, pieces))), *pieces]


def stream_error(text: str, id: str = "") -> bytes:
    """Write what `ModelStreamInfer` answers to a message that failed, with what the message is called."""
    found, about = bytearray(), bytearray()
    _put(about, 3, id.encode())
    _put(found, 1, text.encode(errors="replace") or b"failed")
    _put(found, 2, about, always=True)
    return bytes(found)


@lru_cache(maxsize=MAX_HEADS)
def _titled(model: str, version: str) -> bytes:
    """Return how a response begins."""
    found = bytearray()
    _put(found, 1, model.encode())
    _put(found, 2, version.encode())
    return bytes(found)


def _announced(
    name: str, datatype: str, shape: tuple[int, ...], parameters: Mapping[str, Parameter] | None = None
) -> bytes:
    """Return what stands in the head of a response for an output."""
    if parameters is None:
        return _usual(name, datatype, shape)
    about, found = bytearray(), bytearray()
    _put(about, 1, name.encode())
    _put(about, 2, datatype.encode())
    _put(about, 3, b"".join(map(varint, shape)))
    for key, value in parameters.items():
        _put_parameter(about, 4, key, value)
    _put(found, 5, about, always=True)
    return bytes(found)


@lru_cache(maxsize=MAX_HEADS)
def _usual(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return _announced(name, datatype, shape, _NONE)


def _put(into: bytearray, field: int, content: bytes | bytearray, *, always: bool = False) -> None:
    """Write a field with a length, or nothing if it is empty, which is how protobuf writes that."""
    if content or always:
        into.append(field << 3 | 2)
        into += varint(len(content))
        into += content


def _put_parameter(into: bytearray, field: int, name: str, value: Parameter) -> None:
    """Write an entry of a map from names to InferParameters."""
    about = bytearray()
    if isinstance(value, bool):
        about += bytes([1 << 3, value])
    elif isinstance(value, int):
        about += b"\x10" if value < 1 << 63 else b"\x28"
        about += varint(value)
    elif isinstance(value, float):
        about += b"\x21" + _DOUBLE.pack(value)
    else:
        _put(about, 3, value.encode(), always=True)
    entry = bytearray()
    _put(entry, 1, name.encode(), always=True)
    _put(entry, 2, about, always=True)
    _put(into, field, entry)
