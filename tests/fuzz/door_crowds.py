# SPDX-License-Identifier: Apache-2.0
"""Sends bodies of very many small elements to every door: each answer is quick, small, and nobody else's concern.

The attacks are made from the schemas of all protocols (`tests/attacks`), plain and as gzip, in an order that the seed
gives. An attack is a difference if its answer takes more than a second, if another client's `/healthz` then waits 50 ms
longer than it does without the attack, or if the server takes more memory than four times the bytes of the body once
unpacked and 64 MiB; 200 bytes an element more if the body is taken, for the objects that a model is given. Other
clients may wait while a thread of a model decodes a body that is taken. A difference is tried again, up to `TRIES`
times, since a machine that is busy has slow answers of its own. At the end stand the worst attacks by each measure.

    .venv/bin/python -m tests.fuzz.door_crowds SECONDS SEED
"""

from __future__ import annotations

import contextlib
import http.client
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.attacks.crowds import CROWD, Attack, packed
from tests.attacks.doors import Attacker, Door, doors, serving
from tests.fuzz.patience import awake
from tests.fuzz.serving import ENOUGH, Findings, Running
from tests.processes import peak_bytes, start_peak

ANSWER_S = 1.0
NEIGHBOUR_S = 0.05
SLACK_BYTES = 64 * 1024 * 1024
OBJECT_BYTES = 200
TRIES = 4
REFUSED = "4", "5", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "NOT_FOUND", "closed"
"""How the status of an answer begins that takes nothing of the body."""


class Measured(NamedTuple):
    """What an attack did.

    Attributes:
        name: Of its door and spot.
        status: Of its answer.
        seconds: From its first byte to its answer.
        delay_s: How much longer another client waited for `/healthz` meanwhile than before; 0 if it may wait.
        taken_bytes: Memory that the server had at most beyond what it had before.
        allowed_bytes: Memory that it may have.
    """

    name: str
    status: str
    seconds: float
    delay_s: float
    taken_bytes: int
    allowed_bytes: int

    def faults(self) -> list[str]:
        """What of it is not as it must be."""
        found: list[str] = []
        if self.seconds > ANSWER_S:
            found.append(f"answered after {self.seconds:.2f} s")
        if self.delay_s > NEIGHBOUR_S:
            found.append(f"another client waited {self.delay_s * 1000:.0f} ms longer")
        if self.taken_bytes > self.allowed_bytes:
            found.append(f"took {self.taken_bytes >> 20} MiB, may take {self.allowed_bytes >> 20}")
        return found


class Neighbour(threading.Thread):
    """Another client, which asks for `/healthz` again and again."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._is_over = threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection):
            while not self._is_over.is_set():
                began = time.monotonic()
                connection.request("GET", "/healthz")
                connection.getresponse().read()
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self._is_over.wait(0.005)

    def end(self) -> float:
        """Stop; returns how long the slowest answer took."""
        self._is_over.set()
        self.join()
        return self.longest_s


def allowed_bytes(attack: Attack, status: str) -> int:
    """How much memory an attack may take."""
    found = 4 * attack.size + SLACK_BYTES
    return found if status.startswith(REFUSED) else found + OBJECT_BYTES * CROWD


def quiet(server: Running, seconds: float = 0.3) -> float:
    """How long `/healthz` takes at most where nobody attacks."""
    neighbour = Neighbour(server.ports["http"])
    neighbour.start()
    time.sleep(seconds)
    return neighbour.end()


def measure(server: Running, attacker: Attacker, door: Door, attack: Attack, quiet_s: float) -> Measured:
    """Send an attack while another client asks, which waits so long at most where nobody attacks."""
    neighbour = Neighbour(server.ports["http"])
    before = start_peak(server.process.pid)
    neighbour.start()
    began = time.monotonic()
    try:
        status = attacker.send(door, attack)
        seconds = time.monotonic() - began
    except Exception as error:
        error.add_note(f"{door.name}, {attack.spot}")
        raise
    finally:
        waited = neighbour.end()
    may_wait = door.in_thread and not status.startswith(REFUSED)
    taken = peak_bytes(server.process.pid) - before
    delay = 0.0 if may_wait else max(0.0, waited - quiet_s)
    return Measured(f"{door.name}, {attack.spot}", status, seconds, delay, taken, allowed_bytes(attack, status))


def tried(server: Running, attacker: Attacker, door: Door, attack: Attack) -> Measured:
    """Send an attack, again while something is wrong; returns what the last one did."""
    measured = measure(server, attacker, door, attack, quiet(server, 0.05))
    for _ in range(1, TRIES):
        if not measured.faults():
            break
        measured = measure(server, attacker, door, attack, quiet(server))
    return measured


def worst(done: list[Measured]) -> list[str]:
    """A line for each measure, with the worst attack by it."""
    if not done:
        return []
    slowest = max(done, key=lambda one: one.seconds)
    unkindest = max(done, key=lambda one: one.delay_s)
    largest = max(done, key=lambda one: one.taken_bytes / one.allowed_bytes)
    measures = {
        f"slowest answer: {slowest.seconds:.2f} s of {ANSWER_S:g}": slowest,
        f"another client's longest delay: {unkindest.delay_s * 1000:.0f} ms of {NEIGHBOUR_S * 1000:.0f}": unkindest,
        f"most memory: {largest.taken_bytes >> 20} MiB of {largest.allowed_bytes >> 20}": largest,
    }
    return [f"  {measure} ({one.name}: {one.status})" for measure, one in measures.items()]


def main(seconds: float, seed: int) -> int:
    """Run; returns the number of differences."""
    dice = random.Random(seed)
    findings, done = Findings("crowds"), list[Measured]()
    by_server: dict[str, list[tuple[Door, int, bool]]] = defaultdict(list)
    for door in doors():
        both = [(door, number, is_packed) for number in range(len(door.attacks)) for is_packed in (False, True)]
        by_server[door.server] += both if door.way != "worker" else both[::2]
    total = sum(map(len, by_server.values()))
    for name, listed in by_server.items():
        dice.shuffle(listed)
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(name, Path(folder)) as server,
            contextlib.closing(Attacker(server, Path(folder))) as attacker,
        ):
            end = awake() + seconds * len(listed) / total
            for door, number, is_packed in listed:
                if awake() > end or findings.differences >= ENOUGH:
                    break
                attack = door.attacks[number]()
                attack = packed(attack) if is_packed else attack
                done.append(measured := tried(server, attacker, door, attack))
                findings.counts[f"{door.way} {measured.status}"] += 1
                if found := measured.faults():
                    findings.differ(f"{measured.name}: {measured.status}, {'; '.join(found)}")
        if defects := server.defects():
            findings.differ("a defect stands in the log", defects[-3000:])
    print(f"crowds: {len(done)} attacks of {total}, {findings.differences} differences")
    print(f"  answers: {dict(findings.counts)}", *worst(done), sep="\n", flush=True)
    return findings.differences


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
