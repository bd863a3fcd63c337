# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays as bytes: what travels between a started serving and partitions in processes of their own.

A packed tree is eight bytes of length, a msgpack header of that length, then the buffers of the arrays, each at a
multiple of 64 bytes. The header has the structure and, for each array, its dtype and shape. Never a pickle.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from forebay.arrays.libraries import kind_of
from forebay.arrays.tree_structure import Structure, flatten
from forebay.errors import BadOutcome
from forebay.types.first_use import known
from forebay_target import target_name

if TYPE_CHECKING:
    import numpy as np

_ALIGNMENT = 64
_ORDERS = "<>|"
"""What the names of numpy's own types begin with."""
LEARNED = 2
"""What numpy says of a type that another library has told it of."""
_PLAIN: dict[str, type] = {"dict": dict, "list": list, "tuple": tuple, "NoneType": type(None)}

_PLAIN_KEYS = {str, int, float, bool, bytes, type(None)}

_PROGRAM = {"__main__", "__mp_main__"}
"""Names of the file that is run as a program."""


class _Shape(msgspec.Struct, array_like=True):
    """A `Structure` as plain data; the class by name, None for a leaf."""

    type: str | None
    keys: list[Any]
    children: list[_Shape]


_Described: TypeAlias = "tuple[str, str, list[int]]"
"""The library, dtype and shape of an array."""


class _Header(msgspec.Struct, array_like=True):
    structure: _Shape
    arrays: list[_Described]
    about: Any


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(known(_Header))


def pack(tree: Any, about: Any = None) -> bytearray:
    """Return a tree of arrays, and plain data about it, as bytes.

    Raises:
        BadOutcome: Something in it cannot travel: Python objects in arrays, or data that is not plain.
    """
    leaves, structure = flatten(tree)
    found = [_described(leaf, path) for leaf, path in zip(leaves, structure.paths(), strict=True)]
    try:
        header = _encoder.encode(_Header(_shape(structure), [described for described, _ in found], about))
    except (TypeError, ValueError, OverflowError) as error:
        msg = f"the metadata cannot travel between processes: {error}; use numbers, texts, lists and dicts"
        raise BadOutcome(msg) from error
    return _written(header, [content for _, content in found])


def unpack(data: Any) -> tuple[Any, Any]:
    """Return the tree and what was said about it; numpy's arrays are read-only views of `data`."""
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "big")
    header = _decoder.decode(view[8:start])
    leaves: list[Any] = []
    for kind, name, shape in header.arrays:
        start = _aligned(start)
        leaf, size = _restored(view, start, kind, name, shape)
        leaves.append(leaf)
        start += size
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


def _described(leaf: Any, path: str) -> tuple[_Described, np.ndarray[Any, Any]]:
    """Return what an array is, and its content as numpy can hold it: of tensors, which have more types, the bytes."""
    kind = kind_of(leaf)
    if kind.name == "torch":
        tensor = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return (kind.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)), _bytes_of(tensor)
    array = kind.host(leaf)
    if array.dtype.hasobject or array.dtype.names:
        msg = f"{path} is an array of {array.dtype}, which cannot travel between processes; use numbers or texts"
        raise BadOutcome(msg)
    return (kind.name, _name(array.dtype), list(array.shape)), array


def _restored(data: memoryview, start: int, kind: str, name: str, shape: list[int]) -> tuple[Any, int]:
    """Return the array that lies there, and its length in bytes."""
    if kind == "torch":
        torch: Any = importlib.import_module("torch")  # it need not be installed where this file is type-checked
        tensor = torch.empty(shape, dtype=getattr(torch, name))  # of its own, as torch has no read-only tensors
        content = _bytes_of(tensor)
        content[...] = _view(data, start, content.dtype, content.shape)
        return tensor, content.nbytes
    array = _view(data, start, _dtype(name), shape)
    if kind == "jax":
        jax_numpy: Any = importlib.import_module("jax.numpy")
        return jax_numpy.array(array), array.nbytes
    return array, array.nbytes


def _view(data: memoryview, start: int, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    import numpy as np

    count = math.prod(shape)
    array: np.ndarray[Any, Any]
    if count and dtype.itemsize:
        array = np.frombuffer(data, dtype, count, start).reshape(shape)
    else:
        array = np.empty(shape, dtype)
    array.flags.writeable = False
    return array


def _bytes_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return the bytes of a contiguous tensor where they lie."""
    return tensor.reshape(-1).view(importlib.import_module("torch").uint8).numpy()


def _name(dtype: np.dtype[Any]) -> str:
    # Types that numpy learned from jax (bfloat16 and others) are raw bytes to it except by name.
    return dtype.name if dtype.isbuiltin == LEARNED else dtype.str


def _dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    if name[0] in _ORDERS:
        return np.dtype(name)
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))  # jax may not have been imported here yet


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _shape(structure: Structure) -> _Shape:
    cls = structure.type
    if cls is None:
        return _Shape(None, [], [])
    if cls is dict:
        _check_keys(structure.keys)
    name = cls.__name__ if cls in _PLAIN.values() else f"{_sent_name(cls.__module__)}:{cls.__qualname__}"
    return _Shape(name, list(structure.keys), [_shape(child) for child in structure.children])


def _sent_name(module: str) -> str:
    """Return the name of a module as its workers know it: they import the file that is the program here."""
    file = getattr(sys.modules.get(module), "__file__", None) if module in _PROGRAM else None
    return module if file is None else _target_name(file)


@functools.cache
def _target_name(file: str) -> str:
    return target_name(Path(file))


def _check_keys(keys: Sequence[Hashable]) -> None:
    """Refuse keys that would arrive as others; raises a `BadOutcome` if one would."""
    for key in keys:
        if type(key) in _PLAIN_KEYS:
            continue
        try:
            arrived = _key(msgspec.msgpack.decode(_encoder.encode(key)))
        except TypeError:
            arrived = None
        if arrived != key:
            msg = f"a dict has the key {key!r}, which cannot travel between processes; use texts and numbers as keys"
            raise BadOutcome(msg)


def _structure(shape: _Shape) -> Structure:
    if shape.type is None:
        return Structure()
    children = tuple([_structure(child) for child in shape.children])
    keys = tuple(map(_key, shape.keys))
    return Structure(_class(shape.type), keys, children, sum(child.size for child in children))


def _key(key: Any) -> Hashable:
    """Return a key of a dict as it was: msgpack makes lists of tuples."""
    return tuple(map(_key, cast("list[Any]", key))) if isinstance(key, list) else key


def _class(name: str) -> type:
    if name in _PLAIN:
        return _PLAIN[name]
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) or (sys.modules["__main__"] if _sent_name("__main__") == module else None)
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type):
        msg = f"the class {path} of a tree of arrays is not known on the other side; define it in an imported module"
        raise BadOutcome(msg)
    return found
