# SPDX-License-Identifier: Apache-2.0
"""Lists of nothing but numbers, which large texts consist of: read without a step of ours for each element."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from forebay.surfaces.pipeline.protocol.literal_limits import Budget, LiteralLimits, NotLiteral

TEXT_DTYPE: Final = re.compile(r"<?U(\d{0,9})")

_BLANK: Final = b" \t\n\r\f\v"
# Each byte of a list of numbers as the kind of thing it is part of: a number, a bracket, a comma; "x" is none of them.
_KINDS: Final = bytes(
    byte if byte in b"[]," else ord("0") if byte in b"0123456789.eE+-nainf" else ord("x") for byte in range(256)
)
_NO_BRACKETS: Final = bytes(32 if byte in b"[]" else byte for byte in range(256))
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]")
# JSON wants digits behind a point and has no word for what is not finite; texts are read as numbers there.
_AS_JSON: Final = [
    *((b"." + mark, b".0" + mark) for mark in (b",", b" ", b"\n", b"e")),
    (b"nan", b'"nan"'),
    (b"inf", b'"inf"'),
    (b'-"inf"', b'"-inf"'),
]


def bare_numbers(text: str, limits: LiteralLimits) -> list[Any] | tuple[Any, ...] | None:
    """Read a list or a bare tuple of nothing but numbers in the grammar of JSON; None if it is something else."""
    first = text[:1]
    if not first or first not in "[0123456789-+. \t\n" or not text.isascii():
        return None
    stripped = text.strip()
    is_list = stripped.startswith("[")
    data = (stripped if is_list else f"[{stripped}]").encode()
    kinds = data.translate(_KINDS, _BLANK)
    if b"x" in kinds or b"," not in kinds or not _is_within(data, limits):
        return None
    if kinds.count(b",") >= limits.max_elements or kinds.count(b"[") > limits.max_tokens:
        raise NotLiteral
    try:
        values: list[Any] = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return values if is_list else tuple(values)


def _is_within(data: bytes, limits: LiteralLimits) -> bool:
    """Tell whether brackets are balanced and no deeper than the limit."""
    brackets = data.translate(None, _NOT_BRACKETS)
    for _ in range(limits.max_depth):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def made_of_numbers(region: str, dtype: str | None, limits: LiteralLimits, budget: Budget) -> Any:
    """Return the array of a nested list of numbers or booleans; None if it is something else.

    Raises:
        NotLiteral, OverflowError: If it is one, but cannot be made.
    """
    import numpy as np

    if not region.isascii():
        return None
    data = region.encode()
    if b"..." in data:  # what NumPy puts in the place of what it leaves out
        raise NotLiteral
    is_bool = b"r" in data or b"l" in data
    if is_bool:
        if any(mark in data for mark in b"0123456789+-."):
            return None
        data = data.replace(b"True", b"1").replace(b"False", b"0")
    kinds = data.translate(_KINDS, _BLANK)
    if b"x" in kinds or b"0[" in kinds or b"]0" in kinds:
        return None
    structure = kinds.translate(None, b"0")
    if structure.count(b",") >= limits.max_elements:
        raise NotLiteral
    shape = _shape_of(structure, limits)
    is_float = any(mark in data for mark in b".eEni")
    if is_float and is_bool:
        return None
    is_float = is_float or (dtype is not None and dtype.startswith("float"))
    flat = _flat(data, float if is_float else int)
    if flat is None:
        return None
    budget.take(8 * len(flat))
    try:
        made = np.array(flat, dtype=np.float64 if is_float else np.int64)
    except OverflowError:
        if dtype != "uint64":
            return None
        made = np.array(flat, dtype=np.uint64)
    if is_bool:
        made = made.astype(bool)
    return made.reshape(shape) if dtype is None else cast_to(made, dtype, budget).reshape(shape)


def _flat(data: bytes, kind: Any) -> list[Any] | None:
    """Return the numbers of a list that is almost JSON, and is rewritten as such; None if it is not even that."""
    data = data.translate(_NO_BRACKETS)
    if kind is float:
        for ours, json in _AS_JSON:
            data = data.replace(ours, json)
    try:
        return msgspec.json.decode(b"[" + data + b"]", type=list[kind], strict=False)
    except msgspec.DecodeError:
        return None


def _shape_of(structure: bytes, limits: LiteralLimits) -> tuple[int, ...]:
    """Return the shape of an array by its brackets and commas.

    Raises:
        NotLiteral: If its rows differ in length, or it is too deep.
    """
    depth = len(structure) - len(structure.lstrip(b"["))
    if not 0 < depth <= limits.max_depth:
        raise NotLiteral
    shape: list[int] = []
    row = b""
    for level in range(1, depth + 1):
        start = depth - level
        end = structure.find(b"]" * level, start) + level
        length, rest = divmod(end - start - 1, len(row) + 1)
        if end < level or rest:
            raise NotLiteral
        row = b"[" + b",".join([row] * length) + b"]"
        shape.append(length)
    if row != structure:
        raise NotLiteral
    return tuple(reversed(shape))


def cast_to(array: Any, dtype: str, budget: Budget) -> Any:
    """Convert an array to the type that its text names; raises NotLiteral if values get lost by it."""
    import numpy as np

    width = TEXT_DTYPE.fullmatch(dtype)
    if width is not None:
        if array.dtype.kind != "U":
            raise NotLiteral
        budget.take(max(array.size * int(width[1] or 1) * 4 - array.nbytes, 0))
        return array.astype(f"<U{width[1]}")
    if array.dtype.kind == "U" or dtype == "str":
        if array.dtype.kind != "U" or dtype != "str":
            raise NotLiteral
        return array
    target = np.dtype(dtype)
    if target.kind in "iu":
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NotLiteral
        bounds = np.iinfo(target)
        if (
            array.size
            and array.dtype.kind != "b"
            and not bounds.min <= int(array.min()) <= int(array.max()) <= bounds.max
        ):
            raise NotLiteral
    budget.take(max(array.size * target.itemsize - array.nbytes, 0))
    with np.errstate(over="ignore"):
        return array.astype(target)
