# SPDX-License-Identifier: Apache-2.0
"""Chaos: a graph under load while its workers are killed, its nodes raise and are late, and its clients go away.

    .venv/bin/python -m benchmarks.chaos

Every request carries a token that its answer must bring back. Ends with status 1 if a request got no answer or a wrong
one, if requests are still in flight at the end, or if the memory of the serving process grows by more than a tenth
between the second and the last quarter of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks import proc
from benchmarks.launch import ROOT, environment, free_port, stop

NAME = "diamond"
WISHES = {
    "answer": 90,
    "raise in left": 2,
    "raise in right": 2,
    "be late in left": 1,
    "be late in right": 1,
    "leave": 4,
}
HURRIES = {"": 96, "X-Request-Timeout-Ms: 100\r\n": 4}
ALLOWED = {
    "answer": {200, 500, 503, 504},  # 500 and 503: its worker was killed, and so was the one it was handed to
    "raise in left": {500, 503, 504},
    "raise in right": {500, 503, 504},
    "be late in left": {200, 500, 503, 504},
    "be late in right": {200, 503, 504},
}
PATIENCE_S = 30.0


class Account:
    """What became of every request."""

    def __init__(self) -> None:
        self.tokens = itertools.count()
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.left = 0
        self.wrong: list[str] = []

    def answered(self, wish: str, status: int, body: bytes, token: str) -> None:
        self.statuses[wish, status] += 1
        if status not in ALLOWED[wish]:
            self.wrong.append(f"{wish}: {status} {body[:200]!r}")
        elif status == 200 and json.loads(body) != token:
            self.wrong.append(f"asked with {token}, answered {body[:200]!r}")


async def client(port: int, account: Account, end: float, draw: random.Random) -> None:
    """Ask again and again on one connection; a new one after going away."""
    streams = None
    while time.monotonic() < end:
        wish = draw.choices(list(WISHES), list(WISHES.values()))[0]
        hurry = draw.choices(list(HURRIES), list(HURRIES.values()))[0]
        token = f"t{next(account.tokens)}"
        body = json.dumps({"token": token, "wish": wish}).encode()
        head = f"POST /models/{NAME} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{hurry}"
        if streams is None:
            streams = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = streams
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if wish == "leave":
            await asyncio.sleep(draw.random() * 0.02)
            writer.transport.abort()
            streams = None
            account.left += 1
            continue
        try:
            async with asyncio.timeout(PATIENCE_S):
                head_bytes = await reader.readuntil(b"\r\n\r\n")
                length = int(head_bytes.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                account.answered(wish, int(head_bytes[9:12]), await reader.readexactly(length), token)
        except (OSError, EOFError, TimeoutError) as error:
            account.wrong.append(f"{wish}: no answer, {error!r}")
            streams = None


def workers(pid: int) -> list[int]:
    """List the server's children that live; one that was killed has no command line any more."""
    return [child for child in proc.tree(pid)[1:] if command_line(child)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def run(pid: int, port: int, options: argparse.Namespace) -> tuple[Account, int, list[float]]:
    account, draw = Account(), random.Random(options.seed)
    end = time.monotonic() + options.seconds
    clients = [
        asyncio.ensure_future(client(port, account, end, random.Random(draw.random())))
        for _ in range(options.connections)
    ]
    kills, memory = 0, []
    while time.monotonic() < end:
        await asyncio.sleep(options.every)
        memory.append(proc.pss_mib(pid))
        if alive := workers(pid):
            os.kill(draw.choice(alive), signal.SIGKILL)
            kills += 1
    await asyncio.gather(*clients)
    return account, kills, memory


def about(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/models/{NAME}", timeout=10) as answer:
        return json.load(answer)


def wait_ready(process: subprocess.Popen, port: int) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).close()
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.05)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    port = free_port()
    program = str(Path(sys.executable).with_name("forebay"))
    command = [
        program,
        "serve",
        f"benchmarks/jobs/chaos.py:{NAME}",
        "--http-port",
        str(port),
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    try:
        wait_ready(process, port)
        account, kills, memory = asyncio.run(run(process.pid, port, options))
        time.sleep(1.0)
        found = about(port)
    finally:
        stop(process)
    answered = sum(account.statuses.values())
    quarter = max(len(memory) // 4, 1)
    growth = median(memory[-quarter:]) / median(memory[quarter : 2 * quarter] or memory)
    print(
        f"{options.seconds:g} s, {options.connections} clients, {kills} kills: {answered} answers, {account.left} left"
    )
    for (wish, status), count in sorted(account.statuses.items()):
        print(f"  {wish:18} {status}  {count:7}")
    print(f"in flight at the end: {found['in_flight']}; memory of the server: {memory[0]:.0f} to {memory[-1]:.0f} MiB")
    print(f"last quarter / second quarter of the memory: {growth:.3f}")
    print(f"wrong or missing answers: {len(account.wrong)}", *account.wrong[:10], sep="\n  ")
    raise SystemExit(1 if account.wrong or found["in_flight"] or growth > 1.1 else 0)


if __name__ == "__main__":
    main()
