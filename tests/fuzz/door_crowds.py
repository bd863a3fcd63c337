# SPDX-License-Identifier: Apache-2.0
"""Sends bodies of very many small elements to every door: each answer is quick, small, and nobody else's concern.

The attacks are made from the schemas of all protocols (`tests/attacks`), plain and as gzip, in an order that the seed
gives. An attack is a difference if its answer takes more than a second, if another client's `/healthz` then waits 50 ms
longer than it does without the attack, or if the server takes more memory than four times the bytes of the body once
unpacked and 64 MiB; 200 bytes an element more if the body is taken, for the objects that a model is given. A difference
is tried again, up to `TRIES` times, since a machine that is busy has slow answers of its own.

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
        status: Of its answer.
        seconds: From its first byte to its answer.
        neighbour_s: The longest that another client waited for `/healthz` meanwhile.
        taken_bytes: Memory that the server had at most beyond what it had before.
    """

    status: str
    seconds: float
    neighbour_s: float
    taken_bytes: int


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


def measure(server: Running, attacker: Attacker, door: Door, attack: Attack) -> Measured:
    """Send an attack while another client asks."""
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
    return Measured(status, seconds, waited, peak_bytes(server.process.pid) - before)


def allowed_bytes(attack: Attack, status: str) -> int:
    """How much memory an attack may take."""
    found = 4 * attack.size + SLACK_BYTES
    return found if status.startswith(REFUSED) else found + OBJECT_BYTES * CROWD


def faults(attack: Attack, measured: Measured, quiet_s: float) -> list[str]:
    """What of it is not as it must be."""
    found: list[str] = []
    if measured.seconds > ANSWER_S:
        found.append(f"answered after {measured.seconds:.2f} s")
    if measured.neighbour_s > quiet_s + NEIGHBOUR_S:
        found.append(f"another client waited {measured.neighbour_s * 1000:.0f} ms, {quiet_s * 1000:.0f} without it")
    allowed = allowed_bytes(attack, measured.status)
    if measured.taken_bytes > allowed:
        found.append(f"took {measured.taken_bytes >> 20} MiB, may take {allowed >> 20}")
    return found


def quiet(server: Running, seconds: float = 0.3) -> float:
    """How long `/healthz` takes at most where nobody attacks."""
    neighbour = Neighbour(server.ports["http"])
    neighbour.start()
    time.sleep(seconds)
    return neighbour.end()


def tried(server: Running, attacker: Attacker, door: Door, attack: Attack) -> tuple[str, list[str]]:
    """Send an attack, again while something is wrong; returns the last status, and what was wrong."""
    status, found = "", list[str]()
    for _ in range(TRIES):
        before = quiet(server, 0.3 if found else 0.05)
        measured = measure(server, attacker, door, attack)
        status, found = measured.status, faults(attack, measured, before)
        if not found:
            break
    return status, found


def main(seconds: float, seed: int) -> int:
    """Run; returns the number of differences."""
    dice = random.Random(seed)
    findings = Findings("crowds")
    by_server: dict[str, list[tuple[Door, int, bool]]] = defaultdict(list)
    for door in doors():
        both = [(door, number, is_packed) for number in range(len(door.attacks)) for is_packed in (False, True)]
        by_server[door.server] += both if door.way != "worker" else both[::2]
    total = sum(map(len, by_server.values()))
    for name, listed in by_server.items():
        dice.shuffle(listed)
        end = awake() + seconds * len(listed) / total
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(name, Path(folder)) as server,
            contextlib.closing(Attacker(server, Path(folder))) as attacker,
        ):
            for door, number, is_packed in listed:
                if awake() > end or findings.differences >= ENOUGH:
                    break
                attack = door.attacks[number]()
                attack = packed(attack) if is_packed else attack
                status, found = tried(server, attacker, door, attack)
                findings.counts[f"{door.way} {status}"] += 1
                if found:
                    findings.differ(f"{door.name}, {attack.spot}: {status}, {'; '.join(found)}")
        if defects := server.defects():
            findings.differ("a defect stands in the log", defects[-3000:])
    print(f"crowds: {dict(findings.counts)} of {total}, {findings.differences} differences", flush=True)
    return findings.differences


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
