# SPDX-License-Identifier: Apache-2.0
"""How long a worker or front that lost a server waits before it dials again."""

from __future__ import annotations

import secrets
from typing import Final

FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
"""Longest pause between two attempts to reach a server."""
REFUSED_PAUSE_S: Final = 15.0
"""The same while it refuses: a person has to do something first."""

_chance: Final = secrets.SystemRandom()


class Pauses:
    """Pauses that double up to a bound, each shortened by chance, so that many who lost one server do not keep step."""

    def __init__(self) -> None:
        self._longest_s = FIRST_PAUSE_S

    def next_s(self, most_s: float = MAX_PAUSE_S) -> float:
        """Return how long to wait now, at most so long."""
        longest_s = min(self._longest_s, most_s)
        self._longest_s = min(longest_s * 2, most_s)
        return longest_s * _chance.uniform(0.5, 1.0)

    def begin_again(self) -> None:
        """The server was reached."""
        self._longest_s = FIRST_PAUSE_S
