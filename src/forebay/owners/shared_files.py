# SPDX-License-Identifier: Apache-2.0
"""Memory that both ends of a link see, where they are on one machine.

Theory of operation. Each puts long bodies into memory files of its own (`workers/memory/landing.py`), and tells the
other where. That side copies them with `pread` as soon as it hears of them: so nothing changes under what it works on,
and a file that turns out to be short is an error and no signal. It opens only files of the process that the kernel says
is at the other end of the socket, and of those only sealed files in memory. As they have no name, nothing is left of
them, however either side ends.

Before anything is put there, each side has opened a file of the other. In another container that fails, and everything
goes through the socket.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import InvalidRequest
from forebay.workers.memory.landing import Joining, Places
from forebay.workers.memory.memory_file import make_file, open_file
from forebay.workers.wire.address import process_of

if TYPE_CHECKING:
    import asyncio


STEP_BYTES: Final = 1 << 20
"""How much is copied at once."""
COPIED_BYTES: Final = 1 << 14
"""Bytes that cost as much as a request."""
_MAX_OPEN: Final = 32
"""Files of the other side that stay open."""


class SharedFiles:
    """What one end of a link sees of the other's memory.

    Attributes:
        shown: A file of this side, for the other one to open; None if there is no such memory.
        is_seen: Whether the other side sees this side's files.
    """

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        """Begin, at one end of a connection."""
        connection: socket.socket = transport.get_extra_info("socket")
        self.shown: tuple[str, int] | None = None
        self.is_seen = False
        self._peer = process_of(connection) if connection.family == socket.AF_UNIX else 0
        self._open: dict[tuple[str, int], int] = {}
        self._descriptor = -1
        if self._peer:
            try:
                self._descriptor = make_file("forebay-link")
            except OSError:
                return
            self.shown = f"/proc/{os.getpid()}/fd/{self._descriptor}", os.fstat(self._descriptor).st_ino

    def sees(self, shown: Any) -> bool:
        """Tell whether a file of the other side can be opened; nothing is told of one, or anything."""
        try:
            path, inode = shown
            self._descriptor_of(path, inode)
        except (OSError, InvalidRequest, TypeError, ValueError):
            return False
        return True

    def copy(self, place: tuple[str, int, int, int], places: Places | None) -> Generator[int, None, bytes | memoryview]:
        """Return a copy of what lies in a file of the other side; made in steps, each of which yields its cost.

        Args:
            place: Path and inode of the file, where in it and how long.
            places: Where the copy lands, if it is to be seen by workers; None makes bytes.

        Raises:
            InvalidRequest: That is not a file of the other side, or it is shorter than was said.
            OSError: It cannot be opened.
        """
        path, inode, offset, length = place
        descriptor = self._descriptor_of(path, inode)
        joining, room, at = Joining(), None, 0
        if places is not None:
            room = places.room(length, length)[0][:length]
        while at < length:
            if room is None:
                piece = os.pread(descriptor, min(length - at, STEP_BYTES), offset + at)
                size = len(piece)
                if size == length:
                    yield size // COPIED_BYTES
                    return piece
                joining.write(piece)
            else:
                size = os.preadv(descriptor, [room[at : at + STEP_BYTES]], offset + at)
            if not size:
                raise InvalidRequest("less lies in shared memory than was announced")
            at += size
            yield size // COPIED_BYTES
        return joining.getvalue() if room is None else room.toreadonly()

    def close(self) -> None:
        """Let go of all files."""
        for descriptor in (self._descriptor, *self._open.values()):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor, self._open, self._peer = -1, {}, 0

    def _descriptor_of(self, path: str, inode: int) -> int:
        found = self._open.pop((path, inode), None)
        if found is None:
            folder, _, number = path.rpartition("/")
            if not self._peer or folder != f"/proc/{self._peer}/fd" or not (number.isascii() and number.isdecimal()):
                raise InvalidRequest(f"expected a file of the process at the other end, got {path[:80]!r}")
            found = open_file((path, inode), os.O_RDONLY)
            while len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
        self._open[path, inode] = found  # the last one that was used
        return found
