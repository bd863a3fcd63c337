# SPDX-License-Identifier: Apache-2.0
"""The servers of `benchmarks.fronts`: of ours and of the bare one a server alone, and owners with their fronts.

A server alone has core 0, and the load core 1. Where a model has an owner, all servers share core 0 ("one core"), or
the owner, with its workers, leaves it for core 1, where the load is ("two cores").
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks import proc
from benchmarks.launch import Cores, Running, free_port, start
from benchmarks.servers import LOGGING, Server, module

SERVER_CORE, LOAD_CORE = 0, 1
SERVER_CORES: Cores = frozenset({SERVER_CORE})
ONE, TWO = "one core", "two cores"
OWNER_CORES = {ONE: SERVER_CORE, TWO: LOAD_CORE}
UNIX, TCP, TLS = "Unix socket", "TCP", "TLS"
BARE, OURS = "bare", "forebay"
AUTHORITY = "authority.pem"


class Kind(Protocol):
    """Makes the servers of one kind."""

    name: str

    def server(self, job: str, *options: str) -> Server:
        """Return one that runs the model itself."""
        ...

    def owner(self, job: str, address: str, certificate: Path | None) -> Server: ...

    def front(self, job: str, address: str, certificate: Path | None) -> Server: ...


@dataclass
class Ours:
    """`forebay serve`.

    Attributes:
        target: What is served.
        worker_kind: Where the model runs.
        model: What it is called, if not as the job whose requests it answers.
        flags: More of the command line of those that have the model.
    """

    target: str
    worker_kind: str
    model: str = ""
    flags: tuple[str, ...] = ()
    name: str = OURS

    def server(self, job: str, *options: str) -> Server:
        return self._server(job, self.target, "--worker-kind", self.worker_kind, *self.flags, *options)

    def owner(self, job: str, address: str, certificate: Path | None) -> Server:
        proof = () if certificate is None else ("--attach-certfile", str(certificate))
        return self.server(job, "--attach", address, *proof)

    def front(self, job: str, address: str, certificate: Path | None) -> Server:
        proof = () if certificate is None else ("--owner-cafile", str(certificate.with_name(AUTHORITY)))
        return self._server(job, "--owner", address, *proof)

    def _server(self, job: str, *words: str) -> Server:
        program = str(Path(sys.executable).with_name("forebay"))

        def command(_job: str, port: int) -> list[str]:
            return [program, "serve", *words, "--http-port", str(port), *LOGGING]

        return Server("forebay:front", command, path=f"/models/{self.model or job}")


@dataclass
class Bare:
    """`servers/raw_front.py`."""

    worker_kind: str
    name: str = BARE

    def server(self, job: str, *options: str) -> Server:
        return Server(
            "raw:front",
            lambda _job, port: module("raw_front", job, self.worker_kind, "--port", str(port), *options),
        )

    def owner(self, job: str, address: str, certificate: Path | None) -> Server:
        proof = () if certificate is None else ("--certfile", str(certificate))
        return self.server(job, "--attach", address, *proof)

    def front(self, job: str, address: str, certificate: Path | None) -> Server:
        proof = () if certificate is None else ("--cafile", str(certificate.with_name(AUTHORITY)))
        return self.server(job, "--owner", address, *proof)


@dataclass
class Way:
    """How a request comes to a model: the owner of the model, and the fronts that clients ask.

    A server alone is both: its own only front.
    """

    owner: Running
    fronts: list[Running] = field(default_factory=list)

    @property
    def servers(self) -> list[Running]:
        return [self.owner, *(front for front in self.fronts if front is not self.owner)]

    def place(self, where: str) -> None:
        """Move its servers to their cores."""
        for front in self.fronts:
            move(front, SERVER_CORE)
        if self.owner not in self.fronts:
            move(self.owner, OWNER_CORES[where])

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time of the owner, and of all its servers, in seconds so far."""
        each = [cpu_s(server.pids()) for server in self.servers]
        return each[0], sum(each)


def up_alone(kind: Kind, job: str, stack: ExitStack) -> Way:
    """Start a server that runs the model itself."""
    server = stack.enter_context(start(kind.server(job), job, SERVER_CORES))
    return Way(server, [server])


def up(
    kind: Kind, job: str, link: str, folder: Path, stack: ExitStack, fronts: int = 1, cores: Cores = SERVER_CORES
) -> Way:
    """Start an owner, and fronts of it; each has answered by then."""
    address = f"unix:{folder}/{kind.name}-{job}" if link == UNIX else f"tcp:127.0.0.1:{free_port()}"
    proof = certificate(folder) if link == TLS else None
    owner = stack.enter_context(start(kind.owner(job, address, proof), job, cores))
    front = kind.front(job, address, proof)
    return Way(owner, [stack.enter_context(start(front, job, cores)) for _ in range(fronts)])


def certificate(folder: Path) -> Path:
    """Make a certificate of this machine that it has signed itself, with its key, if there is none."""
    path = folder / "certificate.pem"
    if not path.exists():
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
        authority = folder / AUTHORITY
        options = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(authority)]
        subprocess.run([*command.split(), *options], check=True, capture_output=True)
        with path.open("ab") as file:
            file.write(authority.read_bytes())
    return path


def move(server: Running, core: int) -> None:
    """Have all threads of a server, and of its workers, run on a core."""
    for pid in server.pids():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time of processes; their own clocks are finer than what /proc says."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


class Foreign:
    """Finds out how much of the machine other processes took, in cores."""

    def __init__(self, ways: Iterator[Way] | Sequence[Way]) -> None:
        self.ways = list(ways)
        self.began_s, self.busy_s, self.own_s = time.perf_counter(), self._busy_s(), self._own_s()

    def cores(self) -> float:
        took_s = time.perf_counter() - self.began_s
        return max(self._busy_s() - self.busy_s - (self._own_s() - self.own_s), 0.0) / took_s

    @staticmethod
    def _busy_s() -> float:
        return proc.machine_times_s()[0]

    def _own_s(self) -> float:
        times = os.times()
        return sum(way.cpu_s()[1] for way in self.ways) + sum(times[:4])
