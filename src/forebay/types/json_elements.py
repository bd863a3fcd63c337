# SPDX-License-Identifier: Apache-2.0
"""The elements of JSON, counted without parsing it: commas, colons and brackets outside of texts.

See `element_limits` for why. Malformed JSON is counted up to where a parser would stop, and on.
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.types.element_limits import Data, Steps, too_many

BOUND_BYTES: Final = 256 * 1024
"""What one step looks at for the upper bound."""
EXACT_BYTES: Final = 64 * 1024
"""What one step looks at where texts are left out; each may be an object for a moment."""

_OTHERS: Final = bytes(byte for byte in range(256) if byte not in b",:[{")


class JsonElements(msgspec.Struct, frozen=True):
    """How many elements JSON has at most.

    Attributes:
        items: Items of arrays; commas in objects count as well.
        members: Members of objects, and the objects themselves.
        objects: Those of them that are objects.
    """

    items: int = 0
    members: int = 0
    objects: int = 0

    def __add__(self, other: JsonElements) -> JsonElements:
        """Return those of two pieces."""
        return JsonElements(self.items + other.items, self.members + other.members, self.objects + other.objects)

    def __sub__(self, other: JsonElements) -> JsonElements:
        """Return those outside of a piece."""
        return JsonElements(self.items - other.items, self.members - other.members, self.objects - other.objects)


def json_elements(data: Data, items: int, members: int, what: str = "the body") -> Steps[None]:
    """Count the elements of JSON.

    Args:
        items: The most items of arrays.
        members: The most members of objects, and objects.
        what: What the data is, for the error.

    Raises:
        TooLarge: If there are more.
    """
    if len(data) <= min(items, members):
        return
    bound = yield from upper_bound(data)
    if bound.items > items or bound.members > members:
        yield from outside_texts(data, items, members, what)


def upper_bound(data: Data) -> Steps[JsonElements]:
    """Count the elements of JSON, and what looks like some in texts."""
    found = JsonElements()
    for at in range(0, len(data), BOUND_BYTES):
        found += _marked(bytes(data[at : at + BOUND_BYTES]))
        yield
    return found


def outside_texts(
    data: Data, items: float = float("inf"), members: float = float("inf"), what: str = "the body"
) -> Steps[JsonElements]:
    """Count the elements of JSON, and not what stands in texts.

    Raises:
        TooLarge: If there are more than the limits.
    """
    found = JsonElements()
    is_inside = 0
    escape = b""
    for at in range(0, len(data), EXACT_BYTES):
        piece = escape + bytes(data[at : at + EXACT_BYTES])
        escape = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""  # what it escapes comes next
        piece = piece.removesuffix(escape)
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        if is_inside or b'"' in piece:
            parts = piece.split(b'"')
            piece = b"".join(parts[is_inside::2])
            is_inside ^= (len(parts) - 1) & 1
        found += _marked(piece)
        if found.members > members:
            raise too_many(what, "objects and members of objects", int(members))
        if found.items - max(found.members - 2 * found.objects, 0) > items:  # without the commas between members
            raise too_many(what, "elements in arrays", int(items))
        yield
    return found


def _marked(piece: bytes) -> JsonElements:
    marks = piece.translate(None, _OTHERS)
    objects = marks.count(b"{")
    return JsonElements(marks.count(b",") + marks.count(b"["), marks.count(b":") + objects, objects)
