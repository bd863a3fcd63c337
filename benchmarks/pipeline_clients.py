# SPDX-License-Identifier: Apache-2.0
"""What one prediction costs an op, by the client that makes it: the same linear model behind each of them.

    .venv/bin/python benchmarks/pipeline_clients.py [--seconds 1]

The KServe server is that of tests/environments/kserve.txt and left out where it is not installed. It runs a Python
model of its own, so its rows say what the way there and back costs and not how quick a server can be.
"""

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.compat.pipeline.predictor_models import onnx_model  # noqa: E402

from forebay.surfaces.pipeline.predictors import LocalConf, PredictorSettings, client_for  # noqa: E402

KSERVE = ROOT / ".venv/environments/kserve/bin/python"
SIZES = {"3 floats": 3, "150 k floats": 150_528}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def kserve(folder):
    ports = free_port(), free_port()
    script = ROOT / "tests/compat/pipeline/projects/kserve_server.py"
    with (folder / "kserve.log").open("wb") as log:
        command = [KSERVE, "-W", "ignore", script, *map(str, ports)]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, "HOME": str(folder)})
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/v2/health/ready").close()
                break
            time.sleep(0.2)
        yield ports
    finally:
        server.terminate()
        server.wait()


def measure(client, rows, name, seconds):
    """Returns the median and the 99th percentile of a call in microseconds."""
    for _ in range(20):
        client.predict({name: rows})
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        client.predict({name: rows})
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each client is asked (1)")
    options = parser.parse_args()
    print("| client | model | " + " | ".join(f"{size}: p50, p99 (µs)" for size in SIZES) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        models = {
            count: onnx_model(folder / str(count), weights=np.ones((count, 1), np.float32)) for count in SIZES.values()
        }

        def row(title, where, feed, settings_for):
            cells = []
            for count in SIZES.values():
                client = client_for(settings_for(count), concurrency_idx=None, process=False)
                p50, p99 = measure(client, np.ones((1, count), np.float32), feed, options.seconds)
                client.close()
                cells.append(f"{p50:.0f}, {p99:.0f}")
            print(f"| {title} | {where} | {' | '.join(cells)} |", flush=True)

        def conf(kind):
            return lambda count: PredictorSettings(
                local_service_conf=LocalConf(model_config=str(models[count]), client_type=kind)
            )

        row("local_predictor", "onnxruntime in the worker", "x", conf("local_predictor"))
        row("brpc", "onnxruntime in a process that was started for it", "x", conf("brpc"))
        if not KSERVE.exists():
            return
        ports = stack.enter_context(kserve(folder))
        for title, kind, port in (("grpc, kserve_v2", "grpc", ports[1]), ("brpc, kserve_v2", "brpc", ports[0])):
            settings = PredictorSettings(
                client_type=kind, endpoint_protocol="kserve_v2", server_endpoints=[f"127.0.0.1:{port}/twice"]
            )
            row(title, "a KServe server, doubling in Python", "x", lambda _count, settings=settings: settings)


if __name__ == "__main__":
    main()
