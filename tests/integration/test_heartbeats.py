# SPDX-License-Identifier: Apache-2.0
"""Links that do not end and carry nothing: both sides notice, and nothing that is merely slow or busy is cut off."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.test_attached import MODEL, Worker, door_of, joined, workers_of
from tests.relay import Relay

from forebay.workers.wire.loop_heartbeat import SILENCE

NOTICED_S = 5.0
"""Within what time a link that carries nothing is to be noticed, on a machine that does nothing else."""
SLACK_S = 5.0
"""What a machine that does much else may take beside that."""

PLAIN = MODEL.format(name="it", settings="")
HOLDER = """
import ctypes, os, forebay

class It(forebay.Model):
    name = "it"

    def predict(self, batch: list[int]) -> list[tuple[int, int]]:
        ctypes.PyDLL(None).sleep(max(batch))  # holds the lock of the interpreter
        return [(sample, os.getpid()) for sample in batch]
"""


@pytest.fixture
def server(serve):
    """A server that lets a worker owe an answer for as long as it likes."""
    return door_of(serve(None, "--attach", "tcp:127.0.0.1:0", "--worker-hang-s", "1000", "--worker-grace-s", "60"))


@pytest.fixture
def relay(server):
    relay = Relay(server.door)
    yield relay
    relay.stop()


@pytest.fixture
def work(request, tmp_path):
    """Starts workers that dial an address."""

    def start(address, *options, text=PLAIN):
        file = tmp_path / "model.py"
        file.write_text(text)
        worker = Worker(file, address, *options)
        request.addfinalizer(worker.stop)
        return worker

    return start


def test_what_a_worker_behind_a_half_open_link_runs_is_handed_on_once(server, relay, work, tmp_path, eventually):
    until = tmp_path / "until"
    far = work(relay.address, "--threads", "2").ready()
    joined(server, "it", 1, eventually)
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(server.call, "it", str(until))
        eventually(lambda: workers_of(server, "it")["idle"] == 1)
        near = work(server.door).ready()
        joined(server, "it", 2, eventually)
        relay.say("freeze")
        since = time.monotonic()
        joined(server, "it", 1, eventually)
        assert time.monotonic() - since < NOTICED_S + SLACK_S
        assert SILENCE in server.log
        until.touch()
        assert asked.result().json() == [str(until), near.pid]
    relay.say("thaw")
    joined(server, "it", 2, eventually)  # its own side has noticed as well
    assert near.signal().wait() == 0
    assert server.call("it", 0).json() == [0.0, far.pid]


def test_an_idle_worker_behind_a_half_open_link_gets_nothing(server, relay, work, eventually):
    far = work(relay.address).ready()
    joined(server, "it", 1, eventually)
    beating(far, eventually)
    relay.say("freeze")
    joined(server, "it", 0, eventually)
    relay.say("thaw")
    joined(server, "it", 1, eventually)
    assert server.call("it", 0).json() == [0.0, far.pid]


def test_a_worker_whose_model_holds_the_interpreter_is_not_cut_off(server, work, eventually):
    worker = work(server.door, text=HOLDER).ready()
    joined(server, "it", 1, eventually)
    assert server.call("it", int(NOTICED_S) + 1).json() == [NOTICED_S + 1, worker.pid]
    assert SILENCE not in server.log


@pytest.mark.parametrize("how", ["delay 0.4", "rate 150000"])
def test_a_slow_link_is_left_alone(server, relay, work, eventually, how):
    text = "import forebay\nclass It(forebay.Model):\n    def predict(self, batch: list[bytes]) -> list[bytes]:\n"
    work(relay.address, text=text + "        return batch\n").ready()
    joined(server, "it", 1, eventually)
    relay.say(how)
    body = os.urandom(900_000 if how.startswith("rate") else 100_000)
    answer = server.client.post("/models/it", content=body, headers={"content-type": "application/octet-stream"})
    assert answer.content == body
    assert SILENCE not in server.log
    assert workers_of(server, "it")["left"] == 0


def test_a_worker_dials_again_when_its_server_is_silent(server, work, eventually):
    worker = work(server.door).ready()
    joined(server, "it", 1, eventually)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        worker.says("waiting for a server at")
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    eventually(lambda: workers_of(server, "it")["joined"] == 2)
    assert server.call("it", 0).json() == [0.0, worker.pid]


def test_the_process_that_beats_ends_with_its_worker(server, work, eventually):
    worker = work(server.door).ready()
    joined(server, "it", 1, eventually)
    (pulse,) = _children(worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    eventually(lambda: not Path(f"/proc/{pulse}").exists())
    joined(server, "it", 0, eventually)


def test_a_worker_whose_heart_process_was_killed_goes_on(server, work, eventually):
    worker = work(server.door).ready()
    joined(server, "it", 1, eventually)
    pulse = beating(worker, eventually)
    os.kill(pulse, signal.SIGKILL)
    eventually(lambda: not _children(worker.pid))
    assert server.call("it", NOTICED_S + 1).json()[1] == worker.pid


def beating(worker, eventually):
    """Wait until the process that beats for a worker has a connection of its own; returns its id."""
    (pulse,) = _children(worker.pid)
    process = Path(f"/proc/{pulse}")

    def is_connected():
        connections = (process / "net/tcp").read_text().split()  # its words are also the numbers of sockets
        opened = [str(file.readlink()) for file in (process / "fd").iterdir()]
        return any(name.startswith("socket:") and name[8:-1] in connections for name in opened)

    eventually(is_connected)
    return pulse


def _children(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
