# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations as people write them: `10MB`, `64KiB`, `500ms`, `2.5h`."""

from __future__ import annotations

import re
from typing import Final

_AMOUNT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([a-z]{1,3})", re.ASCII)
_SECONDS: Final = {"ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MILLISECONDS: Final = {unit: round(seconds * 1000) for unit, seconds in _SECONDS.items()}
_BYTES: Final = {"b": 1} | {
    prefix + end: base**power
    for power, prefix in enumerate("kmgt", 1)
    for end, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
"""As Kubernetes has them, with or without a B: 1k is 1000 bytes, 1Ki is 1024."""
_UNITS: Final = {"_ms": _MILLISECONDS, "_s": _SECONDS, "_bytes": _BYTES, "_bytes_per_s": _BYTES}
EXAMPLES: Final = {"_ms": "500 or 2s", "_s": "30 or 5m", "_bytes": "65536 or 10MB", "_bytes_per_s": "65536 or 10MB"}
"""Values for each ending of a name, for messages."""


def amount_of(text: str, ending: str) -> float | None:
    """Return the number that a text with a unit means, in the unit of the name's ending; None if it is none.

    Args:
        text: A number and a unit, in small letters or capitals.
        ending: `_ms`, `_s`, `_bytes` or `_bytes_per_s`, as the name of a setting ends.
    """
    found = _AMOUNT.fullmatch(text.strip().lower())
    factor = _UNITS[ending].get(found[2]) if found is not None else None
    if found is None or factor is None:
        return None
    amount = float(found[1]) * factor
    return int(amount) if amount == int(amount) else amount


def size_of(count: float) -> str:
    """Return a number of bytes as people write it, if it is a round one: `64MiB`."""
    for power, prefix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{int(count) // 1024**power}{prefix}"
    return str(count)
