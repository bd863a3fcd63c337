# SPDX-License-Identifier: Apache-2.0
"""Requests a second of a pipeline with one trivial op on two cores, over REST (wrk) and gRPC (h2load, Python).

    .venv/bin/python -m benchmarks.pipeline

The original server (0.9.0) runs the same script in turns with ours, in the environment that `make setup` makes for the
tests; its figure for REST has its gateway, which is written in Go, in it. Each server runs with its defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx

from benchmarks.h2load import run_h2load
from benchmarks.launch import ROOT, environment, free_port, need
from benchmarks.load import SCRIPT
from benchmarks.report import table

KINDS = ("thread", "process")
JOB = "benchmarks/jobs/pipeline_echo.py"
ORIGINAL = ROOT / ".venv/environments/pipeline/bin/python"
ORIGINAL_DRIVER = ROOT / "tests/compat/pipeline/projects/original.py"
RPC, RPC_PYTHON = "gRPC (h2load)", "gRPC (Python client)"
BODY = json.dumps({"key": ["x"], "value": ["a small request"]}).encode()


def rest(port: int, connections: int, seconds: int) -> float:
    with tempfile.NamedTemporaryFile() as body:
        body.write(BODY)
        body.flush()
        url = f"http://127.0.0.1:{port}/echo/prediction"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(SCRIPT), url, "--", body.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(text.rpartition("JSON")[2])
    assert not found["errors"], found
    return found["requests"] / found["duration_s"]


def rpc(port: int, connections: int, seconds: int) -> float:
    from forebay.surfaces.pipeline.protocol.messages import PATH, Request

    message = Request(key=["x"], value=["a small request"]).SerializeToString()
    before = one_answer(port, message)
    rate = run_h2load(f"http://127.0.0.1:{port}{PATH}", message, before, connections, seconds)
    assert one_answer(port, message) == before
    return rate


def one_answer(port: int, message: bytes) -> bytes:
    """Ask once as a client of gRPC does, and look at the answer; returns its message."""
    import grpc

    from forebay.surfaces.pipeline.protocol.messages import PATH, Response

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary(PATH)(message, timeout=30)
    response = Response.FromString(answer)
    assert (response.err_no, *response.value) == (0, "a small request"), response
    return answer


async def rpc_python(port: int, connections: int, seconds: int) -> float:
    import grpc

    from forebay.surfaces.pipeline.protocol.messages import METHOD, SERVICE, Request, Response

    request = Request(key=["x"], value=["a small request"])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/{METHOD}",
            request_serializer=Request.SerializeToString,
            response_deserializer=Response.FromString,
        )
        answered, end = 0, time.perf_counter() + seconds

        async def client() -> None:
            nonlocal answered
            while time.perf_counter() < end:
                response = await call(request)
                assert response.err_no == 0
                answered += 1

        await asyncio.gather(*(client() for _ in range(connections)))
    return answered / seconds


def start(kind: str, folder: str, *, is_original: bool) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start a server; returns it with its ports of gRPC and HTTP once it answers."""
    rpc_port, http_port = free_port(), free_port()
    arguments = [str(rpc_port), str(http_port), kind]
    if is_original:
        command = [str(ORIGINAL), "-W", "ignore", str(ORIGINAL_DRIVER), "serve", str(ROOT / JOB), *arguments]
    else:
        program = str(Path(sys.executable).with_name("forebay"))
        command = [program, "serve", str(ROOT / JOB), "--log-level", "warning", "--", *arguments]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for _ in range(600):
        try:
            answer = httpx.post(f"http://127.0.0.1:{http_port}/echo/prediction", content=BODY, timeout=5)
            if answer.json().get("value") == ["a small request"]:
                return process, rpc_port, http_port
        except (httpx.TransportError, ValueError):
            pass
        time.sleep(0.05)
    end(process)
    raise SystemExit("the server did not start")


def end(process: subprocess.Popen[bytes]) -> None:
    """The original ends with its whole group or not at all."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--connections", type=int, default=16)
    options = parser.parse_args()
    need(h2load="nghttp2-client")
    rates: dict[tuple[str, str, bool], list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        servers = {}
        for kind, is_original in itertools.product(KINDS, (False, True)):
            servers[kind, is_original] = process, *_ = start(kind, folder, is_original=is_original)
            stack.callback(end, process)
            os.killpg(
                process.pid, signal.SIGSTOP
            )  # only one is awake: the original's processes look for work all the time
        for round_ in range(options.rounds + 1):  # the first one warms up
            for (kind, is_original), (process, rpc_port, http_port) in servers.items():
                os.killpg(process.pid, signal.SIGCONT)
                found = {
                    "REST": rest(http_port, options.connections, options.seconds),
                    RPC: rpc(rpc_port, options.connections, options.seconds),
                    RPC_PYTHON: asyncio.run(rpc_python(rpc_port, options.connections, options.seconds)),
                }
                os.killpg(process.pid, signal.SIGSTOP)
                for way, rate in found.items():
                    rates.setdefault((kind, way, is_original), []).extend([rate] if round_ else [])
    rows = []
    for kind, way in itertools.product(KINDS, ("REST", RPC, RPC_PYTHON)):
        ours, original = median(rates[kind, way, False]), median(rates[kind, way, True])
        rows.append([kind, way, f"{ours:,.0f}", f"{original:,.0f}", f"{ours / original:.1f}"])
    print(f"{options.connections} connections, {options.rounds} rounds of {options.seconds} s\n")
    print(table(["op", "over", "req/s", "original", "factor"], rows))


if __name__ == "__main__":
    main()
