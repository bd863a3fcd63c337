# SPDX-License-Identifier: Apache-2.0
"""The reference for overload: what plain Python keeps of its work, with no features but a short queue.

It is `raw.py`, but that a request which finds the queue full is not read further, and told so `LATE_S` later, in
constant bytes: as late as the bar for refusals allows, so that as few as possible have to be written.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from benchmarks.servers.raw import Batcher, Bodies, Frames, Http, Start, run_child, start_thread
from benchmarks.work import COUNTER, COUNTER_ENV, MAX_BATCH, load_counted
from benchmarks.work.shared import shape
from benchmarks.work.spin import spin

LATE_S = 0.93
TICK_S = 0.01
FULL = b'{"error":"the queue is full; try again later"}'
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(FULL),
    FULL,
)
LARGEST = {"batchmodel": MAX_BATCH, "spin": 1, "shared": shape()[0]}


class RefusingBatcher(Batcher):
    """One that sends batches of its job's size, and holds no more than so many that wait."""

    def __init__(self, start: Start, *, largest: int, holds: int) -> None:
        super().__init__(start)
        self.largest = largest
        self.holds = holds
        self.late: deque[tuple[float, asyncio.Transport]] = deque()
        self.tick()

    def send(self) -> None:
        self.batch, self.waiting = self.waiting[: self.largest], self.waiting[self.largest :]
        self.start([body for _, body in self.batch], self.done)

    def refuse(self, transport: asyncio.Transport) -> None:
        self.late.append((self.loop.time() + LATE_S, transport))

    def tick(self) -> None:
        now = self.loop.time()
        while self.late and self.late[0][0] <= now:
            _, transport = self.late.popleft()
            if not transport.is_closing():
                transport.write(REFUSAL)
        self.loop.call_later(TICK_S, self.tick)


class RefusingHttp(Http):
    """One connection, whose client sends one request at a time and each in one piece."""

    batcher: RefusingBatcher

    def data_received(self, data: bytes) -> None:
        if len(self.batcher.waiting) >= self.batcher.holds:
            self.batcher.refuse(self.transport)
        else:
            super().data_received(data)


def answerer(job: str) -> Callable[[Bodies], Bodies]:
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    if job == "spin":

        def answered(body: bytes) -> bytes:
            asked = decode(body)
            answer = dict(zip(asked["key"], [str(spin(int(turns))) for turns in asked["value"]], strict=True))
            return encode({"err_no": 0, "err_msg": "", "key": list(answer), "value": list(answer.values())})

        return lambda bodies: list(map(answered, bodies))
    predict = load_counted(job)

    def predicted(bodies: Bodies) -> Bodies:
        asked: list[Any] = [decode(body) for body in bodies]
        rows = [row for one in asked for row in (one if isinstance(one, list) else [one])]
        answers = iter(predict(rows))
        return [encode([next(answers) for _ in one] if isinstance(one, list) else next(answers)) for one in asked]

    return predicted


async def serve(job: str, kind: str, port: int, holds: int) -> None:
    if kind == "process":
        _, frames = await asyncio.get_running_loop().create_unix_connection(Frames, sock=spawn_child(job))
        start = frames.start
    else:
        start = start_thread(answerer(job))
    batcher = RefusingBatcher(start, largest=LARGEST[job], holds=holds)
    server = await asyncio.get_running_loop().create_server(
        lambda: RefusingHttp(batcher), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def spawn_child(job: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "benchmarks.servers.raw_refusing", job, "child", "--fd", str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return ours


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=LARGEST)
    parser.add_argument("kind", choices=["thread", "process", "child"])
    parser.add_argument("--port", type=int)
    parser.add_argument("--holds", type=int)
    parser.add_argument("--fd", type=int)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as counter:
        counter.truncate(COUNTER.size)
        os.environ[COUNTER_ENV] = counter.name
        if options.kind == "child":
            run_child(answerer(options.job), options.fd)
        else:
            uvloop.run(serve(options.job, options.kind, options.port, options.holds))


if __name__ == "__main__":
    main()
