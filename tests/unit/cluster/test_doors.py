# SPDX-License-Identifier: Apache-2.0
"""Where programs join a deployment: the doors of its fronts, and what the processes of a node are told of them."""

import msgspec
from tests.unit.cluster.test_controller import running

from forebay.cluster import decisions
from forebay.cluster.decisions import NodeView, View, decide
from forebay.cluster.node_plan import plan_of


def view(**hosts):
    spare = ((20_000, 20_001), (20_002, 20_003))
    return View(nodes={name: NodeView(host=host, applied=9, spare=spare) for name, host in hosts.items()})


def test_a_node_keeps_its_door_and_one_that_has_moved_gets_another(monkeypatch):
    state = msgspec.structs.replace(running("a", 20_000), doors={})
    first = decide(state, view(a="127.0.0.1", b="fd00::1")).doors
    assert first == {"a": "tcp:127.0.0.1:20002", "b": "tcp:[fd00::1]:20000"}
    state = msgspec.structs.replace(state, doors=first)
    assert decide(state, view(a="127.0.0.1")).doors == first
    assert decide(state, view(a="127.0.0.1", b="fd00::2")).doors["b"] == "tcp:[fd00::2]:20002"
    monkeypatch.setattr(decisions, "_MAX_ABSENT", 2)
    gone = {**first, **{f"gone{number}": f"tcp:h:{number}" for number in range(3)}}
    state = msgspec.structs.replace(state, doors=gone)
    assert [*decide(state, view(a="127.0.0.1", b="fd00::1")).doors] == ["a", "b", "gone1", "gone2"]


def test_fronts_are_peers_and_owners_let_no_program_in(tmp_path):
    state = running("a", 20_000)
    tls = {"certfile": "/node.pem", "cafile": "/ca.pem"}
    deployment = msgspec.structs.replace(state.deployment, owner={"attach": tls})
    state = msgspec.structs.replace(state, deployment=deployment)
    files = plan_of(state, "a", tmp_path, "python", 8080).files
    found = {name: msgspec.json.decode(files[name]) for name in ("front.yaml", "iris-1.owner-2.yaml")}
    front, owner = (its["attach"] for its in found.values())
    assert front["address"] == state.doors["a"]
    assert front["peers"] == [*state.doors.values()]
    assert "members" not in front
    assert front.items() >= tls.items()
    assert owner["members"] is False
