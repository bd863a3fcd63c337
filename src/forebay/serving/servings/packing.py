# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays as bytes: what travels between a started serving and partitions in processes of their own.

A packed tree is eight bytes of length, a msgpack header of that length, then the buffers of the arrays, each at a
multiple of 64 bytes. The header has the structure and, for each array, its dtype and shape. Never a pickle.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.arrays.libraries import kind_of
from forebay.arrays.structure import Structure, flatten
from forebay.arrays.trees import to_host
from forebay.errors import BadOutcome
from forebay.types.first_use import known

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_ALIGNMENT = 64
_PLAIN: dict[str, type] = {"dict": dict, "list": list, "tuple": tuple, "NoneType": type(None)}


class _Shape(msgspec.Struct, array_like=True):
    """A `Structure` as plain data; the class by name, None for a leaf."""

    type: str | None
    keys: list[Any]
    children: list[_Shape]


class _Header(msgspec.Struct, array_like=True):
    structure: _Shape
    arrays: list[tuple[str, str, list[int]]]
    about: Any


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(known(_Header))


def pack(tree: Any, about: Any = None) -> bytearray:
    """Return a tree of arrays, and plain data about it, as bytes.

    Raises:
        BadOutcome: Something in it cannot travel: Python objects in arrays, or data that is not plain.
    """
    leaves, structure = flatten(tree)
    kinds = [kind_of(leaf).name for leaf in leaves]
    arrays: list[np.ndarray[Any, Any]] = [to_host(leaf) for leaf in leaves]
    for path, array in zip(structure.paths(), arrays, strict=True):
        if array.dtype.hasobject or array.dtype.names:
            msg = f"{path} is an array of {array.dtype}, which cannot travel between processes; use numbers or texts"
            raise BadOutcome(msg)
    described = [(kind, _dtype(array), list(array.shape)) for kind, array in zip(kinds, arrays, strict=True)]
    try:
        header = _encoder.encode(_Header(_shape(structure), described, about))
    except (TypeError, ValueError, OverflowError) as error:
        msg = f"the metadata cannot travel between processes: {error}; use numbers, texts, lists and dicts"
        raise BadOutcome(msg) from error
    return _written(header, arrays)


def unpack(data: Any) -> tuple[Any, Any]:
    """Return the tree and what was said about it; numpy's arrays are read-only views of `data`."""
    import numpy as np

    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "big")
    header = _decoder.decode(view[8:start])
    leaves: list[Any] = []
    for kind, name, shape in header.arrays:
        dtype = np.dtype(name)
        start = _aligned(start)
        count = int(np.prod(shape, dtype=np.int64))
        array: np.ndarray[Any, Any]
        if count and dtype.itemsize:
            array = np.frombuffer(view, dtype, count, start).reshape(shape)
        else:
            array = np.empty(shape, dtype)
        array.flags.writeable = False
        start += array.nbytes
        leaves.append(_restored(kind, array))
    return _structure(header.structure).unflatten(leaves), header.about


def _written(header: bytes, arrays: Sequence[np.ndarray[Any, Any]]) -> bytearray:
    import numpy as np

    end = 8 + len(header)
    places: list[int] = []
    for array in arrays:
        places.append(_aligned(end))
        end = places[-1] + array.nbytes
    packed = bytearray(end)
    packed[:8] = len(header).to_bytes(8, "big")
    packed[8 : 8 + len(header)] = header
    for place, array in zip(places, arrays, strict=True):
        if array.nbytes:
            np.frombuffer(packed, array.dtype, array.size, place).reshape(array.shape)[...] = array
    return packed


def _restored(kind: str, array: np.ndarray[Any, Any]) -> Any:
    if kind == "torch":
        torch: Any = importlib.import_module("torch")  # it need not be installed where this file is type-checked
        return torch.from_numpy(array.copy())  # torch has no read-only tensors
    if kind == "jax":
        jax_numpy: Any = importlib.import_module("jax.numpy")
        return jax_numpy.array(array)
    return array


def _dtype(array: np.ndarray[Any, Any]) -> str:
    # Types that numpy learned from jax (bfloat16 and others) are raw bytes to it except by name.
    return array.dtype.name if array.dtype.kind == "V" else array.dtype.str


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _shape(structure: Structure) -> _Shape:
    cls = structure.type
    if cls is None:
        return _Shape(None, [], [])
    name = cls.__name__ if cls in _PLAIN.values() else f"{cls.__module__}:{cls.__qualname__}"
    return _Shape(name, list(structure.keys), [_shape(child) for child in structure.children])


def _structure(shape: _Shape) -> Structure:
    if shape.type is None:
        return Structure()
    children = tuple([_structure(child) for child in shape.children])
    return Structure(_class(shape.type), tuple(shape.keys), children, sum(child.size for child in children))


def _class(name: str) -> type:
    if name in _PLAIN:
        return _PLAIN[name]
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type):
        msg = f"the class {name} of a tree of arrays is not known on the other side; define it in an imported module"
        raise BadOutcome(msg)
    return found
