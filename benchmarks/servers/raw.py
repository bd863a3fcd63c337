# SPDX-License-Identifier: Apache-2.0
"""The reference: what plain Python reaches with no features at all.

An asyncio protocol on uvloop with httptools, a batcher of the `go` kind, and one worker: in the loop, in a
thread, or in a process reached over a socket pair with one msgpack frame a batch. It decodes and encodes as
the other servers do, but has no routes, limits, errors, metrics or clean stop.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import httptools
import msgspec
import uvloop

from benchmarks.work import JOBS, MAX_BATCH, load_counted

Bodies = list[bytes]
Done = Callable[[Bodies], None]
Start = Callable[[Bodies, Done], None]

WHOLE_S = 0.05
"""When the server that sends whole batches gives up waiting for the rest of one."""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class Batcher:
    """Send what is there at the end of a loop turn, whenever the worker is free; or only whole batches."""

    def __init__(self, start: Start, *, whole: bool = False) -> None:
        self.start = start
        self.whole = whole
        self.loop = asyncio.get_running_loop()
        self.waiting: list[tuple[asyncio.Transport, bytes]] = []
        self.batch: list[tuple[asyncio.Transport, bytes]] = []
        self.busy = False

    def offer(self, transport: asyncio.Transport, body: bytes) -> None:
        self.waiting.append((transport, body))
        if not self.busy:
            self.busy = True
            self.later = self.loop.call_later(WHOLE_S, self.send) if self.whole else self.loop.call_soon(self.send)
        elif self.whole and len(self.waiting) == MAX_BATCH and not self.batch:
            self.later.cancel()
            self.send()

    def send(self) -> None:
        self.batch, self.waiting = self.waiting[:MAX_BATCH], self.waiting[MAX_BATCH:]
        self.start([body for _, body in self.batch], self.done)

    def done(self, answers: Bodies) -> None:
        for (transport, _), answer in zip(self.batch, answers, strict=True):
            if not transport.is_closing():
                transport.write(HEAD % (len(answer), answer))
        self.batch = []
        self.busy = False
        if self.waiting:
            self.offer(*self.waiting.pop())


class Http(asyncio.Protocol):
    """Read requests off one connection; every path is the job."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.batcher.offer(self.transport, self.body)
        self.body = b""


class Frames(asyncio.Protocol):
    """The front's end of the socket pair: one frame out, one frame back."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.decode = msgspec.msgpack.Decoder(Bodies).decode
        self.encode = msgspec.msgpack.Encoder().encode

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def start(self, bodies: Bodies, done: Done) -> None:
        self.done = done
        frame = self.encode(bodies)
        self.transport.write(len(frame).to_bytes(4, "big") + frame)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if len(self.buffer) >= 4 and len(self.buffer) == 4 + int.from_bytes(self.buffer[:4], "big"):
            answers = self.decode(memoryview(self.buffer)[4:])
            self.buffer = bytearray()
            self.done(answers)


def answerer(job: str) -> Callable[[Bodies], Bodies]:
    predict = load_counted(job)
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    return lambda bodies: [encode(answer) for answer in predict([decode(body) for body in bodies])]


def start_inline(answer: Callable[[Bodies], Bodies]) -> Start:
    return lambda bodies, done: done(answer(bodies))


def start_thread(answer: Callable[[Bodies], Bodies]) -> Start:
    loop = asyncio.get_running_loop()
    batches: SimpleQueue[tuple[Bodies, Done]] = SimpleQueue()

    def work() -> None:
        while True:
            bodies, done = batches.get()
            loop.call_soon_threadsafe(done, answer(bodies))

    threading.Thread(target=work, daemon=True).start()
    return lambda bodies, done: batches.put((bodies, done))


async def start_process(job: str) -> Start:
    _, frames = await asyncio.get_running_loop().create_unix_connection(Frames, sock=spawn_child(job))
    return frames.start


def spawn_child(job: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "benchmarks.servers.raw", job, "child", "--fd", str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return ours


def run_child(answer: Callable[[Bodies], Bodies], fd: int) -> None:
    decode, encode = msgspec.msgpack.Decoder(Bodies).decode, msgspec.msgpack.Encoder().encode
    with socket.socket(fileno=fd) as connection, connection.makefile("rb", buffering=1 << 20) as frames:
        while head := frames.read(4):
            frame = encode(answer(decode(frames.read(int.from_bytes(head, "big")))))
            connection.sendall(len(frame).to_bytes(4, "big") + frame)


async def serve(job: str, kind: str, port: int) -> None:
    if kind == "process":
        start = await start_process(job)
    else:
        start = (start_thread if kind == "thread" else start_inline)(answerer(job))
    batcher = Batcher(start, whole=kind == "whole")
    server = await asyncio.get_running_loop().create_server(lambda: Http(batcher), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("kind", choices=["inline", "thread", "process", "whole", "child"])
    parser.add_argument("--port", type=int)
    parser.add_argument("--fd", type=int)
    options = parser.parse_args()
    if options.kind == "child":
        run_child(answerer(options.job), options.fd)
    else:
        uvloop.run(serve(options.job, options.kind, options.port))


if __name__ == "__main__":
    main()
