# SPDX-License-Identifier: Apache-2.0
"""What large bodies cost the others: a small model is called while two clients send 32 MB to another one.

From the repository, on an idle machine: `.venv/bin/python -m benchmarks.large`; with `--write` it writes
RESULTS-large.md. For threads and for processes, of forebay and of a bare server of the same kind, one client calls the
small model, one request at a time, alone and beside the two, in turns. Nothing is pinned: kernel, server, workers and
three clients share the machine as they do in use.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.chaos import wait_ready
from benchmarks.launch import ROOT, environment, free_port, python_helper, stop
from benchmarks.overload import LOAD_CORES, SERVER_CORES
from benchmarks.pings import Pings
from benchmarks.report import machine
from benchmarks.servers import LOGGING, module

CORES = SERVER_CORES | LOAD_CORES
BYTES = 32_000_000
SENDERS = 2
BAR_MS = 5.0
SERVERS = ("forebay", "bare")
RESULTS = Path(__file__).with_name("RESULTS-large.md")

PAGE = """\
# What large bodies cost the others

`.venv/bin/python -m benchmarks.large --write{arguments}`, {date}, {machine}; nothing pinned: kernel, server,
workers and three clients share them. One client calls a small model, alone and beside {senders} that send 32 MB as
quickly as they can. The bare server (`servers/raw_large.py`) does the same without any feature, in the same run.

"Served": p99 without the time in which the client, or the thread with the server's loop, was ready to run but had no
core. The rest is what it costs that more of them want to run than there are cores; the bare server has it too.

| workers | server | | p50 ms | p99 ms | served p99 ms | bodies a second | bar for p99 | |
|---|---|---|--:|--:|--:|--:|---|---|
{rows}

The client sleeps until its answer is there (`pings.py`). Until 22 Nov 2026 it asked its clock all the time instead and
took most of a core away from the four others; it was then the first to be put off, and the figures were 8.75 ms for
threads and 7.63 for processes at the same server.
"""


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


def command(server, kind, port):
    if server == "bare":
        return module("raw_large", kind, "--port", str(port))
    flags = f"--http-port {port} --worker-kind {kind}"
    program = str(Path(sys.executable).with_name("forebay"))
    return [program, "serve", "benchmarks/jobs/large.py", *flags.split(), *LOGGING]


def started(server, kind, stack):
    """Start a server that runs until the stack is left; returns its port and its process."""
    port = free_port()
    process = subprocess.Popen(command(server, kind, port), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    stack.callback(stop, process)
    while server == "bare" and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            return port, process.pid
    wait_ready(process, port)
    return port, process.pid


def ping(port, pid, seconds):
    options = f"--port {port} --pid {pid} --seconds {seconds:g}"
    return msgspec.convert(python_helper("pings", *options.split(), cores=CORES), Pings)


def measure(kind, args):
    """Return what the client saw of each server, alone and beside the senders, and how many bodies came a second."""
    found: dict[tuple[str, bool], list[Pings]] = {
        (server, beside): [] for server in SERVERS for beside in (False, True)
    }
    rates: dict[str, list[float]] = {server: [] for server in SERVERS}
    with ExitStack() as stack:
        up = {server: started(server, kind, stack) for server in SERVERS}
        for turn in range(4 * args.rounds):
            server, beside = SERVERS[turn // 2 % 2], bool(turn % 2)
            port, pid = up[server]
            senders = [Sender(port, args.bytes) for _ in range(args.senders if beside else 0)]
            for sender in senders:
                sender.start()
            began = time.monotonic()
            found[server, beside].append(ping(port, pid, args.seconds))
            took = time.monotonic() - began
            sent = sum(sender.sent for sender in senders)
            for sender in senders:
                sender.is_over.set()
            for sender in senders:
                sender.join()
            if beside:
                rates[server].append(sent / took)
    return found, {server: median(each) for server, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--bytes", type=int, default=BYTES)
    parser.add_argument("--senders", type=int, default=SENDERS)
    parser.add_argument("--kinds", default="thread,process")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds.split(","):
        found, rates = measure(kind, args)
        for (server, beside), seen in found.items():
            p50, p99, served = (median(getattr(each, name) for each in seen) for name in Pings.__struct_fields__[1:])
            row = [kind, server, "beside them" if beside else "alone", f"{p50:.2f}", f"{p99:.2f}", f"{served:.2f}"]
            row += [f"{rates[server]:.0f}" if beside else ""]
            row += (
                [f"{BAR_MS:g}", "holds" if p99 < BAR_MS else "**misses**"]
                if beside and server == "forebay"
                else ["", ""]
            )
            rows.append("| " + " | ".join(row) + " |")
            print(rows[-1], flush=True)
    if args.write:
        arguments = f" --rounds {args.rounds} --seconds {args.seconds:g}"
        date = time.strftime("%d %b %Y %H:%M")
        facts = {"arguments": arguments, "date": date, "machine": machine()["machine"], "senders": args.senders}
        RESULTS.write_text(PAGE.format(rows="\n".join(rows), **facts))


if __name__ == "__main__":
    main()
