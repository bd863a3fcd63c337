# SPDX-License-Identifier: Apache-2.0
"""Reads a link in steps: a few milliseconds of it in a turn of the loop, however much has come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from forebay.transports.intake import FULL_BUFFER, Intake
from forebay.transports.reading_turns import turns_of

TURN: Final = 256
"""What a link may do before others have their turn: so many requests, or four copied megabytes."""


class InSteps:
    """What a link has to read."""

    def __init__(self, transport: asyncio.Transport, read: Callable[[bytes], Iterator[int]]) -> None:
        """Begin with nothing.

        Args:
            transport: Not read while something is left to be done.
            read: Acts on what has come; yields what each step has cost, as requests.
        """
        self._intake = Intake(transport, turns_of(asyncio.get_running_loop()))
        self._read = read
        self._waiting: deque[bytes] = deque()
        self._steps: Iterator[int] | None = None

    def take(self, data: bytes) -> None:
        """Act on what has come, or do so in a later turn."""
        if self._intake.holds:
            self._waiting.append(data)
        else:  # then nothing is left of what came before
            self._steps = self._read(data)
            self._go_on()

    def hold(self) -> None:
        """Read nothing until `release`."""
        self._intake.hold(FULL_BUFFER)

    def release(self) -> None:
        """Go on."""
        self._intake.release(FULL_BUFFER, self._go_on)

    def end(self) -> None:
        """Forget what was not read."""
        self._waiting.clear()
        self._steps = None

    def _go_on(self) -> None:
        left = TURN
        while left > 0:
            if self._steps is None:
                if not self._waiting:
                    return
                self._steps = self._read(self._waiting.popleft())
            cost = next(self._steps, None)
            if cost is None:
                self._steps = None
            else:
                left -= cost
        self._intake.give_way(self._go_on)


def send(transport: asyncio.Transport | None, pieces: Sequence[Any]) -> asyncio.Transport | None:
    """Write the pieces of a frame; returns what they were written to, or None if the connection is closed."""
    if transport is None or transport.is_closing():
        return None
    if len(pieces) == 1:
        transport.write(pieces[0])
    else:
        transport.writelines(pieces)
    return transport
