# SPDX-License-Identifier: Apache-2.0
"""What an echo costs in the trees of several commits: CPU time of the server for each request, in turns.

    .venv/bin/python -m benchmarks.trees dc0be1d 651d407 HEAD

The servers of a kind are up together on core 0 and take turns, the load (wrk, 64 connections) is on core 1. Printed are
medians, and the median of the ratios to the first commit in the same round, for the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import proc
from benchmarks.launch import ROOT, Running, start
from benchmarks.load import run_wrk
from benchmarks.servers import Server

CONNECTIONS = 64
SERVING, ASKING = frozenset({0}), frozenset({1})


def unpack(commit: str, folder: Path) -> None:
    with subprocess.Popen(["git", "archive", commit, "src"], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        with tarfile.open(fileobj=archive.stdout, mode="r|") as packed:
            packed.extractall(folder, filter="data")


def server(commit: str, tree: Path, kind: str) -> Server:
    def command(job: str, port: int) -> list[str]:
        program = ["env", f"PYTHONPATH={tree}/src:{ROOT}", sys.executable, "-m", "forebay", "serve"]
        flags = f"--worker-kind {kind} --http-port {port} --log-level error"
        return [*program, f"benchmarks/jobs/{job}.py", *flags.split()]

    return Server(f"{commit}:{kind}", command)


def cost_us(running: Running, seconds: int) -> float:
    before = proc.cpu_s(running.pids())
    load = run_wrk(running, CONNECTIONS, seconds, ASKING)
    assert not load.errors, load
    return 1e6 * (proc.cpu_s(running.pids()) - before) / load.requests


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.trees", description="What an echo costs in several trees.")
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["inline", "thread", "process"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for commit in options.commits:
            unpack(commit, Path(folder, commit))
        for kind in options.kinds:
            with ExitStack() as stack:
                servers = [
                    stack.enter_context(start(server(commit, Path(folder, commit), kind), "echo", SERVING))
                    for commit in options.commits
                ]
                rounds = [[cost_us(one, options.seconds) for one in servers] for _ in range(options.rounds)]
            for commit, found, ratios in zip(
                options.commits,
                zip(*rounds, strict=True),
                zip(*([one / turn[0] for one in turn] for turn in rounds), strict=True),
                strict=True,
            ):
                print(
                    f"{kind} {commit}: {statistics.median(found):.2f} us, {statistics.median(ratios):.3f}", flush=True
                )


if __name__ == "__main__":
    main()
