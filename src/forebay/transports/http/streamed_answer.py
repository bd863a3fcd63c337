# SPDX-License-Identifier: Apache-2.0
"""One answer of the fast lane that leaves in parts, as fast as its client takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import TYPE_CHECKING, Any

from forebay.observe.logs.access_log import COST
from forebay.observe.logs.request_ids import next_id
from forebay.transports.rate_limit_fields import rate_limit_fields
from forebay.types.call import Media

if TYPE_CHECKING:
    from forebay.transports.http.answering import AnsweringConnection
    from forebay.transports.http.head import Head
    from forebay.transports.http.port import HttpPort


class StreamedAnswer:
    """Writes the head of an answer with its first part, since until then it may become an error, and then the others.

    On a WebSocket it never starts: each part is a message, and its connection sends the end.

    It does not refer to its request, which refers to it and at which the collector does not look.

    Attributes:
        has_started: Whether its head was written.
        is_chunked: Whether its client is told where it ends; otherwise the connection has to close.
        sent_bytes: Of its parts.
        status: Of the answer.
    """

    __slots__ = ("_connection", "_head", "_is_over", "_lane", "has_started", "is_chunked", "sent_bytes", "status")

    def __init__(self, connection: AnsweringConnection, lane: HttpPort, head: Head) -> None:
        self._connection = connection
        self._lane = lane
        self._head = head
        self._is_over = False
        self.has_started = False
        self.is_chunked = head.chunked
        self.sent_bytes = 0
        self.status = 200

    def part(self, part: Any, release: Callable[[], object]) -> None:
        """Send a part; `release` is called once the client has room for more."""
        if self._is_over:  # the connection was given up in this very step
            release()
            return
        assert self._head.route is not None
        assert self._connection.request is not None
        if type(part) is Media:  # the first
            self._begin(part)
            part = part.body
        self._send(part if self._connection.socket else self._head.route.part(part, self._connection.request), release)

    def bundle(self, parts: Sequence[bytes], release: Callable[[], object]) -> None:
        """Send several parts in one piece; see `part`."""
        if self._is_over:
            release()
            return
        assert self._head.route is not None
        assert self._connection.request is not None
        self._send(self._head.route.bundle(parts, self._connection.request), release)

    def end(self, last: bytes, cost: bytes = b"") -> None:
        """Send what comes last, if there is anything, and the end, with a trailer that says what it has cost."""
        self._begin()
        self._write_chunk(last)
        if self.is_chunked:
            self._connection.transport.write(b"0\r\n%b\r\n" % (b"%b: %b\r\n" % (COST, cost) if cost else b""))
        self._is_over = True

    def give_up(self) -> None:
        """Send nothing more; a client of HTTP/1.0, to which a close is the end of an answer, sees a reset instead."""
        self._is_over = True
        transport = self._connection.transport
        if self.has_started and not self.is_chunked and not transport.is_closing():
            transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))

    def _send(self, data: bytes, release: Callable[[], object]) -> None:
        self._begin()
        # Written even if there is no room: it is the next part that waits for some.
        self._write_chunk(data)
        if self._connection.flow.write_paused:
            self._connection.count_unread()
            self._connection.stalled.append(release)
        else:
            release()

    def _begin(self, first: Any = None) -> None:
        if self.has_started or self._connection.socket is not None:
            return
        head, request = self._head, self._connection.request
        assert head.route is not None
        assert request is not None
        self.has_started = True
        request.id = request.id or next_id()
        self.status, headers = head.route.stream_head(first, request.id)
        headers += rate_limit_fields(head.tenant)
        if self.is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
            if head.route.contract.raw_output and self._lane.config.answer_cost:
                headers.append((b"trailer", COST))
        keep_alive = self._connection.keeps_alive(head)
        self._connection.transport.write(self._lane.write_head(self.status, headers, None, keep_alive=keep_alive))

    def _write_chunk(self, data: bytes) -> None:
        if not data:  # an empty chunk is the end of the answer
            return
        self.sent_bytes += len(data)
        if (socket := self._connection.socket) is not None:
            assert self._head.route is not None
            socket.send(data, "BINARY" if self._head.route.contract.raw_output else "TEXT")
            return
        self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data)
