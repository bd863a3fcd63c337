# SPDX-License-Identifier: Apache-2.0
"""The reference for streams that share their steps: what plain Python reaches with no features but the seats.

An asyncio protocol on uvloop with httptools, and for each model a thread that steps it. Who waits sits down between two
steps; the thread writes down the parts of a step as server-sent events, and the loop sends them while the next one
runs. No limits, no checks, no deadlines, no way to leave.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from queue import SimpleQueue

import httptools
import uvloop

from benchmarks.work.streaming import SEATS, Busy, Costly, Counting
from forebay import Last

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
MODELS = {b"/models/costly": Costly, b"/models/busy": Busy}

Told = list[tuple[asyncio.Transport, bytes]]


def event(part: int | Last[int]) -> bytes:
    text = b"data: %d\n\n" % (part.part if isinstance(part, Last) else part)
    chunk = b"%x\r\n%b\r\n" % (len(text), text)
    return chunk + END if isinstance(part, Last) else chunk


class Stepper:
    """One model, its seats and the thread that steps it."""

    def __init__(self, model: Counting) -> None:
        self.model = model
        self.loop = asyncio.get_running_loop()
        self.waiting: SimpleQueue[tuple[asyncio.Transport, int]] = SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        seated: list[tuple[asyncio.Transport, list[int]]] = []
        while True:
            while len(seated) < SEATS and not (seated and self.waiting.empty()):
                transport, sample = self.waiting.get()
                seated.append((transport, self.model.start(sample)))
            parts = self.model.step([state for _, state in seated])
            told = [(transport, event(part)) for (transport, _), part in zip(seated, parts, strict=True)]
            self.loop.call_soon_threadsafe(self.tell, told)
            seated = [one for one, part in zip(seated, parts, strict=True) if not isinstance(part, Last)]

    def tell(self, told: Told) -> None:
        for transport, chunk in told:
            transport.write(chunk)


class Http(asyncio.Protocol):
    """Read requests off one connection."""

    def __init__(self, steppers: dict[bytes, Stepper]) -> None:
        self.steppers = steppers
        self.parser = httptools.HttpRequestParser(self)
        self.body = self.url = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        stepper = self.steppers.get(self.url)
        if stepper is None:
            self.transport.write(READY)
        else:
            self.transport.write(HEAD)
            stepper.waiting.put((self.transport, int(self.body)))
        self.body = b""


async def serve(port: int) -> None:
    steppers = {path: Stepper(model()) for path, model in MODELS.items()}
    server = await asyncio.get_running_loop().create_server(lambda: Http(steppers), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
