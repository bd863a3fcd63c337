# SPDX-License-Identifier: Apache-2.0
"""One client that asks, waits for the answer, and asks again; it sleeps while it waits, as clients do.

A client that asks its clock all the time needs a core of its own. Where there is none it is the first to be put off by
the system, and what it measures is mostly that. Beside each latency this one notes how long itself and the thread with
the server's loop were ready to run but had no core: that is what the machine adds. Prints JSON as `Pings`.
"""

from __future__ import annotations

import argparse
import os
import socket
from time import perf_counter

import msgspec

from benchmarks.client import post
from benchmarks.flood import percentile

WARM_UP_S = 0.5


class Pings(msgspec.Struct):
    """What the client saw."""

    count: int
    p50_ms: float
    p99_ms: float
    served_p99_ms: float
    """Without the time that client and loop were ready to run but had no core."""


def core_waited_s(threads: list[int]) -> float:
    """Return how long these threads, as files of the kernel, have waited for a core so far."""
    return sum(int(os.pread(thread, 100, 0).split()[1]) for thread in threads) / 1e9


def measure(port: int, pid: int, seconds: float, path: str) -> Pings:
    threads = [os.open(f"/proc/{each}/schedstat", os.O_RDONLY) for each in (os.getpid(), pid)]
    request = post("echo", path)
    found: list[tuple[float, float]] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        counts_from = perf_counter() + WARM_UP_S
        asked = 0.0
        while asked < counts_from + seconds:
            waited = core_waited_s(threads)
            asked = perf_counter()
            connection.sendall(request)
            answer = connection.recv(4096)
            took = perf_counter() - asked
            if not answer.startswith(b"HTTP/1.1 200 OK"):
                raise ValueError(answer)
            if asked >= counts_from:
                found.append((took, took - (core_waited_s(threads) - waited)))
    took, served = ([pair[index] for pair in found] for index in (0, 1))
    return Pings(len(found), percentile(took, 0.5), percentile(took, 0.99), percentile(served, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the server; its loop is in its main thread")
    parser.add_argument("--path", default="/models/echo")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(msgspec.json.encode(measure(options.port, options.pid, options.seconds, options.path)).decode())


if __name__ == "__main__":
    main()
