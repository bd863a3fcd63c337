# SPDX-License-Identifier: Apache-2.0
"""A blocking TLS connection that one thread reads while others write.

`ssl.SSLSocket` is not that: what it does for two threads at once is undefined, and it refuses the flag that reads
without waiting. Here a lock guards what the library does in memory, and no thread holds it while it waits for the
network. A writer has the wire from before it encrypts until its bytes are sent. So what the reader finds to be sent
while the wire is free is the library's own, and the reader never waits for a peer that takes nothing.
"""

from __future__ import annotations

import ssl
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

_READ_BYTES: Final = 1 << 17
"""Read from the network at a time. What comes of it fits into a buffer of twice the length, so that nothing stays
behind that whoever waits for the descriptor would not hear of."""
_WRITE_BYTES: Final = 1 << 18
_RECORD_BYTES: Final = 1 << 14
"""Most that the library decrypts at a time."""


class TlsSocket:
    """What of a socket is used, encrypted. A closed connection is an end of the file, however it was closed."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Shake hands.

        Args:
            raw: The connection; a timeout that it has holds here as well.
            context: How to encrypt, and what is believed.
            host: What the certificate of the other side must name.

        Raises:
            ssl.SSLError: If it cannot be agreed on; the other side has been told.
            OSError: If the connection breaks.
        """
        self._raw = raw
        self._received = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._in_memory = threading.Lock()
        self._on_wire = threading.Lock()
        while not self._is_agreed():
            self._send_pending()
            self._receive(0)
        self._send_pending()

    def _is_agreed(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            self._send_pending()
            raise
        return True

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._raw.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """Set how long reading and writing wait; None waits without a limit."""
        self._raw.settimeout(timeout_s)

    def sendall(self, data: bytes) -> None:
        """Write all of it."""
        view = memoryview(data)
        for start in range(0, len(view), _WRITE_BYTES):
            with self._on_wire:
                with self._in_memory:
                    self._tls.write(view[start : start + _WRITE_BYTES])
                self._send_pending()

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Read what there is into a buffer, which has at least 256 KiB; 0 at the end.

        Args:
            buffer: Where to.
            nbytes: As of sockets.
            flags: `MSG_DONTWAIT` raises `BlockingIOError` where nothing is there.
        """
        size = nbytes or len(buffer)
        while True:
            count = self._decrypt(buffer[:size])
            if count is not None:
                return count
            if self._to_send.pending and self._on_wire.acquire(blocking=False):
                try:
                    self._send_pending()  # an answer of the library's own, such as new keys
                finally:
                    self._on_wire.release()
            self._receive(flags)

    def shutdown(self, how: int) -> None:
        """End reading and writing, for whichever thread does either."""
        self._raw.shutdown(how)

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()

    def _decrypt(self, buffer: memoryview) -> int | None:
        """Fill the buffer with all that has come; None if that is nothing."""
        count = 0
        with self._in_memory:
            try:
                while count < len(buffer) and (read := self._tls.read(min(len(buffer) - count, _RECORD_BYTES))):
                    buffer[count : count + len(read)] = read
                    count += len(read)
            except ssl.SSLWantReadError:
                return count or None
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                pass
        return count

    def _receive(self, flags: int) -> None:
        data = self._raw.recv(_READ_BYTES, flags)
        with self._in_memory:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()

    def _send_pending(self) -> None:
        """Send what was encrypted; the caller has the wire, or is alone."""
        with self._in_memory:
            data = self._to_send.read()
        if data:
            self._raw.sendall(data)
