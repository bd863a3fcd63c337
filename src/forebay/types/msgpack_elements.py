# SPDX-License-Identifier: Apache-2.0
"""The elements of msgpack, counted without decoding it, and found.

See `element_limits` for why. Each value, and each name in a map, has a first byte that says how long it is. Nesting
plays no part, since arrays and maps are followed by what they hold: one of n values is over when n more are, so that
the number of values that are left says where it ends.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from forebay.types.element_limits import Data, Steps, too_many

STEP_BYTES: Final = 16 * 1024
"""Bytes after which others have their turn."""
_STRIDES: Final = 4096
"""Strides after which they do."""
STRIDE_BYTES: Final = 4 * 1024
"""What is looked at value by value in one of them."""
_BEHIND: Final = {
    **dict.fromkeys((*range(0xA1), *range(0xC0, 0xC4), *range(0xE0, 0x100)), 0),
    **{0xA0 | length: length for length in range(1, 32)},
    0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""Bytes behind the first one, for values of a fixed length."""
_LENGTHS: Final = [_BEHIND.get(first, -1) + 1 for first in range(256)]
"""Bytes of a value by its first one; 0 if it says its length behind that."""
_ONE_BYTE: Final = re.compile(rb"[\x00-\xa0\xc0-\xc3\xe0-\xff]++")
_RUNS: Final = {
    first: re.compile(rb"(?:\x%02x[\s\S]{%d})++" % (first, size)) if size else _ONE_BYTE
    for first, size in _BEHIND.items()
}
"""Values that begin alike, or are of one byte."""
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length behind the first one, for texts, bytes and extensions."""
_LONG: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""The same for long arrays and maps, and how many values each of their elements is."""
_INSIDE: Final = bytes(0x80) + bytes(range(0, 0x20, 2)) + bytes(range(0x10)) + bytes(0x60)
"""Values in a short array or map, by its first byte."""
_BARE: Final = bytes(first for first in range(256) if not _INSIDE[first])
_FEW: Final = 8
"""Values that are sooner looked at one by one than as a run."""
_TINY: Final = 3
"""Values that say their length are found in runs up to this length."""
_EXTENSIONS: Final = frozenset({0xC7, 0xC8, 0xC9})


@cache
def _alike(head: bytes, length: int) -> re.Pattern[bytes]:
    """Match values with the same head again and again."""
    return re.compile(rb"(?:%b[\s\S]{%d})++" % (re.escape(head), length))


def msgpack_elements(data: Data, limit: int, what: str = "the body") -> Steps[int]:
    """Count the values of msgpack, or return an upper bound if that is within the limit.

    Raises:
        TooLarge: If there are more.
    """
    size = len(data)
    if size <= limit:
        return size
    found, _ = yield from _walked(data, 0, 1, size + 1, limit, what)
    return found


def msgpack_ends(data: Data, start: int, count: int, limit: int) -> Steps[list[int]]:
    """Return where each of so many values ends; there are fewer, or the last ends behind the data, if that is cut off.

    Raises:
        TooLarge: If there are more values in them than the limit.
    """
    _, ends = yield from _walked(data, start, count, 1, limit, "the body")
    return ends


def _walked(data: Data, at: int, rows: int, each_row: int, limit: int, what: str) -> Steps[tuple[int, list[int]]]:
    """Return how many values there are in so many rows, each of so many values and of what is in them, and their ends.

    Raises:
        TooLarge: If there are too many.
    """
    size, ends = len(data), list[int]()
    found = seen = strides = 0
    last = each_row  # how many are found when the row is over
    lengths, inside = _LENGTHS, _INSIDE
    while at < size and len(ends) < rows:
        first = data[at]
        each = lengths[first]
        left = last - found
        if not each:
            count, at, behind = _sized(data, at, left)
            found += count
            last += behind
        elif left > _FEW and at + each < size and (data[at + each] == first or each == 1 == lengths[data[at + 1]]):
            run = _RUNS[first].match(data, at, min(at + STEP_BYTES, at + left * each, size))
            assert run is not None
            found += (run.end() - at) // each
            last += sum(run[0].translate(inside, _BARE)) if each == 1 else 0
            at = run.end()
        else:
            stop = min(at + STRIDE_BYTES, size)
            if left > size - at:  # whatever is in them, no row ends here
                while at < stop and (each := lengths[data[at]]):
                    at += each
                    found += 1
            while at < stop and found < last and (each := lengths[first := data[at]]):
                at += each
                found += 1
                last += inside[first]
        if found > limit:
            raise too_many(what, "elements", limit)
        if found == last:
            ends.append(at)
            last += each_row
        strides += 1
        if at - seen > STEP_BYTES or strides > _STRIDES:
            seen, strides = at, 0
            yield
    return found, ends


def _sized(data: Data, at: int, left: int) -> tuple[int, int, int]:
    """Return how many alike values there are that say their length, where they end, and how many values are in one."""
    first = data[at]
    bytes_of_length, of_each = _LONG.get(first) or (_SIZED[first], 0)
    begin = at + 1 + bytes_of_length
    length = int.from_bytes(data[at + 1 : begin], "big") + (first in _EXTENSIONS)
    if of_each:
        return 1, begin, length * of_each
    head, stop = bytes(data[at:begin]), begin + length
    if length > _TINY or data[stop : stop + len(head)] != head:
        return 1, stop, 0
    run = _alike(head, length).match(data, at, min(at + STEP_BYTES, at + left * (stop - at), len(data)))
    assert run is not None
    return (run.end() - at) // (stop - at), run.end(), 0
