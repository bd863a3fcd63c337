# SPDX-License-Identifier: Apache-2.0
"""Arrays as texts that `literal` reads back bit by bit, and that look as NumPy prints them where they are short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from forebay.types.datatypes import BY_NUMPY


def array_text(value: Any) -> str:
    """Write an array, or what NumPy makes one of, as `array(...)`.

    Every element is written with as many digits as it takes to read the same value back, and none is left out.

    Raises:
        TypeError: If its elements are no numbers, booleans or texts.
    """
    import numpy as np

    array = np.asarray(value)
    kind = array.dtype.kind
    if kind != "U" and array.dtype.name not in BY_NUMPY:
        raise TypeError(f"an array of {array.dtype} cannot be written as text; numbers, booleans and texts can")
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
