# SPDX-License-Identifier: Apache-2.0
"""POST and GET with connections that are kept, for several threads; the standard library is enough for that."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from email.message import Message
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import TooLarge
from forebay.remote_servers.servers import CONNECT_S, MAX_ANSWER_BYTES, PARENT, ServerAddress, Unreachable, parent
from forebay.remote_servers.whole_head import WholeHeadResponse

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class HttpAnswer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    headers: Message
    body: bytes


class HttpCalls:
    """Calls to one server. A connection is used by one call at a time and kept for the next one."""

    def __init__(self, endpoint: ServerAddress) -> None:
        self.endpoint = endpoint
        self._idle: deque[http.client.HTTPConnection] = deque()

    def call(
        self, method: str, path: str, deadline: float, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> HttpAnswer:
        """Make a call; once more with a new connection if the server had closed the one that was kept.

        Args:
            path: With a slash at the beginning.
            deadline: When to give up, by the monotonic clock.

        Raises:
            Unreachable: If the server lets nobody in or goes away.
            TimeoutError: If it does not answer in time.
            TooLarge: If it answers with too much.
        """
        try:
            kept = self._idle.pop()
        except IndexError:
            kept = None
        if kept is not None:
            try:
                return self._exchange(kept, method, path, deadline, body, headers)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                pass  # most likely closed while nobody looked; a new one tells
        made = self._connect(deadline)
        try:
            return self._exchange(made, method, path, deadline, body, headers)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as problem:
            is_cut = isinstance(problem, http.client.IncompleteRead)
            reason = "in the middle of the answer" if is_cut else problem or type(problem).__name__
            raise Unreachable(f"the connection broke ({reason})") from problem

    def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.pop().close()

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        where = self.endpoint
        budget_s = max(0.001, min(CONNECT_S, deadline - time.monotonic()))
        if where.scheme == "https":
            context = ssl.create_default_context()
            made = http.client.HTTPSConnection(where.host, where.port, timeout=budget_s, context=context)
        else:
            made = http.client.HTTPConnection(where.host, where.port, timeout=budget_s)
        try:
            made.connect()
        except OSError as problem:
            made.close()
            raise Unreachable(problem.strerror or str(problem)) from problem
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        deadline: float,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> HttpAnswer:
        is_whole = False
        try:
            connection.sock.settimeout(_left(deadline))
            connection.request(method, path, body, {**headers, PARENT: parent.get()} if parent.get() else dict(headers))
            connection.response_class = functools.partial(_Response, deadline)  # pyright: ignore[reportAttributeAccessIssue] # only called
            response = connection.getresponse()
            parts: list[bytes] = []
            size = 0
            while data := response.read(1 << 20):
                size += len(data)
                if size > MAX_ANSWER_BYTES:
                    raise TooLarge(f"{self.endpoint.address} answered with more than {MAX_ANSWER_BYTES} bytes")
                parts.append(data)
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            is_whole = True
            return HttpAnswer(response.status, response.headers, b"".join(parts))
        finally:
            if is_whole and connection.sock is not None:
                self._idle.append(connection)
            else:
                connection.close()


class _Response(WholeHeadResponse):
    """An answer that has to be here, all of it, at a moment: the time-out of a socket begins anew with every byte."""

    def __init__(self, deadline: float, sock: socket.socket, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Until(deadline, sock, self.fp.detach()))


class _Until(io.RawIOBase):
    def __init__(self, deadline: float, sock: socket.socket, file: io.RawIOBase) -> None:
        super().__init__()
        self._deadline = deadline
        self._socket = sock
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        self._socket.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(deadline: float) -> float:
    """Return the time that is left; raises a `TimeoutError` if there is none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
