# SPDX-License-Identifier: Apache-2.0
"""Arrays of numbers in JSON, written as TensorFlow Serving writes them.

Floats of up to 32 bits have six significant digits, or nine where six do not read back as the same float. NaN and
infinities stand as `NaN`, `Infinity` and `-Infinity`, which is not JSON but what its clients read.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KINDS: Final = "biuf"
"""NumPy's kinds of what can be written."""
_PART: Final = 65_536
"""Numbers that are written at a time; each needs a few temporary numbers."""
_MAX_POWER: Final = 22
"""Powers of ten up to this are exact in a double."""
_DIGITS: Final = (6, 9)
_DOUBLE_BYTES: Final = 8
_FEW: Final = 100
_KEPT: Final = {2: Struct("e"), 4: Struct("f")}
"""How a float is kept, by its bytes."""


def written(array: npt.NDArray[Any]) -> bytes:
    """Write numbers, or truth values, as lists in lists; an array without axes as its element."""
    if not array.ndim or array.size <= _PART:
        return msgspec.json.encode(listed(array))
    rows = max(1, _PART // math.prod(array.shape[1:]))
    parts = (msgspec.json.encode(listed(array[at : at + rows]))[1:-1] for at in range(0, len(array), rows))
    return b"[%b]" % b",".join(parts)


def listed(array: npt.NDArray[Any]) -> Any:
    """Return numbers as lists in lists that msgspec encodes in this way."""
    if array.dtype.kind != "f":
        return array.tolist()
    import numpy as np

    is_double = array.dtype.itemsize >= _DOUBLE_BYTES
    is_finite = bool(np.isfinite(array).all())
    if is_finite and not is_double and array.size <= _FEW:
        return np.array(_few(array), object).reshape(array.shape).tolist()
    values = array if is_double else rounded(array)
    if is_finite:
        return values.tolist()
    found = values.astype(object)
    for is_one, token in (
        (np.isnan(values), b"NaN"),
        (values == np.inf, b"Infinity"),
        (values == -np.inf, b"-Infinity"),
    ):
        raw = np.empty((), object)
        raw[()] = msgspec.Raw(token)
        found[is_one] = raw
    return found.tolist()


def number(value: float) -> Any:
    """Return a single number of 64 bits as msgspec encodes it in this way."""
    if math.isfinite(value):
        return value
    return msgspec.Raw(b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity")


def rounded(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return floats of 16 or 32 bits as doubles that are spelled with six digits, or nine where six do not suffice."""
    import numpy as np

    exact = array.astype(np.float64)
    found = exact.copy()
    size = np.abs(exact)
    is_number = np.isfinite(exact) & (size > 0)
    with np.errstate(all="ignore"):
        above = np.floor(np.log10(np.where(is_number, size, 1.0)))
        is_exact = (above >= _DIGITS[-1] - 1 - _MAX_POWER) & (above <= _DIGITS[0] - 1 + _MAX_POWER)
        is_open = is_number
        for digits in _DIGITS:
            power = digits - 1 - above
            scale = 10.0 ** np.minimum(np.abs(power), _MAX_POWER)
            is_up = power >= 0
            whole = np.rint(np.where(is_up, exact * scale, exact / scale))
            shorter = np.where(is_up, whole / scale, whole * scale)
            fits = is_open & is_exact & (shorter.astype(array.dtype) == array)
            found[fits] = shorter[fits]
            is_open = is_open & ~fits
    if is_open.any():  # very large or very small ones
        found[is_open] = _few(array[is_open])
    return found


def _few(array: npt.NDArray[Any]) -> list[float]:
    """Shorten a few finite numbers without the twenty steps over an array."""
    as_kept = _KEPT[array.dtype.itemsize]
    return [_shorter(value, as_kept) for value in array.ravel().tolist()]


def _shorter(value: float, as_kept: Struct) -> float:
    short, long = (float(f"{value:.{digits}g}") for digits in _DIGITS)
    try:
        (kept,) = as_kept.unpack(as_kept.pack(short))
    except OverflowError:
        return long
    return short if kept == value else long
