# SPDX-License-Identifier: Apache-2.0
"""Whether the other side of a link can still be reached, where neither an end nor an error of the connection says so.

A network that is cut, a machine that vanishes and a relay that forwards no more leave both sides with a connection that
looks idle. So each side sends a beat every second, and ends the link when it has heard nothing for four of its own.
"""

from __future__ import annotations

from typing import Final

BEAT: Final = "beat"
"""The message."""
BEAT_S: Final = 1.0
"""Time between two beats."""
MISSED: Final = 4
"""Beats that may be missed; with the last of them the link is over."""


class Heartbeat:
    """Counts what was missed.

    It counts ticks and not time: who could not run for a while has not missed what came meanwhile.
    """

    def __init__(self) -> None:
        self._missed = 0

    def heard(self) -> None:
        """The other side has said something."""
        self._missed = 0

    def tick(self) -> bool:
        """A beat was due, and what has come by now was heard; returns whether the link is still alive."""
        self._missed += 1
        return self._missed < MISSED
