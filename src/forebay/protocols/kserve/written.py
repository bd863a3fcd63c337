# SPDX-License-Identifier: Apache-2.0
"""Responses of `ModelInfer` written as bytes, without objects of protobuf; what is large stays as it is."""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from forebay.types.tensor import Data, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.protocols.kserve.calls import Parameter

JOINED_BYTES: Final = 16 * 1024
"""A response up to this is one piece: copying it costs less than writing several."""
MAX_HEADS: Final = 256
"""What is remembered of heads that were written before."""

_DOUBLE: Final = Struct("<d")


def response(
    *, model: str, version: str, id: str, outputs: Sequence[Tensor], parameters: Mapping[str, Parameter]
) -> bytes | list[Data]:
    """Write a response with raw contents.

    Returns:
        Its bytes, or its pieces if there are many.
    """
    head = bytearray(titled(model, version))
    if id:
        put(head, 3, id.encode())
    for name, value in parameters.items():
        put_parameter(head, 4, name, value)
    size = 0
    for tensor in outputs:
        head += announced(tensor.name, tensor.datatype, tensor.shape)
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


def stream_response(pieces: bytes | list[Data]) -> bytes | list[Data]:
    """Write a response as one of `ModelStreamInfer`."""
    if isinstance(pieces, bytes):
        return b"\x12" + varint(len(pieces)) + pieces
    return [b"\x12" + varint(sum(map(len, pieces))), *pieces]


def stream_error(text: str, id: str = "") -> bytes:
    """Write what `ModelStreamInfer` answers to a message that failed, with what the message is called."""
    found, about = bytearray(), bytearray()
    put(about, 3, id.encode())
    put(found, 1, text.encode(errors="replace") or b"failed")
    put(found, 2, about, always=True)
    return bytes(found)


@lru_cache(maxsize=MAX_HEADS)
def titled(model: str, version: str) -> bytes:
    """Return how a response begins."""
    found = bytearray()
    put(found, 1, model.encode())
    put(found, 2, version.encode())
    return bytes(found)


@lru_cache(maxsize=MAX_HEADS)
def announced(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands in the head of a response for an output."""
    about, found = bytearray(), bytearray()
    put(about, 1, name.encode())
    put(about, 2, datatype.encode())
    put(about, 3, b"".join(map(varint, shape)))
    put(found, 5, about, always=True)
    return bytes(found)


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    if 0 <= value < 0x80:
        return _SHORT[value]
    found = bytearray()
    value &= 0xFFFFFFFFFFFFFFFF
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_SHORT: Final = [bytes([value]) for value in range(0x80)]


def put(into: bytearray, field: int, content: bytes | bytearray, *, always: bool = False) -> None:
    """Write a field with a length, or nothing if it is empty, which is how protobuf writes that."""
    if content or always:
        into.append(field << 3 | 2)
        into += varint(len(content))
        into += content


def put_parameter(into: bytearray, field: int, name: str, value: Parameter) -> None:
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
        put(about, 3, value.encode(), always=True)
    entry = bytearray()
    put(entry, 1, name.encode(), always=True)
    put(entry, 2, about, always=True)
    put(into, field, entry)
