# SPDX-License-Identifier: Apache-2.0
"""Where the workers of a project ask their server for more while they run: messages of a stream, folders of models.

A worker is given batches; what it needs beside them it asks for here, over one connection of its process that all its
threads share. Both sides send msgpack arrays, framed as in the worker protocol: a kind, and what belongs to it. Who
asks for what is not said here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from forebay.workers.processes.private_socket import PrivateSocket
from forebay.workers.user_calls.user_code import caught
from forebay.workers.wire import frames

log = logging.getLogger("forebay")

_READ_BYTES: Final = 1 << 18


class DeskVisitor(asyncio.Protocol):
    """One worker process, as the server sees it; used on the loop.

    Attributes:
        on_leave: Called when it is gone.
    """

    def __init__(self, desk: Desk) -> None:
        self.on_leave: list[Callable[[], object]] = []
        self._desk = desk
        self._reader = frames.FrameReader()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet it."""
        self._transport = transport
        self._desk.visitors.add(self)
        for greet in self._desk.on_visit:
            greet(self)

    def data_received(self, data: bytes) -> None:
        """Hear what it asks for."""
        for kind, *rest in self._reader.feed(data):
            self._desk.asked[kind](self, *rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._desk.visitors.discard(self)
        for leave in self.on_leave:
            leave()

    def tell(self, *message: Any) -> None:
        """Send it something."""
        if not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def hang_up(self) -> None:
        """Close the connection."""
        self._transport.abort()


class Desk:
    """The server's side.

    Attributes:
        asked: What to call for each kind of message: with the visitor, and what the message holds.
        on_visit: Called with each new visitor.
        visitors: Who is there.
    """

    def __init__(self) -> None:
        self.asked: dict[str, Callable[..., None]] = {}
        self.on_visit: list[Callable[[DeskVisitor], None]] = []
        self.visitors: set[DeskVisitor] = set()
        self._entrance: PrivateSocket | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Listen; returns where."""
        self._entrance = PrivateSocket()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: DeskVisitor(self), sock=self._entrance.take_listener())
        return self._entrance.path

    def close(self) -> None:
        """Listen no more."""
        for visitor in list(self.visitors):
            visitor.hang_up()
        if self._server is not None:
            self._server.close()
        if self._entrance is not None:
            self._entrance.close()


class DeskClient:
    """The worker's side, for all its threads; another thread reads.

    Attributes:
        told: What to call for each kind of message, in the thread that reads; it must not wait for the desk.
        on_end: Called in that thread once the server is gone.
    """

    def __init__(self, path: str) -> None:
        """Connect; raises OSError if nobody is there."""
        self.told: dict[str, Callable[..., None]] = {}
        self.on_end: list[Callable[[], object]] = []
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._read, name="forebay-desk", daemon=True).start()

    def ask(self, *message: Any) -> None:
        """Send something; what is said to a server that is gone is lost, and `on_end` was or will be called."""
        frame = frames.encode(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            log.debug("the server is gone: %s", error)

    def _read(self) -> None:
        reader = frames.FrameReader()
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                break
            if not data:
                break
            for kind, *rest in reader.feed(data):
                _, error = caught(self.told[kind], *rest)
                if error is not None:  # who waits for what comes next must not wait for ever
                    log.error("failed to handle the message %r of the server", kind, exc_info=error)
        for end in self.on_end:
            end()
        self._socket.close()
