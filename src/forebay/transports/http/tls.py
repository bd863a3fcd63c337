# SPDX-License-Identifier: Apache-2.0
"""Accepts connections to a port that speaks TLS, and stays with each until its handshake is over.

The event loop's own server knows a connection only once its handshake is done: until then it counts nowhere. Here it
counts from the first moment, has the time that any beginning of a request has, and a client that speaks plain HTTP is
told so in a form it can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from forebay.errors import Unavailable
from forebay.transports.acceptor import Acceptor
from forebay.transports.http.errors import NotHttp, NotTls, TooSlow, error_answer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from forebay.transports.http.port import HttpPort

log = logging.getLogger("forebay")

TLS_GOODBYE_S: Final = 1.0
"""How long a closing TLS connection waits for the client's goodbye."""
_HANDSHAKE: Final = 0x16
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 256 * 1024


class TlsDoor:
    """Listens on one address."""

    def __init__(self, lane: HttpPort, context: ssl.SSLContext, connect: Callable[[], asyncio.Protocol]) -> None:
        """Describe the door.

        Args:
            lane: Whose connections they become.
            context: How they are encrypted.
            connect: Makes the protocol of one.
        """
        self._lane = lane
        self._context = context
        self._connect = connect
        self._acceptor = Acceptor(self._take)
        self._greeting: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, backlog: int) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            OSError: If the address cannot be bound.
        """
        return await self._acceptor.open(host, port, backlog)

    def close(self) -> None:
        """Accept nothing more."""
        self._acceptor.close()

    def abandon(self) -> None:
        """Wait for no handshake any more."""
        for task in list(self._greeting):
            task.cancel()

    def _take(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        lane = self._lane
        if len(lane.connections) + lane.greeted >= lane.config.max_connections:
            accepted.close()
            lane.tell(Unavailable(f"all {lane.config.max_connections} connections are taken"), peer)
            return
        lane.greeted += 1
        task = asyncio.get_running_loop().create_task(self._greet(accepted, peer))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        """Make a connection of a socket, or tell the client why not."""
        loop, patience_s = asyncio.get_running_loop(), self._lane.config.read_timeout_s
        is_taken = False
        try:
            async with asyncio.timeout(patience_s):
                first = await _peek(accepted)
                if first[:1] == bytes([_HANDSHAKE]):
                    is_taken = True
                    await loop.connect_accepted_socket(
                        self._connect,
                        accepted,
                        ssl=self._context,
                        ssl_handshake_timeout=patience_s,
                        ssl_shutdown_timeout=TLS_GOODBYE_S,
                    )
                elif first:
                    error = NotHttp("this port speaks HTTPS, and plain HTTP came; ask for it with https://")
                    self._lane.tell(NotTls(error.message), peer)
                    await _answer(accepted, error)
        except TimeoutError:
            self._lane.tell(TooSlow(f"the TLS handshake was not over within {patience_s:g} seconds"), peer)
        except OSError as error:
            self._lane.tell(NotTls(f"the TLS handshake failed: {error.strerror or error}"), peer)
        finally:
            self._lane.greeted -= 1
            if not is_taken:
                accepted.close()


async def _peek(accepted: socket.socket) -> bytes:
    """Wait for the first bytes and leave them where they are."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(accepted, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(8, socket.MSG_PEEK)


async def _answer(accepted: socket.socket, error: NotHttp) -> None:
    """Write an answer in plain HTTP, and read what the client is still sending, so that the answer is not lost."""
    loop = asyncio.get_running_loop()
    status, headers, body = error_answer(error, "")
    headers = [*headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    await loop.sock_sendall(accepted, STATUS_LINE[status] + lines + b"\r\n" + body)
    accepted.shutdown(socket.SHUT_WR)
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and (data := await loop.sock_recv(accepted, 65536)):
                left -= len(data)
