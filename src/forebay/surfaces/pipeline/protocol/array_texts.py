# SPDX-License-Identifier: Apache-2.0
"""Arrays as texts that look as NumPy prints them where they are short.

Those of numbers, booleans and texts are read back by `literal` bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, cast

from forebay.types.datatypes import BY_NUMPY


def array_text(value: Any) -> str:
    """Write an array, or what NumPy makes one of, as `array(...)`.

    Every element is written with as many digits as it takes to read the same value back, and none is left out.

    Raises:
        TypeError: If it holds objects of which only their own class could say what they are.
    """
    import numpy as np

    array = np.asarray(value)
    kind = array.dtype.kind
    if kind != "U" and array.dtype.name not in BY_NUMPY:
        return _printed(array)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.size == 0:
        shape = "" if array.ndim == 1 else f", shape={array.shape}"
        return f"array([]{shape}, dtype={_dtype_text(array)})"
    # How it calls what is not finite is the one thing that NumPy cannot be told here, for the settings are the user's.
    if array.size <= _PRETTY and (kind != "f" or np.isfinite(array).all()):
        body = np.array2string(array, **_LAYOUT)
    else:
        body = _nested(array)
    implied = array.dtype.name in {"bool", "int64", "float64"}
    return f"array({body})" if implied else f"array({body}, dtype={_dtype_text(array)})"


_PRETTY: Final = 1000
"""Up to so many elements are laid out as NumPy does, which takes longer."""

_LAYOUT: Final[Mapping[str, Any]] = {
    "separator": ", ",
    "prefix": "array(",
    "floatmode": "unique",
    "threshold": _PRETTY,
    "max_line_width": 75,
    "suppress_small": False,
    "sign": "-",
    "formatter": {},
    "legacy": False,
}


def _printed(array: Any) -> str:
    """Return an array as NumPy prints it, whatever the settings of its printing are.

    Raises:
        TypeError: See `array_text`.
    """
    import numpy as np

    if array.dtype.hasobject:
        foreign = next((one for one in array.flat if not _is_plain(one)), None)
        if foreign is not None:
            found = f"{type(foreign).__module__}.{type(foreign).__qualname__}"
            raise TypeError(f"an array with a {found} cannot be written as text; plain values of Python can")
    # How NumPy writes the type stands behind an array without elements.
    dtype = np.array_repr(array.ravel()[:0]).removeprefix("array([],").removesuffix(")").strip()
    if array.size == 0:
        shape = "" if array.ndim == 1 else f", shape={array.shape}"
        return f"array([]{shape}, {dtype})"
    layout: dict[str, Any] = {**_LAYOUT, "threshold": sys.maxsize}
    body = np.array2string(array, **layout)
    if array.dtype.name == "complex128":
        return f"array({body})"
    line = f"array({body},".rpartition("\n")[2]
    gap = " " if len(line) + len(dtype) + 2 <= _LAYOUT["max_line_width"] else "\n      "
    return f"array({body},{gap}{dtype})"


def _is_plain(value: object, depth: int = 0) -> bool:
    """Tell whether `repr` of a value runs no code of a project."""
    kind = type(value)
    if kind is list or kind is tuple:
        return depth < _MAX_DEPTH and all(_is_plain(one, depth + 1) for one in cast("Sequence[object]", value))
    if kind is dict:
        found = cast("dict[object, object]", value)
        return _is_plain([*found, *found.values()], depth)
    return kind in _PLAIN


_MAX_DEPTH: Final = 16
_PLAIN: Final = {type(None), bool, int, float, complex, str, bytes, date, datetime, time, timedelta, Decimal}


def _dtype_text(array: Any) -> str:
    return repr(array.dtype.str) if array.dtype.kind == "U" else array.dtype.name


def _nested(array: Any) -> str:
    flat = array.ravel()
    # A Python float prints the digits of a float64; the narrower ones are printed by NumPy, one at a time.
    parts: Iterable[str] = (
        map(str, flat) if array.dtype.kind == "f" and array.itemsize < 8 else map(repr, flat.tolist())
    )
    for length in reversed(array.shape):
        row = [iter(parts)] * length
        parts = ["[" + ", ".join(cells) + "]" for cells in zip(*row, strict=True)]
    (whole,) = parts
    return whole
