# SPDX-License-Identifier: Apache-2.0
"""Triton's perf_analyzer, in an environment of its own, against a server with both ports and shared memory."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

PROGRAM = Path(__file__).parents[3] / ".venv/environments/perf-analyzer/run"
pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="make perf-analyzer installs it: glibc 2.38 is needed, or Debian's packages"
)
BRIEF = ["--measurement-interval", "50", "--stability-percentage", "999", "--max-trials", "100"]
"""Windows of 50 ms, of which three suffice, however much they scatter; one without a request is tried again."""


@pytest.fixture(scope="module")
def server(launch):
    return launch("tensors_rpc.py", "--worker-kind", "thread", "--grpc-port", "0", "--shared-memory")


@pytest.mark.parametrize(
    "options",
    [
        ["-i", "grpc"],
        ["-i", "grpc", "--streaming"],
        ["-i", "grpc", "--shared-memory", "system"],
        ["-i", "http"],
        ["-i", "http", "--shared-memory", "system"],
    ],
    ids=" ".join,
)
def test_it_measures_and_ends_well(server, options, tmp_path):  # F86
    (grpc,) = re.findall(r"gRPC at ([\d.:]+)", server.log)
    address = grpc if "grpc" in options else server.url.removeprefix("http://")
    report = tmp_path / "report.json"
    command = [PROGRAM, "-m", "add", "-u", address, *options, "--concurrency-range", "1:16", *BRIEF]
    done = subprocess.run(
        [*command, "--profile-export-file", report], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "Unable to" not in done.stderr  # F88: it forgets regions of both kinds
    assert len(re.findall(r"^Concurrency: \d+, throughput: ", done.stdout, re.MULTILINE)) == 16
    assert all(one["requests"] for one in json.loads(report.read_text())["experiments"])
