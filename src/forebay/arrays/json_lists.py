# SPDX-License-Identifier: Apache-2.0
"""Lists in JSON that hold a tensor, flat or nested, read in parts: a long one has millions of elements.

Theory of operation. A part ends at a comma, wherever that stands: a row may be as long as the whole. How many lists are
open there is known, since brackets are counted; so each part can be completed, and is decoded as a list of its own. In
it only the first list of each depth can have begun before, and only the last one can go on: of these it is remembered
how long they are so far, and all others must have the length that the shape says.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from forebay.errors import ValidationError
from forebay.types.first_use import known
from forebay.types.json_segments import cut
from forebay.types.tensor import Data, Tensor

PART_BYTES: Final = 16 * 1024
"""Longest part, unless it has a longer element."""
_NO_FIRST: Final = {b"", b"]"}
"""What cannot stand behind a comma."""
_NO_LAST: Final = {b"", b"["}
"""And before one."""
_NESTED: Final = re.compile(rb"\s*\[\s*\[")


class _Part(NamedTuple):
    """What is between two commas, with the number of lists that are open before and after it."""

    text: Data
    before: int
    after: int

    def completed(self) -> Data:
        if not self.before and not self.after:
            return self.text
        return b"".join((b"[" * self.before, self.text, b"]" * self.after))


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
    listed: Any = list[kind]
    for _ in axes[1:]:
        listed = list[listed]
    decoder: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(listed)
    lengths = [0] * len(axes)
    found = 0
    try:
        for part in _parts(data):
            values = _flat(_read(part.completed(), decoder), part, axes, lengths)
            found += len(values)
            yield values
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = str(error)  # the error would be in a circle with a frame that holds the tensor
    else:
        return
    if found:  # the place in the part means nothing to anybody
        why = f"{why.partition(' - at ')[0]}, behind element {found}"
    raise ValidationError(
        f"data of tensor '{tensor.name}': expected a list of {tensor.datatype}, flat or of the shape "
        f"{list(tensor.shape)}: {why}"
    )


def _read(text: Data, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any]:
    """Return a list; raises a `DecodeError` if it is none."""
    try:
        return decoder.decode(text)
    except msgspec.DecodeError:
        text = bytes(text)
        if b"NaN" not in text and b"Infinity" not in text:  # a protocol that has them lets them through
            raise
    try:
        return msgspec.convert(json.loads(text), type=known(decoder.type))
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from None


def _flat(values: list[Any], part: _Part, axes: tuple[int, ...], lengths: list[int]) -> list[Any]:
    """Return the elements of a part.

    Args:
        axes: How long the lists of each depth are to be; none for a flat list of any length.
        lengths: How many elements those have that are open; is changed.

    Raises:
        msgspec.ValidationError: If a list is too long or too short.
    """
    if not axes:
        return values
    lists = [values]
    for depth, axis in enumerate(axes):
        found = [*map(len, lists)]
        if depth < part.before:  # the first of them has begun before, and so has the first list in it
            found[0] += lengths[depth] - (depth + 1 < part.before)
        lengths[depth] = found.pop() if depth < part.after else 0
        if lengths[depth] > axis or found.count(axis) < len(found):
            raise msgspec.ValidationError(f"a list on axis {depth} does not have the length {axis}")
        lists = [*itertools.chain.from_iterable(lists)]
    return lists


def _parts(data: Data) -> Iterator[_Part]:
    """Cut a list; one that is short comes as it is. Raises a `DecodeError` if its brackets do not match."""
    if len(data) <= 2 * PART_BYTES:
        yield _Part(data, 0, 0)
        return
    start = at = before = after = 0
    is_in_text = False
    while at < len(data):
        end, text, bare, is_in_text = cut(data, at, PART_BYTES, b'["' if is_in_text else b"[")
        if b"[" in bare or b"]" in bare:  # which is seen much faster than they are counted
            after += bare.count(b"[") - bare.count(b"]")
        if is_in_text:  # it is one element, however long it is
            at = end
            continue
        inner = text.strip()
        lacks_value = (before and at == start and inner[:1] in _NO_FIRST) or (after and inner[-1:] in _NO_LAST)
        if lacks_value or (after > 0) == (end == len(data)):
            raise msgspec.DecodeError("JSON is malformed: a comma without a value, or brackets that do not match")
        yield _Part(data[start:end], before, after)
        start = at = end + 1
        before = after
