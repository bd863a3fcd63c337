# SPDX-License-Identifier: Apache-2.0
"""What the front of a node tells of its deployment on the dashboard."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.cluster.test_controller import running

from forebay.cluster import cluster_report
from forebay.cluster.cluster_report import ClusterReport
from forebay.cluster.keeper import DirectoryKeeper
from forebay.cluster.node_folder import folder_with, root
from forebay.cluster.node_life import NodeStatus
from forebay.errors import Unavailable
from forebay.machine.children import ChildState

STATE = msgspec.structs.replace(running("a", 20_000, worker="b"), draining=("c",), problem="rolled back")
FRONT = ChildState("front", 2, is_ready=False, starts=3, said="", problem="it ended with status 1")


@pytest.fixture
def report(monkeypatch):
    asked = []

    def status_of(folder):
        asked.append(folder)
        if len(asked) > 1:
            raise Unavailable("the node process does not answer")
        return NodeStatus(pid=1, version=7, children=(FRONT,), front="http://127.0.0.1:1")

    monkeypatch.setattr(cluster_report, "status_of", status_of)
    monkeypatch.setattr(cluster_report, "folder_with", lambda path: SimpleNamespace(name="a", state=STATE))
    peers: Any = SimpleNamespace(problems_of={STATE.doors["b"]: "", STATE.doors["c"]: "it cannot be reached"})
    return ClusterReport(DirectoryKeeper(), peers, root()), asked


def told(report, *, is_trusted=True):
    return asyncio.run(report[0].describe(is_trusted))


def test_it_tells_of_all_nodes_and_of_the_processes_of_its_own(report, monkeypatch):
    found = told(report)
    assert (found["deployment"], found["version"], found["problems"]) == ("test", 7, ["rolled back"])
    a, b, c = found["nodes"]
    assert a == {
        "name": "a",
        "is_here": True,
        "is_draining": False,
        "owns": ["iris"],
        "workers": 0,
        "door": STATE.doors["a"],
        "away": "",
    }
    assert (b["is_here"], b["owns"], b["workers"], b["away"]) == (False, [], 1, "")
    assert (c["is_draining"], c["away"]) == (True, "it cannot be reached")
    assert found["processes"] == [
        {"name": "front", "starts": 3, "is_ready": False, "problem": "it ended with status 1"}
    ]
    assert told(report) == found
    assert len(report[1]) == 1, "the node process is asked now and then only"
    monkeypatch.setattr(cluster_report, "FRESH_S", -1.0)
    assert told(report)["problems"] == ["rolled back", "the node process does not answer"]


def test_strangers_are_told_no_addresses_and_no_reasons(report):
    found = told(report, is_trusted=False)
    assert [one["name"] for one in found["nodes"]] == ["a", "b", "c"]
    text = str(found)
    for secret in ("tcp:", "cannot be reached", "status 1", "rolled back"):
        assert secret not in text


def test_the_folder_of_a_node_is_known_by_its_place(tmp_path):
    folder = folder_with(root() / "test" / "a" / "front.yaml")
    assert folder is not None
    assert (folder.deployment, folder.name) == ("test", "a")
    assert folder_with(tmp_path / "forebay.yaml") is None
