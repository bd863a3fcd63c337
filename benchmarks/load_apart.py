# SPDX-License-Identifier: Apache-2.0
"""An open loop in a process of its own, beside a benchmark that meanwhile does something to the server."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter
from typing import Self

import msgspec
import uvloop

from benchmarks.client import Connection
from benchmarks.launch import ROOT, environment, pinned
from benchmarks.openloop import WARM_UP_S, Generator, arrivals

ASKING = frozenset({1})


class Answer(msgspec.Struct):
    """How often an answer came, and when first, by the machine's own clock."""

    count: int
    first: float


class Told(msgspec.Struct):
    """What the load saw; latencies with the moment they were due, both in seconds."""

    latencies: list[tuple[float, float]]
    answers: dict[str, Answer]
    errors: int
    stall_s: float


class LoadApart:
    """Asks from when it is made; `began` is the moment that `Told` counts from, by this clock."""

    def __init__(self, port: int, request: bytes, seconds: float, rate: int) -> None:
        command = [sys.executable, "-m", "benchmarks.load_apart", str(port), str(seconds), str(rate), request.hex()]
        self._process = subprocess.Popen(
            pinned(command, ASKING), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.began = perf_counter()

    def told(self) -> Told:
        """Wait for its end."""
        return msgspec.json.decode(self._process.communicate()[0], type=Told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()


class _Reader(Connection):
    body = b""

    def on_body(self, body: bytes) -> None:
        self.body = body


class _Counting(Generator):
    connection = _Reader

    def __init__(self, request: bytes, due: list[float]) -> None:
        super().__init__(request, due)
        self.answers: dict[str, Answer] = {}

    def answered(self, connection: Connection, status: int, due: float) -> None:
        assert isinstance(connection, _Reader)
        if status == 200:
            text = connection.body.decode()
            known = self.answers.get(text)
            if known is None:
                self.answers[text] = Answer(1, perf_counter())
            else:
                known.count += 1
        super().answered(connection, status, due)


async def send(port: int, seconds: float, rate: int, request: bytes) -> Told:
    """Send requests when they are due."""
    load = _Counting(request, arrivals(rate, WARM_UP_S + seconds, 3))
    print("go", flush=True)
    await load.run(port)
    return Told(load.latencies, load.answers, load.errors, load.stall_s)


def main() -> None:
    port, seconds, rate, request = sys.argv[1:]
    told = uvloop.run(send(int(port), float(seconds), int(rate), bytes.fromhex(request)))
    print(msgspec.json.encode(told).decode())


if __name__ == "__main__":
    main()
