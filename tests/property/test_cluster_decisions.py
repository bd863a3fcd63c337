# SPDX-License-Identifier: Apache-2.0
"""What the controller of a cluster decides: whatever happens to nodes, live models keep an owner, and it all ends."""

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.decisions import NodeView, View, begin, decide, drain, run_of, why_not
from forebay.cluster.deployment import Deployment, PlacedWorker, Unit, encode_state, read_state
from forebay.cluster.node_plan import plan_of
from forebay.types.ray_needs import RayNeeds
from forebay.types.worker_range import WorkerRange

NODES = ("a", "b", "c")
UNITS = ("iris", "clip", "ocr")
SETTLED = 12
"""Looks after which nothing changes any more, if nothing happens."""


def deployment(units, code):
    wanted = tuple(Unit(name=name, target=f"project:{name}.py", models=(name,), workers=1) for name in units)
    return Deployment(name="test", code=code, front={}, owner={}, units=wanted, load_timeout_s=100)


class Cluster:
    """Nodes that do what they are told, a step for each look."""

    def __init__(self):
        self.state = begin(None, deployment(UNITS[:2], "code0"), 0.0)
        self.alive = set(NODES)
        self.applied = dict.fromkeys(NODES, -1)
        self.running = {name: {} for name in NODES}
        self.stuck = set()
        self.slow = set()
        self.told = {}
        self.were_live = set()
        self.were_lost = set()
        self.now_s = 0.0
        self.port = 20_000

    def look(self):
        before, view = self.state, self.view()
        self.state = read_state(encode_state(decide(before, view)))
        assert self.state.version == before.version + (self.state != before)
        if view.nodes:
            for key in self.state.live:
                route = self.state.route(key)
                assert route is not None, "a live model has an owner"
                assert route.node in view.nodes
        for key in set(before.live) & set(self.state.live):
            route = before.route(key)
            if route is not None and route.node in view.nodes and route.node not in before.draining:
                assert self.state.routes[key] == route.key, "an owner that is well stays"
        for name in before.doors.keys() & view.nodes.keys():
            assert self.state.doors[name] == before.doors[name], "programs come back to the door that they know"
        ports = [(one.node, one.address) for one in self.state.owners] + list(self.state.doors.items())
        assert len(ports) == len({*ports}), "a port is given to one process"
        routed = {self.state.routes.get(key) for key in self.state.live}
        assert all(one.left_at is None for one in self.state.owners if one.key in routed)
        self.see_that_no_front_asks_what_is_gone()
        for name in self.alive - self.slow:
            self.obey(name)
        self.were_live |= {*self.state.live}
        for name in self.alive - self.were_lost:
            for run in {run_of(key) for key in self.running[name]} & self.were_live:
                assert run in {one.run for one in self.state.workers}, "what drains has its workers"

    def see_that_no_front_asks_what_is_gone(self):
        there = {one.key for one in self.state.owners}
        for name in self.alive & self.told.keys():
            for key in self.told[name].live:
                route = self.told[name].route(key)
                assert route is None or route.node in self.were_lost or route.key in there

    def view(self):
        nodes = {}
        for name in sorted(self.alive):
            self.port += 2
            spare = tuple((self.port + 100 * step, self.port + 100 * step + 1) for step in range(8))
            nodes[name] = NodeView(host=name, applied=self.applied[name], owners=dict(self.running[name]), spare=spare)
        workers = [(run.key, index) for run in self.state.runs for index in range(run.unit.workers)]
        placed = {key: PlacedWorker(run=key[0], index=key[1], node=min(self.alive)) for key in workers if self.alive}
        return View(nodes=nodes, placed=placed, now_s=self.now_s)

    def obey(self, name):
        wanted = {one.key for one in self.state.owners if one.node == name}
        further = {"starting": "up", "up": "ready", "ready": "ready"}
        before = self.running[name]
        running = {
            key: "starting" if key not in before or run_of(key) in self.stuck else further[before[key]]
            for key in sorted(wanted)
        }
        draining = {key: "up" for key, level in before.items() if key not in wanted and level != "up"}
        self.running[name] = {**running, **draining}
        self.applied[name] = self.state.version
        self.told[name] = self.state

    def happen(self, event):
        kind, value = event
        match kind:
            case "lose":
                self.alive.discard(value)
                self.were_lost.add(value)
                self.told.pop(value, None)
            case "find":
                self.alive.add(value)
            case "slow":
                self.slow ^= {value}
            case "drain":
                self.state = drain(self.state, value, on=True)
            case "resume":
                self.state = drain(self.state, value, on=False)
            case "deploy":
                self.state = begin(self.state, deployment(*value), self.now_s)
            case "looks":
                for _ in range(value):
                    self.look()


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["lose", "find", "slow", "drain", "resume"]), st.sampled_from(NODES)),
    st.tuples(
        st.just("deploy"),
        st.tuples(st.lists(st.sampled_from(UNITS), min_size=1, unique=True), st.sampled_from(["code0", "code1"])),
    ),
    st.tuples(st.just("looks"), st.integers(1, 5)),
)


@given(st.lists(EVENTS, max_size=12))
def test_whatever_happens_it_settles_with_one_owner_for_each_model(events):
    cluster = Cluster()
    for event in events:
        cluster.happen(event)
        cluster.look()
    cluster.alive |= {NODES[0]}
    cluster.slow.clear()
    for _ in range(SETTLED):
        cluster.look()
    state = cluster.state
    cluster.look()
    assert cluster.state == state
    assert cluster.alive <= state.doors.keys(), "programs can join at each node"
    wanted = [(one.name, state.deployment.code) for one in state.deployment.units]
    assert sorted((run.unit.name, run.code) for run in state.runs) == sorted(wanted)
    assert sorted(state.live) == sorted(run.key for run in state.runs) == sorted(one.run for one in state.owners)
    assert {one.node for one in state.workers} == {min(cluster.alive)}
    owners = {one.node for one in state.owners}
    assert owners <= cluster.alive - set(state.draining) or cluster.alive <= set(state.draining)


def test_a_version_that_never_gets_ready_is_given_up():
    cluster = Cluster()
    for _ in range(SETTLED):
        cluster.look()
    live, wanted = cluster.state.live, cluster.state.deployment
    cluster.happen(("deploy", (UNITS[:2], "code1")))
    cluster.stuck = set(cluster.state.wanted)
    for _ in range(SETTLED):
        cluster.look()
        assert cluster.state.live == live
    cluster.now_s += 101
    for _ in range(SETTLED):
        cluster.look()
    assert (cluster.state.live, cluster.state.deployment) == (live, wanted)
    assert [run.key for run in cluster.state.runs] == list(live)
    assert cluster.state.problem.startswith("rolled back: the new version of clip, iris was not ready within 100 s")


def test_the_number_of_workers_follows_what_their_owner_wants_within_its_bounds():
    cluster = Cluster()
    unit = Unit(name="iris", target="iris.py", models=("iris",), workers=1, bounds=WorkerRange(min=0, max=3))
    cluster.state = begin(None, Deployment(name="test", code="code0", front={}, owner={}, units=(unit,)), 0.0)
    cluster.look()
    (run,), (owner,) = cluster.state.runs, cluster.state.owners
    for wanted, count in ((None, 1), (2, 2), (9, 3), (None, 3), (1, 1), (0, 0), (None, 0), (2, 2)):
        nodes = dict(cluster.view().nodes)
        if wanted is not None:
            nodes[owner.node] = msgspec.structs.replace(nodes[owner.node], wanted={owner.key: wanted, "another": 7})
        placed = {(run.key, index): PlacedWorker(run=run.key, index=index, node="a") for index in range(3)}
        cluster.state = read_state(encode_state(decide(cluster.state, View(nodes=nodes, placed=placed))))
        assert [one.index for one in cluster.state.workers] == list(range(count))
        assert cluster.state.size(run) == count
    files = plan_of(cluster.state, owner.node, Path("/n"), "python", 1).files
    (told,) = msgspec.json.decode(files[f"{owner.key}.yaml"])["models"]
    assert told["workers"] == {"min": 0, "max": 3, "initial": 2, "dial_in": True}  # for one that is started anew


def test_new_owners_are_shared_out():
    cluster = Cluster()
    cluster.happen(("deploy", (UNITS, "code1")))
    cluster.look()
    assert sorted(one.node for one in cluster.state.owners) == sorted(NODES[:2] + NODES)


def test_why_no_node_can_have_a_worker_names_what_is_missing():
    nodes = [{"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}]
    labels = [{"zone": "a"}, {"zone": "b"}]
    assert why_not(RayNeeds(num_gpus=1), nodes, labels) == ""
    assert why_not(RayNeeds(num_gpus=2), nodes, labels) == "each worker reserves 2 GPU, and no node has more than 1 GPU"
    assert why_not(RayNeeds(labels={"zone": "c"}), nodes, labels) == "no node has the labels zone=c"
    missing = why_not(RayNeeds(num_gpus=1, num_cpus=2), nodes, labels)
    assert missing == "each worker reserves 2 CPU, 1 GPU, and no node has all of that"
    assert why_not(RayNeeds(), [], []) == "the cluster has no node"
