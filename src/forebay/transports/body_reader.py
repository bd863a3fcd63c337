# SPDX-License-Identifier: Apache-2.0
"""Has what a client sends put where it belongs by the kernel, for as long as somebody names such a place.

An event loop otherwise makes an object of each piece that comes, out of a buffer of its own; a long body would be
copied twice before anybody has looked at it. A connection that has sent one such body will send others, so this stays
between it and the transport from then on: what belongs nowhere is read in short pieces, so that little of a body comes
with its head, and is given to the connection as always.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

SHORT_BYTES: Final = 8 * 1024
"""How much is read at once of what belongs nowhere."""
TURN_BYTES: Final = 1 << 20
"""How much is read of one client in a turn of the loop."""


class Reads(Protocol):
    """A connection whose bodies land."""

    def room(self) -> memoryview | None:
        """Return where what comes next belongs, not more than there is of it; None if nobody knows."""
        ...

    def advance(self, size: int) -> None:
        """Take note that so much was put there."""
        ...

    def data_received(self, data: bytes) -> None:
        """Take what belongs nowhere."""
        ...

    def eof_received(self) -> bool | None:
        """The client will send nothing more."""
        ...

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        ...

    def pause_writing(self) -> None:
        """The client takes its answers slowly."""
        ...

    def resume_writing(self) -> None:
        """The client has room again."""
        ...


class BodyReader(asyncio.BufferedProtocol):
    """Stands between a transport and a connection whose bodies land."""

    def __init__(self, connection: Reads) -> None:
        self._connection: Reads | None = connection
        self._short = memoryview(bytearray(SHORT_BYTES))
        self._has_room = False
        self.pause_writing = connection.pause_writing
        self.resume_writing = connection.resume_writing

    def get_buffer(self, sizehint: int) -> memoryview:
        """Name where the next bytes belong."""
        room = None if self._connection is None else self._connection.room()
        self._has_room = room is not None
        return self._short if room is None else room[:TURN_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Tell the connection of them."""
        if self._connection is None:
            return
        if self._has_room:
            self._connection.advance(nbytes)
        else:
            self._connection.data_received(bytes(self._short[:nbytes]))

    def eof_received(self) -> bool | None:
        """Tell the connection."""
        return None if self._connection is None else self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the connection, and let go of it."""
        connection, self._connection = self._connection, None
        del self.pause_writing, self.resume_writing
        if connection is not None:
            connection.connection_lost(exc)


def read_bodies(transport: asyncio.Transport, connection: Reads) -> bool:
    """Have what comes read where it belongs, if this transport can do so; it is pausing while it is asked."""
    if transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
        return False
    transport.set_protocol(BodyReader(connection))
    return True
