# SPDX-License-Identifier: Apache-2.0
"""Whether what a stranger sent is plain data: what JSON can carry, not too deep and not too much.

Code further in walks over it, copies it and writes it into documents. That must be safe whoever sent it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from forebay.errors import InvalidRequest

MAX_DEPTH = 64
"""Lists and maps inside of each other; schemas that people write have a dozen."""
MAX_VALUES = 50_000
"""Values in all, those inside of lists and maps counted one by one."""

_LEAVES = frozenset({str, int, float, bool, type(None)})


def require_plain(value: Any) -> None:
    """Check a value, level by level.

    Raises:
        InvalidRequest: It holds something else, or is too deep or too large.
    """
    level = [value]
    seen = 0
    for _ in range(MAX_DEPTH):
        seen += len(level)
        if seen > MAX_VALUES:
            raise InvalidRequest(f"it has more than {MAX_VALUES} values")
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidRequest(f"it is nested more than {MAX_DEPTH} levels deep")


def _inside(value: Any) -> Iterable[Any]:
    kind = value.__class__
    if kind in _LEAVES:
        return ()
    if kind is list:
        return cast("list[Any]", value)
    if kind is not dict:
        raise InvalidRequest(f"expected plain data, got {kind.__name__}")
    found = cast("dict[Any, Any]", value)
    odd = set(map(type, found)) - {str}
    if odd:
        raise InvalidRequest(f"it holds a map with a key of type {odd.pop().__name__}")
    return found.values()
