# SPDX-License-Identifier: Apache-2.0
"""The servers compared: how each is started and what is measured of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.work import JOBS, MAX_BATCH

EVERY_JOB = frozenset(JOBS)


@dataclass(frozen=True)
class Server:
    """How to start one server.

    `every_round` names the jobs where it is measured each round; elsewhere once shows enough. `key` is the API key that
    it is asked with.
    """

    name: str
    command: Callable[[str, int], list[str]]
    path: str = "/"
    key: str = ""
    start_limit_s: float = 60.0
    every_round: frozenset[str] = EVERY_JOB
    closed_loop: bool = True
    open_loop: bool = False

    @property
    def kind(self) -> str:
        """Where the model runs: inline, thread or process; empty for the others."""
        return self.name.partition(":")[2]

    @property
    def is_forebay(self) -> bool:
        return self.name.startswith("forebay:")


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.servers.{name}", *arguments]


def forebay_command(kind: str, *extra: str, workers: int = 1) -> Callable[[str, int], list[str]]:
    def command(job: str, port: int) -> list[str]:
        program = str(Path(sys.executable).with_name("forebay"))
        flags = f"--worker-kind {kind} --workers {workers} --http-port {port} --max-batch-size {MAX_BATCH}"
        return [program, "serve", f"benchmarks/jobs/{job}.py", *flags.split(), *LOGGING, *extra]

    return command


LOGGING = ("--log-format", "json", "--log-level", "warning")


def forebay(kind: str, *, open_loop: bool) -> Server:
    return Server(f"forebay:{kind}", forebay_command(kind), open_loop=open_loop)


def raw(kind: str, *, every_round: frozenset[str] = frozenset({"echo"})) -> Server:
    return Server(
        f"raw:{kind}", lambda job, port: module("raw", job, kind, "--port", str(port)), every_round=every_round
    )


SERVERS = (
    Server(
        "mosec",
        lambda _, port: module("mosec_app", *f"--address 127.0.0.1 --port {port} --log-level warning".split()),
        path="/inference",
        open_loop=True,
    ),
    forebay("inline", open_loop=False),
    forebay("thread", open_loop=True),
    forebay("process", open_loop=True),
    Server("forebay:thread-go", forebay_command("thread", "--idle", "go"), closed_loop=False, open_loop=True),
    raw("inline"),
    raw("thread"),
    raw("process", every_round=frozenset({"echo", "iris"})),
    raw("whole", every_round=frozenset({"batchmodel"})),
    Server(
        "litserve",
        lambda job, port: module("litserve_app", job, str(port)),
        path="/predict",
        every_round=frozenset(),
    ),
    Server("fastapi", lambda job, port: module("fastapi_app", job, str(port)), every_round=frozenset()),
)
