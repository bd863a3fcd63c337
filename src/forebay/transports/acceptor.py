# SPDX-License-Identifier: Apache-2.0
"""Listens on an address and takes the connections that wait there, many in one turn of the loop.

The event loop's own server takes one in a turn (libuv 1.45 and later). While turns are long because many clients are
being answered, new ones would wait thousands of turns before they are even seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from forebay.transports.binding import OWN, ListeningPlace
from forebay.workers.wire.kept_socket import keep_socket

if TYPE_CHECKING:
    Take = Callable[[socket.socket, tuple[str, int]], object]

log = logging.getLogger("forebay")

TAKEN_AT_ONCE: Final = 512
"""How many connections are taken in one turn: about 10 ms of work."""
PAUSE_S: Final = 0.1
"""How long none is taken after the system could not give one."""
TOLD_EVERY_S: Final = 1.0
"""How often the log says that."""
KEPT_SHARE: Final = 8
MOST_KEPT: Final = 256
"""So large a part of the descriptors that the process may have, or so many, are not for connections: with the last one
that is idle, no worker could be started in another one's place, no file be read and no body land."""
ENOUGH: Final = 65_536
"""How many descriptors a server of its own asks for, if it may have them."""


def ask_for_descriptors() -> None:
    """Let this process have as many as connections may need, as far as the system lets it decide that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a jail may forbid it; then there are fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _most_for_connections() -> int:
    """Return how many descriptors may be in use while a connection is taken."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - min(limit // KEPT_SHARE, MOST_KEPT)


class Acceptor:
    """Takes the connections of one address."""

    def __init__(self, take: Take) -> None:
        """Describe it; `open` binds.

        Args:
            take: Is called with each connection and the address of its client. The socket does not block and is the
                callee's to close.
        """
        self._take = take
        self._sockets: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._told_s = -TOLD_EVERY_S
        self._most = sys.maxsize
        self._keeping: asyncio.Task[NoReturn] | None = None

    async def open(self, host: str, port: int, backlog: int, place: ListeningPlace = OWN) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            OSError: If the address cannot be bound.
            UnicodeError: If the host cannot be the name of one.
        """
        self._most = _most_for_connections()
        self._listen(await place.bind(host, port), backlog)
        if place.path:
            again = functools.partial(self._listen_again, backlog)
            self._keeping = asyncio.get_running_loop().create_task(keep_socket(place.path, again))
        return (host, 0) if place.path else self._sockets[0].getsockname()[:2]

    def _listen(self, sockets: list[socket.socket], backlog: int) -> None:
        """Accept connections of these sockets; raises OSError if one cannot be listened at."""
        try:
            for listening in sockets:
                listening.listen(backlog)
                listening.setblocking(False)
        except OSError:
            for listening in sockets:
                listening.close()
            raise
        self._sockets = sockets
        for listening in sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _listen_again(self, backlog: int, made: socket.socket) -> None:
        self._take_rest()
        self._listen([made], backlog)

    def close(self) -> None:
        """Take what the kernel has queued, then accept nothing more."""
        if self._keeping is not None:
            self._keeping.cancel()
        self._take_rest()

    def _take_rest(self) -> None:
        sockets, self._sockets = self._sockets, []
        for listening in sockets:
            if (pause := self._pauses.pop(listening, None)) is None:
                asyncio.get_running_loop().remove_reader(listening)
                while self._accept(listening):
                    pass
            else:
                pause.cancel()
            listening.close()

    def _accept(self, listening: socket.socket) -> bool:
        """Take what waits; returns whether more may."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(listening, error)
                return False
            if accepted.fileno() >= self._most:  # the system gives the lowest number that is free
                accepted.close()
                self._tell(f"{self._most} files are open, and the last ones (ulimit -n) are kept for workers")
                continue
            accepted.setblocking(False)
            self._take(accepted, peer[:2])
        return True

    def _tell(self, why: str) -> None:
        if (now := time.monotonic()) - self._told_s >= TOLD_EVERY_S:
            self._told_s = now
            log.warning("failed to accept a connection: %s", why)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Ask the system again a moment later: asking at once would cost all of the loop's time."""
        loop = asyncio.get_running_loop()
        self._tell(error.strerror or str(error))

        def again() -> None:
            del self._pauses[listening]
            loop.add_reader(listening, self._accept, listening)

        if listening in self._sockets:
            loop.remove_reader(listening)
            self._pauses[listening] = loop.call_later(PAUSE_S, again)


def adopting(connect: Callable[[], asyncio.Protocol]) -> Take:
    """Return what makes connections of sockets, with the protocol that `connect` makes of each."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = set()

    def adopt(accepted: socket.socket, peer: tuple[str, int]) -> None:
        del peer
        task = loop.create_task(begin(accepted))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def begin(accepted: socket.socket) -> None:
        has_begun = False
        try:
            await loop.connect_accepted_socket(connect, accepted)
            has_begun = True
        except OSError as error:
            log.debug("a connection ended before it began: %s", error)
        finally:
            if not has_begun:
                accepted.close()

    return adopt
