# SPDX-License-Identifier: Apache-2.0
"""Start a server pinned to a core, find out when it answers, read its figures, stop it with all its children."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import proc
from benchmarks.servers import Server
from benchmarks.work import COUNTER, COUNTER_ENV, job, request_body

ROOT = Path(__file__).resolve().parent.parent
STOP_LIMIT_S = 10.0
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Cores = frozenset[int]


class ServerFailed(Exception):
    """A server did not start, or answered wrongly."""


def pinned(command: list[str], cores: Cores) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def need(**packages: str) -> None:
    """Make sure that programs are there before anything is measured; each is named with its package in Debian."""
    for program, package in packages.items():
        if shutil.which(program) is None:
            raise SystemExit(f"the program {program} is missing; on Debian: apt-get install {package}")


def environment() -> dict[str, str]:
    """Give servers and helpers this repository's code, whatever is installed, and one thread for linear algebra.

    Their output is buffered: without a buffer Python drops what a pipe does not take at once, and after a loop of
    uvloop's has run, that is all beyond 64 KiB.
    """
    return {**os.environ, **SINGLE_THREADED, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONUNBUFFERED": ""}


@dataclass
class Running:
    """A server that has answered correctly at least once."""

    server: Server
    job: str
    port: int
    process: subprocess.Popen[bytes]
    counter: Path
    start_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.server.path}"

    def pids(self) -> list[int]:
        return proc.tree(self.process.pid)

    def front(self) -> int:
        return proc.front(self.pids(), self.port)

    def exchange(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            key = {"X-API-Key": self.server.key} if self.server.key else {}
            connection.request(method, path, body, {"Content-Type": "application/json", **key})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def check_answer(self) -> None:
        """Ask once and compare with the job's own answer.

        Raises:
            ServerFailed: If the answer is not the right one.
        """
        status, content = self.exchange("POST", self.server.path, request_body(self.job))
        if status != 200 or not job(self.job).is_answer(msgspec.json.decode(content)):
            raise ServerFailed(f"{self.server.name} answered {self.job} with {status} {content[:200]!r}")

    def metrics(self) -> dict[str, float]:
        """Read forebay's metrics, labels summed up."""
        totals: dict[str, float] = {}
        for line in self.exchange("GET", "/metrics")[1].decode().splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def batches(self) -> tuple[float, float]:
        """Count batches and the rows in them, since the start."""
        if self.server.is_forebay:
            metrics = self.metrics()
            return metrics.get("forebay_batch_size_count", 0.0), metrics.get("forebay_batch_size_sum", 0.0)
        batches, rows = COUNTER.unpack(self.counter.read_bytes())
        return batches, rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def start(server: Server, job_name: str, cores: Cores) -> Iterator[Running]:
    """Run a server while the block runs.

    Raises:
        ServerFailed: If it has not answered after a minute, or the block raises; the end of its output is told.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        counter, log = Path(folder, "counter"), Path(folder, "log")
        counter.write_bytes(bytes(COUNTER.size))
        with log.open("wb") as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                pinned(server.command(job_name, port), cores),
                cwd=ROOT,
                env={**environment(), COUNTER_ENV: str(counter), "BENCH_JOB": job_name},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running = Running(server, job_name, port, process, counter)
        try:
            wait_answering(running, began)
            running.start_s = time.perf_counter() - began
            yield running
        except Exception as error:  # whatever went wrong while it ran, its own output says most
            raise ServerFailed(
                f"{server.name}, {job_name}: {error!r}\n{log.read_text(errors='replace')[-2000:]}"
            ) from error
        finally:
            stop(process)


def wait_answering(running: Running, began: float) -> None:
    limit_s = running.server.start_limit_s
    while time.perf_counter() < began + limit_s:
        if running.process.poll() is not None:
            raise ServerFailed(f"ended with status {running.process.returncode} before it answered")
        try:
            return running.check_answer()
        except (OSError, http.client.HTTPException, ServerFailed):
            time.sleep(0.01)
    raise ServerFailed(f"no answer after {limit_s:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, then end whatever of its family is left."""
    family = proc.tree(process.pid)
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in family[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def python_helper(name: str, *arguments: str, cores: Cores) -> Any:
    """Run one of our modules in a process of its own, pinned, and decode the JSON it prints."""
    result = subprocess.run(
        pinned([sys.executable, "-m", f"benchmarks.{name}", *arguments], cores),
        cwd=ROOT,
        env=environment(),
        check=True,
        stdout=subprocess.PIPE,
    )
    return msgspec.json.decode(result.stdout)
