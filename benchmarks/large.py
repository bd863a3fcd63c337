# SPDX-License-Identifier: Apache-2.0
"""What large bodies cost the others: a small model is called while two clients send 32 MB to another one.

From the repository, on an idle machine: `.venv/bin/python -m benchmarks.large`. For threads and for processes one
client calls the small model, one request at a time, alone and beside the two, in turns; prints its latencies.
Nothing is pinned: kernel, server, workers and three clients share the machine as they do in use.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.flood import Flood
from benchmarks.launch import ROOT, environment, free_port, python_helper, stop
from benchmarks.overload import LOAD_CORES, SERVER_CORES
from benchmarks.scrapes import wait

CORES = SERVER_CORES | LOAD_CORES
BYTES = 32_000_000
SENDERS = 2


class Sender(threading.Thread):
    """Send large bodies, one after the other, until it is stopped."""

    def __init__(self, port, size):
        super().__init__(daemon=True)
        self.port = port
        self.size = size
        self.sent = 0
        self.is_over = threading.Event()

    def run(self):
        head = f"POST /models/large HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {self.size}\r\n\r\n"
        body = bytes(self.size)
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            while not self.is_over.is_set():
                connection.sendall(head.encode())
                connection.sendall(body)
                answer = b""
                while not answer.endswith(str(self.size).encode()):
                    answer += connection.recv(4096)
                    assert b"200 OK" in answer, answer
                self.sent += 1


def measure(kind, args):
    """Return the floods alone and beside the senders, and how many bodies these sent a second."""
    port = free_port()
    program = str(Path(sys.executable).with_name("forebay"))
    flags = f"--http-port {port} --worker-kind {kind} --log-level error"
    command = [program, "serve", "benchmarks/jobs/large.py", *flags.split()]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    found: dict[bool, list[Flood]] = {False: [], True: []}
    rates = []
    try:
        wait(port)
        for turn in range(2 * args.rounds):
            senders = [Sender(port, args.bytes) for _ in range(SENDERS if turn % 2 else 0)]
            for sender in senders:
                sender.start()
            options = f"--port {port} --path /models/echo --job echo --connections 1 --seconds {args.seconds:g}"
            found[bool(senders)].append(msgspec.convert(python_helper("flood", *options.split(), cores=CORES), Flood))
            for sender in senders:
                sender.is_over.set()
            for sender in senders:
                sender.join()
            if senders:
                rates.append(sum(sender.sent for sender in senders) / (args.seconds + 1))
    finally:
        stop(process)
    return found, median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--bytes", type=int, default=BYTES)
    parser.add_argument("--kinds", default="thread,process")
    args = parser.parse_args()
    for kind in args.kinds.split(","):
        found, rate = measure(kind, args)
        for beside, floods in found.items():
            senders = f"beside {SENDERS} clients that send {rate:.0f} bodies of {args.bytes:,} bytes a second"
            p50, p99 = median(each.accepted_p50_ms for each in floods), median(each.accepted_p99_ms for each in floods)
            print(f"{kind}: p50 {p50:.2f} ms, p99 {p99:.2f} ms {senders if beside else 'alone'}", flush=True)


if __name__ == "__main__":
    main()
