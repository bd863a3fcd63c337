# SPDX-License-Identifier: Apache-2.0
"""Everything at once for a long time: does a server hold on to anything of what it has done?

    .venv/bin/python -m benchmarks.mixed --minutes 60

One server has a model for JSON, one for arrays and one that streams (`jobs/mixed.py`), one a graph (`jobs/chaos.py`),
and one a pipeline of processes over REST and gRPC (`jobs/pipeline_echo.py`). Clients ask them at a steady rate, one in
twenty leaves before it is answered, and every so often a worker is killed. Memory, descriptors and threads of the
servers, workers included, are read all the time; the third and the fourth quarter of the readings must be alike. Ends
with status 1 if they are not, if an answer was wrong, or if a request is in flight at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from benchmarks import proc
from benchmarks.chaos import wait_ready, workers
from benchmarks.launch import ROOT, environment, free_port, stop

LEAVING = 0.05
READ_S = 5.0
PATIENCE_S = 900.0
FINE = {200, 500, 503, 504}
"""What a client may be told while workers are killed."""
GROWTH = 1.05
KINDS = ("json", "array", "stream", "large", "graph", "rest", "rpc")


STREAMED = {"stream", "large"}
LARGE = 10_000
"""How often a long text repeats its token."""


class Account:
    """What became of every request."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.left = 0
        self.kills = 0
        self.wrong: list[str] = []

    def take(self, kind: str, status: int, found: Any, expected: Any) -> None:
        self.answers[kind, status] += 1
        if status not in FINE or (status == 200 and found != expected):
            self.wrong.append(f"{kind}: {status} {str(found)[:200]}, expected {str(expected)[:200]}")


def question(kind: str, token: str) -> tuple[str, Any, Any]:
    """The path, what is sent, and the right answer."""
    if kind == "array":
        numbers = list(range(len(token) % 7 + 1))
        return "/models/doubles", numbers, [2 * number for number in numbers]
    if kind == "stream":
        return "/models/words", f"{token} and on", [token, "and", "on"]
    if kind == "large":  # lands where workers see it
        return "/models/words", token * LARGE, [token * LARGE]
    if kind == "graph":
        return "/models/diamond", {"token": token}, token
    if kind == "rest":
        return "/echo/prediction", {"key": ["x"], "value": [token]}, [token]
    return "/models/echo", token, token


def answer_of(kind: str, body: bytes) -> Any:
    if kind in STREAMED:
        return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    if kind == "rest":
        return json.loads(body)["value"]
    return json.loads(body)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        return int(head[9:12]), await reader.readexactly(length)
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return int(head[9:12]), body


async def ask(kind: str, port: int, account: Account, end: float, draw: random.Random, rest_s: float) -> None:
    """Ask again and again on one connection; on a new one after leaving."""
    streams = None
    number = 0
    while time.monotonic() < end:
        await asyncio.sleep(draw.expovariate(1 / rest_s))
        number += 1
        path, sample, expected = question(kind, f"t{draw.randrange(1 << 30)}n{number}")
        body = json.dumps(sample).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        try:
            if streams is None:
                streams = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = streams
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if draw.random() < LEAVING:
                await asyncio.sleep(draw.random() * 0.005)
                writer.transport.abort()
                streams = None
                account.left += 1
                continue
            async with asyncio.timeout(PATIENCE_S):
                status, content = await read_answer(reader)
            if kind in STREAMED and b"event: error" in content:
                status = 503  # its worker was killed after the answer had begun
            if kind == "rest" and status == 200 and json.loads(content)["err_no"]:
                status = 500  # pipelines tell errors of their ops in answers of their own
            account.take(kind, status, answer_of(kind, content) if status == 200 else content, expected)
        except (OSError, EOFError, TimeoutError, ValueError, KeyError) as error:
            account.wrong.append(f"{kind}: {error!r}")
            streams = None


async def call(port: int, account: Account, end: float, draw: random.Random, rest_s: float) -> None:
    """Ask the pipeline over gRPC."""
    import grpc

    from forebay.surfaces.pipeline.protocol.messages import PATH, Request, Response

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_unary(
            PATH, request_serializer=Request.SerializeToString, response_deserializer=Response.FromString
        )
        while time.monotonic() < end:
            await asyncio.sleep(draw.expovariate(1 / rest_s))
            token = f"t{draw.randrange(1 << 30)}"
            calling = method(Request(key=["x"], value=[token]), timeout=PATIENCE_S)
            if draw.random() < LEAVING:
                await asyncio.sleep(draw.random() * 0.005)
                calling.cancel()
                account.left += 1
                continue
            response = await calling
            status = 200 if response.err_no == 0 else 500
            account.take("rpc", status, list(response.value), [token])


async def run(servers: list[subprocess.Popen[bytes]], ports: dict[str, int], options: argparse.Namespace) -> Any:
    account, draw = Account(), random.Random(options.seed)
    began = time.monotonic()
    end = began + options.minutes * 60
    clients = []
    for kind in KINDS:
        for _ in range(options.clients):
            details = account, end, random.Random(draw.random()), options.rest_ms / 1000
            asking = call(ports[kind], *details) if kind == "rpc" else ask(kind, ports[kind], *details)
            clients.append(asyncio.ensure_future(asking))
    readings: list[dict[str, float]] = []
    killed = time.monotonic()
    while time.monotonic() < end:
        await asyncio.sleep(READ_S)
        if time.monotonic() - killed > options.every:
            killed = time.monotonic()
            if alive := workers(draw.choice(servers).pid):
                os.kill(draw.choice(alive), signal.SIGKILL)
                account.kills += 1
        readings.append(reading(servers))
        if len(readings) % 60 == 0:
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:5.1f} min {json.dumps(readings[-1])} {sum(account.answers.values())} answers", flush=True)
    await asyncio.gather(*clients)
    return account, readings


def reading(servers: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    fronts = [server.pid for server in servers]
    found: dict[str, float] = {"front MiB": round(sum(map(proc.pss_mib, fronts)), 1)}
    pids = []
    for pid in (pid for front in fronts for pid in proc.tree(front)):
        try:
            pids.append((proc.pss_mib(pid), proc.descriptors(pid), proc.threads(pid)))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it was killed
    found["MiB"] = round(sum(mib for mib, _, _ in pids), 1)
    found["descriptors"] = sum(proc.descriptors(pid) for pid in fronts)
    found["threads"] = sum(proc.threads(pid) for pid in fronts)
    return found


def in_flight(port: int) -> int:
    with urlopen(f"http://127.0.0.1:{port}/models", timeout=30) as answer:
        return sum(about["in_flight"] for about in json.load(answer)["models"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.mixed", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4, help="of each kind")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    parser.add_argument("--rest-ms", type=float, default=40.0, help="a client's pause between requests, on average")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    native, graph, rpc, rest = free_port(), free_port(), free_port(), free_port()
    program = str(Path(sys.executable).with_name("forebay"))
    quiet = ["--log-level", "error", "--keep-alive-s", "3600", "--read-timeout-s", "3600", "--write-timeout-s", "3600"]
    commands = [
        [program, "serve", "--config", "benchmarks/jobs/mixed.yaml", "--http-port", str(native), *quiet],
        [program, "serve", "benchmarks/jobs/chaos.py:diamond", "--http-port", str(graph), *quiet],
        [program, "serve", "benchmarks/jobs/pipeline_echo.py", *quiet, "--", str(rpc), str(rest), "process"],
    ]
    servers = [
        subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    ports = {**dict.fromkeys(KINDS, native), "graph": graph, "rest": rest, "rpc": rpc}
    try:
        for server, port in zip(servers, (native, graph, rest), strict=True):
            wait_ready(server, port)
        account, readings = asyncio.run(run(servers, ports, options))
        time.sleep(2.0)
        left = [in_flight(port) for port in (native, graph, rest)]
    finally:
        for server in servers:
            stop(server)
    answers = sum(account.answers.values())
    print(f"{options.minutes:g} minutes: {answers:,} answers, {account.left:,} left, {account.kills} kills")
    for (kind, status), count in sorted(account.answers.items()):
        print(f"  {kind:8} {status} {count:9,}")
    quarter = len(readings) // 4
    grown = False
    for name in readings[0]:
        third = median(each[name] for each in readings[2 * quarter : 3 * quarter])
        fourth = median(each[name] for each in readings[3 * quarter :])
        grown |= fourth > third * GROWTH + 1
        print(f"{name}: {readings[0][name]} at first, {third} in the third quarter, {fourth} in the fourth")
    print(
        f"in flight at the end: {left}; wrong or missing answers: {len(account.wrong)}", *account.wrong[:10], sep="\n  "
    )
    raise SystemExit(1 if grown or account.wrong or any(left) else 0)


if __name__ == "__main__":
    main()
