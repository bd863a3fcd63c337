# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 frame by frame, however wrong."""

import socket
import struct
from typing import NamedTuple

import hpack
from tests.integration.grpc.served import PATIENCE_S, path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, _, STREAM_CLOSED, FRAME_SIZE_ERROR = range(7)
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, _, ENHANCE_YOUR_CALM = range(7, 12)


class Frame(NamedTuple):
    """One frame as it came."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind, payload=b"", *, flags=0, stream=0, length=None):
    """The bytes of a frame; `length` may lie."""
    length = len(payload) if length is None else length
    return struct.pack(">BHBBL", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def settings(*pairs):
    return frame(SETTINGS, b"".join(struct.pack(">HL", name, value) for name, value in pairs))


OPENING = PREFACE + settings()


def number(value):
    """The payload of a WINDOW_UPDATE or RST_STREAM."""
    return struct.pack(">L", value)


def prefixed(message, *, flag=0):
    """A message as it stands in DATA frames."""
    return struct.pack(">BL", flag, len(message)) + message


def header_list(method, **more):
    """The headers of a call; `more` replaces some, None leaves one out."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method if method.startswith("/") else path(method),
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return [(name, value) for name, value in fields.items() if value is not None]


def packed(fields):
    """A header block that leaves the dynamic table alone."""
    return hpack.Encoder().encode([(*pair, True) for pair in fields], huffman=False)


def headers(method, *, stream=1, flags=END_HEADERS, **more):
    return frame(HEADERS, packed(header_list(method, **more)), flags=flags, stream=stream)


def data(payload, *, stream=1, flags=0):
    return frame(DATA, payload, flags=flags, stream=stream)


def call(method, message=b"", *, stream=1, **more):
    """All frames of a call with one message."""
    return headers(method, stream=stream, **more) + data(prefixed(message), stream=stream, flags=END_STREAM)


class Answer:
    """What came back on a stream."""

    def __init__(self):
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.body = bytearray()
        self.blocks = 0
        self.is_over = False
        self.reset = None

    @property
    def status(self):
        """The number of the gRPC status."""
        return int(self.trailers["grpc-status"])

    @property
    def message(self):
        assert self.status == 0, self.trailers
        length = int.from_bytes(self.body[1:5])
        assert len(self.body) == 5 + length
        return bytes(self.body[5:])


class Wire:
    """A connection that sends what it is told to and follows what comes back."""

    def __init__(self, port, *, opening=OPENING, receive_bytes=None):
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect((port.host, port.number))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = {}
        self.settings = {}
        self.windows = {}
        self.last = self.goaway = None
        self.pings = 0
        self.received = b""
        self._hpack = hpack.Decoder()
        self.send(opening)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.socket.close()

    def send(self, *frames):
        self.socket.sendall(b"".join(frames))
        return self

    def flood(self, *frames):
        """Sends without reading, as far as the server lets it."""
        try:
            self.send(*frames)
        except ConnectionError:
            pass
        return self

    def read_bytes(self):
        """What comes next; empty at the end."""
        try:
            return self.socket.recv(1 << 16)
        except ConnectionError:
            return b""

    def read(self):
        """The next frame, None at the end."""
        while len(self.received) < 9 or len(self.received) < 9 + int.from_bytes(self.received[:3]):
            more = self.read_bytes()
            if not more:
                return None
            self.received += more
        length = int.from_bytes(self.received[:3])
        kind, flags, stream = struct.unpack(">BBL", self.received[3:9])
        found = Frame(kind, flags, stream, self.received[9 : 9 + length])
        self.received = self.received[9 + length :]
        self._follow(found)
        return found

    def _follow(self, found):
        answer = self.answers.setdefault(found.stream, Answer())
        if found.kind == HEADERS:
            fields = dict(self._hpack.decode(found.payload))
            answer.blocks += 1
            if not answer.headers:
                answer.headers = fields
            if found.flags & END_STREAM:
                answer.trailers = fields
        elif found.kind == DATA:
            answer.body += found.payload
        elif found.kind == RST_STREAM:
            answer.reset = int.from_bytes(found.payload)
            answer.is_over = True
        elif found.kind == SETTINGS and not found.flags & ACK:
            self.settings.update(struct.iter_unpack(">HL", found.payload))
        elif found.kind == WINDOW_UPDATE:
            self.windows[found.stream] = self.windows.get(found.stream, 0) + int.from_bytes(found.payload)
        elif found.kind == GOAWAY:
            self.last, self.goaway = struct.unpack(">LL", found.payload[:8])
        if found.kind in {HEADERS, DATA} and found.flags & END_STREAM:
            answer.is_over = True

    def answer(self, stream=1):
        """The whole answer to a call; fails if the connection ends before it."""
        while not (answer := self.answers.setdefault(stream, Answer())).is_over:
            assert self.read() is not None, f"closed before stream {stream} was answered"
        return answer

    def settle(self):
        """Waits until the server has done all it can do with what was sent."""
        self.pings += 1
        mark = self.pings.to_bytes(8)
        self.send(frame(PING, mark))
        while (found := self.read()) is not None:
            if found.kind == PING and found.flags & ACK and found.payload == mark:
                return self
        raise AssertionError("closed before the ping was answered")

    def end(self):
        """Reads until the server closes; the code of its GOAWAY, None if it said none."""
        while self.read() is not None:
            pass
        return self.goaway
