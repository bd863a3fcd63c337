# SPDX-License-Identifier: Apache-2.0
"""Overload at the other doors: arrays of rows, a graph, a pipeline over REST and over gRPC.

    .venv/bin/python -m benchmarks.crowded

As `overload.py`, for each door: 1.3, 3 and 10 times of what a closed loop that its queue holds gave just before. Over
gRPC, where many calls share a connection, h2load keeps 2,000 calls open on 40 connections instead; the bytes that came
tell how many of them were accepted, for a refusal has no message. Medians are written to RESULTS-crowded.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

import msgspec

from benchmarks import report
from benchmarks.flood import Flood
from benchmarks.h2load import HEADERS, prefixed
from benchmarks.launch import ROOT, environment, free_port, pinned, python_helper, stop
from benchmarks.overload import FACTORS, LOAD_CORES, SERVER_CORES, numbers, say
from benchmarks.work import request_body

CLOSED_CONNECTIONS = 48
JSON = {"Content-Type": "application/json"}
CALLS = (40, 50)
"""Connections over gRPC, and calls at a time on each."""
PIPELINE_BODY = json.dumps({"key": ["turns"], "value": ["2000"]}).encode()


class Door:
    """A server that was started for one door."""

    def __init__(self, name: str, command: list[str], port: int, path: str, body: bytes) -> None:
        self.name, self.command, self.port, self.path = name, command, port, path
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(body)
        self.body = Path(file.name)

    def start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            pinned(self.command, SERVER_CORES), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
        )
        for _ in range(600):
            try:
                asked = Request(f"http://127.0.0.1:{self.port}{self.path}", self.body.read_bytes(), JSON)
                urlopen(asked, timeout=10).close()
            except OSError:
                time.sleep(0.1)
            else:
                return process
        stop(process)
        raise SystemExit(f"{self.name}: the server did not start")

    def closed(self, seconds: float) -> float:
        """Return the answers a second to as many clients as its queue holds, from the same client."""
        return flood(self, 0.0, CLOSED_CONNECTIONS, seconds).accepted


def flood(door: Door, rate: float, connections: int, seconds: float) -> Flood:
    facts = {"port": door.port, "path": door.path, "rate": rate, "connections": connections, "seconds": seconds}
    flags = [text for name, value in {**facts, "body": door.body}.items() for text in (f"--{name}", str(value))]
    return msgspec.convert(python_helper("flood", *flags, cores=LOAD_CORES), Flood)


def doors() -> list[Door]:
    program = str(Path(sys.executable).with_name("forebay"))
    quiet = ["--log-level", "error"]
    found = []
    for name, target, path, body in (
        ("arrays of 4 rows", "crowded.py", "/", b"[" + b",".join([request_body("batchmodel")] * 4) + b"]"),
        ("graph", "crowded_graph.py", "/", request_body("batchmodel")),
    ):
        port = free_port()
        command = [program, "serve", f"benchmarks/jobs/{target}", "--http-port", str(port), *quiet]
        found.append(Door(name, command, port, path, body))
    for kind in ("thread", "process"):
        rpc, rest = free_port(), free_port()
        command = [program, "serve", "benchmarks/jobs/pipeline_spin.py", *quiet, "--", str(rpc), str(rest), kind]
        found.append(Door(f"pipeline of {kind}s", command, rest, "/spin/prediction", PIPELINE_BODY))
        found[-1].rpc = rpc  # type: ignore[attr-defined]
    return found


def calls(port: int, connections: int, each: int, seconds: int) -> tuple[float, float]:
    """Return accepted and refused calls a second of the pipeline."""
    import grpc

    from forebay.protocols.pipeline import messages

    message = messages.Request(key=["turns"], value=["2000"]).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary(messages.PATH)(message, timeout=30)
    assert messages.Response.FromString(answer).err_no == 0
    with tempfile.NamedTemporaryFile() as body:
        body.write(prefixed(message))
        body.flush()
        named = [option for header in HEADERS for option in ("-H", header)]
        url = f"http://127.0.0.1:{port}{messages.PATH}"
        command = ["h2load", "-t1", f"-c{connections}", f"-m{each}", f"-D{seconds}", "-d", body.name, *named, url]
        text = subprocess.run(pinned(command, LOAD_CORES), check=True, capture_output=True, text=True).stdout
    done = int(re.findall(r"(\d+) done", text)[0])
    accepted = int(re.findall(r"\((\d+)\) data", text)[0]) // len(prefixed(answer))
    return accepted / seconds, (done - accepted) / seconds


def measure(door: Door, options: argparse.Namespace, rows: list[list[str]]) -> None:
    with ExitStack() as stack:
        stack.callback(stop, door.start())
        door.closed(1)
        closed: list[float] = []
        shares: dict[float, list[float]] = {}
        floods: dict[float, list[Flood]] = {}
        rpc: dict[str, list[tuple[float, float]]] = {"closed": [], "crowd": []}
        for _ in range(options.rounds):
            closed.append(door.closed(options.seconds))
            for factor in options.factors:
                found = flood(door, factor * closed[-1], 2000, options.seconds)
                floods.setdefault(factor, []).append(found)
                closed.append(door.closed(options.seconds))
                shares.setdefault(factor, []).append(found.accepted / ((closed[-2] + closed[-1]) / 2))
            if hasattr(door, "rpc"):
                few = calls(door.rpc, 8, 6, options.seconds)
                for _ in range(2):
                    many = calls(door.rpc, *CALLS, options.seconds)
                    before, few = few, calls(door.rpc, 8, 6, options.seconds)
                    rpc["closed"].append(((before[0] + few[0]) / 2, 0.0))
                    rpc["crowd"].append(many)
        for factor, found in floods.items():
            row(rows, door.name, f"{factor:g}x, 2,000 connections", median(closed), median(shares[factor]), found)
        if rpc["closed"]:
            share = median(more[0] / few[0] for more, few in zip(rpc["crowd"], rpc["closed"], strict=True))
            accepted = median(few[0] for few in rpc["closed"])
            refused = median(more[1] for more in rpc["crowd"])
            verdict = "pass" if share >= 0.95 else "**FAIL**"
            rows.append([f"{door.name}, gRPC", "2,000 calls open", f"{accepted:,.0f}", f"{share:.2f}", "", ""])
            rows[-1] += [f"{refused:,.0f}", "", "", verdict]
            say(" | ".join(rows[-1]))


def row(rows: list[list[str]], name: str, offered: str, closed: float, share: float, found: list[Flood]) -> None:
    def of(kind: Callable[[Flood], float]) -> float:
        return median(map(kind, found))

    errors = sum(each.errors for each in found)
    rows.append(
        [
            name,
            offered,
            f"{closed:,.0f}",
            f"{share:.2f}",
            f"{of(lambda each: each.accepted_p50_ms):.0f}",
            f"{of(lambda each: each.accepted_p99_ms):.0f}",
            f"{of(lambda each: each.refused):,.0f}",
            f"{of(lambda each: each.refused_p99_ms):.0f}",
            str(errors),
            "pass" if share >= 0.95 and not errors else "**FAIL**",
        ]
    )
    say(" | ".join(rows[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.crowded", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--factors", type=lambda text: numbers(float, text), default=FACTORS)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-crowded.md"))
    options = parser.parse_args()
    os.sched_setaffinity(0, LOAD_CORES)
    rows: list[list[str]] = []
    for door in doors():
        measure(door, options, rows)
    heads = [
        "door",
        "offered",
        "closed loop/s",
        "accepted / closed",
        "p50 ms",
        "p99 ms",
        "refused/s",
        "p99 ms",
        "errors",
    ]
    facts = {"date": time.strftime("%d %b %Y %H:%M"), **report.machine(), "rounds": f"{options.rounds}"}
    text = [
        "# Overload at the other doors\n\nWritten by `python -m benchmarks.crowded`.\n",
        report.table(["", ""], [[key, value] for key, value in facts.items()]),
        "",
        report.table([*heads, ""], rows),
    ]
    options.output.write_text("\n".join(text) + "\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
