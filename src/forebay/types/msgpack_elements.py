# SPDX-License-Identifier: Apache-2.0
"""The elements of msgpack, counted without decoding it.

See `element_limits` for why. Each value, and each name in a map, has a first byte that says how long it is. Nesting
plays no part, since arrays and maps are followed by what they hold.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.types.element_limits import Data, Steps, too_many

STEP_BYTES: Final = 64 * 1024
"""What is looked at in one go of values that are all alike."""
_STEPS: Final = 4096
"""Values after which others have their turn; so many bytes of a run count as one:"""
_BYTES_OF_STEP: Final = 64
_ONE_BYTE: Final = re.compile(rb"[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]*+")
"""Values that are one byte: small integers, short arrays and maps, an empty text, nil, true and false."""
_FIXED: Final = {
    0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""Bytes behind the first one, for values of a fixed length; of long arrays and maps that is how long they are."""
_RUNS: Final = {first: re.compile(rb"(?:\x%02x[\s\S]{%d})*+" % (first, size)) for first, size in _FIXED.items()}
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length behind the first one, for texts, bytes and extensions."""
_EXTENSIONS: Final = frozenset({0xC7, 0xC8, 0xC9})


def msgpack_elements(data: Data, limit: int, what: str = "the body") -> Steps[int]:
    """Count the values of msgpack, or return an upper bound if that is within the limit.

    Raises:
        TooLarge: If there are more.
    """
    size = len(data)
    if size <= limit:
        return size
    at = found = steps = 0
    while at < size:
        start, first = at, data[at]
        each = _FIXED.get(first, 0)
        if first in _SIZED:
            begin = at + 1 + _SIZED[first]
            at = begin + int.from_bytes(data[at + 1 : begin], "big") + (first in _EXTENSIONS)
            found += 1
        elif 0xA1 <= first <= 0xBF:
            at += 1 + (first & 0x1F)
            found += 1
        else:
            run = (_RUNS[first] if each else _ONE_BYTE).match(data, at, min(at + STEP_BYTES, size))
            assert run is not None
            found += max((run.end() - at) // (1 + each), 1)  # none of a value that breaks off, or that there is not
            at = max(run.end(), at + 1 + each)
        if found > limit:
            raise too_many(what, "elements", limit)
        steps += 1 + min(at - start, STEP_BYTES) // _BYTES_OF_STEP
        if steps >= _STEPS:
            steps = 0
            yield
    return found
