# SPDX-License-Identifier: Apache-2.0
"""When a change counts: once two looks in a row have found the same, so that nothing is taken that is being copied."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Settling(Generic[K, V]):
    """Tells what has changed for good, of several things that are looked at together.

    Attributes:
        settled: What counts.
        is_moving: Whether the last look found something that does not count yet.
    """

    def __init__(self, settled: Mapping[K, V] | None = None) -> None:
        """Begin with what counts already."""
        self.settled: dict[K, V] = dict(settled or {})
        self.is_moving = False
        self._seen: Mapping[K, V] = dict(self.settled)

    def look(self, found: Mapping[K, V]) -> dict[K, V | None]:
        """Return what counts from now on, by its key: None is gone."""
        changed: dict[K, V | None] = {}
        self.is_moving = False
        for key, value in found.items():
            if self.settled.get(key) != value:
                if self._seen.get(key) == value:
                    self.settled[key] = changed[key] = value
                else:
                    self.is_moving = True
        for key in [key for key in self.settled if key not in found]:
            if key in self._seen:
                self.is_moving = True
            else:
                del self.settled[key]
                changed[key] = None
        self._seen = found
        return changed
