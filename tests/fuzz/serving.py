# SPDX-License-Identifier: Apache-2.0
"""What fuzzers of a running server share: the server, clients that send in pieces, and several of them at once."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from tests.fuzz.patience import HANG_S, UNHURRIED, awake
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENOUGH = 20
"""Differences after which a fuzzer stops."""
CLIENTS = 3
THREADS = ("--worker-kind", "thread")


class Running:
    """A server in a process of its own."""

    def __init__(self, *targets: str, options: tuple[str, ...] = THREADS) -> None:
        command = [sys.executable, "-m", "forebay", "serve", *targets, "--http-port", "0"]
        command += UNHURRIED
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: list[str] = []
        self.ports: dict[str, int] = {}
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        assert ready.wait(PATIENCE_S), self.said

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"gRPC at [\d.]+:(\d+)", line):
                self.ports["grpc"] = int(found[1])
            if found := re.search(r"ready at http://[\d.]+:(\d+)", line):
                self.ports["http"] = int(found[1])
                ready.set()
        ready.set()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def defects(self) -> str:
        """What the log tells of faults of ours."""
        text = "".join(self.said)
        return text if "Traceback" in text or self.process.returncode else ""


@contextlib.contextmanager
def running(*targets: str, options: tuple[str, ...] = THREADS) -> Iterator[Running]:
    """A server for as long as the block runs."""
    found = Running(*targets, options=options)
    try:
        yield found
    finally:
        found.stop()


class Sender:
    """A client that keeps its connection, and sends bodies in pieces: with their length, or in chunks."""

    def __init__(self, port: int, dice: random.Random) -> None:
        self._dice = dice
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(self, path: str, body: bytes, headers: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send; the answer is still to be read."""
        dice, connection = self._dice, self._connection
        connection.putrequest("POST", path, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        is_chunked = dice.random() < 0.2
        connection.putheader(*(("Transfer-Encoding", "chunked") if is_chunked else ("Content-Length", str(len(body)))))
        pieces = [body]
        if dice.random() < 0.3:
            cuts = sorted(dice.randrange(len(body) + 1) for _ in range(dice.randint(1, 4)))
            pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        if is_chunked:
            pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece]
            pieces.append(b"0\r\n\r\n")
        connection.endheaders(None if len(pieces) > 1 else pieces[0])
        for piece in pieces if len(pieces) > 1 else ():
            connection.send(piece)
            if dice.random() < 0.1:
                time.sleep(0.001)
        return connection.getresponse()

    def leave(self) -> None:
        """Close the connection, whatever is still to come; the next request opens another."""
        self._connection.close()


class Visitor:
    """A client of one door that now and then leaves before it has read its answer."""

    def __init__(self, findings: Findings, port: int, dice: random.Random) -> None:
        self.findings, self.dice = findings, dice
        self._sender = Sender(port, dice)

    def close(self) -> None:
        """Close the connection."""
        self._sender.leave()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes] | None:
        """Return status, media type and body of the answer; None if it was not read."""
        answer = self._sender.post(path, body, headers)
        if self.dice.random() < 0.05:
            answer.read(self.dice.randrange(200))
            self._sender.leave()
            self.findings.counts["left"] += 1
            return None
        data = answer.read()
        self.findings.counts[str(answer.status)] += 1
        return answer.status, answer.headers.get("content-type", ""), data


class Asking(Protocol):
    """A client of a fuzzer."""

    def round(self) -> None:
        """Ask, and compare."""

    def close(self) -> None:
        """Let go of its connections."""


class Findings:
    """What several clients counted and found; a difference is printed at once."""

    def __init__(self, door: str) -> None:
        self.door = door
        self.counts: Counter[str] = Counter()
        self.differences = 0
        self._lock = threading.Lock()

    def differ(self, what: str, *details: object) -> None:
        """Tell of a difference."""
        with self._lock:
            self.differences += 1
            print(f"DIFFERENCE in {self.door}: {what}", *(str(one)[:1500] for one in details), sep="\n  ", flush=True)

    def run(self, seconds: float, seed: int, client: Callable[[random.Random], Asking], clients: int = CLIENTS) -> None:
        """Have several clients go round until the time is over; each has dice of its own.

        Args:
            seconds: How long.
            seed: Of the dice.
            client: Makes a client.
            clients: How many.
        """
        end = awake() + seconds

        def go(number: int) -> None:
            dice = random.Random(f"{seed} {number}")
            try:
                with contextlib.closing(client(dice)) as one:
                    while awake() < end and self.differences < ENOUGH:
                        one.round()
            except Exception as error:
                import traceback

                self.differ("a client broke down", repr(error), traceback.format_exc())

        threads = [threading.Thread(target=go, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and awake() < end + HANG_S:
                thread.join(1.0)
            if thread.is_alive():
                self.differ(f"a client got no answer for {HANG_S:g} seconds")

    def wait_for(self, left: Callable[[], object]) -> None:
        """Wait until nothing is left in the models."""
        end = awake() + HANG_S
        while found := left():
            if awake() > end:
                self.differ("somebody is left in a model", found)
                return
            time.sleep(0.05)

    def end(self, server: Running) -> int:
        """Look into the log; returns how many differences there were."""
        if defects := server.defects():
            self.differ("a defect stands in the log", defects[-3000:])
        print(f"{self.door}: {dict(self.counts)}, {self.differences} differences", flush=True)
        return self.differences


def left_in(server: Running) -> list[str]:
    """The models that have requests."""
    models = httpx.get(f"http://127.0.0.1:{server.ports['http']}/models").json()["models"]
    return [one["name"] for one in models if one["in_flight"] or one["waiting"]]


def fuzz_door(
    findings: Findings,
    target: Path,
    time_and_seed: tuple[float, int],
    client: Callable[[Findings, int, random.Random], Asking],
    options: tuple[str, ...] = THREADS,
) -> int:
    """Have clients ask a server for a time until nobody is left in it; returns how many differences there were."""
    with running(str(target), options=options) as server:
        findings.run(*time_and_seed, lambda dice: client(findings, server.ports["http"], dice))
        findings.wait_for(lambda: left_in(server))
    return findings.end(server)


def pick(dice: random.Random, usual: Any, *others: Any) -> Any:
    """What is usual most of the time."""
    return usual if dice.random() < 0.85 else dice.choice(others)


def is_text(sent: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        return sent.decode() is not None
    except UnicodeDecodeError:
        return False
