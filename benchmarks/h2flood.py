# SPDX-License-Identifier: Apache-2.0
"""Load of unary gRPC calls from a client that keeps to what a port says: frames as long as it takes, and its windows.

    python -m benchmarks.h2flood PORT PATH FILE --connections 16 --seconds 2 --answer 4154

h2load sends frames of 16 KB, whatever a port takes; clients made of gRPC's C core send long ones. This costs about 230
us of a core for a message of 600 KB, h2load twice as much. Each connection asks again as soon as it was answered.
Prints JSON: `rate`, `p50_ms`.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import time
from pathlib import Path
from statistics import median
from struct import Struct
from typing import Any

HEAD, NUMBER, SETTING = Struct(">HBBBI"), Struct(">I"), Struct(">HI")
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
LARGEST = (1 << 31) - 1
MAX_PIECES = 256


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Client:
    """One connection."""

    def __init__(self, port: int, path: bytes, message: bytes, answer: int) -> None:
        self.message = memoryview(b"\0" + NUMBER.pack(len(message)) + message)
        fields = [(b":path", path), (b":authority", b"127.0.0.1"), (b"content-type", b"application/grpc")]
        self.block = b"\x83\x86" + b"".join(field(*one) for one in [*fields, (b"te", b"trailers")])
        self.answer = answer
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        opening = frame(SETTINGS, 0, 0, SETTING.pack(4, LARGEST)) + frame(
            WINDOW_UPDATE, 0, 0, NUMBER.pack(LARGEST - 65_535)
        )
        self.out: list[Any] = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + opening]
        self.longest, self.first_window, self.window = 16_384, 65_535, 65_535
        self.rest = b""
        self.stream = -1
        self.sent = self.received = self.stream_window = 0
        self.began = 0.0
        self.times: list[float] = []
        self.is_ready = False

    def ask(self) -> None:
        self.stream += 2
        self.sent = self.received = 0
        self.stream_window = self.first_window
        self.out.append(frame(HEADERS, 4, self.stream, self.block))
        self.began = time.perf_counter()

    def fill(self) -> None:
        """Cut what the windows allow into frames."""
        message, end = self.message, len(self.message)
        while self.is_ready and self.sent < end and len(self.out) < MAX_PIECES:
            size = min(self.longest, end - self.sent, self.window, self.stream_window)
            if size <= 0:
                return
            flags = 1 if self.sent + size == end else 0
            self.out += [
                HEAD.pack(size >> 8, size & 0xFF, DATA, flags, self.stream),
                message[self.sent : self.sent + size],
            ]
            self.sent += size
            self.window -= size
            self.stream_window -= size

    def write(self) -> bool:
        """Write what can be written; returns whether there is more."""
        out = self.out
        while True:
            self.fill()
            if not out:
                return False
            try:
                size = self.sock.sendmsg(out)
            except BlockingIOError:
                return True
            done = 0
            while done < len(out) and size >= len(out[done]):
                size -= len(out[done])
                done += 1
            del out[:done]
            if size:
                out[0] = memoryview(out[0])[size:]

    def read(self) -> None:
        found = self.sock.recv(1 << 16)
        if not found:
            raise ConnectionError("the server hung up")
        data = self.rest + found
        at = 0
        while at + 9 <= len(data):
            high, low, kind, flags, stream = HEAD.unpack_from(data, at)
            end = at + 9 + (high << 8 | low)
            if end > len(data):
                break
            self.take(kind, flags, stream, data[at + 9 : end])
            at = end
        self.rest = data[at:]

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self.received += len(payload)
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
            if not 0.9 * self.answer <= self.received <= 1.1 * self.answer:
                raise ConnectionError(f"an answer of {self.received} bytes, not {self.answer}")
            self.times.append(time.perf_counter() - self.began)
            self.ask()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.h2flood", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("file", type=Path)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--answer", type=int, required=True)
    options = parser.parse_args()
    message = options.file.read_bytes()
    selector = selectors.DefaultSelector()
    clients = [Client(options.port, options.path.encode(), message, options.answer) for _ in range(options.connections)]
    for client in clients:
        selector.register(client.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        for key, events in selector.select(1.0):
            client: Client = key.data
            if events & selectors.EVENT_READ:
                client.read()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.write() else 0)
            if wanted != key.events:
                selector.modify(client.sock, wanted, client)
    times = [one for client in clients for one in client.times]
    print(json.dumps({"rate": len(times) / options.seconds, "p50_ms": 1e3 * median(times or [0.0])}))


if __name__ == "__main__":
    main()
