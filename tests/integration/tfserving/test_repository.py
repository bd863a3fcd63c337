# SPDX-License-Identifier: Apache-2.0
"""Models of a repository: loaded for who asks, and as clients say that manage the server."""

import shutil

import pytest
from tests.integration.tfserving.conftest import Client, M
from tests.integration.tfserving.test_grpc import ROWS, arrays_of, predict, refused
from tests.models.saved_models import saved_models

pytest.importorskip("grpc")


@pytest.fixture
def managed(serve, tmp_path):
    shutil.copytree(saved_models() / "iris", tmp_path / "iris")
    shutil.copytree(saved_models() / "scalar", tmp_path / "scalar")
    options = ["--worker-kind", "thread", "--lazy", "--versions", "all", "--manage", "--repository-poll-s", "0.2"]
    server = serve(tmp_path, *options, "--grpc-port", "0")
    found = Client(server)
    yield server, found
    found.close()


def wanted(*configs):
    return M.ReloadConfigRequest(config={"model_config_list": {"config": list(configs)}})


def ids(client, **spec):
    return arrays_of(client.call("Predict", predict("iris", {"x": ROWS}, "class_ids", **spec)))["class_ids"].tolist()


def states(server, name):
    found = server.client.get(f"/v1/models/{name}").json()["model_version_status"]
    return {one["version"]: one["state"] for one in found}


def known(server, name):
    return {one["version"]: one["state"] for one in server.client.get(f"/models/{name}").json()["versions"]}


def test_a_model_is_loaded_for_who_asks_first(managed):
    server, client = managed
    assert states(server, "iris") == {"2": "AVAILABLE", "1": "AVAILABLE"}  # a call would be answered
    assert server.client.get("/v1/models/iris/metadata").status_code == 503
    assert ids(client) == [0, 0]  # the highest version
    assert ids(client, version=1) == [2, 2]
    answer = server.client.post("/v1/models/scalar:predict", json={"inputs": {"x": 1, "y": 2}})
    assert answer.json() == {"outputs": 3}
    assert refused(client, "Predict", predict("iris", {"x": ROWS}, version=3))[0] == "NOT_FOUND"
    assert refused(client, "Predict", predict("irish", {"x": ROWS}))[0] == "NOT_FOUND"


def test_clients_that_manage_say_what_is_loaded(managed, tmp_path, eventually):
    server, client = managed
    specific = {"specific": {"versions": [1]}}
    iris = {"name": "iris", "base_path": str(tmp_path / "iris"), "model_version_policy": specific}
    client.call("HandleReloadConfigRequest", wanted({**iris, "version_labels": {"stable": 1}}), "ReloadConfigResponse")
    assert ids(client) == [2, 2]
    assert ids(client, version_label="stable") == [2, 2]
    told = {"instances": [[1, 2, 3, 4]]}
    answer = server.client.post("/v1/models/iris/labels/stable:predict", json=told)
    assert answer.json()["predictions"][0]["class_ids"] == 2
    assert server.client.get("/v1/models/iris/labels/stable").json()["model_version_status"][0]["version"] == "1"
    # What was copied there just now is waited for, and what is not named leaves.
    shutil.copytree(saved_models() / "plain", tmp_path / "plain")
    every = {"name": "iris", "model_version_policy": {"all": {}}, "version_labels": {"stable": 2}}
    client.call("HandleReloadConfigRequest", wanted(every, {"name": "plain"}), "ReloadConfigResponse")
    assert ids(client, version_label="stable") == [0, 0]
    answer = server.client.post("/v1/models/iris/labels/stable:predict", json=told)
    assert answer.json()["predictions"][0]["class_ids"] == 0
    assert states(server, "plain") == {"1": "AVAILABLE"}
    client.call("HandleReloadConfigRequest", wanted({"name": "plain"}), "ReloadConfigResponse")
    eventually(lambda: states(server, "iris") == {"2": "END", "1": "END"})


def test_the_versions_that_they_say_stay_when_others_come(managed, tmp_path, eventually):
    server, client = managed
    iris = {"name": "iris", "model_version_policy": {"specific": {"versions": [1]}}}
    client.call("HandleReloadConfigRequest", wanted(iris), "ReloadConfigResponse")
    shutil.copytree(tmp_path / "iris" / "2", tmp_path / "iris" / "3")
    eventually(lambda: known(server, "iris") == {"1": "ready", "2": "not served", "3": "not served"})
    assert ids(client) == [2, 2]
    iris = {"name": "iris", "model_version_policy": {"latest": {"num_versions": 1}}}
    client.call("HandleReloadConfigRequest", wanted(iris), "ReloadConfigResponse")
    assert ids(client) == [0, 0]


@pytest.mark.parametrize(
    "configs, code, said",
    [
        ([{"name": "iris", "base_path": "/etc"}], "INVALID_ARGUMENT", "names another folder; here a model has"),
        ([{"name": "iris"}, {"name": "iris"}], "INVALID_ARGUMENT", "is named twice"),
        ([{"name": "iris", "version_labels": {"a": 1}}], "INVALID_ARGUMENT", "for version 1, which is not loaded"),
    ],
)
def test_what_they_may_not_say(managed, configs, code, said):
    _, client = managed
    found, text = refused(client, "HandleReloadConfigRequest", wanted(*configs), "ReloadConfigResponse")
    assert (found, said in text) == (code, True), text
