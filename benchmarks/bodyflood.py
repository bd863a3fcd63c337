# SPDX-License-Identifier: Apache-2.0
"""Load of long requests, over HTTP/1.1 or as unary gRPC calls, by a client that does not copy what it sends.

    python -m benchmarks.bodyflood grpc PORT PATH FILE --answer FILE --connections 16 --seconds 2
    python -m benchmarks.bodyflood http PORT PATH FILE --answer FILE --header "content-type: application/json"

Over the loopback a client that writes bytes pays for a copy of them into the kernel, which for long bodies is more than
many a server does with them. So each connection has its request in a file in memory, and has the system send the file's
pages; only what frames them is written. The server's copy out of the kernel stays. Over gRPC frames are as long as the
port takes them, as those of clients made of gRPC's C core are, and the windows of the port are kept to.

Each connection asks again as soon as it was answered. The end of each answer (its data) must be that of `--answer`,
byte for byte; ids in front of it may differ. Prints JSON: `rate`, `p50_ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from struct import Struct

HEAD, NUMBER, SETTING = Struct(">HBBBI"), Struct(">I"), Struct(">HI")
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
LARGEST = (1 << 31) - 1
MAX_PIECES = 256
READ_BYTES = 1 << 17
COMPARED_BYTES = 4096
"""How much of the end of an answer is looked at."""


class Client:
    """One connection: what is to be sent, and how it is sent."""

    def __init__(self, port: int, request: bytes, answer: bytes) -> None:
        self.size = len(request)
        self.file = os.memfd_create("request", os.MFD_CLOEXEC)
        os.truncate(self.file, self.size)
        assert os.pwrite(self.file, request, 0) == self.size
        self.expected = answer[-COMPARED_BYTES:]
        self.out: deque[bytes | tuple[int, int]] = deque()  # bytes, or where in the file and how many
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.rest = b""
        self.began = 0.0
        self.times: list[float] = []

    def fill(self) -> None:
        """Say what may be sent now."""

    def take(self, data: bytes) -> bytes:
        """Act on what has come; returns what is not complete yet."""
        raise NotImplementedError

    def write(self) -> None:
        """Write what can be written, in segments as long as if it were one piece."""
        self.fill()
        if self.out:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            self.write_pieces()
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    def write_pieces(self) -> None:
        out, sock = self.out, self.sock
        while True:
            self.fill()
            if not out:
                return
            piece = out[0]
            try:
                if type(piece) is bytes:
                    sent = sock.send(piece)
                    rest = piece[sent:]
                else:
                    at, size = piece
                    sent = os.sendfile(sock.fileno(), self.file, at, size)
                    rest = (at + sent, size - sent) if sent < size else b""
            except BlockingIOError:
                return
            if rest:
                out[0] = rest
            else:
                out.popleft()

    def read(self) -> None:
        """Read all that is there."""
        while True:
            try:
                found = self.sock.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not found:
                raise ConnectionError("the server hung up")
            self.rest = self.take(self.rest + found if self.rest else found)
            if len(found) < READ_BYTES:
                return

    def answered(self, answer: bytes) -> None:
        if not answer.endswith(self.expected):
            raise ConnectionError(f"a wrong answer: {answer[:200]!r} ... {answer[-50:]!r}")
        self.times.append(time.perf_counter() - self.began)


class HttpClient(Client):
    def __init__(self, port: int, path: str, request: bytes, answer: bytes, headers: list[str]) -> None:
        super().__init__(port, request, answer)
        lines = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}", f"content-length: {len(request)}", *headers]
        self.head = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
        self.ask()

    def ask(self) -> None:
        self.out += self.head, (0, self.size)
        self.began = time.perf_counter()

    def take(self, data: bytes) -> bytes:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return data
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise ConnectionError(f"a refusal, or an answer without its length: {data[:500]!r}")
        if len(rest) < length:
            return data
        if len(rest) > length:
            raise ConnectionError(f"more than one answer: {rest[length : length + 200]!r}")
        self.answered(rest)
        self.ask()
        return b""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class GrpcClient(Client):
    def __init__(self, port: int, path: str, message: bytes, answer: bytes, longest: int) -> None:
        super().__init__(port, b"\0" + NUMBER.pack(len(message)) + message, answer)
        fields = [(b":path", path.encode()), (b":authority", b"127.0.0.1"), (b"content-type", b"application/grpc")]
        self.block = b"\x83\x86" + b"".join(field(*one) for one in [*fields, (b"te", b"trailers")])
        opening = frame(SETTINGS, 0, 0, SETTING.pack(4, LARGEST))
        opening += frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(LARGEST - 65_535))
        self.out.append(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + opening)
        self.limit, self.longest = longest, 16_384
        self.first_window = self.window = 65_535
        self.stream = -1
        self.sent = self.stream_window = self.received = 0
        self.answer: list[bytes] = []
        self.is_ready = False

    def ask(self) -> None:
        self.stream += 2
        self.sent = 0
        self.stream_window = self.first_window
        self.out.append(frame(HEADERS, 4, self.stream, self.block))
        self.began = time.perf_counter()

    def fill(self) -> None:
        """Cut what the windows allow into frames."""
        out, end = self.out, self.size
        while self.is_ready and self.sent < end and len(out) < MAX_PIECES:
            size = min(self.longest, self.limit, end - self.sent, self.window, self.stream_window)
            if size <= 0:
                return
            head = HEAD.pack(size >> 8, size & 0xFF, DATA, int(self.sent + size == end), self.stream)
            if out and type(out[-1]) is bytes:
                out[-1] += head
            else:
                out.append(head)
            out.append((self.sent, size))
            self.sent += size
            self.window -= size
            self.stream_window -= size

    def take(self, data: bytes) -> bytes:
        at = 0
        while at + 9 <= len(data):
            high, low, kind, flags, stream = HEAD.unpack_from(data, at)
            end = at + 9 + (high << 8 | low)
            if end > len(data):
                break
            self.act(kind, flags, stream, data[at + 9 : end])
            at = end
        return data[at:]

    def act(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self.answer.append(payload)
        elif kind == WINDOW_UPDATE and stream in (0, self.stream):
            more = NUMBER.unpack(payload)[0]
            self.window += 0 if stream else more
            self.stream_window += more if stream else 0
        elif kind == SETTINGS and not flags & 1:
            for name, value in SETTING.iter_unpack(payload):
                self.longest = value if name == 5 else self.longest
                if name == 4:
                    self.stream_window += value - self.first_window
                    self.first_window = value
            self.out.append(frame(SETTINGS, 1, 0, b""))
            if not self.is_ready:
                self.is_ready = True
                self.ask()
        elif kind == PING and not flags & 1:
            self.out.append(frame(PING, 1, 0, payload))
        elif kind in (RST_STREAM, GOAWAY) and (kind == GOAWAY or NUMBER.unpack(payload)[0]):
            raise ConnectionError(f"the server ended a call: {payload!r}")
        if kind in (DATA, HEADERS) and flags & 1:
            answer, self.answer = b"".join(self.answer), []
            self.answered(answer)
            self.ask()


def run(clients: list[Client], is_over: Callable[[], bool]) -> None:
    """Have them ask until then."""
    poll = select.epoll()
    by_file = {client.sock.fileno(): client for client in clients}
    for file in by_file:
        poll.register(file, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    while not is_over():
        for file, events in poll.poll(1.0):
            client = by_file[file]
            if events & ~select.EPOLLOUT:
                client.read()
            client.write()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.bodyflood", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("door", choices=["grpc", "http"])
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("file", type=Path, help="a message, or a body")
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--header", action="append", default=[])
    parser.add_argument("--longest", type=int, default=LARGEST, help="frames are no longer, whatever the port takes")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    request, answer = options.file.read_bytes(), options.answer.read_bytes()
    clients: list[Client] = [
        HttpClient(options.port, options.path, request, answer, options.header)
        if options.door == "http"
        else GrpcClient(options.port, options.path, request, answer, options.longest)
        for _ in range(options.connections)
    ]
    end = time.perf_counter() + options.seconds
    run(clients, lambda: time.perf_counter() >= end)
    times = [one for client in clients for one in client.times]
    print(json.dumps({"rate": len(times) / options.seconds, "p50_ms": 1e3 * median(times or [0.0])}))


if __name__ == "__main__":
    main()
