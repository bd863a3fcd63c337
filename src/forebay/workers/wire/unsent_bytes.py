# SPDX-License-Identifier: Apache-2.0
"""Tells how much of what was written the other side has not taken yet; what follows is for connections to say."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

_NONE: Final = struct.pack("i", 0)
_SO_NWRITE: Final = 0x1024
"""The same as an option of a socket, on macOS."""


def untaken_bytes(transport: asyncio.Transport) -> int:
    """Return how much the other side has not acknowledged of what was written.

    The kernel's share counts, too: it may hold megabytes, and takes more of a transport only once it is rid of a third
    of them, for which a slow one needs minutes.
    """
    left = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None:  # closed meanwhile, with TLS
        return left
    try:
        if sys.platform == "darwin":
            return left + sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return left + struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _NONE))[0]
    except (OSError, ValueError):  # closed meanwhile
        return left
