# SPDX-License-Identifier: Apache-2.0
"""The reference for large bodies: what plain Python reaches with no features at all.

An asyncio protocol on uvloop that has the kernel put each body into memory which is kept for the next one, a megabyte
in a turn of the loop. Two workers, threads or processes: one is told where a body lies, makes bytes of it and answers
with their length; the other one echoes. There is one body at a time on a connection, and nothing is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
TURN_BYTES = 1 << 20
SHORT_BYTES = 8192

Done = Callable[[bytes], None]
Start = Callable[[bytes, Done], None]


def echoed(body: bytes) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(body))


def measured(name: bytes, files: dict[bytes, int]) -> bytes:
    """Make bytes of the body that lies at a name: `/proc/PID/fd/NUMBER LENGTH`."""
    path, length = name.split()
    if path not in files:
        files[path] = os.open(path, os.O_RDONLY)
    return b"%d" % len(os.pread(files[path], int(length), 0))


def answerer() -> Callable[[bytes], bytes]:
    files: dict[bytes, int] = {}
    return lambda asked: measured(asked, files) if asked.startswith(b"/proc/") else echoed(asked)


class Http(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, start: Start, start_large: Start) -> None:
        self.start = start
        self.start_large = start_large
        self.loop = asyncio.get_running_loop()
        self.short = memoryview(bytearray(SHORT_BYTES))
        self.file = -1
        self.body = memoryview(b"")
        self.at = self.length = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.body[self.at : self.length][:TURN_BYTES] if self.length else self.short

    def buffer_updated(self, nbytes: int) -> None:
        if self.length:
            self.at += nbytes
        else:
            head, _, rest = bytes(self.short[:nbytes]).partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])
            if not head.startswith(b"POST /models/large "):
                self.start(rest, self.done)
                return
            if self.file < 0:
                self.file = os.memfd_create("body")
                os.ftruncate(self.file, length)
                self.body = memoryview(mmap.mmap(self.file, length))
            self.body[: len(rest)] = rest
            self.at, self.length = len(rest), length
        if self.at == self.length:
            name = b"/proc/%d/fd/%d %d" % (os.getpid(), self.file, self.length)
            self.length = 0
            self.start_large(name, self.done)
        elif nbytes == TURN_BYTES:
            self.transport.pause_reading()
            self.loop.call_soon(self.transport.resume_reading)

    def done(self, answer: bytes) -> None:
        self.transport.write(HEAD % (len(answer), answer))


class Lines(asyncio.Protocol):
    """The front's end of a socket pair: a line out, a line back."""

    def __init__(self) -> None:
        self.waiting: deque[Done] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def start(self, asked: bytes, done: Done) -> None:
        self.waiting.append(done)
        self.transport.write(asked + b"\n")

    def data_received(self, data: bytes) -> None:
        for line in data.splitlines():
            self.waiting.popleft()(line)


def start_thread() -> Start:
    answer, loop = answerer(), asyncio.get_running_loop()
    asked: SimpleQueue[tuple[bytes, Done]] = SimpleQueue()

    def work() -> None:
        while True:
            what, done = asked.get()
            loop.call_soon_threadsafe(done, answer(what))

    threading.Thread(target=work, daemon=True).start()
    return lambda what, done: asked.put((what, done))


async def start_process() -> Start:
    _, lines = await asyncio.get_running_loop().create_unix_connection(Lines, sock=spawn_child())
    return lines.start


def spawn_child() -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "benchmarks.servers.raw_large", "child", "--fd", str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return ours


def run_child(fd: int) -> None:
    answer = answerer()
    with socket.socket(fileno=fd) as connection, connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(answer(line[:-1]) + b"\n")


async def serve(kind: str, port: int) -> None:
    starts = [start_thread() if kind == "thread" else await start_process() for _ in range(2)]
    server = await asyncio.get_running_loop().create_server(lambda: Http(*starts), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["thread", "process", "child"])
    parser.add_argument("--port", type=int)
    parser.add_argument("--fd", type=int)
    options = parser.parse_args()
    if options.kind == "child":
        run_child(options.fd)
    else:
        uvloop.run(serve(options.kind, options.port))


if __name__ == "__main__":
    main()
