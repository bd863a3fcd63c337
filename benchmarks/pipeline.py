# SPDX-License-Identifier: Apache-2.0
"""Requests a second of a pipeline with one trivial op on two cores, over REST (wrk) and gRPC (h2load, Python).

    .venv/bin/python -m benchmarks.pipeline

`original` is what the original server of version 0.9.0 reached on a machine of this kind when it was looked at; it is
not run here (its packages need a Python of their own), so hold the factors for a size and not for a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.chaos import wait_ready
from benchmarks.h2load import run_h2load
from benchmarks.launch import ROOT, environment, free_port, stop
from benchmarks.load import SCRIPT
from benchmarks.report import table

ORIGINAL = {("thread", "REST"): 856, ("process", "REST"): 625, ("thread", "gRPC"): 864, ("process", "gRPC"): 654}
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
    from forebay.protocols.pipeline.messages import PATH, Request

    message = Request(key=["x"], value=["a small request"]).SerializeToString()
    before = one_answer(port, message)
    rate = run_h2load(f"http://127.0.0.1:{port}{PATH}", message, before, connections, seconds)
    assert one_answer(port, message) == before
    return rate


def one_answer(port: int, message: bytes) -> bytes:
    """Ask once as a client of gRPC does, and look at the answer; returns its message."""
    import grpc

    from forebay.protocols.pipeline.messages import PATH, Response

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary(PATH)(message, timeout=30)
    response = Response.FromString(answer)
    assert (response.err_no, *response.value) == (0, "a small request"), response
    return answer


async def rpc_python(port: int, connections: int, seconds: int) -> float:
    import grpc

    from forebay.protocols.pipeline.messages import METHOD, SERVICE, Request, Response

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--connections", type=int, default=16)
    options = parser.parse_args()
    servers, processes = {}, []
    try:
        for kind in ("thread", "process"):
            ports = free_port(), free_port()
            program = str(Path(sys.executable).with_name("forebay"))
            command = [program, "serve", "benchmarks/jobs/pipeline_echo.py", "--log-level", "warning", "--"]
            command += [*map(str, ports), kind]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL))
            wait_ready(processes[-1], ports[1])
            servers[kind] = ports
        rates: dict[tuple[str, str], list[float]] = {}
        for round_ in range(options.rounds + 1):  # the first one warms up
            for kind, (rpc_port, http_port) in servers.items():
                found = {
                    "REST": rest(http_port, options.connections, options.seconds),
                    RPC: rpc(rpc_port, options.connections, options.seconds),
                    RPC_PYTHON: asyncio.run(rpc_python(rpc_port, options.connections, options.seconds)),
                }
                for way, rate in found.items():
                    rates.setdefault((kind, way), []).extend([rate] if round_ else [])
    finally:
        for process in processes:
            stop(process)
    rows = []
    for (kind, way), found in rates.items():
        original = ORIGINAL[kind, way.partition(" ")[0]]
        rows.append([kind, way, f"{median(found):,.0f}", f"{original:,}", f"{median(found) / original:.1f}"])
    print(f"{options.connections} connections, {options.rounds} rounds of {options.seconds} s\n")
    print(table(["op", "over", "req/s", "original", "factor"], rows))


if __name__ == "__main__":
    main()
