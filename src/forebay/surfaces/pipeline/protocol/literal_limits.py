# SPDX-License-Identifier: Apache-2.0
"""How much a text with a literal in it may contain, and what the values of a request may take together."""

from __future__ import annotations

from typing import Final

import msgspec


class LiteralLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a text may contain; one that has more stays a text.

    Attributes:
        max_bytes: Characters of the text, and bytes of an array made of it.
        max_elements: Numbers in a list or array of nothing but numbers.
        max_tokens: Words, marks and escapes in all else.
        max_depth: Brackets within brackets.
    """

    max_bytes: int = 256 * 1024 * 1024
    max_elements: int = 16 * 1024 * 1024
    max_tokens: int = 200_000
    max_depth: int = 32


DEFAULT: Final = LiteralLimits()
MAX_ODD_KEYS: Final = 20_000
"""Keys that are not texts, in all texts of a request."""
_FREE_BYTES: Final = 1024 * 1024
_BYTES_OF_ONE: Final = 32
"""What arrays may take for each character of the texts, beside what is free."""


class LiteralTooLarge(Exception):
    """The values of a request would take more than its texts allow for."""


class Budget:
    """What the values of one request may take together; counted before it is taken."""

    def __init__(self, characters: int, limits: LiteralLimits = DEFAULT) -> None:
        """Allow for texts of so many characters."""
        self.limits = limits
        self._left_bytes = _FREE_BYTES + _BYTES_OF_ONE * characters
        self._left_keys = MAX_ODD_KEYS

    def take(self, size: int) -> None:
        """Count an array.

        Raises:
            NotLiteral: If it is too large for any text.
            LiteralTooLarge: If it is too large for this request.
        """
        if size > self.limits.max_bytes:
            raise NotLiteral
        self._left_bytes -= size
        if self._left_bytes < 0:
            msg = f"arrays may take {_BYTES_OF_ONE} bytes for each character of the request, and {_FREE_BYTES} more"
            raise LiteralTooLarge(msg)

    def take_keys(self, count: int) -> None:
        """Count keys that are not texts; raises LiteralTooLarge if there are too many in this request."""
        self._left_keys -= count
        if self._left_keys < 0:
            raise LiteralTooLarge(f"expected at most {MAX_ODD_KEYS} keys that are not strings, got more")


class NotLiteral(Exception):
    """The text is outside of the grammar or over a limit."""
