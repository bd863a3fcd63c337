# SPDX-License-Identifier: Apache-2.0
"""Starts: a pipeline whose four ops are processes is started, asked and stopped again and again.

    .venv/bin/python -m benchmarks.starts

Every other script has no `if __name__ == "__main__"`. A start hangs if there is no answer within a minute, a stop if
the server or one of its processes is still there after ten seconds. Ends with status 1 if anything hung.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median

from benchmarks import proc
from benchmarks.launch import ROOT, environment, free_port, stop

START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
BODY = json.dumps({"key": ["q"], "value": ["x"]}).encode()
ANSWER = {"err_no": 0, "err_msg": "", "key": ["q"], "value": ["xAB+xACD"]}


def asked(port: int) -> bool:
    """Ask once; false where nobody is ready for it yet."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/diamond/prediction", BODY)
    try:
        with urllib.request.urlopen(request, timeout=START_LIMIT_S) as answer:
            found = json.load(answer)
    except OSError:
        return False
    if {name: found[name] for name in ANSWER} != ANSWER:
        raise SystemExit(f"a wrong answer: {found}")
    return True


def is_gone(pid: int) -> bool:
    try:
        return proc.stat_fields(Path(f"/proc/{pid}/stat"))[0] == "Z"
    except OSError:
        return True


def one(guard: str) -> tuple[float | None, float | None]:
    """Start, ask and stop; returns the seconds of start and stop, None for what hung."""
    ports = free_port(), free_port()
    program = str(Path(sys.executable).with_name("forebay"))
    command = [program, "serve", "benchmarks/jobs/pipeline_diamond.py", "--log-level", "error", "--"]
    command += [*map(str, ports), "process", guard]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    try:
        began = time.perf_counter()
        while not asked(ports[1]):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            if time.perf_counter() - began > START_LIMIT_S:
                return None, None
            time.sleep(0.02)
        started_s = time.perf_counter() - began
        pids = proc.tree(process.pid)
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        while process.poll() is None or not all(map(is_gone, pids)):
            if time.perf_counter() - began > STOP_LIMIT_S:
                return started_s, None
            time.sleep(0.01)
        return started_s, time.perf_counter() - began
    finally:
        stop(process)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.starts", description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=50)
    options = parser.parse_args()
    times = [one("unguarded" if number % 2 else "guarded") for number in range(options.starts)]
    starts = [start for start, _ in times if start is not None]
    stops = [end for _, end in times if end is not None]
    hung = len(times) - len(starts)
    print(f"{len(times)} starts of four process ops, every other one without a guard")
    for what, found in (("start to answer", starts), ("stop", stops)):
        print(f"  {what}: median {median(found):.2f} s, longest {max(found):.2f} s")
    print(f"  hung while starting: {hung}, while stopping: {len(starts) - len(stops)}")
    raise SystemExit(1 if len(stops) < len(times) else 0)


if __name__ == "__main__":
    main()
