# SPDX-License-Identifier: Apache-2.0
"""A deployment on a Ray cluster of several nodes, one failure after the other: what was accepted is answered, once.

One cluster is started, by a program of its own, and one test goes through its life: each step needs what those before
it have left. Failures that clients of a node would see, whose front has died, are no part of it: they ask other fronts.
"""

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.cluster.ray_members import programs_of_different_nodes_call_each_other
from tests.forked import COMMAND
from tests.waiting import PATIENCE_S, eventually

from forebay.cluster import local_view
from forebay.cluster.node_folder import folders
from forebay.observe.metrics.cost_files import lines_since, summed

ray = pytest.importorskip("ray")
pytest.importorskip("ray.cluster_utils")

MACHINE = Path(__file__).parent / "ray_machine.py"
NODES = ("one", "two", "three", "four")
RECONNECT_S = int(os.environ.get("CLUSTER_RECONNECT_S", "10"))
"""How long Ray goes on without its head; by itself it does for 60 s."""
ALONE_S = int(os.environ.get("CLUSTER_ALONE_S", "15"))
"""How long the deployment is asked after all of Ray has ended."""
CLIENTS = 2
WORKERS = 3
PROJECT = """
import forebay

class Echo(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [f"{text} %s" for text in batch]

class Count(forebay.Model):
    def predict(self, batch: list[str]) -> list[int]:
        return [len(text) for text in batch]
"""
CONFIG = """
models:
  - target: project.py:Echo
    workers: 2
    ray: {num_cpus: 0.5}
  - target: project.py:Count
    ray: {num_cpus: 0.5, num_gpus: 1}
http: {port: 0}
attach: {certfile: "%(tls)s/node.pem", cafile: "%(tls)s/ca.pem"}
cost_log: "%(costs)s"
"""


def environment():
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {
        **os.environ,
        **settings,
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


class Machine:
    """The cluster."""

    def __init__(self, deployment):
        self.process: Any = subprocess.Popen(
            [sys.executable, str(MACHINE), deployment, *NODES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,
        )
        told = json.loads(self.process.stdout.readline())
        self.address, self.raylets, self.head = told["address"], told["raylets"], told["head"]

    def pids(self):
        """The raylets that are left, and all processes below them."""
        there = parents()
        return {one for pid in self.raylets.values() if pid in there for one in (pid, *below(pid))}

    def end(self):
        left = [self.head, *self.pids()]
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def parents():
    """The parent of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def below(pid):
    """The processes below one."""
    found, there = set(), parents()
    while more := {one for one, parent in there.items() if parent in {pid, *found}} - found:
        found |= more
    return found


class Deployer:
    """`forebay serve --cluster`, and what it says."""

    def __init__(self, folder, address, name):
        self._command = [*COMMAND, "serve", str(folder), "--cluster", address, "--deployment", name]
        self._start()

    def _start(self):
        self.lines = []
        self.process: Any = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=environment())
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self):
        self.lines += iter(self.process.stderr.readline, "")

    def _find(self):
        if self.process.poll() is not None and is_late(self.end()):
            self._start()
        assert self.process.poll() is None, "".join(self.lines)
        return [found[1] for line in list(self.lines) if (found := re.match(r"forebay: ready at (\S+) on", line))]

    def fronts(self):
        """Where each node answers, once all do."""
        with contextlib.suppress(AssertionError):
            return eventually(lambda: len(found := self._find()) == len(NODES) and found, "the fronts")
        raise AssertionError("".join(self.lines))

    def end(self):
        self.process.kill()
        self.process.wait()
        self._reading.join()
        self.process.stderr.close()
        return "".join(self.lines)

    def detach(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE_S) == 0, "".join(self.lines)
        self._reading.join()
        self.process.stderr.close()


class Load:
    """Clients that ask all the time, each one front after the other, and check what they get."""

    def __init__(self, fronts):
        self.fronts = list(fronts)
        self.answers = []
        self.failures = []
        self.longest_s = 0.0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error):
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def wait(self, more=20):
        """Wait until so many more requests were answered."""
        before = len(self.answers)
        eventually(lambda: len(self.answers) >= before + more or self.failures, "further answers")

    def _ask(self, number):
        connections = {}
        turn = number
        while not self._over.is_set():
            fronts = list(self.fronts)
            for gone in connections.keys() - {*fronts}:
                connections.pop(gone).close()
            front = fronts[turn % len(fronts)]
            turn += 1
            connection = connections.get(front) or connections.setdefault(front, connected(front))
            text = secrets.token_hex(4)
            model = ("echo", "count")[turn % 2]
            began = time.monotonic()
            try:
                status, answer = asked(connection, model, text)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append((front, model, repr(error), time.time()))
                connections.pop(front).close()
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            is_right = status == 200 and (answer == len(text) if model == "count" else answer.split()[0] == text)
            (self.answers if is_right else self.failures).append((front, model, status, answer))
        for connection in connections.values():
            connection.close()


def connected(front):
    return http.client.HTTPConnection(front.removeprefix("http://"), timeout=40)


def asked(connection, model, text):
    connection.request("POST", f"/models/{model}", json.dumps(text), {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def forebay(*arguments):
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=PATIENCE_S, check=False)


def is_late(said):
    """Tell whether Ray took longer to answer a command than that may take, as it does on a busy machine."""
    return "does not answer; is its head alive?" in said


class Life:
    """What the steps share."""

    def __init__(self, folder):
        self.folder, self.tls, self.costs = folder / "project", folder / "tls", folder / "costs"
        self.folder.mkdir()
        self.tls.mkdir()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.tls / "ca.pem")
        node = authority.issue_cert(ray.util.get_node_ip_address(), "127.0.0.1")
        node.private_key_and_cert_chain_pem.write_to_path(self.tls / "node.pem")
        self.name = f"test-{secrets.token_hex(4)}"
        self.machines = []
        self.deployers = []
        self.fronts = {}

    def write(self, version):
        (self.folder / "project.py").write_text(PROJECT % version)
        (self.folder / "forebay.yaml").write_text(CONFIG % {"tls": self.tls, "costs": self.costs})

    def machine(self):
        self.machines.append(Machine(self.name))
        return self.machines[-1]

    def deploy(self, machine):
        self.deployers.append(Deployer(self.folder, machine.address, self.name))
        return self.deployers[-1]

    def state(self):
        return max((one.state for one in folders(self.name) if one.state), key=lambda one: one.version)

    def children(self, node):
        """The processes of a node by their names."""
        folder = next(one for one in folders(self.name) if one.name == node)
        status = local_view.status_of(folder)
        return {"": status.pid, **{one.name: one.pid for one in status.children}}

    def are_ready(self, node):
        folder = next(one for one in folders(self.name) if one.name == node)
        return all(one.is_ready for one in local_view.status_of(folder).children)

    def everything(self):
        alive = [one.name for one in folders(self.name) if one.identity]
        return {(node, name): pid for node in alive for name, pid in self.children(node).items()}

    def end(self):
        for one in self.deployers:
            one.end()
        for one in self.machines:
            one.end()
        local_view.end_all(self.name)


@pytest.fixture
def life(tmp_path):
    life = Life(tmp_path)
    life.write("first")
    yield life
    life.end()


@pytest.mark.slow
@pytest.mark.lasts(240)
def test_a_deployment_lives_through_the_end_of_all_that_it_was_started_with(life):
    machine = life.machine()
    what_no_node_has_room_for_is_refused(life, machine)
    deployer = life.deploy(machine)
    deployer.fronts()
    life.fronts = {one.name: local_view.status_of(one).front for one in folders(life.name)}
    assert sorted(life.fronts) == sorted(NODES)
    everything_answers_everywhere(life)
    workers_see_what_is_reserved_for_them(life)
    owners_write_what_their_models_cost(life)
    began = time.monotonic()
    programs_of_different_nodes_call_each_other(life)
    print("programs of different nodes", round(time.monotonic() - began, 1), "s", flush=True)
    deploying_it_again_changes_nothing(life, machine)
    with Load(life.fronts.values()) as load:
        load.wait()
        for step in (
            nobody_notices_that_the_controller_is_killed,
            a_drained_node_is_left_and_used_again,
            a_new_version_takes_over,
            a_node_dies,
            all_of_ray_ends,
            an_owner_that_dies_without_ray_is_started_again,
        ):
            began = time.monotonic()
            step(life, machine, load)
            load.wait()
            print(step.__name__, round(time.monotonic() - began, 1), "s", len(load.answers), load.longest_s, flush=True)
            if load.failures:
                print("\n".join(local_view.describe(life.name)))
                for one in folders(life.name):
                    print(one.name, (one.path / "log").read_text()[-6000:])
            assert load.failures == [], step.__name__
    what_runs_is_adopted(life)
    nothing_is_left(life)


def what_no_node_has_room_for_is_refused(life, machine):
    config = (life.folder / "forebay.yaml").read_text()
    (life.folder / "forebay.yaml").write_text(config.replace("num_gpus: 1", "num_gpus: 2"))
    command = ("serve", str(life.folder), "--cluster", machine.address)
    done = eventually(lambda: not is_late((said := forebay(*command)).stderr) and said, "an answer of Ray")
    words = "'count' cannot run on this cluster: each worker reserves 2 GPU, and no node has more than 1 GPU"
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, f"forebay: {words}")
    (life.folder / "forebay.yaml").write_text(config)


def everything_answers_everywhere(life):
    for front in life.fronts.values():
        connection = connected(front)
        assert asked(connection, "echo", "hello") == (200, "hello first")
        assert asked(connection, "count", "hello") == (200, 5)
        connection.close()


def workers_see_what_is_reserved_for_them(life):
    shown = [
        seen for (_, child), pid in life.everything().items() if "worker count" in child for seen in variables(pid)
    ]
    assert [one for one in shown if one.startswith((b"CUDA_VISIBLE", b"RAY_"))] == [b"CUDA_VISIBLE_DEVICES=0"]


def owners_write_what_their_models_cost(life):
    def written():
        rows = {line.model: line.rows for line in summed(lines_since(life.costs, 0.0))}
        return rows == {"echo": len(NODES), "count": len(NODES)}  # fronts write nothing

    eventually(written, "the costs of both models")


def deploying_it_again_changes_nothing(life, machine):
    before = life.everything()
    again = life.deploy(machine)
    again.fronts()
    assert life.everything() == before
    again.detach()


def nobody_notices_that_the_controller_is_killed(life, machine, load):
    (controller,) = [pid for pid in machine.pids() if title(pid).startswith("ray::Controller")]
    before = life.everything()
    os.kill(controller, signal.SIGKILL)
    eventually(lambda: any(title(pid).startswith("ray::Controller") and pid != controller for pid in machine.pids()))
    eventually(lambda: forebay("cluster", "resume", NODES[0], "--deployment", life.name).returncode == 0)
    assert life.everything() == before


def a_drained_node_is_left_and_used_again(life, machine, load):
    node = owner_node(life)
    load.fronts = [front for name, front in life.fronts.items() if name != node]  # as a load balancer would
    done = forebay("cluster", "drain", node, "--deployment", life.name)
    assert (done.returncode, done.stderr) == (0, f"forebay: nothing runs on {node} any more\n")
    assert list(life.children(node)) == [""]
    assert owner_node(life) != node
    forebay("cluster", "resume", node, "--deployment", life.name)
    eventually(lambda: is_up(life.fronts[node]))
    load.fronts = list(life.fronts.values())


def a_new_version_takes_over(life, machine, load):
    life.write("second")
    life.deploy(machine).fronts()
    at = len(load.answers)
    load.wait()
    assert {answer[3].split()[1] for answer in load.answers[at + CLIENTS :] if answer[1] == "echo"} == {"second"}
    eventually(lambda: len(life.state().runs) == 2 or None, "the end of the first version")


def a_node_dies(life, machine, load):
    if owner_node(life) == NODES[0]:  # the head is there, and without it nobody would decide anything
        load.fronts = [front for name, front in life.fronts.items() if name != NODES[0]]
        load.wait()
        assert forebay("cluster", "drain", NODES[0], "--deployment", life.name).returncode == 0
        assert forebay("cluster", "resume", NODES[0], "--deployment", life.name).returncode == 0
        eventually(lambda: is_up(life.fronts[NODES[0]]))
    node = owner_node(life)
    load.fronts = [front for name, front in life.fronts.items() if name != node]
    load.wait()
    load.longest_s = 0.0
    doomed = [machine.raylets[node], *below(machine.raylets[node]), *life.children(node).values()]
    for pid in doomed:  # its host is one of them: it would start the node process again
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: owner_node(life) != node)
    load.wait(200)
    eventually(lambda: [one.node == node for one in life.state().workers] == [False] * WORKERS, "workers elsewhere")
    eventually(lambda: all(life.are_ready(one) for one in NODES if one != node), "workers that are ready")


def all_of_ray_ends(life, machine, load):
    before = life.everything()
    load.longest_s = 0.0
    os.kill(machine.head, signal.SIGKILL)
    eventually(lambda: not machine.pids(), "the end of all of Ray", RECONNECT_S + 80)
    began, answered = time.monotonic(), len(load.answers)
    eventually(lambda: time.monotonic() > began + ALONE_S, "further answers", PATIENCE_S + ALONE_S)
    print(len(load.answers) - answered, "answers in", ALONE_S, "s without Ray,", len(load.failures), "failures")
    assert life.everything() == before


def an_owner_that_dies_without_ray_is_started_again(life, machine, load):
    node = owner_node(life)
    (pid,) = [pid for name, pid in life.children(node).items() if name.startswith("owner echo")]
    load.longest_s = 0.0
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: any(n.startswith("owner echo") and p != pid for n, p in life.children(node).items()))
    load.wait(200)


def what_runs_is_adopted(life):
    for one in life.deployers:
        one.process.wait(PATIENCE_S)
    machine = life.machine()
    before = life.everything()
    life.deploy(machine).fronts()
    after = life.everything()
    assert {one: pid for one, pid in after.items() if one in before and not one[1].startswith("worker")} == {
        one: pid for one, pid in before.items() if not one[1].startswith("worker")
    }


def nothing_is_left(life):
    pids = [*life.everything().values()]
    done = forebay("cluster", "down", "--deployment", life.name)
    assert done.returncode == 0, done.stderr
    assert {*pids} & parents().keys() == set()
    assert list(folders(life.name)) == []
    assert life.deployers[-1].process.wait(PATIENCE_S) == 0


def owner_node(life):
    """The node that owns the first model."""
    state = life.state()
    return state.route(next(key for key in state.live if key.startswith("echo"))).node


def is_up(front):
    connection = connected(front)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def variables(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def title(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().strip()
    return ""
