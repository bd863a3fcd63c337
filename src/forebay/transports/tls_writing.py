# SPDX-License-Identifier: Apache-2.0
"""Gives a TLS transport its bytes a little at a time.

A TLS transport encrypts all that it is given at once, and moves all of it into the buffer of the transport beneath as
soon as that has room for anything. How much is left there it does not say. So a long answer would be held where nobody
counts it, for as long as the client likes: it is written in pieces instead, and the rest waits here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

PIECE_BYTES: Final = 64 * 1024
"""How much is written at once: this much encrypts in a fraction of a millisecond."""


class TlsWriter:
    """Stands in for the transport of a connection, which tells it when the transport pauses and resumes writing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._is_paused = self._is_closing = False

    def __getattr__(self, name: str) -> Any:
        """Leave everything but writing to the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write as much as there is room for, and the rest later."""
        if self._is_closing or not data:
            return
        if not (self._waiting or self._is_paused) and len(data) <= PIECE_BYTES:
            self._transport.write(data)
            return
        self._waiting.append(memoryview(data))
        self._size += len(data)
        self._write_some()

    def writelines(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write several pieces, one after the other."""
        for piece in pieces:
            self.write(piece)

    def get_write_buffer_size(self) -> int:
        """Return how much is not written yet, as far as that is known."""
        return self._size + self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Write no more for now."""
        self._is_paused = True

    def resume(self) -> bool:
        """Write more; returns whether that was all, and there is room again."""
        self._is_paused = False
        self._write_some()
        return not (self._waiting or self._is_paused)

    def is_closing(self) -> bool:
        """Tell whether the connection is closed, or will be once everything is written."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is written."""
        self._is_closing = True
        if not self._waiting:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now."""
        self._waiting.clear()
        self._size = 0
        self._transport.abort()

    def _write_some(self) -> None:
        waiting = self._waiting
        while waiting and not self._is_paused:
            piece = waiting.popleft()
            if len(piece) > PIECE_BYTES:
                waiting.appendleft(piece[PIECE_BYTES:])
                piece = piece[:PIECE_BYTES]
            self._size -= len(piece)
            self._transport.write(piece)
        if self._is_closing and not waiting:
            self._transport.close()
