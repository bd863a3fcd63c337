# SPDX-License-Identifier: Apache-2.0
"""Values on their way to other programs: plain data and arrays of NumPy, as msgpack and raw buffers. Never pickle.

Theory of operation. A value is a list of buffers, `[index, *arrays]`. The index is msgpack, `[tree, specs]`: in the
tree a tuple is an array that begins with the extension `TUPLE`, a `Batch` one that begins with `BATCH`, and each array
of NumPy is the extension `ARRAY`, whose data are told by `specs` and the next buffer. Long buffers are written as they
are.

What is read comes from another program: it is bounded and checked before it is made, and arrays get memory of their
own, as user code may write into them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias, cast

import msgspec

from forebay.arrays.array_batch import Batch
from forebay.arrays.libraries import find_kind
from forebay.errors import ForebayError, InvalidRequest
from forebay.types.first_use import known
from forebay.workers.wire import frames

Buffers: TypeAlias = Sequence[bytes | memoryview]

MAX_DEPTH: Final = 64
"""Containers within containers."""
MAX_ELEMENTS: Final = 1_000_000
"""Values in an index; an array is one, whatever its size."""
MAX_ARRAYS: Final = 100_000
"""Arrays in a value."""
MAX_AXES: Final = 64

KINDS: Final = frozenset({bytes, bytearray, memoryview})
"""What buffers are that have come."""
TUPLE: Final = msgspec.msgpack.Ext(16, b"")
BATCH: Final = msgspec.msgpack.Ext(17, b"")
ARRAY: Final = msgspec.msgpack.Ext(18, b"")
_MARKS: Final = {mark.code: mark for mark in (TUPLE, BATCH, ARRAY)}

_DTYPE: Final = re.compile(r"[<>|=](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,6}[a-zA-Zμ]{1,2}\])?)")
_KEYS: Final = frozenset({str, int, bytes, bool, float})
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_Axis = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[list[_Axis], msgspec.Meta(max_length=MAX_AXES)]
    is_scalar: bool


class _Index(msgspec.Struct, frozen=True, array_like=True):
    tree: Any
    specs: Annotated[list[_Spec], msgspec.Meta(max_length=MAX_ARRAYS)]


def pack_value(value: Any, what: str, cure: str, how: str = "sent to another program") -> list[bytes | memoryview]:
    """Return the buffers of a value. Large arrays are referred to and not copied.

    Args:
        value: Plain data, arrays of NumPy and batches of them.
        what: What messages call it.
        cure: How messages say that it is brought into such a form.
        how: What they say cannot be done with it.

    Raises:
        InvalidRequest: It holds something else; names where and what.
    """
    packer = _Packer(f"{what} cannot be {how}", cure)
    tree = packer.pack(value, "$", 0)
    return [msgspec.msgpack.encode(_Index(tree, packer.specs)), *packer.buffers]


def unpack_value(buffers: Any, max_elements: int = MAX_ELEMENTS) -> Any:
    """Make the value that another program has packed.

    Raises:
        InvalidRequest: It is none, or has more of something than is allowed.
    """
    found = cast("list[Any]", buffers) if isinstance(buffers, list) else []
    if not found or set(map(type, found)) - KINDS:
        raise InvalidRequest("expected a value as a list of buffers")
    frames.require_few(found[0], max_elements)
    try:
        index = _INDEX.decode(found[0])
        if len(index.specs) != len(found) - 1:
            raise InvalidRequest(f"a value has {len(found) - 1} arrays, {len(index.specs)} are described")
        arrays = iter([_array(spec, data) for spec, data in zip(index.specs, found[1:], strict=True)])
        value = _unpacked(index.tree, arrays, 0)
        if next(arrays, None) is not None:
            raise InvalidRequest("a value has arrays that stand nowhere in it")
    except ForebayError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError, StopIteration) as error:
        raise InvalidRequest(f"a value of another program cannot be read: {error}") from error
    return value


class _Packer:
    def __init__(self, failing: str, cure: str) -> None:
        self.specs: list[_Spec] = []
        self.buffers: list[bytes | memoryview] = []
        self._failing = failing
        self._cure = cure

    def pack(self, value: Any, place: str, depth: int) -> Any:
        kind = cast("Any", type(value))
        if value is None or kind is bool or kind is float or kind is str or kind is bytes or kind is bytearray:
            return value
        if kind is int:
            if not _INT_MIN <= value <= _INT_MAX:
                raise self._refused(place, "a whole number of more than 64 bits")
            return value
        if depth >= MAX_DEPTH:
            raise self._refused(place, f"nested more than {MAX_DEPTH} levels deep")
        if kind is list:
            return self._each(value, place, depth)
        if kind is tuple:
            return [TUPLE, *self._each(value, place, depth)]
        if kind is dict:
            return self._fields(value, place, depth)
        if isinstance(value, Batch):
            tree = None if value.size == 0 else value.pad(0).realize()
            return [BATCH, *[self.pack(one, place, depth + 1) for one in (tree, value.batch_key, value.padding)]]
        return self._array(value, place)

    def _each(self, values: Iterable[Any], place: str, depth: int) -> list[Any]:
        return [self.pack(one, f"{place}[{number}]", depth + 1) for number, one in enumerate(values)]

    def _fields(self, fields: dict[Any, Any], place: str, depth: int) -> dict[Any, Any]:
        odd = set(map(type, fields)) - _KEYS
        if odd:
            raise self._refused(place, f"a dict with a key of type {odd.pop().__name__}")
        return {name: self.pack(one, f"{place}[{name!r}]", depth + 1) for name, one in fields.items()}

    def _array(self, value: Any, place: str) -> Any:
        kind = find_kind(value)
        if kind is None or kind.name != "numpy" or type(value) is complex:
            raise self._refused(place, f"a {_name(value)}")
        if len(self.specs) >= MAX_ARRAYS:
            raise self._refused(place, f"one of more than {MAX_ARRAYS} arrays")
        import numpy as np

        array = np.asarray(value)
        if not _DTYPE.fullmatch(array.dtype.str):
            raise self._refused(place, f"an array of {array.dtype}")
        self.specs.append(_Spec(array.dtype.str, list(array.shape), isinstance(value, np.generic)))
        self.buffers.append(_bytes_of(array))
        return ARRAY

    def _refused(self, place: str, found: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self._failing}: {place} is {found}; expected plain data and arrays of NumPy, in dicts, lists, tuples "
            f"and Batches: {self._cure}"
        )


def _name(value: Any) -> str:
    kind = cast("type[Any]", type(value))
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _bytes_of(array: Any) -> bytes | memoryview:
    import numpy as np

    if array.nbytes < frames.LONG_BYTES or array.dtype.kind in "mMUS":
        return array.tobytes()
    return memoryview(cast("Any", np.ascontiguousarray(array))).cast("B")


def _array(spec: _Spec, data: bytes | bytearray | memoryview) -> Any:
    import numpy as np

    if not _DTYPE.fullmatch(spec.dtype):
        raise InvalidRequest(f"an array of {spec.dtype!r} is not taken")
    dtype = np.dtype(spec.dtype)
    count = math.prod(spec.shape)
    if count * dtype.itemsize != len(data) or (count and not dtype.itemsize):
        raise InvalidRequest(f"an array of {spec.dtype} and the shape {spec.shape} has {len(data)} bytes")
    array = (np.frombuffer(bytearray(data), dtype) if count else np.zeros(0, dtype)).reshape(spec.shape)
    return array[()] if spec.is_scalar and not spec.shape else array


def _unpacked(tree: Any, arrays: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"a value is nested more than {MAX_DEPTH} levels deep")
    kind = cast("Any", type(tree))
    if kind is list:
        values = cast("list[Any]", tree)
        mark = values[0] if values and type(values[0]) is msgspec.msgpack.Ext else None
        if mark is None or mark is ARRAY:
            return [_unpacked(one, arrays, depth + 1) for one in values]
        made = [_unpacked(one, arrays, depth + 1) for one in values[1:]]
        return tuple(made) if mark is TUPLE else _batch(made)
    if kind is dict:
        fields = cast("Mapping[Any, Any]", tree)
        return {name: _unpacked(one, arrays, depth + 1) for name, one in fields.items()}
    if kind is msgspec.msgpack.Ext:
        if tree is not ARRAY:
            raise InvalidRequest("a tuple or a Batch of a value has no place")
        return next(arrays)
    return tree


def _batch(made: list[Any]) -> Batch:
    tree, key, padding = made
    hash(key)
    if type(padding) is not int or not 0 <= padding <= MAX_ELEMENTS:
        raise InvalidRequest(f"a Batch has {padding!r:.40} rows of padding")
    batch = Batch() if tree is None else Batch.concatenate([tree])
    return batch.key(cast("Hashable", key)).pad(padding)


def _mark(code: int, data: memoryview) -> Any:
    if code not in _MARKS or len(data):
        raise InvalidRequest(f"msgpack extension {code} is not part of a value")
    return _MARKS[code]


_INDEX: Final = msgspec.msgpack.Decoder(known(_Index), ext_hook=_mark)
