# SPDX-License-Identifier: Apache-2.0
"""What saying no costs: CPU time of the server for each refusal of a full queue, and for each echo.

    benchmarks/.venv/bin/python -m benchmarks.refusal_cost

Server on core 0, wrk with 400 connections on core 1, closed loop. One server echoes in a thread, one on the loop, and a
bare one does nothing but read, decode, encode and write (`servers/raw.py`). One in C, which `gcc` compiles, shows what
the system alone costs to take a request in and send an answer out (`servers/limit.c`). The last one has a queue of one
place, which is taken, and a model that sleeps: all it does is to refuse, and it is not paced (`servers/unpaced.py`), so
that it is as busy as the others. Rounds alternate; CPU time and answers are summed up.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import proc, report
from benchmarks.client import post
from benchmarks.launch import Running, ServerFailed, need, start
from benchmarks.load import run_wrk
from benchmarks.servers import SERVERS, Server, forebay_command, module

SERVER_CORES, LOAD_CORES = frozenset({0}), frozenset({1})
CONNECTIONS = 400
HELD_S = 100
TAKEN = b'{"held_s": %d}' % HELD_S
KINDS = {
    "limit": "the system alone",
    "raw:inline": "bare echo",
    "forebay:inline": "echo, inline",
    "forebay:thread": "echo, thread",
    "full": "refusal",
}


def full(_job: str, port: int) -> list[str]:
    _, *told = forebay_command("thread", "--max-queue", "1", "--timeout-ms", str(1000 * HELD_S))("held", port)
    return module("unpaced", *told)


def limit(stack: ExitStack) -> Server:
    program = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "limit"))
    subprocess.run(["gcc", "-O2", "-o", program, str(Path(__file__).with_name("servers") / "limit.c")], check=True)
    return Server("limit", lambda _job, port: [program, str(port)])


def fill(running: Running, stack: ExitStack) -> None:
    """Have one request run and one wait."""
    for _ in range(2):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        client.sendall(post("echo", running.server.path, TAKEN))
        time.sleep(0.5)
    status, _ = running.exchange("POST", running.server.path, TAKEN)
    if status != 429:
        raise ServerFailed(f"the queue should be full, and a request got {status}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.refusal_cost", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-refusals.md"))
    options = parser.parse_args()
    need(gcc="gcc", wrk="wrk")
    cpu_s, answers = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    with ExitStack() as stack:
        servers = [limit(stack), *(one for one in SERVERS if one.name in KINDS), Server("full", full)]
        up = [stack.enter_context(start(server, "echo", SERVER_CORES)) for server in servers]
        fill(up[-1], stack)
        for count in range(options.rounds + 1):  # the first one warms up
            for running in up if count % 2 else reversed(up):
                before = proc.cpu_s(running.pids())
                load = run_wrk(running, CONNECTIONS, options.seconds, LOAD_CORES)
                if (load.errors == load.requests) != (running.server.name == "full") or not load.requests:
                    raise ServerFailed(f"{running.server.name}: {load.errors} of {load.requests} answers are errors")
                if count:
                    cpu_s[running.server.name] += proc.cpu_s(running.pids()) - before
                    answers[running.server.name] += load.requests
    cost_us = {name: 1e6 * cpu_s[name] / answers[name] for name in KINDS}
    least_us = cost_us["forebay:inline"]
    rows = [
        [label, f"{answers[name]:,}", f"{cost_us[name]:.1f}", f"{cost_us[name] / least_us:.2f}"]
        for name, label in KINDS.items()
    ]
    text = [
        "# What a refusal costs\n\nWritten by `python -m benchmarks.refusal_cost`, which says how it measures.\n",
        report.table(["", ""], [["date", time.strftime("%d %b %Y %H:%M")], *map(list, report.machine().items())]),
        "",
        report.table(["answer", "measured", "CPU us", "/ echo inline"], rows),
    ]
    options.output.write_text("\n".join(text) + "\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
