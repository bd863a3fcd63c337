# SPDX-License-Identifier: Apache-2.0
"""Accepts connections to a port that speaks TLS, and stays with each until its handshake is over.

The event loop's own server knows a connection only once its handshake is done: until then it counts nowhere. Here it
counts from the first moment and has the time that any beginning of a request has, and a client that speaks without TLS
is told so in a form it can read. What that form is, its port knows.

A port without TLS has a plain acceptor; `open_door` makes whichever is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError, InvalidRequest, Unavailable
from forebay.transports.acceptor import Acceptor, adopting
from forebay.transports.binding import OWN, ListeningPlace, why_not
from forebay.workers.wire.peeking import peek

if TYPE_CHECKING:
    from forebay.transports.grpc.port import GrpcPort
    from forebay.transports.http.port import HttpPort
    from forebay.workers.wire.tls_files import TlsFiles

TLS_GOODBYE_S: Final = 1.0
"""How long a closing TLS connection waits for the client's goodbye."""
_HANDSHAKE: Final = 0x16
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 256 * 1024


class NotTls(InvalidRequest):
    """What came to a port that speaks TLS is not TLS, or none that can be agreed on."""


class LateHandshake(NotTls):
    """The handshake was not over in time."""


class TlsDoor:
    """Listens on one address."""

    def __init__(self, port: HttpPort | GrpcPort, tls: TlsFiles, connect: Callable[[], asyncio.Protocol]) -> None:
        self._port = port
        self._tls = tls
        self._connect = connect
        self._acceptor = Acceptor(self._take)
        self._greeting: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, backlog: int, place: ListeningPlace = OWN) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            OSError: If the address cannot be bound.
        """
        return await self._acceptor.open(host, port, backlog, place)

    def close(self) -> None:
        """Accept nothing more."""
        self._acceptor.close()

    def abandon(self) -> None:
        """Wait for no handshake any more."""
        for task in list(self._greeting):
            task.cancel()

    def _take(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        port, limit = self._port, self._port.config.max_connections
        if len(port.connections) + port.greeted >= limit:
            accepted.close()
            port.tell(Unavailable(f"all {limit} connections are taken"), peer)
            return
        port.greeted += 1
        task = asyncio.get_running_loop().create_task(self._greet(accepted, peer))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        """Make a connection of a socket, or tell the client why not."""
        loop, port = asyncio.get_running_loop(), self._port
        patience_s = port.config.read_timeout_s
        is_taken = False
        try:
            async with asyncio.timeout(patience_s):
                first = await peek(accepted)
                if first[:1] == bytes([_HANDSHAKE]):
                    is_taken = True
                    await loop.connect_accepted_socket(
                        self._connect,
                        accepted,
                        ssl=self._tls.context,
                        ssl_handshake_timeout=patience_s,
                        ssl_shutdown_timeout=TLS_GOODBYE_S,
                    )
                elif first:
                    why, answer = port.refuse_plain()
                    port.tell(NotTls(why), peer)
                    await _answer(accepted, answer)
        except TimeoutError:
            port.tell(LateHandshake(f"the TLS handshake was not over within {patience_s:g} seconds"), peer)
        except OSError as error:
            reason = error.strerror or str(error) or "the client hung up"
            port.tell(NotTls(f"the TLS handshake failed: {reason}"), peer)
        finally:
            port.greeted -= 1
            if not is_taken:
                accepted.close()


async def _answer(accepted: socket.socket, answer: bytes) -> None:
    """Send an answer without TLS, and read what the client is still sending, so that the answer is not lost."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(accepted, answer)
    accepted.shutdown(socket.SHUT_WR)
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and (data := await loop.sock_recv(accepted, 65536)):
                left -= len(data)


async def open_door(
    port: HttpPort | GrpcPort,
    tls: TlsFiles | None,
    connect: Callable[[], asyncio.Protocol],
    place: ListeningPlace,
    source: str,
) -> tuple[TlsDoor | Acceptor, tuple[str, int]]:
    """Bind the address of a port and accept; returns the door and the address.

    Args:
        tls: How it is encrypted; None if it is not.
        source: What has set the port, for messages; see `why_not`.

    Raises:
        ConfigError: If the address cannot be bound, with the reason and the cure.
    """
    config, number = port.config, port.config.port or 0
    if not 0 <= number < 1 << 16:
        raise ConfigError(f"expected a port from 0 to 65535, got {number}")
    door = Acceptor(adopting(connect)) if tls is None else TlsDoor(port, tls, connect)
    try:
        return door, await door.open(config.host, number, config.backlog, place)
    except (OSError, UnicodeError) as error:
        raise ConfigError(why_not(config.host, number, error, source)) from error


async def wait_closed(port: HttpPort | GrpcPort, timeout_s: float) -> None:
    """Wait until no connection is left; not on the data path, so looking now and then is good enough."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while port.connections or port.greeted:  # noqa: ASYNC110 - a connection closes in many ways
                await asyncio.sleep(0.02)
