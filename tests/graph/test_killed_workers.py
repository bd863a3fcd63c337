# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a graph are killed again and again, whatever they are doing, and no request is left waiting.

FOREBAY_TEST_KILLS=500 has it go on for longer.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import Server
from tests.waiting import PATIENCE_S

KILLS = int(os.environ.get("FOREBAY_TEST_KILLS", "10"))

GRAPH = f"""
import time
import forebay
from forebay import node

class Batched(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return batch

batched = node(Batched, worker_kind="process", workers=2)

@node(worker_kind="process", attempts=2, timeout_ms={PATIENCE_S * 1000:.0f})
def one_by_one(text: str) -> str:
    if text.endswith("7"):
        time.sleep(0.02)
    return text

@node
def join(one: str, other: str) -> str:
    assert one == other
    return one

@forebay.compose(timeout_ms={PATIENCE_S * 1000:.0f})
def both(text: str) -> str:
    return join(batched(text), one_by_one(text))
"""

NO_PAUSE = """
import sys
from forebay.workers.processes import supervisor
supervisor.FIRST_PAUSE_S = supervisor.MAX_PAUSE_S = 0.0
supervisor.MAX_FAILURES = sys.maxsize
from forebay.cli.main import main
sys.exit(main())
"""


@pytest.mark.stress
def test_no_request_waits_for_its_deadline_because_a_worker_was_killed(tmp_path):
    (tmp_path / "graph.py").write_text(GRAPH)
    server = Server(tmp_path / "graph.py", "--timeout-ms", "120000", command=[sys.executable, "-c", NO_PAUSE, "serve"])
    dice = random.Random(KILLS)
    killed: list[int] = []
    over = threading.Event()

    def children():
        tasks = Path(f"/proc/{server.process.pid}/task")  # each process is started by a thread of its own
        found = []
        for task in tasks.glob("*/children"):
            with contextlib.suppress(OSError):
                found += task.read_text().split()
        return sorted({int(pid) for pid in found} - set(killed[-100:]))

    def client(number):
        asked = 0
        with server.connect() as wire:
            while not over.is_set():
                asked += 1
                text = f'"{number} {asked}"'.encode()
                answer = wire.ask("POST", "/models/both", text, headers=["content-type: application/json"])
                assert answer.status in {200, 503}, answer.body  # what has lost two workers is not tried again
                assert answer.status == 503 or answer.body == text
        return asked

    try:
        server.wait_ready()
        with ThreadPoolExecutor(4) as threads:
            clients = [threads.submit(client, number) for number in range(4)]
            while len(killed) < KILLS and not any(one.done() for one in clients):
                if there := children():
                    victim = dice.choice(there)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                        killed.append(victim)
                time.sleep(dice.uniform(0.0, 0.4))  # any moment of a life will do
            over.set()
            assert all(one.result() > 0 for one in clients)
    finally:
        server.stop()
