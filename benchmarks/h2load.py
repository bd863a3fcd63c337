# SPDX-License-Identifier: Apache-2.0
"""Load from h2load: unary gRPC calls, each connection asking again as soon as it was answered."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile

from benchmarks.launch import Cores, pinned

HEADERS = ("content-type: application/grpc", "te: trailers")


def prefixed(message: bytes) -> bytes:
    """Write a message as it stands on the wire."""
    return struct.pack(">BL", 0, len(message)) + message


def run_h2load(
    url: str,
    message: bytes,
    answer: bytes,
    connections: int,
    seconds: int,
    *,
    calls: int = 1,
    cores: Cores | None = None,
) -> float:
    """Return the answers a second, of so many calls at a time on each connection.

    h2load looks at the status of HTTP, which is 200 for calls that failed as well. Those have no message, so the bytes
    that came must be those of as many answers as it counted; each must be as long as `answer`.

    Raises:
        RuntimeError: If other answers came.
    """
    with tempfile.NamedTemporaryFile() as body:
        body.write(prefixed(message))
        body.flush()
        named = [option for header in HEADERS for option in ("-H", header)]
        command = ["h2load", "-t1", f"-c{connections}", f"-m{calls}", f"-D{seconds}", "-d", body.name, *named, url]
        if cores is not None:
            command = pinned(command, cores)
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    done, answered = map(int, re.findall(r"(\d+) (?:done|succeeded)", text))
    received = int(re.findall(r"\((\d+)\) data", text)[0])
    duration = re.findall(r"finished in ([\d.]+)(ms|s|us)", text)[0]
    size = len(prefixed(answer))
    # What came of calls that were not complete at the end is counted as bytes only.
    if answered != done or not 0 <= received - answered * size <= connections * calls * size:
        raise RuntimeError(f"not every call was answered with {size} bytes\n{text}")
    return answered / (float(duration[0]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[duration[1]])
