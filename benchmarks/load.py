# SPDX-License-Identifier: Apache-2.0
"""Load from wrk: a fixed number of connections, each asking again as soon as it was answered."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import msgspec

from benchmarks.launch import Cores, Running, pinned
from benchmarks.work import request_body

SCRIPT = Path(__file__).with_name("post.lua")


class Load(msgspec.Struct):
    """What a load generator saw.

    `stall_ms` is the longest time it was itself kept from working, where it knows.
    """

    requests: int
    duration_s: float
    p50_ms: float
    p99_ms: float
    mean_ms: float
    errors: int
    stall_ms: float = 0.0


def run_wrk(running: Running, connections: int, seconds: int, cores: Cores) -> Load:
    with tempfile.NamedTemporaryFile() as body:
        body.write(request_body(running.job))
        body.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(SCRIPT), running.url, "--", body.name]
        result = subprocess.run(
            pinned(command, cores),
            check=True,
            capture_output=True,
            text=True,
        )
    return msgspec.json.decode(result.stdout.rpartition("JSON")[2], type=Load)
