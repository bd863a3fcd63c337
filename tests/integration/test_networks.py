# SPDX-License-Identifier: Apache-2.0
"""A worker on another machine, as far as the network shows: a partition, loss, and a peer that vanishes.

The other machine is a network namespace behind a pair of virtual interfaces; nftables drop what they are told to.
"""

import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tests.integration.test_attached import MODEL, Worker, door_of, joined, workers_of
from tests.integration.test_heartbeats import NOTICED_S, SLACK_S

from forebay.workers.wire.loop_heartbeat import SILENCE

SECRET = "the secret of these tests"
NAME = f"fb{os.getpid()}"


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machine:
    """Another machine with a network of its own."""

    def __init__(self):
        _ip("netns", "add", NAME)
        _ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
        net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.address = f"{net}.1"
        _ip("address", "add", f"{net}.1/24", "dev", f"{NAME}a")
        _ip("link", "set", f"{NAME}a", "up")
        _ip("-n", NAME, "address", "add", f"{net}.2/24", "dev", f"{NAME}b")
        _ip("-n", NAME, "link", "set", f"{NAME}b", "up")
        _ip("-n", NAME, "link", "set", "lo", "up")
        self.inside = ("ip", "netns", "exec", NAME)

    def drop(self, what):
        """Have such packets not leave and not arrive there; an empty text drops all."""
        rules = "".join(
            f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}\n"
            f"add rule inet cut {hook} {what} drop\n"
            for hook in ("input", "output")
        )
        command = [*self.inside, "nft", "-f", "-"]
        subprocess.run(command, input=f"add table inet cut\n{rules}", text=True, check=True, capture_output=True)

    def heal(self):
        subprocess.run([*self.inside, "nft", "delete", "table", "inet", "cut"], check=True, capture_output=True)

    def unplug(self):
        _ip("-n", NAME, "link", "set", f"{NAME}b", "down")

    def stop(self):
        subprocess.run(["ip", "link", "delete", f"{NAME}a"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", NAME], check=False, capture_output=True)


@pytest.fixture
def machine():
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a network namespace needs root, ip and nft; missing: {', '.join(missing) or 'root'}")
    made = None
    try:
        made = Machine()
        made.drop("tcp dport 1")
        made.heal()
    except subprocess.CalledProcessError as error:
        if made is not None:
            made.stop()
        pytest.skip(f"no network namespace can be made here: {error.stderr}")
    yield made
    made.stop()


@pytest.fixture
def server(serve, machine):
    options = ("--attach-secret", SECRET, "--worker-hang-s", "1000", "--worker-grace-s", "60")
    return door_of(serve(None, "--attach", f"tcp:{machine.address}:0", *options))


@pytest.fixture
def work(request, server, tmp_path):
    """Starts workers here, or on another machine."""

    def start(prefix=()):
        file = tmp_path / "model.py"
        file.write_text(MODEL.format(name="it", settings=""))
        worker = Worker(file, server.door, "--secret", SECRET, prefix=prefix)
        request.addfinalizer(worker.stop)
        return worker

    return start


@pytest.mark.parametrize("how", ["a partition", "a machine that vanishes"])
def test_what_a_worker_out_of_reach_was_running_is_handed_on(machine, server, work, tmp_path, eventually, how):
    until = tmp_path / "until"
    far = work(machine.inside).ready()
    joined(server, "it", 1, eventually)
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(server.call, "it", str(until))
        eventually(lambda: workers_of(server, "it")["idle"] == 0)
        near = work().ready()
        joined(server, "it", 2, eventually)
        if how == "a partition":
            machine.drop("")
        else:
            machine.unplug()
            os.kill(far.pid, signal.SIGKILL)  # and nothing of it reaches the server
        since = time.monotonic()
        joined(server, "it", 1, eventually)
        assert time.monotonic() - since < NOTICED_S + SLACK_S
        assert SILENCE in server.log
        until.touch()
        assert asked.result().json() == [str(until), near.pid]
    if how == "a partition":
        far.says("waiting for a server at")
        machine.heal()
        joined(server, "it", 2, eventually)


def test_nothing_is_lost_on_a_bad_line(machine, server, work, eventually):
    far = work(machine.inside).ready()
    joined(server, "it", 1, eventually)
    machine.drop("numgen random mod 100 < 10")
    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(partial(server.call, "it"), [number / 1e6 for number in range(200)]))
    assert [answer.json() for answer in answers] == [[number / 1e6, far.pid] for number in range(200)]
