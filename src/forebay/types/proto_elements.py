# SPDX-License-Identifier: Apache-2.0
"""The elements of a message of protobuf, counted before it is parsed.

See `element_limits` for why. The walk knows from the descriptor which fields hold messages and which may be packed, and
looks at nothing else. Every field that stands in the message counts, also one that is said again or that is unknown.
What a parser would refuse is walked over as far as it goes.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from forebay.types.element_limits import Data, ElementLimits, Steps, too_many
from forebay.types.proto_numbers import read_varint

_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)
_WIDTHS: Final = {_FIXED64: 8, _FIXED32: 4}
_NUMBERS: Final = {
    wire: re.compile(rb"([\x80-\xff]*+[\x00-\x7f])%b(?:\1%b)*+" % (value, value))
    for wire, value in {_VARINT: rb"[\x80-\xff]*+[\x00-\x7f]", _FIXED64: rb"[\s\S]{8}", _FIXED32: rb"[\s\S]{4}"}.items()
}
"""Match a tag and a number that stands alone, and then the same tag and a number again and again."""

_TENSORS: Final = frozenset({"TensorProto", "InferTensorContents", "Tensor", "BytesList", "FloatList", "Int64List"})
"""Messages whose repeated fields are elements of tensors, also texts and bytes."""
_SHAPES: Final = frozenset({"shape", "dims", "dim", "lod"})
"""Fields that never are."""

_END_OF_NUMBERS: Final = 1 << 29
_DEPTH: Final = 128
"""Deeper than any parser goes."""
_STEPS: Final = 4096
"""Fields after which others have their turn."""
_TINY: Final = 3
"""Values up to this length are matched in runs, by a pattern for each length; longer ones in a loop."""
_RUN_BYTES: Final = 128 * 1024
"""What is looked at in one go of fields that are all alike."""
_HIGH: Final = bytes(range(128, 256))


_Plan = dict[int, "_Field"]
_Field = tuple[_Plan | None, int, bool, str]
"""What is in a field: the fields of the message that it holds if anything repeats there, the bytes of an element if it
may be packed (1 for varints, 0 if it may not), whether it counts as elements of a tensor, and its full name."""
_UNKNOWN: Final[_Field] = (None, 0, False, "")


def message_elements(data: Data, descriptor: Any, limits: ElementLimits) -> Steps[None]:
    """Count the elements of a message.

    Args:
        limits: How many there may be.

    Raises:
        TooLarge: If there are more; it names the field with which they are.
    """
    if len(data) <= min(limits.tensors, limits.elsewhere):
        return
    left = [limits.elsewhere, limits.tensors]
    steps = counted_to = 0
    stack: list[tuple[_Plan, int, int]] = [(_plan_of(descriptor), 0, len(data))]
    while stack:
        plan, at, end = stack.pop()
        groups = 0
        while at < end:
            start = at
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = read_varint(data, start, end)
            if not 0 < tag >> 3 < _END_OF_NUMBERS:  # no parser goes on
                break
            wire, tag_bytes = tag & 7, at - start
            inner, width, is_tensor, name = _UNKNOWN if groups else plan.get(tag >> 3, _UNKNOWN)
            count = 1
            if wire == _LENGTH:
                if at >= end:
                    break
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = read_varint(data, at - 1, end)
                stop = at + size
                if stop > end:
                    break
                if width:
                    count = size // width if width > 1 else (yield from _varints(data, at, stop))
                elif stop < end and data[stop] == data[start]:
                    if inner is None:
                        count, stop = _same_texts(data, start, at, stop, end)
                    elif start >= counted_to:
                        siblings, counted_to = yield from _siblings(data, start, tag_bytes, end, left[0])
                        count = siblings if siblings > left[0] else 1
                if inner is not None and size and len(stack) < _DEPTH:
                    stack.append((plan, stop, end))
                    plan, stop, end, groups = inner, at, stop, 0
                at = stop
            elif wire in _NUMBERS:
                if wire != _VARINT:
                    at += _WIDTHS[wire]
                elif at < end and data[at] < 0x80:
                    at += 1
                else:
                    at = read_varint(data, at, end)[1]
                if at < end and data[at] == data[start]:
                    count, at = _same_numbers(data, start, at, end, wire)
            elif wire == _GROUP:
                groups += 1
            elif wire == _END_GROUP and groups:
                groups -= 1
            else:
                break
            left[is_tensor] -= count
            if is_tensor:
                left[0] -= 1  # a run of them: elements of tensors stand behind each other, and other fields cost more
            if left[0] < 0 or left[1] < 0:
                limit, of = (limits.tensors, " of tensors") if left[1] < 0 else (limits.elsewhere, "")
                what = f"the field {name}" if name else "the message"
                raise too_many(what, f"elements{of}", limit)
            steps += count
            if steps >= _STEPS:
                steps = 0
                yield


def _same_texts(data: Data, start: int, at: int, stop: int, end: int) -> tuple[int, int]:
    """Count the same field again and again, from the one at `start` whose value lies between `at` and `stop`.

    Returns how many there are, and where they end.
    """
    size = stop - at
    if size <= _TINY and data[stop : stop + at - start] == data[start:at]:  # where the next one is as long, many may be
        found = _equals(at - start, size).match(data, start, min(start + _RUN_BYTES, end))
        if found is not None:
            return (found.end() - start) // (stop - start), found.end()
    if at - start != 2:
        return 1, stop
    tag, count, at = data[start], 1, stop
    while at + 1 < end and data[at] == tag and (size := data[at + 1]) < 0x80 and count < _STEPS:
        stop = at + 2 + size
        if stop > end:
            break
        at = stop
        count += 1
    return count, at


def _same_numbers(data: Data, start: int, stop: int, end: int, wire: int) -> tuple[int, int]:
    """Count the same number again and again, from one on that lies between two places.

    Returns how many there are, and where they end.
    """
    found = _NUMBERS[wire].match(data, start, min(start + _RUN_BYTES, end))
    if found is None:
        return 1, stop
    if wire == _VARINT:  # of one, and so of its tag, only the last byte lacks the highest bit
        return len(found[0].translate(None, _HIGH)) // 2, found.end()
    return (found.end() - start) // (found.end(1) - start + _WIDTHS[wire]), found.end()


def _siblings(data: Data, at: int, tag_bytes: int, end: int, limit: int) -> Steps[tuple[int, int]]:
    """Count the same message again and again, and one field in each that is not empty; stop beyond the limit.

    Returns how many there are, and where they end.
    """
    first, tag, count, turn = data[at], data[at : at + tag_bytes], 0, 0
    while at + tag_bytes < end and data[at] == first and count <= limit:
        if tag_bytes > 1 and data[at : at + tag_bytes] != tag:
            break
        size = data[at + tag_bytes]
        at += tag_bytes + 1
        if size >= 0x80:
            size, at = read_varint(data, at - 1, end)
        at += size
        count += 2 if size else 1
        turn += 1
        if not turn % _STEPS:
            yield
    return count, at


def _varints(data: Data, at: int, end: int) -> Steps[int]:
    """Count the varints in packed data: each has one byte without the highest bit."""
    count = 0
    for begin in range(at, end, _RUN_BYTES):
        count += len(bytes(data[begin : min(begin + _RUN_BYTES, end)]).translate(None, _HIGH))
        if end - begin > _RUN_BYTES:
            yield
    return count


@cache
def _equals(prefix: int, size: int) -> re.Pattern[bytes]:
    """Match the same field again and again, by the bytes of its tag and length together, and of its value."""
    return re.compile(rb"([\s\S]{%d})[\s\S]{%d}(?:\1[\s\S]{%d})*+" % (prefix, size, size))


@cache
def _plan_of(descriptor: Any) -> _Plan:
    """Return what is in the fields of a message, by number."""
    return _planned(descriptor, {})


def _planned(descriptor: Any, known: dict[str, _Plan]) -> _Plan:
    plan = known.get(descriptor.full_name)
    if plan is None:
        plan = known[descriptor.full_name] = {}
        plan |= {number: _field(descriptor, field, known) for number, field in descriptor.fields_by_number.items()}
    return plan


def _field(descriptor: Any, field: Any, known: dict[str, _Plan]) -> _Field:
    inner, name = field.message_type, field.full_name
    if inner is not None:
        is_open = field.type != field.TYPE_GROUP and _repeats(inner)
        return _planned(inner, known) if is_open else None, 0, False, name
    if not field.is_repeated:
        return None, 0, False, name
    is_number = field.type not in {field.TYPE_STRING, field.TYPE_BYTES}
    width = {
        field.TYPE_DOUBLE: 8, field.TYPE_FIXED64: 8, field.TYPE_SFIXED64: 8,
        field.TYPE_FLOAT: 4, field.TYPE_FIXED32: 4, field.TYPE_SFIXED32: 4,
    }.get(field.type, 1)  # fmt: skip
    is_tensor = field.name not in _SHAPES and (is_number or descriptor.name in _TENSORS)
    return None, width if is_number else 0, is_tensor, name


@cache
def _repeats(descriptor: Any) -> bool:
    """Tell whether anything can repeat in a message, so that it has to be looked into."""
    seen: set[str] = set()
    waiting = [descriptor]
    while waiting:
        kind = waiting.pop()
        if kind.full_name in seen:
            return True  # it may hold itself
        seen.add(kind.full_name)
        if any(field.is_repeated for field in kind.fields):
            return True
        waiting += [field.message_type for field in kind.fields if field.message_type is not None]
    return False
