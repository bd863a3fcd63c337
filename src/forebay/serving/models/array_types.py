# SPDX-License-Identifier: Apache-2.0
"""Annotations of NumPy arrays: `NDArray[np.float32]`, `np.ndarray[tuple[int, Literal[4]], np.dtype[np.float32]]`.

Such a value comes as nested lists in JSON and msgpack, as all values of its name in forms and queries, and as a tensor
in protocols that have them. The second form says how many axes there are, and which of them have one length. NumPy is
imported only where such a type is read.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from forebay.errors import ConfigError
from forebay.types.datatypes import BY_NUMPY, DATATYPES
from forebay.types.first_use import known

if TYPE_CHECKING:
    import numpy.typing as npt

SCALARS: Final[Mapping[str, Any]] = {"b": bool, "f": float, "i": int, "u": int}
"""What an element is without NumPy, by the kind of its type there."""
_TEXTS: Final = (str, bytes)
_NUMBERS: Final = frozenset({int, float})
_LISTS: Final[set[type[Any]]] = {list}


class ArrayType(msgspec.Struct, frozen=True):
    """What an annotation says of an array.

    Attributes:
        datatype: Its type.
        shape: Its axes, -1 for any length; None if it says nothing of them.
    """

    datatype: str
    shape: tuple[int, ...] | None

    def read(self, value: Any, *, strict: bool = True) -> npt.NDArray[Any]:
        """Make the array of nested lists, or of an array; nothing is copied that fits as it is.

        Args:
            strict: Whether texts are not numbers; else a list of them is read as one of numbers.

        Raises:
            ValueError: If it is none of this type and shape.
        """
        import numpy as np

        numpy_type = np.dtype(DATATYPES[self.datatype].numpy)
        try:
            array = array_of(value if strict else _of_texts(value, SCALARS[numpy_type.kind]))
            # Numbers become wider ones, and whole numbers of a list any that can hold each of them. Of an array truth
            # values do, too; in a list they are none, as everywhere in JSON.
            if array.dtype != numpy_type:
                is_listed = not isinstance(value, np.ndarray) and array.dtype.kind in "iufb"
                if not array.size or (is_listed and numpy_type.kind == "f" and array.dtype.kind != "b"):
                    with np.errstate(over="raise"):
                        array = array.astype(numpy_type)
                elif is_listed and array.dtype.kind in "iu" and numpy_type.kind in "iu":
                    limits = np.iinfo(numpy_type)
                    if int(array.min()) < limits.min or int(array.max()) > limits.max:
                        raise ValueError
                    array = array.astype(numpy_type)
                else:
                    array = array.astype(numpy_type, casting="no" if is_listed else "safe")
        except (ValueError, TypeError, OverflowError, FloatingPointError, msgspec.ValidationError):
            raise ValueError(f"Expected an array of {numpy_type}") from None
        if self.shape is not None and not fits(array.shape, self.shape):
            raise ValueError(f"Expected an array of the shape {list(self.shape)}, got {list(array.shape)}")
        return array


def _of_texts(value: Any, scalar: Any) -> Any:
    """Return the numbers of a list of texts; anything else as it is."""
    if isinstance(value, list) and value and isinstance(cast("list[Any]", value)[0], str):
        return msgspec.convert(value, known(list[scalar]), strict=False)
    return cast("Any", value)


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return nested lists as an array; numbers of which one is larger than any integer there become floats.

    Where there is a text, its elements are Python's own: NumPy gives each text the room of the longest, and makes a
    hundred kilobytes of JSON gigabytes. So they are where truth values stand among numbers, of which it makes some.

    Raises:
        ValueError: If the lists are of unlike lengths.
        OverflowError: If a number is not a float either.
    """
    import numpy as np

    if _is_list(value) and _holds_texts(value):
        return objects_of(value)
    array: npt.NDArray[Any] = np.asarray(value)
    # So does JavaScript write 1e20: JSON knows numbers, and no types of them.
    if array.dtype.hasobject and all(type(one) in _NUMBERS for one in array.flat):
        return array.astype(np.float64)
    if array.dtype.kind in "iuf" and _is_list(value) and not _holds_only(value, array):
        return objects_of(value)
    return array


def objects_of(value: Any) -> npt.NDArray[Any]:
    """Return nested lists as an array of Python's own objects.

    Raises:
        ValueError: If the lists are of unlike lengths.
    """
    import numpy as np

    array: npt.NDArray[Any] = np.array(value, object)
    if any(map(_is_list, array.flat)):
        raise ValueError("its lists are of unlike lengths")
    return array


def _holds_texts(value: list[Any]) -> bool:
    """Tell whether there is a text anywhere in nested lists; each level is looked at by what needs no loop here."""
    level = value
    while level:
        try:
            sum(level)
        except (TypeError, OverflowError):  # it holds more than numbers
            kinds: set[type[Any]] = set(map(type, level))
            if not kinds.isdisjoint(_TEXTS):
                return True
            level = list[Any](chain.from_iterable(level if kinds == _LISTS else filter(_is_list, level)))
        else:
            return False
    return False


def _holds_only(value: list[Any], array: npt.NDArray[Any]) -> bool:
    """Tell whether lists hold numbers alone, of the kind of the array that NumPy made of them."""
    listed = _listed(SCALARS[array.dtype.kind], array.ndim)
    try:
        msgspec.convert(value, listed)
    except msgspec.ValidationError:
        return False
    return True


@cache
def _listed(kind: Any, depth: int) -> Any:
    return list[_listed(kind, depth - 1)] if depth else kind


def _is_list(value: Any) -> bool:
    return type(value) is list


def fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Tell whether a shape is one of those that were declared."""
    return len(shape) == len(declared) and all(to in {-1, axis} for axis, to in zip(shape, declared, strict=True))


def is_array(annotation: Any) -> bool:
    """Tell whether an annotation is NumPy's array, with or without a type."""
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def array_type_of(annotation: Any) -> ArrayType | None:
    """Read an annotation; None if it is not an array.

    Raises:
        ConfigError: If it is one that cannot be read from a request.
    """
    if not is_array(annotation):
        return None
    arguments = typing.get_args(annotation)
    scalar: Any = (typing.get_args(arguments[1]) or (None,))[0] if len(arguments) == 2 else None
    import numpy as np

    is_scalar = isinstance(scalar, type) and issubclass(scalar, np.generic)
    known = BY_NUMPY.get(np.dtype(cast("Any", scalar)).name) if is_scalar else None
    if known is None or not known.size:
        told = ", ".join(row.numpy for row in BY_NUMPY.values() if row.size)
        msg = f"`numpy.ndarray` cannot be read from a request without its type; write NDArray[np.float32], of {told}"
        raise ConfigError(msg)
    axes: Any = typing.get_args(arguments[0])
    if not axes or Ellipsis in axes:
        return ArrayType(known.name, None)
    return ArrayType(known.name, tuple(_length(axis) for axis in axes))


def _length(axis: Any) -> int:
    said = typing.get_args(axis) if typing.get_origin(axis) is Literal else ()
    return said[0] if len(said) == 1 and type(said[0]) is int else -1
