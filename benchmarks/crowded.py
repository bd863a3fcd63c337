# SPDX-License-Identifier: Apache-2.0
"""Overload at the other doors: arrays of rows, a graph, a pipeline over REST and over gRPC.

    .venv/bin/python -m benchmarks.crowded

As `overload.py`, for each door, with 2,000 connections, and in turns with it for a bare server that does the same work
and refuses by the same rule (`servers/raw_refusing.py`): what a flood of so many connections costs anybody. Over gRPC,
where many calls share a connection, h2load keeps 2,000 calls open on 40 connections instead; the bytes that came tell
how many of them were accepted, for a refusal has no message. Medians are written to RESULTS-crowded.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec

from benchmarks import proc
from benchmarks.flood import Flood, Phase
from benchmarks.h2load import HEADERS, prefixed
from benchmarks.launch import ROOT, environment, free_port, need, pinned, stop
from benchmarks.overload import (
    ACCEPTED_BAR,
    BARE,
    CALM,
    CALM_S,
    CLOSED_S,
    FACTORS,
    LOAD_CORES,
    SERVER_CORES,
    Round,
    earlier,
    measure,
    numbers,
    write,
)
from benchmarks.servers import module
from benchmarks.work import request_body

JSON = {"Content-Type": "application/json"}
CALLS = (40, 50)
"""Connections over gRPC, and calls at a time on each."""
CALLS_S = 5
"""Seconds of a load over gRPC: h2load counts from the start, and it takes a tenth of one to read 2,000 calls."""
PIPELINE_BODY = json.dumps({"key": ["turns"], "value": ["2000"]}).encode()


class Door:
    """A server that was started for one door."""

    def __init__(
        self, name: str, command: list[str], port: int, path: str, body: bytes, *, holds: int, bare: list[str]
    ) -> None:
        self.name, self.command, self.port, self.path = name, command, port, path
        self.bare = bare
        """What the bare server beside it is told: its job, its kind, how many may wait."""
        self.holds = holds
        """Requests that its queue holds, or nearly."""
        self.rpc = 0
        """Its port for gRPC."""
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(body)
        self.body = Path(file.name)

    def reference(self) -> Door:
        """Return the bare server."""
        port, (job, kind, holds) = free_port(), self.bare
        command = module("raw_refusing", job, kind, "--port", str(port), "--holds", holds)
        body = self.body.read_bytes()
        return Door(f"{BARE}{self.name}", command, port, self.path, body, holds=self.holds, bare=[])

    def start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            pinned(self.command, SERVER_CORES), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
        )
        for _ in range(600):
            if process.poll() is not None:
                break
            try:
                asked = Request(f"http://127.0.0.1:{self.port}{self.path}", self.body.read_bytes(), JSON)
                urlopen(asked, timeout=10).close()
            except OSError:
                time.sleep(0.1)
            else:
                return process
        stop(process)
        raise SystemExit(f"{self.name}: the server did not start")


def doors() -> list[Door]:
    program = str(Path(sys.executable).with_name("forebay"))
    quiet = ["--log-level", "error"]
    found = []
    for name, target, body, holds, queue in (
        ("arrays of 4 rows", "crowded.py", b"[" + b",".join([request_body("batchmodel")] * 4) + b"]", 64, 64),
        ("graph", "crowded_graph.py", request_body("batchmodel"), 240, 256),
    ):
        port = free_port()
        command = [program, "serve", f"benchmarks/jobs/{target}", "--http-port", str(port), *quiet]
        found.append(Door(name, command, port, "/", body, holds=holds, bare=["batchmodel", "thread", str(queue)]))
    for kind in ("thread", "process"):
        rpc, rest = free_port(), free_port()
        command = [program, "serve", "benchmarks/jobs/pipeline_spin.py", *quiet, "--", str(rpc), str(rest), kind]
        bare = ["spin", kind, "128"]
        found.append(Door(f"pipeline, {kind}", command, rest, "/spin/prediction", PIPELINE_BODY, holds=48, bare=bare))
        found[-1].rpc = rpc
    return found


def calls(port: int, connections: int, each: int, seconds: int) -> tuple[float, float]:
    """Return accepted and refused calls a second of the pipeline."""
    import grpc

    from forebay.surfaces.pipeline.protocol import messages

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


def machine_s() -> float:
    """Return what the cores have done since they started, without what this process and its clients took."""
    clients = resource.getrusage(resource.RUSAGE_CHILDREN)
    return proc.machine_times_s()[0] - time.process_time() - clients.ru_utime - clients.ru_stime


def of_calls(door: Door, seconds: int, pids: list[int]) -> Round:
    """Measure a pipeline over gRPC: a closed loop, as many calls as there may be, and the loop again."""
    phases = [Phase(8 * 6, 0, seconds), Phase(CALLS[0] * CALLS[1], 0, seconds), Phase(8 * 6, 0, seconds)]
    found = Round(f"{door.name}, gRPC", time.strftime("%d %b %Y %H:%M"), 0, phases, [], [])
    found.pss_mib.append(sum(map(proc.pss_mib, pids)))
    for connections, each in ((8, 6), CALLS, (8, 6)):
        cpu_s, others_s = proc.cpu_s(pids), machine_s()
        accepted, refused = calls(door.rpc, connections, each, seconds)
        cpu_s = proc.cpu_s(pids) - cpu_s
        cpu_us = 1e6 * cpu_s / max(accepted * seconds, 1)
        others = max(machine_s() - others_s - cpu_s, 0.0) / seconds
        sent = accepted + refused
        found.floods.append(Flood(accepted, refused, 0, 0, 0, 0, 0, sent, sent, cpu_us, others=others))
    found.pss_mib.append(sum(map(proc.pss_mib, pids)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.crowded", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--doors", default="arrays,graph,thread,process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.8, help="a flood, once it has settled")
    parser.add_argument("--factors", type=lambda text: numbers(float, text), default=FACTORS)
    parser.add_argument("--idle", type=int, default=0, help="connections that say nothing, beside it")
    parser.add_argument("--raw", type=Path, help="file with the rounds of earlier runs; those of this one are added")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-crowded.md"))
    options = parser.parse_args()
    need(h2load="nghttp2-client")
    os.sched_setaffinity(0, LOAD_CORES)
    rounds = earlier(options.raw)
    for door in doors():
        if not any(name in door.name for name in options.doors.split(",")):
            continue
        closed = Phase(door.holds, 0, CLOSED_S)
        loads = [Phase(door.holds, CALM, CALM_S)]
        loads += [Phase(2000, factor, options.seconds) for factor in options.factors]
        phases = [closed, *(phase for load in loads for phase in (load, closed))]
        with ExitStack() as stack:
            up: list[tuple[Door, list[int]]] = []
            for each in (door, door.reference()):
                process = each.start()
                stack.callback(stop, process)
                up.append((each, proc.tree(process.pid)))
            for count in range(options.rounds):
                for each, pids in reversed(up) if count % 2 else up:
                    flags = ("--path", each.path, "--body", str(each.body), "--seed", str(len(rounds)))
                    rounds.append(measure(each.name, each.port, pids, phases, options.idle, *flags))
                    if each.rpc:
                        rounds.append(of_calls(each, CALLS_S, pids))
        if options.raw:
            options.raw.write_bytes(msgspec.json.encode(rounds))
    bars = f"accepted / closed loop >= {ACCEPTED_BAR}, refusals' p99 at most 1 s, no error"
    write(options.output, "Overload at the other doors", "crowded", rounds, bars, judges_p99=False)
    print(options.output.read_text())


if __name__ == "__main__":
    main()
