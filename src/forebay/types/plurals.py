# SPDX-License-Identifier: Apache-2.0
"""Numbers of things, as a sentence has them."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 version`, `2 versions`; `many` is a plural without an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
