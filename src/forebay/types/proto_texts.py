# SPDX-License-Identifier: Apache-2.0
"""Texts that repeat in a message of protobuf, from the wire to the layout of BYTES, a part at a time.

Protobuf would make a place of 16 bytes for each, Python an object of 33 and more, and both in one call that nothing
interrupts. Here there is never more than a part of them.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from forebay.types.proto_numbers import read_varint

_TAG_AND_LENGTH: Final = 2
_TINY: Final = 3
"""Texts up to this length are copied in runs."""
_RUN_BYTES: Final = 64 * 1024
_PART: Final = 4096
"""Longer ones that are copied at a time."""
_LENGTHS: Final = [length.to_bytes(4, "little") for length in range(128)]


def split_texts(message: bytes, field: int) -> tuple[int, bytearray, bytes]:
    """Take the texts of a field out of a message.

    Args:
        field: A number below 16, whose tag is a byte.

    Returns:
        How many there are, the texts as elements of BYTES, and the message without them.
    """
    tag = field << 3 | 2
    found, count, rest = bytearray(), 0, bytearray()
    at, end = 0, len(message)
    while at < end:
        if message[at] == tag:
            more, stop = _copy(message, at, end, found)
            count += more
        else:
            stop = _after(message, at, end)
            rest += message[at:stop]
        if stop == at:  # it breaks off: whoever parses the rest says so
            rest += message[at:]
            break
        at = stop
    return count, found, bytes(rest)


def _copy(message: bytes, at: int, end: int, into: bytearray) -> tuple[int, int]:
    """Copy some texts that stand behind each other; returns how many, and where they end."""
    begin = message[at : at + _TAG_AND_LENGTH]
    if len(begin) == _TAG_AND_LENGTH and begin[1] <= _TINY and message[at + 2 + begin[1] : at + 4 + begin[1]] == begin:
        size = begin[1]
        found = _run(begin[0], size).match(message, at, min(at + _RUN_BYTES, end))
        assert found is not None
        run, each = found[0], _TAG_AND_LENGTH + size
        count = len(run) // each
        block = bytearray(count * (4 + size))
        block[:: 4 + size] = begin[1:] * count
        for place in range(size):
            block[4 + place :: 4 + size] = run[2 + place :: each]
        into += block
        return count, at + len(run)
    parts: list[bytes] = []
    tag = begin[0]
    while at + 1 < end and message[at] == tag and len(parts) < 2 * _PART:
        size, start = message[at + 1], at + 2
        if size < 0x80:
            parts.append(_LENGTHS[size] if start + size <= end else b"")
        else:
            size, start = read_varint(message, at + 1, end)
            parts.append(size.to_bytes(4, "little") if size < 1 << 32 else b"")
        if start + size > end or not parts[-1]:
            del parts[-1]
            break
        parts.append(message[start : start + size])
        at = start + size
    into += b"".join(parts)
    return len(parts) // 2, at


def _after(message: bytes, at: int, end: int) -> int:
    """Return where a field ends; where it begins if it breaks off, or is none that is passed over."""
    tag, stop = read_varint(message, at, end)
    wire = tag & 7
    if wire == 0:
        _, stop = read_varint(message, stop, end)
    elif wire == 1:
        stop += 8
    elif wire == 2:
        size, stop = read_varint(message, stop, end)
        stop += size
    elif wire == 5:
        stop += 4
    else:
        return at
    return stop if stop <= end else at


@cache
def _run(tag: int, size: int) -> re.Pattern[bytes]:
    return re.compile(rb"(?:\x%02x\x%02x[\s\S]{%d})++" % (tag, size, size))
