# SPDX-License-Identifier: Apache-2.0
"""Has the kernel put what a client sends where it belongs, for as long as a reader names such a place.

An event loop otherwise makes an object of each piece that comes, out of a buffer of its own; a long body would be
copied twice before anybody has looked at it. A connection that has sent one such body will send others, so this stays
between it and the transport from then on: what belongs nowhere is read in short pieces, so that little of a body comes
with its head, and is given to the connection as always. Where a body comes in frames, it belongs in several places at
once; no event loop reads so, and the socket is asked here whenever a loop has filled what it was given.

A loop that has filled what it was given also looks for more. So where a body ends there is room for one byte more: it
stays empty if nothing has come after the body, which spares that look.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final, Protocol

SHORT_BYTES: Final = 8 * 1024
"""How much is read at once of what belongs nowhere."""
TURN_BYTES: Final = 1 << 20
"""How much is read of one client in a turn of the loop."""


class Reads(Protocol):
    """A connection whose bodies land."""

    def room(self) -> memoryview | None:
        """Return where what comes next belongs, at most a byte more than there is of it; None if nobody knows."""
        ...

    def advance(self, size: int) -> bytes:
        """Count so much as put there; returns what does not belong there, to be taken with what follows."""
        ...

    def data_received(self, data: bytes) -> None:
        """Take what belongs nowhere."""
        ...

    def give_way(self) -> None:
        """Read nothing more in this turn of the loop."""
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


class Rooms(Protocol):
    """Several places.

    Attributes:
        size: How long they are together.
    """

    rooms: list[memoryview]
    size: int


class Scatters(Protocol):
    """What knows several places at once."""

    def rooms(self) -> Rooms | None:
        """Return where what comes next belongs, one place after the other; None if nobody knows."""
        ...

    def placed(self, size: int) -> None:
        """Count so much as put there."""
        ...

    def head_bytes(self) -> int:
        """How much of what belongs nowhere comes before what does, if that is known; else 0."""
        ...


class BodyReader(asyncio.BufferedProtocol):
    """Stands between a transport and a connection whose bodies land."""

    def __init__(self, connection: Reads, scatters: Scatters | None, descriptor: int) -> None:
        self._connection: Reads | None = connection
        self._scatters = scatters
        self._descriptor = descriptor
        self._short = memoryview(bytearray(SHORT_BYTES))
        self._has_room = False
        self._given = 0
        self._early = b""
        self._unbroken = 0
        self.pause_writing = connection.pause_writing
        self.resume_writing = connection.resume_writing

    def get_buffer(self, sizehint: int) -> memoryview:
        """Name where the next bytes belong."""
        if self._given:  # last time there were none
            self._unbroken = 0
        found = None if self._connection is None else self._connection.room()
        self._has_room = found is not None
        if found is None:
            size = 0 if self._scatters is None else self._scatters.head_bytes()
            found = self._short[:size] if size else self._short
        elif len(found) > TURN_BYTES:
            found = found[:TURN_BYTES]
        self._given = len(found)
        return found

    def buffer_updated(self, nbytes: int) -> None:
        """Tell the connection of them."""
        connection = self._connection
        if connection is None:
            return
        given, self._given = self._given, 0
        if self._has_room:
            self._early = connection.advance(nbytes)
        else:
            data = bytes(self._short[:nbytes])
            if self._early:
                data, self._early = self._early + data, b""
            connection.data_received(data)
        if nbytes < given:  # this was all
            self._unbroken = 0
            return
        self._unbroken += nbytes
        if self._scatters is not None:
            self._scatter(self._scatters)
        if self._unbroken >= TURN_BYTES:
            self._unbroken = 0
            connection.give_way()

    def _scatter(self, scatters: Scatters) -> None:
        """Read what is there where it belongs."""
        while self._unbroken < TURN_BYTES and (rooms := scatters.rooms()):
            try:
                size = os.readv(self._descriptor, rooms.rooms)
            except OSError:  # there is nothing yet; or worse, which the transport will find as well
                return
            if not size:
                return
            is_all = size < rooms.size
            scatters.placed(size)
            self._unbroken = 0 if is_all else self._unbroken + size
            if is_all:
                return

    def eof_received(self) -> bool | None:
        """Tell the connection."""
        return None if self._connection is None else self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the connection, and let go of it."""
        connection, self._connection, self._scatters = self._connection, None, None
        del self.pause_writing, self.resume_writing
        if connection is not None:
            connection.connection_lost(exc)


def read_bodies(transport: asyncio.Transport, connection: Reads, *, scatters: Scatters | None = None) -> bool:
    """Have what comes read where it belongs, if this transport can do so; it is pausing while it is asked."""
    if transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
        return False
    transport.set_protocol(BodyReader(connection, scatters, transport.get_extra_info("socket").fileno()))
    return True
