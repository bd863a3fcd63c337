# SPDX-License-Identifier: Apache-2.0
"""Calls a second of a user's own gRPC service: a Nucleus project beside plain grpcio, asyncio and with threads.

    .venv/bin/python -m benchmarks.user_grpc

All servers and their children run on core 0, h2load on core 1; they are up together and take turns. A shape is
connections x calls at a time on each. `SayHello` is trivial. `Score` runs `work/batchmodel.py`, for which
n rows take about 2.4 ms + n * 20 us: the Nucleus project has as many threads as the server beside it, and they hand
their rows to a `Serving`, which runs them together; the other runs each by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import proc
from benchmarks.h2load import run_h2load
from benchmarks.launch import ROOT, environment, free_port, need, pinned, stop
from benchmarks.report import installed, machine, table
from benchmarks.work import batchmodel

SERVER_CORE, LOAD_CORE = frozenset({0}), frozenset({1})
JOB = ROOT / "benchmarks" / "jobs" / "user_grpc"
FOREBAY, BATCHED, ASYNCIO, THREADS = "forebay", "forebay, 32 threads", "grpcio asyncio", "grpcio, 32 threads"
SHAPES = ((64, 1), (256, 1), (8, 32), (1, 64), (16, 1), (1, 1))
X = batchmodel.ROW["x"]
CALLS = {
    "SayHello": (b"\n\x05world", b"\n\x0bhello world"),
    "Score": (b"\n\x80\x01" + struct.pack(f"<{len(X)}d", *X), b"\t" + struct.pack("<d", 0.0)),
}


def command(name: str, port: int, folder: str) -> list[str]:
    if name in {FOREBAY, BATCHED}:
        target = JOB / ("nucleus.yaml" if name == FOREBAY else "threads.yaml")
        program = str(Path(sys.executable).with_name("forebay"))
        options = ["--http-port", str(port), "--state-dir", f"{folder}/{port}", "--log-level", "warning"]
        return [program, "serve", str(target), *options]
    kind = "asyncio" if name == ASYNCIO else "threads"
    return [sys.executable, "-m", "benchmarks.servers.grpcio_app", str(port), kind]


@contextlib.contextmanager
def started(name: str, folder: str) -> Iterator[tuple[int, int]]:
    """Run a server; yields its process and its port once it gives the right answers."""
    import grpc

    port = free_port()
    process = subprocess.Popen(
        pinned(command(name, port, folder), SERVER_CORE),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method, (message, _) in CALLS.items():
                deadline = time.monotonic() + 60
                while True:
                    try:
                        call = channel.unary_unary(f"/greeter.Greeter/{method}")
                        found = call(message, timeout=60, wait_for_ready=True)
                        break
                    except grpc.RpcError:
                        if time.monotonic() > deadline or process.poll() is not None:
                            raise
                        time.sleep(0.1)
                assert is_right(method, found), (name, method, found)
        yield process.pid, port
    finally:
        stop(process)


def is_right(method: str, found: bytes) -> bool:
    if method == "Score":
        return batchmodel.is_answer({"y": struct.unpack("<d", found[1:])[0]})
    return found == CALLS[method][1]


def measured(servers: dict[str, tuple[int, int]], method: str, shape: tuple[int, int], rounds: int, seconds: int):
    """Return calls a second and microseconds of CPU time a call, by server; medians of the rounds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    message, answer = CALLS[method]
    for round_ in range(rounds + 1):  # the first one warms up
        for name, (pid, port) in servers.items():
            family = proc.tree(pid)
            before = proc.cpu_s(family)
            url = f"http://127.0.0.1:{port}/greeter.Greeter/{method}"
            connections, calls = shape
            lasts = seconds if round_ else 1
            rate = run_h2load(url, message, answer, connections, lasts, calls=calls, cores=LOAD_CORE)
            if round_:
                found[name].append((rate, (proc.cpu_s(family) - before) / (rate * seconds) * 1e6))
    return {name: (median(rate for rate, _ in one), median(cpu for _, cpu in one)) for name, one in found.items()}


def busy_s(pids: list[int]) -> float:
    """Return the processor time that was spent so far by others than these, their children and what has ended."""
    ours = proc.cpu_s({one for pid in pids for one in proc.tree(pid)}) + sum(os.times()[2:4])
    return proc.machine_times_s()[0] - ours


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.user_grpc", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of them, the first ones")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    need(h2load="nghttp2-client")
    rows: list[list[str]] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = (FOREBAY, BATCHED, ASYNCIO, THREADS)
        servers = {name: stack.enter_context(started(name, folder)) for name in names}
        pids = [os.getpid(), *(pid for pid, _ in servers.values())]
        before, began = busy_s(pids), time.monotonic()
        for method, ours, theirs, shapes in (
            ("SayHello", FOREBAY, (ASYNCIO, THREADS), SHAPES[: options.shapes]),
            ("Score", BATCHED, (THREADS,), SHAPES[:1]),
        ):
            for shape in shapes:
                others = theirs if shape == SHAPES[0] else theirs[:1]
                asked = {name: servers[name] for name in (ours, *others)}
                found = measured(asked, method, shape, options.rounds, options.seconds)
                for other in others:
                    ratio = found[ours][0] / found[other][0]
                    rows.append([
                        method, f"{shape[0]} x {shape[1]}", f"{found[ours][0]:,.0f}", f"{found[ours][1]:.1f}", other,
                        f"{found[other][0]:,.0f}", f"{found[other][1]:.1f}", f"{ratio:.1f}",
                    ])  # fmt: skip
                    print(*rows[-1], sep="  ", flush=True)
        foreign = (busy_s(pids) - before) / (time.monotonic() - began)
    head = ["method", "shape", "forebay, calls/s", "us CPU", "beside", "calls/s", "us CPU", "factor"]
    text = table(head, rows)
    if options.output is not None:
        facts = table(["", ""], [[name, value] for name, value in {**machine(), "grpcio": installed("grpcio")}.items()])
        said = str(__doc__).partition("\n\n")[2].partition("\n\n")[2].strip().replace("\n", " ")
        how = f"{options.rounds} rounds of {options.seconds} s, medians; meanwhile other work took {foreign:.2f} cores."
        options.output.write_text(f"# A user's own gRPC service\n\n{said} {how}\n\n{facts}\n\n{text}\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
