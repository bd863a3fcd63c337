# SPDX-License-Identifier: Apache-2.0
"""What an op that computes in pure Python gains when its two workers are processes and not threads, on two cores.

    .venv/bin/python -m benchmarks.parallel

The servers take turns. `machine` is what two bare processes of the same work reach beside one: a server cannot gain
more. `cores` is the CPU time of a server's processes for each second; two of them are all there are, for the clients
as well.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.chaos import wait_ready
from benchmarks.launch import ROOT, environment, free_port, stop
from benchmarks.proc import cpu_s, tree
from benchmarks.report import table
from benchmarks.work.spin import spin

CLIENTS = 4
KINDS = ("thread", "process")


def turns_for(ms: float) -> int:
    """Count the turns that take so long here when nothing else runs."""
    trial = 200_000

    def once() -> float:
        began = time.perf_counter()
        spin(trial)
        return time.perf_counter() - began

    return max(round(trial * ms / 1000 / min(once() for _ in range(20))), 1)


def bare(turns: int, seconds: float) -> float:
    """Work without any server; return runs a second."""
    runs, end = 0, time.perf_counter() + seconds
    began = time.perf_counter()
    while time.perf_counter() < end:
        spin(turns)
        runs += 1
    return runs / (time.perf_counter() - began)


def served(port: int, turns: int, seconds: float) -> float:
    """Let clients call one after the other; return answers a second."""
    body = json.dumps({"key": ["turns"], "value": [str(turns)]})
    counts: list[int] = []
    end = time.perf_counter() + seconds

    def client() -> None:
        answered = 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while time.perf_counter() < end:
            connection.request("POST", "/spin/prediction", body)
            assert json.loads(connection.getresponse().read())["err_no"] == 0
            answered += 1
        connection.close()
        counts.append(answered)

    began = time.perf_counter()
    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert len(counts) == CLIENTS, "a client failed"
    return sum(counts) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.parallel", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--ms", type=float, nargs="+", default=[50, 10, 2], help="how long the work takes")
    options = parser.parse_args()
    servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    rows = []
    try:
        for kind in KINDS:
            rpc, port = free_port(), free_port()
            command = [str(Path(sys.executable).with_name("forebay")), "serve", "benchmarks/jobs/pipeline_spin.py"]
            command += ["--log-level", "warning", "--", str(rpc), str(port), kind]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
            servers[kind] = process, port
            wait_ready(process, port)
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            for ms in options.ms:
                turns = turns_for(ms)
                found: dict[str, list[float]] = {name: [] for name in ("one", "two", *KINDS, "cores")}
                for round_ in range(options.rounds + 1):  # the first one warms up
                    told = {
                        f"{kind}": sum(pool.map(bare, [turns] * count, [options.seconds] * count))
                        for count, kind in enumerate(("one", "two"), 1)
                    }
                    for kind, (process, port) in servers.items():
                        used, began = cpu_s(tree(process.pid)), time.perf_counter()
                        told[kind] = served(port, turns, options.seconds)
                        told["cores"] = (cpu_s(tree(process.pid)) - used) / (time.perf_counter() - began)
                    for name, value in told.items():
                        found[name].extend([value] if round_ else [])
                middle = {name: median(values) for name, values in found.items()}
                gains = [two / one for one, two in zip(found["thread"], found["process"], strict=True)]
                rows.append(
                    [
                        f"{ms:g}",
                        f"{middle['thread']:,.1f}",
                        f"{middle['process']:,.1f}",
                        f"{median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})",
                        f"{middle['two'] / middle['one']:.2f}",
                        f"{middle['cores']:.2f}",
                    ]
                )
    finally:
        for process, _ in servers.values():
            stop(process)
    print(f"{CLIENTS} clients, {options.rounds} rounds of {options.seconds:g} s\n")
    print(table(["work ms", "thread req/s", "process req/s", "gain (rounds)", "machine", "cores"], rows))


if __name__ == "__main__":
    main()
