# SPDX-License-Identifier: Apache-2.0
"""Lists in JSON that hold a tensor, flat or nested, read in parts: a long one has millions of elements.

A part ends at a comma that seems to stand between rows, or between elements of a flat list. If it does not, as where a
text has a comma in it, the part is no list, and the whole is read in one go, which also tells what is wrong with it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from forebay.errors import ValidationError
from forebay.types.tensor import Data, Tensor

PART_BYTES: Final = 16 * 1024
"""Shortest part but for the last one."""

_LIST: Final = re.compile(rb"\s*\[")
_NESTED: Final = re.compile(rb"\s*\[\s*\[")
_TEXT_ENDS: Final = re.compile(rb'"\s*,')
_COMMA: Final = re.compile(rb",")


def values_in_parts(tensor: Tensor, kind: type) -> Iterator[list[Any]]:
    """Yield the elements of a flat list, or of lists in lists as deep and as long as the shape says.

    Where the shape has a single axis its elements may be lists of one: an axis that the model does not see.

    Raises:
        ValidationError: If it is none.
    """
    data = tensor.data if len(tensor.data) > 2 * PART_BYTES else bytes(tensor.data)  # a long one is not copied
    shape = tensor.shape if len(tensor.shape) != 1 else (*tensor.shape, 1)
    # Else what is wrong with a flat list is to be told.
    axes = shape if len(shape) > 1 and _NESTED.match(data) else ()
    element: Any = kind
    for axis in reversed(axes[1:]):
        element = Annotated[list[element], msgspec.Meta(min_length=min(axis, 2**62), max_length=min(axis, 2**62))]
    listed: Any = list[element]
    found, why = 0, ""
    for part in _parts(data, len(axes[1:]), is_text=kind is str):
        values, why = _read(part, listed)
        is_whole = bool(why) or (not values and part is not data)
        if is_whole:
            values, why = _read(data, listed)
            del values[:found]
        if why:
            break
        found += len(values)
        for _ in axes[1:]:
            values = [*itertools.chain.from_iterable(values)]
        yield values
        if is_whole:
            break
    if axes and not why and found != axes[0]:
        why = f"{found} lists came"
    if why:
        raise ValidationError(
            f"the data of tensor '{tensor.name}' is no list of {tensor.datatype}, flat or of the shape "
            f"{list(tensor.shape)}: {why}"
        )


def _read(text: Data, listed: Any) -> tuple[list[Any], str]:
    """Return a list, or why it is none."""
    try:
        return msgspec.json.decode(text, type=listed), ""
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = str(error)  # the error would be in a circle with a frame that holds the tensor
    text = bytes(text)
    if b"NaN" in text or b"Infinity" in text:  # a protocol that has them lets them through
        try:
            return msgspec.convert(json.loads(text), type=listed), ""
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            why = str(error)
    return [], why


def _parts(data: Data, depth: int, *, is_text: bool) -> Iterator[Data]:
    """Cut a list whose elements are lists in lists of this depth; one that is short comes as it is."""
    begin = _LIST.match(data)
    if len(data) > 2 * PART_BYTES and begin is not None:
        start = begin.end()
        first = start
        ends = re.compile(rb"(?:\]\s{0,64}+){%d}," % depth) if depth else _TEXT_ENDS if is_text else _COMMA
        at = start + PART_BYTES
        while found := ends.search(data, at):
            end = found.end() - 1
            if is_text and _is_in_text(bytes(data[start:end])):
                at = end + (end - start)  # so that a long text is not looked at again and again
                continue
            yield b"[%s]" % data[start:end]
            start = end + 1
            at = start + PART_BYTES
        if start > first:
            yield b"[%s" % data[start:]
            return
    yield data


def _is_in_text(part: bytes) -> bool:
    """Tell whether a text that begins in a part of a list does not end there."""
    return part.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') % 2 == 1
