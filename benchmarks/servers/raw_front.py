# SPDX-License-Identifier: Apache-2.0
"""The reference for a front and an owner: what plain Python reaches with no features at all.

    python -m benchmarks.servers.raw_front echo inline --port 8001 --attach unix:/tmp/owner
    python -m benchmarks.servers.raw_front echo inline --port 8000 --owner unix:/tmp/owner

uvloop and httptools. A front sends what came in a turn of its loop in one frame, and an owner what became known in one
of its own. An owner queues what fronts and clients ask, and has it run as the bare server does. Bodies of 64 KB and
more are read into memory that their connection keeps, and echoed as they are; by a Unix socket the owner is told where
they lie, otherwise each has a frame of its own, which is written as it is. Both sides believe each other.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
import uvloop

from benchmarks.servers.raw import HEAD, Bodies, Start, answerer, start_inline, start_process
from benchmarks.work import JOBS, MAX_BATCH

LONG_BYTES = 1 << 16
LONG_FRAME = 1 << 31
"""Set in the length of a frame that is one long body: its seat, and its bytes as they are."""
TURN_BYTES = 1 << 20
SOCKET_BYTES = 4 << 20

Place = tuple[str, int]
"""A file in memory that holds a body, and the body's length."""
Body = bytes | Place


class Queue:
    """Run what is there at the end of a turn, whenever the worker is free."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.loop = asyncio.get_running_loop()
        self.waiting: list[tuple[Any, int, bytes]] = []
        self.batch: list[tuple[Any, int, bytes]] = []
        self.busy = False

    def offer(self, asker: Any, seat: int, body: bytes) -> None:
        self.waiting.append((asker, seat, body))
        if not self.busy:
            self.busy = True
            self.loop.call_soon(self.send)

    def send(self) -> None:
        self.batch, self.waiting = self.waiting[:MAX_BATCH], self.waiting[MAX_BATCH:]
        self.start([body for _, _, body in self.batch], self.done)

    def done(self, answers: Bodies) -> None:
        for (asker, seat, _), answer in zip(self.batch, answers, strict=True):
            asker.answer(seat, answer)
        self.batch = []
        self.busy = False
        if self.waiting:
            self.offer(*self.waiting.pop())


class Http(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, queue: Queue | Front) -> None:
        self.queue = queue
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""
        self.long: LongBody | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if self.body:  # and there is more of it
            if self.long is None:
                length = int(data.lower().partition(b"content-length:")[2].split(None, 1)[0])
                self.long = LongBody(self, length, is_shared=isinstance(self.queue, Front) and self.queue.is_near)
            self.long.begin(self.body)
            self.parser, self.body = httptools.HttpRequestParser(self), b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.queue.offer(self, 0, self.body)
        self.body = b""

    def answer(self, _seat: int, answer: Any) -> None:
        if self.transport.is_closing():
            return
        if type(answer) is bytes and len(answer) < LONG_BYTES:
            self.transport.write(HEAD % (len(answer), answer))
        else:
            if type(answer) is list:
                assert self.long is not None
                answer = self.long.memory[: answer[1]]
            self.transport.writelines([HEAD % (len(answer), b""), answer])

    def connection_lost(self, _error: Exception | None) -> None:
        self.parser = None


class LongBody(asyncio.BufferedProtocol):
    """Reads the rest of a long body into memory that is there for the next one as well."""

    def __init__(self, http: Http, length: int, *, is_shared: bool) -> None:
        self.http = http
        self.length = length
        self.at = 0
        self.place: list[Any] | None = None
        if is_shared:
            file = os.memfd_create("body")
            os.ftruncate(file, length)
            self.memory = memoryview(mmap.mmap(file, length))
            self.place = [f"/proc/{os.getpid()}/fd/{file}", length]
        else:
            self.memory = memoryview(bytearray(length))

    def begin(self, first: bytes) -> None:
        self.at = len(first)
        self.memory[: self.at] = first
        self._take_over(self)

    def get_buffer(self, _hint: int) -> memoryview:
        return self.memory[self.at : self.at + TURN_BYTES]

    def buffer_updated(self, count: int) -> None:
        self.at += count
        if self.at == self.length:
            self._take_over(self.http)
            self.http.queue.offer(self.http, 0, self.memory if self.place is None else self.place)  # type: ignore[arg-type]

    def connection_lost(self, _error: Exception | None) -> None:
        """The client has gone."""

    def _take_over(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self.http.transport
        transport.pause_reading()
        transport.set_protocol(protocol)
        transport.resume_reading()


class Link(asyncio.Protocol):
    """One end of a connection between a front and an owner."""

    def __init__(self) -> None:
        self.seats: list[int] = []
        self.bodies: list[Any] = []
        self.pieces: list[bytes] = []
        self.size = 0
        self.loop = asyncio.get_running_loop()
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(tuple[list[int], list[bytes | list[Any]]]).decode

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)

    def say(self, seat: int, body: Any) -> None:
        """Have it sent at the end of the turn; what is long leaves at once, in a frame of its own."""
        if type(body) is list or (type(body) is bytes and len(body) < LONG_BYTES):
            if not self.seats:
                self.loop.call_soon(self.send)
            self.seats.append(seat)
            self.bodies.append(body)
        else:
            head = (LONG_FRAME | 4 + len(body)).to_bytes(4, "big") + seat.to_bytes(4, "big")
            self.transport.writelines([head, body])

    def send(self) -> None:
        frame = self.encode((self.seats, self.bodies))
        self.seats, self.bodies = [], []
        self.transport.write(len(frame).to_bytes(4, "big") + frame)

    def data_received(self, data: bytes) -> None:
        if not self.pieces and int.from_bytes(data[:4], "big") == len(data) - 4:
            self.hear(*self.decode(memoryview(data)[4:]))
            return
        self.pieces.append(data)
        self.size += len(data)
        while self.size >= 4:
            if len(self.pieces[0]) < 4:
                self.pieces = [b"".join(self.pieces)]
            length = int.from_bytes(self.pieces[0][:4], "big")
            end = 4 + (length & ~LONG_FRAME)
            if self.size < end:
                return
            frame = b"".join(self.pieces) if len(self.pieces) > 1 else self.pieces[0]
            rest = frame[end:]
            self.pieces, self.size = [rest] if rest else [], len(rest)
            if length & LONG_FRAME:
                self.hear([int.from_bytes(frame[4:8], "big")], [memoryview(frame)[8:end]])
            else:
                self.hear(*self.decode(memoryview(frame)[4:end]))

    def hear(self, seats: list[int], bodies: list[Any]) -> None:
        raise NotImplementedError


class Front(Link):
    """The front's end; hands requests on as `Queue` runs them."""

    def __init__(self, *, is_near: bool) -> None:
        super().__init__()
        self.is_near = is_near
        self.askers: dict[int, Http] = {}
        self.last = 0

    def offer(self, asker: Http, _seat: int, body: Any) -> None:
        self.last = seat = self.last + 1 & LONG_FRAME - 1
        self.askers[seat] = asker
        self.say(seat, body)

    def hear(self, seats: list[int], bodies: list[Any]) -> None:
        for seat, body in zip(seats, bodies, strict=True):
            self.askers.pop(seat).answer(0, body)


class Owner(Link):
    """The owner's end."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue
        self.places: dict[int, list[Any]] = {}
        self.memories: dict[str, mmap.mmap] = {}

    def hear(self, seats: list[int], bodies: list[Any]) -> None:
        offer = self.queue.offer
        for seat, body in zip(seats, bodies, strict=True):
            if type(body) is list:
                path, length = self.places[seat] = body
                if path not in self.memories:
                    file = os.open(path, os.O_RDWR)
                    self.memories[path] = mmap.mmap(file, length)
                    os.close(file)
                offer(self, seat, self.memories[path][:length])
            else:
                offer(self, seat, body)

    def answer(self, seat: int, answer: bytes) -> None:
        if self.places and (place := self.places.pop(seat, None)) is not None:
            self.memories[place[0]][: len(answer)] = answer
            self.say(seat, [place[0], len(answer)])
        else:
            self.say(seat, answer)


def answerer_of_long(job: str) -> Callable[[Bodies], Bodies]:
    """Return what the job answers, and bodies that are long as they are."""
    answer = answerer(job)
    return lambda bodies: bodies if len(bodies[0]) >= LONG_BYTES else answer(bodies)


def where(address: str) -> tuple[str, dict[str, Any]]:
    kind, _, place = address.partition(":")
    if kind == "unix":
        return kind, {"path": place}
    host, _, port = place.rpartition(":")
    return kind, {"host": host, "port": int(port)}


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    queue: Queue | Front
    if options.owner:
        kind, place = where(options.owner)
        context = ssl.create_default_context(cafile=options.cafile) if options.cafile else None
        connect = loop.create_unix_connection if kind == "unix" else loop.create_connection
        _, queue = await connect(lambda: Front(is_near=kind == "unix"), ssl=context, **place)
    else:
        is_process = options.kind == "process"
        queue = Queue(await start_process(options.job) if is_process else start_inline(answerer_of_long(options.job)))
    if options.attach:
        kind, place = where(options.attach)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if options.certfile else None
        if context is not None:
            context.load_cert_chain(options.certfile)
        listen = loop.create_unix_server if kind == "unix" else loop.create_server
        await listen(lambda: Owner(queue), ssl=context, **place)  # type: ignore[arg-type]
    server = await loop.create_server(lambda: Http(queue), "127.0.0.1", options.port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("kind", choices=["inline", "process"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--attach", default="")
    parser.add_argument("--certfile", default="")
    parser.add_argument("--owner", default="")
    parser.add_argument("--cafile", default="")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
