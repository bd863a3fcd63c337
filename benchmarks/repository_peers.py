# SPDX-License-Identifier: Apache-2.0
"""A repository of small models beside MLServer's: how long a load takes, how long a swap, and who feels it.

    python -m venv /tmp/mlserver && /tmp/mlserver/bin/pip install mlserver
    .venv/bin/python -m benchmarks.repository_peers --mlserver /tmp/mlserver/bin/mlserver [--write]

Both are told by the same calls of the KServe protocol. A load is of a model that is not there, a swap of one that is,
so that it is read anew; both servers keep models in their own process, and read a text of one line. While a model is
swapped once a second, an open loop asks it, slowly enough for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.client import post
from benchmarks.launch import ROOT, environment, free_port
from benchmarks.load_apart import LoadApart
from benchmarks.openloop import WARM_UP_S

RESULTS = Path(ROOT, "benchmarks", "RESULTS-repository-peers.md")
FOREBAY = str(Path(sys.executable).with_name("forebay"))
MODELS = 20
SWAP_S = 0.5
"""So long after a swap was asked for its requests count as those during it."""

RUNTIME = """
from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput

class Text(MLModel):
    async def load(self):
        with open(self.settings.parameters.uri) as file:
            self.text = file.read()
        return True

    async def predict(self, payload):
        output = ResponseOutput(name="output", shape=[1, 1], datatype="BYTES", data=[self.text])
        return InferenceResponse(model_name=self.name, outputs=[output])
"""
OURS = """
import forebay

class Text(forebay.Model):
    repository = "models"

    def load(self, path):
        self.text = (path / "text").read_text()

    def predict(self, batch: list[int]) -> list[str]:
        return [self.text] * len(batch)
"""
BODY = b'{"inputs":[{"name":"input","shape":[1],"datatype":"INT64","data":[1]}]}'


@contextmanager
def mlserver(folder: Path, program: str) -> Iterator[int]:
    port = free_port()
    (folder / "runtime.py").write_text(RUNTIME)
    told = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port(), "parallel_workers": 0}
    (folder / "settings.json").write_text(json.dumps({**told, "load_models_at_startup": False, "debug": False}))
    for number in range(MODELS):
        model = folder / f"m{number}"
        model.mkdir()
        (model / "text").write_text(f"model {number}")
        settings = {"name": f"m{number}", "implementation": "runtime.Text", "parameters": {"uri": str(model / "text")}}
        (model / "model-settings.json").write_text(json.dumps(settings))
    with server([program, "start", str(folder)], folder, port):
        yield port


@contextmanager
def forebay(folder: Path, _program: str) -> Iterator[int]:
    port = free_port()
    (folder / "code.py").write_text(OURS)
    for number in range(MODELS):
        model = folder / "models" / f"m{number}" / "1"
        model.mkdir(parents=True)
        (model / "text").write_text(f"model {number}")
    command = [FOREBAY, "serve", "code.py", "--http-port", str(port), "--worker-kind", "thread", "--lazy", "--manage"]
    with server([*command, "--log-level", "error"], folder, port):
        yield port


@contextmanager
def server(command: list[str], folder: Path, port: int) -> Iterator[None]:
    command = ["taskset", "-c", "0", *command]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                assert process.poll() is None
                try:
                    if call(port, "GET", "/v2/health/ready") == 200:
                        break
                except OSError:
                    time.sleep(0.05)
            yield
        finally:
            process.terminate()


def call(port: int, verb: str, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(verb, path, b"" if verb == "GET" else b"{}", {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def load(port: int, name: str) -> float:
    began = time.perf_counter()
    status = call(port, "POST", f"/v2/repository/models/{name}/load")
    assert status == 200, status
    return time.perf_counter() - began


def measure(port: int, seconds: float, rate: int) -> list[str]:
    loads = [load(port, f"m{number}") for number in range(MODELS)]
    swaps = [load(port, f"m{number}") for number in range(MODELS)]
    apart = LoadApart(port, post("echo", "/v2/models/m0/infer", BODY), seconds, rate)
    began = apart.began
    at: list[float] = []

    def swap() -> None:
        while (now := time.perf_counter() - began) < WARM_UP_S + seconds - 1:
            at.append(now)
            load(port, "m0")
            time.sleep(max(now + 1 - (time.perf_counter() - began), 0.0))

    swapping = threading.Thread(target=swap)
    swapping.start()
    told = apart.told()
    swapping.join()
    during, beside = [], []
    for due, latency in told.latencies:
        if due >= WARM_UP_S:
            (during if any(0 <= due - one < SWAP_S for one in at) else beside).append(latency)
    return [
        ms(statistics.median(loads)),
        ms(statistics.median(swaps)),
        ms(sorted(beside)[-max(len(beside) // 100, 1)]),
        ms(sorted(during)[-max(len(during) // 100, 1)]),
        f"{told.errors} of {len(told.latencies):,}",
    ]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlserver")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rate", type=int, default=300)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    heads = ["a load", "a swap", "p99 beside swaps", f"p99 within {SWAP_S:g} s of one", "requests that failed"]
    rows: list[list[str]] = []
    for name, start in (("forebay", forebay), ("MLServer", mlserver)):
        with tempfile.TemporaryDirectory() as folder, start(Path(folder), options.mlserver) as port:
            rows.append([name, *measure(port, options.seconds, options.rate)])
            print(" | ".join(rows[-1]), flush=True)
    if options.write:
        table = [["", *heads], ["---"] + ["--:"] * len(heads), *rows]
        day = time.strftime("%d %b %Y")
        text = f"# A repository beside MLServer's\n\n`python -m benchmarks.repository_peers --write`, {day}: "
        text += f"{options.rate} requests a second to one model for {options.seconds:g} s, on two cores.\n\n"
        RESULTS.write_text(text + "".join(f"| {' | '.join(row)} |\n" for row in table))


if __name__ == "__main__":
    main()
