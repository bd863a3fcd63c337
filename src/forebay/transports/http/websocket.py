# SPDX-License-Identifier: Apache-2.0
"""The frames of a WebSocket, which stands in the place of the HTTP parser after the handshake.

A text from the client is a sample in JSON, bytes are one in msgpack or of a model of bytes. A stream is answered by a
message for each part and an empty text. Messages are answered as pipelined requests are: in order, and the connection
reads no further while one waits. The library `websockets` reads the frames; none is compressed.
"""

from __future__ import annotations

from typing import Any, Literal

from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import Protocol, Side
from websockets.server import ServerProtocol

from forebay.errors import CapacityError, ForebayError
from forebay.protocols import native
from forebay.transports.http.connection_state import END, ConnectionState
from forebay.transports.http.http_errors import NotHttp


class WebSocket:
    """The messages of one client, and those to it."""

    def __init__(self, connection: Any, body: Any, max_bytes: int) -> None:
        """Accept the handshake that a `ReadingConnection` has just read; raises NotHttp if it is none.

        Args:
            body: The connection's `ArrivingBody`, which counts what is kept.
        """
        self._connection, self._body = connection, body
        self._talk: ConnectionState = connection.talk
        self._headers: list[tuple[bytes, bytes]] = connection.headers
        handshake = ServerProtocol()
        given = Headers([(name.decode(), value.decode("latin-1")) for name, value in self._headers])
        accept = handshake.accept(Request("/", given)).headers.get("Sec-WebSocket-Accept", "")
        self.accept = b"sec-websocket-accept", accept.encode()
        if handshake.handshake_exc is not None:
            raise NotHttp(f"expected a handshake of WebSocket, version 13: {handshake.handshake_exc}")
        self._protocol = Protocol(Side.SERVER, max_size=max_bytes)
        self._is_text, self._fragments = False, bytearray()

    def feed_data(self, data: bytes) -> None:
        """Take the next bytes of the client."""
        connection, protocol, talk = self._connection, self._protocol, self._talk
        protocol.receive_data(data)
        for frame in protocol.events_received():
            talk.pieces += 16  # as many chunks of a body take as long
            if isinstance(frame, Frame) and frame.opcode < Opcode.CLOSE and protocol.close_sent is None:
                self._take(frame)
        talk.body_bytes = len(self._fragments) + len(protocol.reader.buffer)
        if talk.state.reads and talk.body_bytes:
            if not talk.state.is_inside:
                talk.begin()
            self._body.hold(len(data))
        elif talk.state.is_inside:
            talk.on(END)
            self._body.drop()
        if (close := protocol.close_sent) is not None:
            connection.leave(NotHttp(f"WebSocket: {close}") if protocol.close_rcvd is None else None)
        else:
            connection.transport.write(b"".join(protocol.data_to_send()))

    def _take(self, frame: Frame) -> None:
        """Take a frame of a message, and ask the model with the last one."""
        if not self._talk.state.is_inside:
            self._talk.begin()
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        if not frame.fin:
            self._fragments += frame.data
            return
        body = b"".join((self._fragments, frame.data)) if self._fragments else bytes(frame.data)
        self._fragments.clear()
        try:
            if self._is_text:
                body.decode()
        except UnicodeDecodeError as error:
            self._protocol.fail(CloseCode.INVALID_DATA, f"{error.reason} at position {error.start}")
        else:
            kind = native.JSON_TYPE if self._is_text else native.MSGPACK_TYPE
            self._connection.take_message(body, [*self._headers, (b"content-type", kind.encode())])

    def send(self, data: bytes, kind: Literal["TEXT", "BINARY", "PING"]) -> None:
        """Send a message, or a ping."""
        self._connection.transport.write(Frame(Opcode[kind], data).serialize(mask=False))

    def close(self, error: ForebayError | None) -> None:
        """Tell the client why the connection closes, unless it was told; without an error the server stops."""
        code = CloseCode.TRY_AGAIN_LATER if isinstance(error, CapacityError) else CloseCode.POLICY_VIOLATION
        reason = b"" if error is None else error.message.encode()[:120]  # a frame has room for 123 bytes
        self._protocol.fail(CloseCode.GOING_AWAY if error is None else code, reason.decode(errors="ignore"))
        self._connection.transport.write(b"".join(self._protocol.data_to_send()))
