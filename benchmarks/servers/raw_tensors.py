# SPDX-License-Identifier: Apache-2.0
"""The reference for tensors: what plain Python reaches with no features at all, over HTTP and over gRPC.

Both are an asyncio protocol on uvloop whose model runs in the loop, in a thread or in a process of its own, which is
handed each message by copying it into memory that both have and telling where over a socket pair. The HTTP one is that
of `raw.py`: it joins the pieces of a body, and takes what is raw behind a JSON that it does not read. The gRPC one cuts
a connection into frames, takes each HEADERS for a call of its only method and what lies at the end of a message for its
tensor. Neither looks at names, types or shapes, has limits or errors, or minds the windows of its client. The kind
`copy` is what no server can be faster than: it has the system copy each request into memory that is there and warm,
counts its bytes or looks at the heads of its frames, joins nothing, asks no model, and always answers the same.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from struct import Struct

import httptools
import numpy as np
import uvloop

from benchmarks.work import tensors

ANSWER_JSON = (
    b'{"model_name":"%b","model_version":"1","outputs":[{"name":"output","datatype":"FP32","shape":[1,%d],'
    b'"parameters":{"binary_data_size":%d}}]}'
)
HTTP_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
    b"content-length: %d\r\n\r\n"
)
FRAME = Struct(">HBBBI")
PREFACE_BYTES = 24
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
WINDOW = (1 << 31) - 1 - 65_535
OPENING = (
    FRAME.pack(0, 12, SETTINGS, 0, 0)
    + b"\x00\x04\x7f\xff\xff\xff"
    + b"\x00\x05\x00\x10\x00\x00"
    + FRAME.pack(0, 4, 8, 0, 0)
    + WINDOW.to_bytes(4, "big")
)
STATUS = b"\x88\x00\x0ccontent-type\x10application/grpc"
TRAILERS = b"\x00\x0bgrpc-status\x010"

ASKED = Struct("II")
ROOMS, ROOM_BYTES = 64, 1 << 20

Predict = Callable[[bytes | memoryview], bytes]
Done = Callable[[bytes], None]
Start = Callable[[bytes, Done], None]


def predictor(job: str) -> Predict:
    """Return what makes the data of an answer of what ends with the data of a request."""
    run, size = (tensors.scores, 4 * tensors.ELEMENTS) if job == "large" else (tensors.doubled, 16)
    return lambda body: run(np.frombuffer(body, np.float32, offset=len(body) - size)).tobytes()


def varint(value: int) -> bytes:
    found = b""
    while value >= 0x80:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


class Http(asyncio.Protocol):
    def __init__(self, job: str, start: Start) -> None:
        self.start = start
        self.name = job.encode()
        self.parser = httptools.HttpRequestParser(self)
        self.pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self.pieces)
        self.pieces = []
        self.start(body, self.done)

    def done(self, data: bytes) -> None:
        text = ANSWER_JSON % (self.name, len(data) // 4, len(data))
        self.transport.write(HTTP_HEAD % (len(text), len(text) + len(data)) + text + data)


class Grpc(asyncio.Protocol):
    def __init__(self, job: str, start: Start) -> None:
        self.start = start
        self.name = job.encode()
        self.rest = b""
        self.skip = PREFACE_BYTES
        self.calls: dict[int, list[bytes]] = {}
        self.taken = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(OPENING)

    def data_received(self, data: bytes) -> None:
        data = self.rest + data if self.rest else data
        at, self.skip = self.skip, 0
        end = len(data)
        while at + 9 <= end:
            high, low, kind, flags, stream = FRAME.unpack_from(data, at)
            stop = at + 9 + (high << 8 | low)
            if stop > end:
                break
            if kind == DATA:
                self.calls[stream].append(data[at + 9 : stop])
                if flags & 1:
                    message = b"".join(self.calls.pop(stream))
                    self.taken += len(message)
                    self.start(message, lambda found, stream=stream: self.done(found, stream))
            elif kind == HEADERS:
                self.calls[stream] = []
            elif kind == SETTINGS and not flags & 1:
                self.transport.write(FRAME.pack(0, 0, SETTINGS, 1, 0))
            elif kind == PING and not flags & 1:
                self.transport.write(FRAME.pack(0, 8, PING, 1, 0) + data[at + 9 : stop])
            at = stop
        self.rest = data[at:]
        if self.taken > 1 << 28:
            self.transport.write(FRAME.pack(0, 4, 8, 0, 0) + self.taken.to_bytes(4, "big"))
            self.taken = 0

    def done(self, data: bytes, stream: int) -> None:
        shape = b"\x01" + varint(len(data) // 4)
        tensor = b"\x0a\x06output\x12\x04FP32\x1a" + varint(len(shape)) + shape
        message = b"\x0a" + varint(len(self.name)) + self.name + b"\x12\x011\x2a" + varint(len(tensor)) + tensor
        message += b"\x32" + varint(len(data)) + data
        size = len(message) + 5
        self.transport.write(
            FRAME.pack(0, len(STATUS), HEADERS, 4, stream)
            + STATUS
            + FRAME.pack(size >> 8, size & 0xFF, DATA, 0, stream)
            + b"\x00"
            + (size - 5).to_bytes(4, "big")
            + message
            + FRAME.pack(0, len(TRAILERS), HEADERS, 5, stream)
            + TRAILERS
        )


class Copied(asyncio.BufferedProtocol):
    """Have what comes copied, and answer whenever a request is over."""

    def __init__(self, job: str, writer: Http | Grpc) -> None:
        values = np.arange(tensors.ELEMENTS if job == "large" else 4, dtype=np.float32)
        self.data = (tensors.scores(values) if job == "large" else tensors.doubled(values)).tobytes()
        self.writer = writer
        self.buffer = memoryview(bytearray(1 << 20))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.writer.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer


class CopiedHttp(Copied):
    """All requests of a connection are as long as its first one."""

    size = count = 0

    def buffer_updated(self, nbytes: int) -> None:
        if not self.size:
            head, _, _ = bytes(self.buffer[:nbytes]).lower().partition(b"\r\n\r\n")
            self.size = len(head) + 4 + int(head.partition(b"\ncontent-length:")[2].split()[0])
        self.count += nbytes
        if self.count == self.size:
            self.count = 0
            self.writer.done(self.data)


class CopiedGrpc(Copied):
    missing = PREFACE_BYTES
    head = b""
    ends = 0
    taken = 0

    def buffer_updated(self, nbytes: int) -> None:
        at = 0
        while True:
            size = min(self.missing, nbytes - at)
            at += size
            self.missing -= size
            if self.missing:
                return
            if self.ends:
                self.writer.done(self.data, self.ends)
                self.ends = 0
            if at + 9 - len(self.head) > nbytes:
                self.head += bytes(self.buffer[at:nbytes])
                return
            more = 9 - len(self.head)
            high, low, kind, flags, stream = FRAME.unpack(self.head + self.buffer[at : at + more])
            at += more
            self.head, self.missing = b"", high << 8 | low
            self.ends = stream if kind == DATA and flags & 1 else 0
            if kind == SETTINGS and not flags & 1:
                self.writer.transport.write(FRAME.pack(0, 0, SETTINGS, 1, 0))
            elif kind == DATA:
                self.taken += self.missing
                if self.taken > 1 << 28:
                    self.writer.transport.write(FRAME.pack(0, 4, 8, 0, 0) + self.taken.to_bytes(4, "big"))
                    self.taken = 0


def start_inline(predict: Predict) -> Start:
    return lambda body, done: done(predict(body))


def start_thread(predict: Predict) -> Start:
    loop = asyncio.get_running_loop()
    asked: SimpleQueue[tuple[bytes, Done]] = SimpleQueue()

    def work() -> None:
        while True:
            body, done = asked.get()
            loop.call_soon_threadsafe(done, predict(body))

    threading.Thread(target=work, daemon=True).start()
    return lambda body, done: asked.put((body, done))


class Apart:
    """A process in which the model runs. It is forked, so it begins before the loop does."""

    def __init__(self, predict: Predict) -> None:
        self.memory = memoryview(mmap.mmap(-1, ROOMS * ROOM_BYTES))
        self.socket, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self.socket.close()
            while found := child.recv(ASKED.size):
                room, size = ASKED.unpack(found)
                at = room * ROOM_BYTES
                child.send(room.to_bytes(4, "big") + predict(self.memory[at : at + size]))
            os._exit(0)
        child.close()
        self.socket.setblocking(False)
        self.free = list(range(ROOMS))
        self.asked: dict[int, Done] = {}

    def listen(self) -> Start:
        asyncio.get_running_loop().add_reader(self.socket, self.answered)
        return self.start

    def start(self, body: bytes, done: Done) -> None:
        room = self.free.pop()
        at = room * ROOM_BYTES
        self.memory[at : at + len(body)] = body
        self.asked[room] = done
        self.socket.send(ASKED.pack(room, len(body)))

    def answered(self) -> None:
        try:
            while True:
                found = self.socket.recv(1 << 16)
                room = int.from_bytes(found[:4], "big")
                self.free.append(room)
                self.asked.pop(room)(found[4:])
        except BlockingIOError:
            return


async def serve(options: argparse.Namespace, predict: Predict, apart: Apart | None) -> None:
    if apart is not None:
        start = apart.listen()
    else:
        start = start_thread(predict) if options.kind == "thread" else start_inline(predict)
    plain, copied = (Http, CopiedHttp) if options.transport == "http" else (Grpc, CopiedGrpc)

    def connected() -> asyncio.BaseProtocol:
        found = plain(options.job, start)
        return copied(options.job, found) if options.kind == "copy" else found

    loop = asyncio.get_running_loop()
    server = await loop.create_server(connected, "127.0.0.1", options.port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=["large", "small"])
    parser.add_argument("transport", choices=["http", "grpc"])
    parser.add_argument("kind", choices=["inline", "thread", "process", "copy"])
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    predict = predictor(options.job)
    apart = Apart(predict) if options.kind == "process" else None
    uvloop.run(serve(options, predict, apart))


if __name__ == "__main__":
    main()
