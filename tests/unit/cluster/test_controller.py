# SPDX-License-Identifier: Apache-2.0
"""What a controller does that begins while a deployment runs, with a Ray and hosts of the test's own.

Each turn of a controller is called by the test, so nothing happens between two of them.
"""

import contextlib
import socket
import sys
import types

import msgspec
import pytest

from forebay.cluster import ray_hosts
from forebay.cluster.controller import Controller
from forebay.cluster.decisions import Level
from forebay.cluster.deployment import ClusterState, Deployment, Owning, PlacedWorker, Run, Unit, read_state
from forebay.cluster.host import NodeReport

SECRET = b"0123456789abcdef"
UNIT = Unit(name="iris", target="project:iris.py", models=("iris",), workers=1)
RUN = Run(key="iris-1", unit=UNIT, code="code")
SPARE = ((20_001, 20_002), (20_003, 20_004))


def running(node, port, worker=None):
    """The state of a deployment whose only model has its owner on a node."""
    deployment = Deployment(name="test", code="code", front={}, owner={}, units=(UNIT,))
    owner = Owning(key="iris-1.owner-2", run=RUN.key, node=node, host="127.0.0.1", port=port, http_port=1)
    return ClusterState(
        version=7,
        deployment=deployment,
        runs=(RUN,),
        live=(RUN.key,),
        routes={RUN.key: owner.key},
        owners=(owner,),
        workers=(PlacedWorker(run=RUN.key, index=0, node=worker or node),),
        doors={name: f"tcp:127.0.0.1:{number}" for number, name in enumerate("abc", 1)},
        made=2,
    )


class Answer:
    """What comes of a call, once it is not late any more."""

    def __init__(self, value, is_late):
        self.value, self.is_late = value, is_late


class FakeHost:
    """A host, and the node process that it has found."""

    def __init__(self, cluster, name):
        self._cluster, self._name = cluster, name

    def __getattr__(self, verb):
        def remote(*arguments):
            answer = getattr(self, f"_{verb}")(*arguments)
            return Answer(answer, lambda: (self._name, verb) in self._cluster.late)

        return types.SimpleNamespace(remote=remote)

    def _kept(self):
        return self._name, SECRET, msgspec.msgpack.encode(self._cluster.states[self._name])

    def _begin(self, secret):
        assert secret == SECRET
        return msgspec.msgpack.encode(self._cluster.states[self._name])

    def _report(self):
        state = self._cluster.states[self._name]
        owners: dict[str, Level] = {one.key: "ready" for one in state.owners if one.node == self._name}
        return NodeReport(name=self._name, host="127.0.0.1", applied=state.version, owners=owners, spare=SPARE)

    def _apply(self, data):
        self._cluster.states[self._name] = read_state(data)
        return read_state(data).version


class FakeRay:
    """What the controller uses of Ray.

    Attributes:
        names: The nodes that Ray has, and those that it is given during a test.
        states: What the node process of each does.
        late: Hosts, with the questions that they do not answer yet.
        cpus: The processors of each node.
        reserved: Where workers have reserved something: the labels that were asked for.
    """

    def __init__(self, states):
        self.names = list(states)
        self.states = states
        self.late = set()
        self.cpus = dict.fromkeys(states, 2.0)
        self.reserved = []
        affinity = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)
        self.util = types.SimpleNamespace(scheduling_strategies=affinity, list_named_actors=list)

    def nodes(self):
        some = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Labels": {}}
        return [{**some, "NodeID": one, "NodeName": one, "Resources": {"CPU": self.cpus[one]}} for one in self.names]

    def remote(self, kind):
        def options(**said):
            if kind is ray_hosts.Host:
                return types.SimpleNamespace(remote=lambda *_: FakeHost(self, said["scheduling_strategy"]))
            return types.SimpleNamespace(remote=lambda: self._reservation(said["label_selector"] or {}))

        return types.SimpleNamespace(options=options)

    def _reservation(self, labels):
        node = labels.get("ray.io/node-id", self.names[0])
        self.reserved.append(node)
        where = types.SimpleNamespace(remote=lambda: Answer((node, None), lambda: False))
        return types.SimpleNamespace(where=where)

    def wait(self, answers, timeout, num_returns=1):
        ready = [one for one in answers if not one.is_late()]
        return ready, [one for one in answers if one not in ready]

    def get(self, answer, timeout=None):
        return answer.value

    def kill(self, actor):
        pass


@pytest.fixture
def begun(monkeypatch):
    """Begins a controller on a cluster; it takes no turns by itself."""
    monkeypatch.setattr(Controller, "_look", lambda self: None)

    def begin(ray):
        monkeypatch.setitem(sys.modules, "ray", ray)
        return Controller("test", True)

    return begin


@pytest.fixture
def clock(monkeypatch):
    """Puts the clock of the hosts forward."""
    passed = [0.0]
    real = ray_hosts.time.monotonic
    monkeypatch.setattr(ray_hosts, "time", types.SimpleNamespace(monotonic=lambda: real() + passed[0]))

    def forward(seconds):
        passed[0] += seconds

    return forward


@pytest.fixture
def dead_port():
    """A port that refuses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


@contextlib.contextmanager
def owner_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def turns(controller, count=6):
    for _ in range(count):
        controller._turn()


def state_of(controller):
    return msgspec.msgpack.decode(controller.status()["state"], type=ClusterState)


def owner_node(controller):
    route = state_of(controller).route(RUN.key)
    return route and route.node


@pytest.mark.parametrize("question", ["kept", "begin", "report"])
def test_nothing_is_decided_before_each_host_has_said_what_runs_on_its_node(begun, dead_port, question):
    state = running("b", dead_port)
    ray = FakeRay({"a": state, "b": state})
    ray.late.add(("b", question))
    controller = begun(ray)
    turns(controller)
    assert ray.states == {"a": state, "b": state}
    assert ray.reserved == []
    ray.late.clear()
    turns(controller)
    assert state_of(controller).route(RUN.key) == state.route(RUN.key)
    assert ray.reserved == ["b"]


def test_a_host_that_never_answers_is_waited_for_a_minute_even_if_it_is_started_again(begun, clock, dead_port):
    state = running("a", dead_port)
    ray = FakeRay({"a": state, "b": state})
    ray.late.add(("b", "report"))
    controller = begun(ray)
    turns(controller)
    clock(ray_hosts.START_S / 2)
    for handle in controller._hosts.every:
        if handle.node_id == "b":
            handle.forget_actor()
    turns(controller)
    assert ray.reserved == []
    clock(ray_hosts.START_S / 2)
    turns(controller)
    assert ray.reserved == ["a"]


def test_a_node_that_ray_does_not_have_keeps_what_runs_there_while_it_answers(begun, monkeypatch):
    monkeypatch.setattr(ray_hosts, "AGAIN_S", 0.0)
    with owner_port() as port:
        state = running("c", port)
        ray = FakeRay({"a": state, "b": state})
        controller = begun(ray)
        turns(controller)
        assert state_of(controller) == state
        assert controller.status()["outside"] == ["c"]
        assert ray.reserved == []
    turns(controller)
    assert owner_node(controller) == "a"
    assert [one.node for one in state_of(controller).workers] == ["a"]
    assert controller.status()["outside"] == []


def test_a_node_that_comes_to_ray_later_is_adopted_with_what_runs_there(begun):
    with owner_port() as port:
        state = running("c", port)
        ray = FakeRay({"a": state, "c": state})
        ray.names.remove("c")
        controller = begun(ray)
        turns(controller)
        ray.names.append("c")
        turns(controller)
        assert state_of(controller) == state
        assert (controller.status()["outside"], ray.reserved) == ([], ["c"])


def test_a_lost_owner_is_not_placed_where_ray_has_no_processors_unless_nothing_else_is_there(begun, dead_port):
    state = running("gone", dead_port)
    ray = FakeRay({"a": state, "b": state})
    ray.cpus["a"] = 0.0
    controller = begun(ray)
    turns(controller)
    assert owner_node(controller) == "b"
    alone = FakeRay({"a": state})
    alone.cpus["a"] = 0.0
    controller = begun(alone)
    turns(controller)
    assert owner_node(controller) == "a"
