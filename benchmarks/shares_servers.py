# SPDX-License-Identifier: Apache-2.0
"""The servers of `benchmarks.shares`, and the loads that several tenants send them at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import msgspec

from benchmarks.launch import ROOT, Cores, Running, environment, pinned, start
from benchmarks.policies.fair.simulation import Load
from benchmarks.servers import LOGGING, Server, module
from benchmarks.tenant_load import Told
from benchmarks.work.shared import SHAPE_ENV, TRUTH_ENV, batches

SERVER_CORES: Cores = frozenset({0})
LOAD_CORES: Cores = frozenset({1})
LARGEST = 16
AHEAD_S = 1.0
"""Until the loads of a run begin: as long as their programs need to connect."""
WARM_S = 2.0
PROBE = "probe"
"""The tenant that asks whether the server answers."""


@dataclass(frozen=True)
class Speed:
    """How fast the model is: `workers` that each take `batch_s` for a full batch; 0.44 of it is the batch's own."""

    workers: int
    batch_s: float

    @property
    def a(self) -> float:
        return 0.44 * self.batch_s

    @property
    def b(self) -> float:
        return 0.56 * self.batch_s / LARGEST

    @property
    def rate(self) -> float:
        return self.workers * LARGEST / self.batch_s

    def __str__(self) -> str:
        return f"{self.workers} x {self.rate / self.workers:.0f}/s"


@dataclass
class Run:
    """What became of a load: what each tenant saw, and what the model knows of the same time."""

    told: dict[str, Told]
    seconds: float
    worker_s: dict[str, float] = field(default_factory=dict[str, float])
    batches: int = 0
    rows: int = 0

    @property
    def answered(self) -> float:
        """Answers a second, of all tenants."""
        return sum(one.answered for one in self.told.values()) / self.seconds

    def share(self, tenant: str) -> float:
        return self.worker_s.get(tenant, 0.0) / max(sum(self.worker_s.values()), 1e-9)


@dataclass
class Up:
    """A server that runs, and the folder in which its model writes."""

    running: Running
    truth: Path

    def run(self, loads: Sequence[Load], seconds: float, *, seed: int = 1, connections: int = 0) -> Run:
        """Send these loads at the same time, each from a process of its own; a rate of 0 is a closed loop."""
        at = perf_counter() + AHEAD_S + 0.15 * len(loads)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, load in enumerate(loads, 1):
                facts = {
                    "port": self.running.port,
                    "path": self.running.server.path,
                    "key": f"key-{load.tenant}",
                    "row": 100 * number + int(load.cost),
                    "rate": load.rate,
                    "connections": connections or min(2500, int(load.rate) + 64),
                    "limits": msgspec.json.encode(load.times_s).decode(),
                    "at": at,
                    "warm": WARM_S,
                    "seconds": seconds,
                    "seed": seed * 100 + number,
                }
                flags = [text for key, value in facts.items() for text in (f"--{key}", str(value))]
                command = pinned([sys.executable, "-m", "benchmarks.tenant_load", *flags], LOAD_CORES)
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE))
            told = {
                load.tenant: msgspec.json.decode(
                    process.communicate(timeout=AHEAD_S + WARM_S + seconds + 30)[0], type=Told
                )
                for load, process in zip(loads, processes, strict=True)
            }
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = Run(told, seconds)
        begins = at + WARM_S
        parts = Counter[int]()
        for batch in batches(self.truth):
            if begins <= batch.ended < begins + seconds:
                found.batches += 1
                found.rows += batch.rows
                whole = sum(batch.parts.values())
                parts.update({tenant: batch.seconds * part / whole for tenant, part in batch.parts.items()})
        found.worker_s = {load.tenant: parts[number] for number, load in enumerate(loads, 1)}
        return found

    def cost_s(self) -> dict[str, float]:
        """Return what the server bills to each tenant, since its start."""
        found: dict[str, float] = {}
        for line in self.running.exchange("GET", "/metrics")[1].decode().splitlines():
            if line.startswith("forebay_tenant_worker_seconds_total{"):
                tenant = line.partition('tenant="')[2].partition('"')[0]
                found[tenant] = found.get(tenant, 0.0) + float(line.rpartition(" ")[2])
        return found

    def known_s(self, loads: Sequence[Load]) -> dict[str, float]:
        """Return what the model knows of each tenant's part, since the start."""
        parts = Counter[int]()
        for batch in batches(self.truth):
            whole = sum(batch.parts.values())
            parts.update({tenant: batch.seconds * part / whole for tenant, part in batch.parts.items()})
        return {load.tenant: parts[number] for number, load in enumerate(loads, 1)}


@contextmanager
def up(server: Server, speed: Speed) -> Iterator[Up]:
    """Have a server with a model of this speed while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SHAPE_ENV] = f"{LARGEST},{speed.a},{speed.b}"
        os.environ[TRUTH_ENV] = folder
        with start(server, "shared", SERVER_CORES) as running:
            yield Up(running, Path(folder))


@contextmanager
def ours(loads: Sequence[Load], speed: Speed, *, queue: int, named: bool = True) -> Iterator[Up]:
    """Have forebay while the block runs; without names its keys are a list, and there are no tenants."""
    with tempfile.TemporaryDirectory() as project:
        keys = {name: f"key-{name}" for name in (PROBE, *(load.tenant for load in loads))}
        settings = {
            "models": [{"target": str(ROOT / "benchmarks/jobs/shared.py")}],
            "http": {"api_keys": keys if named else list(keys.values())},
            **({"tenants": {load.tenant: {"weight": load.weight} for load in loads}} if named else {}),
        }
        Path(project, "forebay.yaml").write_bytes(msgspec.json.encode(settings))
        flags = f"--worker-kind process --workers {speed.workers} --max-batch-size {LARGEST} --max-queue {queue}"
        flags += " --max-connections 20000"

        def command(_: str, port: int) -> list[str]:
            program = str(Path(sys.executable).with_name("forebay"))
            return [program, "serve", project, "--http-port", str(port), *flags.split(), *LOGGING]

        server = Server("forebay:process", command, path="/models/shared", key=keys[PROBE])
        with up(server, speed) as found:
            yield found


def bare(queue: int) -> Server:
    """Return the bare server, which refuses what finds its queue full."""
    return Server(
        "bare", lambda job, port: module("raw_refusing", job, "process", "--port", str(port), "--holds", str(queue))
    )


def mosec(python: str, queue: int) -> Server:
    """Return mosec, whose capacity counts what is in a batch as well."""
    flags = f"--address 127.0.0.1 --capacity {queue} --log-level warning --port"
    return Server(
        "mosec",
        lambda _, port: [python, "-m", "benchmarks.servers.mosec_app", *flags.split(), str(port)],
        path="/inference",
    )


def ray_serve(python: str, queue: int) -> Server:
    """Return Ray Serve with a queue in its proxy."""
    command = [python, "-m", "benchmarks.servers.ray_shared"]
    return Server("Ray Serve", lambda _, port: [*command, str(port), str(queue)], start_limit_s=120.0)
