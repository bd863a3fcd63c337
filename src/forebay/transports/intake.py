# SPDX-License-Identifier: Apache-2.0
"""When the transport of a connection is read, and how the connection closes so that its last answer arrives.

A transport is read while nothing holds it. There are four holds, and each is set and released by itself:

    hold         set while                                        released by
    TURN         other clients have their turn                    `ReadingTurns`
    FULL_BUFFER  the client does not take its answers             the transport, once there is room again
    PIPELINE     earlier requests of this client are answered     the connection
    BEHIND       an application has not taken what came           the application, and its answer

A connection that closes while its client sends may lose its last answer on the way. So the connection lingers: it ends
its own side and drops what still arrives, until the client is quiet for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from forebay.transports.body_reader import Reads, Scatters, read_bodies

if TYPE_CHECKING:
    import asyncio

    from forebay.transports.reading_turns import ReadingTurns

LARGE_READ_BYTES: Final = 64 * 1024
"""A client from which this much arrives at once has its next turn after the others."""
LINGER_S: Final = 1.0
"""How long a lingering client may be quiet before its connection is closed."""
MAX_LINGER_S: Final = 30.0
"""How long it may go on sending: many clients read the answer only after they have sent everything. nginx has the same
time (`lingering_time` in ngx_http_core_module.c) and no limit of bytes either."""

TURN: Final = 1
FULL_BUFFER: Final = 2
PIPELINE: Final = 4
BEHIND: Final = 8


class Intake:
    """The reading side of one connection.

    Attributes:
        holds: The holds that are set; the transport is read while there is none.
    """

    __slots__ = ("_lands", "_lingers_since", "_transport", "_turns", "holds")

    def __init__(self, transport: asyncio.Transport, turns: ReadingTurns) -> None:
        self.holds = 0
        self._transport = transport
        self._turns = turns
        self._lands = False
        self._lingers_since = 0.0

    def hold(self, reason: int) -> None:
        """Read nothing until this hold is released."""
        if not self.holds and not self._transport.is_closing():
            self._transport.pause_reading()
        self.holds |= reason

    def release(self, reason: int, act: Callable[[], object] | None = None) -> None:
        """Release a hold; `act` on what has arrived if it is the connection's turn, and read on."""
        self.holds &= ~reason
        if act is not None and not self.holds & (TURN | FULL_BUFFER) and not self._transport.is_closing():
            act()
        if not self.holds and not self._transport.is_closing():
            self._transport.resume_reading()

    def give_way(self, act: Callable[[], object]) -> None:
        """Read nothing before the other clients had their turn: a quick client would be read for megabytes at once."""
        if not self.holds & TURN:
            self.hold(TURN)
            self._turns.wait(partial(self.release, TURN, act))

    def land(self, connection: Reads, scatters: Scatters | None = None) -> None:
        """Have the kernel put bodies where they belong, from the first one on that has such a place."""
        if not self._lands and connection.room() is not None:
            self._lands = True
            read_bodies(self._transport, connection, scatters=scatters)

    def linger(self, now: float) -> None:
        """End this side of the connection; close all of it where one side cannot be ended alone."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._lingers_since = now
            self.release(PIPELINE | BEHIND)
        else:
            self._transport.close()

    def has_lingered(self, now: float, quiet_s: float) -> bool:
        """Tell whether the client had its time to read the last answer."""
        return quiet_s > LINGER_S or now - self._lingers_since > MAX_LINGER_S
