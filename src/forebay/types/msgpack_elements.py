# SPDX-License-Identifier: Apache-2.0
"""The elements of msgpack, counted without decoding it.

See `element_limits` for why. Each value, and each name in a map, has a first byte that says how long it is. Nesting
plays no part, since arrays and maps are followed by what they hold.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from forebay.types.element_limits import Data, Steps, too_many

STEP_BYTES: Final = 64 * 1024
"""Bytes after which others have their turn."""
_STEPS: Final = 4096
"""Values after which they do."""
_BEHIND: Final = {
    **dict.fromkeys((*range(0xA1), *range(0xC0, 0xC4), *range(0xE0, 0x100)), 0),
    **{0xA0 | length: length for length in range(1, 32)},
    0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""Bytes behind the first one, for values of a fixed length; of long arrays and maps the number of their values."""
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
    at = found = seen = values = 0
    while at < size:
        first = data[at]
        each = _LENGTHS[first]
        if not each:
            begin = at + 1 + _SIZED[first]
            length = int.from_bytes(data[at + 1 : begin], "big") + (first in _EXTENSIONS)
            head, stop = bytes(data[at:begin]), begin + length
            if length <= _TINY and data[stop : stop + len(head)] == head:
                run = _alike(head, length).match(data, at, min(at + STEP_BYTES, size))
                assert run is not None
                found += (run.end() - at) // (len(head) + length)
                at = run.end()
            else:
                found += 1
                at = stop
        elif at + each < size and (data[at + each] == first or each == 1 == _LENGTHS[data[at + 1]]):
            run = _RUNS[first].match(data, at, min(at + STEP_BYTES, size))
            assert run is not None
            found += (run.end() - at) // each
            at = run.end()
        else:
            stop = found + _STEPS
            while at < size and found < stop and (each := _LENGTHS[data[at]]):
                at += each
                found += 1
        if found > limit:
            raise too_many(what, "elements", limit)
        values += 1
        if at - seen > STEP_BYTES or values > _STEPS:
            seen, values = at, 0
            yield
    return found
