# SPDX-License-Identifier: Apache-2.0
"""How soon `--reload` shows an edit while requests come, and whether one of them fails.

    .venv/bin/python -m benchmarks.reload [--write]

An open loop asks a model from one core, the server has the other one. A file that the model imports is replaced again
and again, as editors do; the delay is from then until the first answer of the new code was read. The rest between two
edits is no multiple of the pause between two looks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.client import post
from benchmarks.launch import ROOT, environment, free_port, pinned, stop
from benchmarks.load_apart import LoadApart
from benchmarks.openloop import WARM_UP_S

RESULTS = Path(ROOT, "benchmarks", "RESULTS-reload.md")
FOREBAY = str(Path(sys.executable).with_name("forebay"))
REST_S = 1.37
MODEL = """
import forebay
from answers import ANSWER

class Tells(forebay.Model):
    def predict(self, batch: list[int]) -> list[str]:
        return [ANSWER] * len(batch)
"""


def write(folder: Path, number: int) -> None:
    draft = folder / "draft"
    draft.write_text(f"ANSWER = 'edit {number}'\n")
    draft.replace(folder / "answers.py")


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
            return True
    except OSError:
        return False


def measure(kind: str, folder: Path, edits: int, rate: int) -> list[str]:
    write(folder, 0)
    (folder / "model.py").write_text(MODEL)
    port = free_port()
    command = [FOREBAY, "serve", "model.py", "--reload", "--http-port", str(port), "--worker-kind", kind]
    command += ["--log-level", "error"]
    server = subprocess.Popen(pinned(command, frozenset({0})), cwd=folder, env=environment())
    try:
        while not is_ready(port):
            assert server.poll() is None
            time.sleep(0.02)
        with LoadApart(port, post("echo", "/models/tells", b"1"), (edits + 1) * REST_S, rate) as load:
            time.sleep(WARM_UP_S)
            at: list[float] = []
            for number in range(1, edits + 1):
                time.sleep(REST_S)
                at.append(time.perf_counter())
                write(folder, number)
            told = load.told()
    finally:
        stop(server)
    delays = [told.answers[f'"edit {number}"'].first - one for number, one in enumerate(at, 1)]
    calm = sorted(latency for due, latency in told.latencies if due >= WARM_UP_S)
    return [
        kind,
        f"{statistics.median(delays):.2f} s",
        f"{max(delays):.2f} s",
        f"{told.errors} of {len(told.latencies):,}",
        f"{1e3 * calm[len(calm) // 2]:.2f} ms",
        f"{1e3 * calm[int(0.99 * len(calm))]:.2f} ms",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reload", description="How soon --reload shows an edit.")
    parser.add_argument("--edits", type=int, default=12)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    heads = ["worker kind", "an edit is seen, p50", "at the latest", "requests that failed", "latency p50", "p99"]
    rows = [heads, ["---"] + ["--:"] * (len(heads) - 1)]
    before = os.getloadavg()[0]
    for kind in ("inline", "thread", "process"):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(kind, Path(folder), options.edits, options.rate))
            print(" | ".join(rows[-1]), flush=True)
    if options.write:
        text = f"# Edits under --reload\n\n`python -m benchmarks.reload --write`, {time.strftime('%d %b %Y')}: "
        text += f"{options.edits} edits at {options.rate:,} requests a second, on two cores; "
        text += f"load before it {before:.1f}.\n\n"
        RESULTS.write_text(text + "".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main()
