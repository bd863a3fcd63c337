# SPDX-License-Identifier: Apache-2.0
"""How many requests a project has begun to answer, over whatever protocol they came (N95)."""

from __future__ import annotations

from typing import Final

TOO_MANY: Final = "too many requests are in flight; try again later"


class InFlight:
    """Requests in flight."""

    def __init__(self, limit: int) -> None:
        """Count up to a limit; 0 means none."""
        self.limit = limit
        self._count = 0

    @property
    def is_full(self) -> bool:
        """Whether one more is too many."""
        return 0 < self.limit <= self._count

    def begin(self) -> None:
        """Note that one has begun."""
        self._count += 1

    def end(self) -> None:
        """Note that one has ended."""
        self._count -= 1
