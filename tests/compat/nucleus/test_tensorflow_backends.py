# SPDX-License-Identifier: Apache-2.0
"""TensorFlow handlers on TensorFlow itself, in the worker, and behind TensorFlow Serving's gRPC services.

That server is forebay, which the original client is tested against elsewhere: the original is a program that neither
Debian nor the package index has.
"""

import os
import shutil
import subprocess

import pytest
from tests.compat.nucleus.conftest import Server, write_project
from tests.compat.nucleus.test_tensorflow import HANDLER, ROW, ask, copied, text_of
from tests.conftest import Server as Forebay
from tests.models.saved_models import PYTHON, QUIET, SOURCE, saved_models
from tests.ports import free_port
from tests.waiting import eventually

pytest.importorskip("grpc")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A project whose worker has TensorFlow."""
    folder = tmp_path_factory.mktemp("embedded")
    store = copied(folder / "store", iris="iris/1", two="two/1", texts="texts/1", types="types/1")
    models = {"paths": [{"name": "total", "path": str(store / "two"), "signature_key": "total"}]}
    models["paths"] += [{"name": name, "path": str(store / name)} for name in ("iris", "two", "texts", "types")]
    state = folder / "state"
    state.mkdir()
    project = write_project(folder / "project", HANDLER, {"type": "tensorflow", "models": models})
    command = [str(PYTHON), "-m", "forebay", "serve", str(project), "--http-port", "0", "--state-dir", str(state)]
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        env = {**os.environ, **QUIET, "PYTHONPATH": str(SOURCE)}
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
    server = Server(project, state, process, out, err)
    try:
        yield server.wait_ready()
    finally:
        process.kill()
        process.wait()


def test_all_types_of_tensorflow(embedded):  # N130
    found = ask(embedded, {"x": [0, 2.5, 100]}, "types")
    assert found["float32"] == found["float64"] == [0, 2.5, 100]
    assert found["int64"] == ["0", "2", "100"]
    for name in ("int8", "int16", "int32", "uint8", "uint32"):
        assert found[name] == [0, 2, 100]
    assert found["bool"] == [False, True, True]
    assert found["string"] == ["MA==", "Mg==", "MTAw"]


def test_texts_and_other_signatures(embedded):  # N128, N131
    found = ask(embedded, {"texts": ["a", "b"]}, "texts")
    assert found == {"length": [1, 1], "upper": ["QQ==", "Qg=="]}
    assert ask(embedded, {"x": [ROW]}, "total") == {"total": [10.0]}
    assert ask(embedded, {"x": [ROW]}, "two")["class_ids"] == ["2"]
    assert 'key "texts": expected shape [-1]: expected strings or bytes' in text_of(embedded, {"texts": [1]}, "texts")


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def serving(port, tmp_path):
    """Starts TensorFlow Serving over the folder that the handler shares with it."""
    started = []

    def start():
        options = ["--worker-kind", "thread", "--lazy", "--versions", "all", "--manage", "--repository-poll-s", "0.1"]
        folder = tmp_path / "state/models/tfs"
        server = Forebay(folder, *options, "--grpc-port", str(port))
        started.append(server)
        return server.wait_ready()

    yield start
    for server in started:
        server.stop()


def remote(serve, tmp_path, port, **more):
    config = {
        "type": "tensorflow",
        "tfs_container_dns": f"127.0.0.1:{port}",
        "models": {"dir": str(tmp_path / "store")},
    }
    return serve(HANDLER, {**config, **more}, "--repository-poll-s", "0.2", state=tmp_path / "state")


def ready_at(server, name):
    return {version["version"]: version["state"] for version in server.client.get(f"/models/{name}").json()["versions"]}


def test_tensorflow_serving_answers_the_same(serve, serving, tmp_path, port):  # N134, N135
    copied(tmp_path / "store", iris="iris", scalar="scalar")
    folder = tmp_path / "state/models/tfs"
    folder.mkdir(parents=True)
    (folder / "seed").symlink_to(saved_models() / "plain")  # an empty folder is no repository
    backend = serving()
    server = remote(serve, tmp_path, port, threads_per_process=2)
    assert ask(server, {"x": [ROW, [0, 0, 0, 0]]}, "iris", "1")["class_ids"] == ["2", "0"]
    assert ask(server, {"x": [ROW]}, "iris")["class_ids"] == ["0"]
    assert ask(server, {"x": 1, "y": 2}, "scalar") == {"sum": [3.0]}
    assert ready_at(backend, "iris") == {"1": "ready", "2": "ready"}  # and nothing ran in the worker
    assert backend.metric("forebay_requests_total") >= 3
    # What changes in the store changes there: another version, other files of one, a model that is gone.
    shutil.copytree(saved_models() / "iris/1", tmp_path / "store/iris/3")
    eventually(lambda: ask(server, {"x": [ROW]}, "iris").get("class_ids") == ["2"])
    shutil.rmtree(tmp_path / "store/scalar")
    eventually(lambda: "couldn't be found" in ask(server, {"x": 1, "y": 2}, "scalar").get("text", ""))


def test_tensorflow_serving_that_was_started_anew(serve, serving, tmp_path, port):  # N134, N138
    copied(tmp_path / "store", iris="iris/1")
    folder = tmp_path / "state/models/tfs"
    folder.mkdir(parents=True)
    (folder / "seed").symlink_to(saved_models() / "plain")
    backend = serving()
    server = remote(serve, tmp_path, port)
    assert ask(server, {"x": [ROW]}, "iris")["class_ids"] == ["2"]
    backend.stop()
    text = text_of(server, {"x": [ROW]}, "iris")
    assert f"TensorFlow Serving at 127.0.0.1:{port} cannot be asked" in text
    serving()
    eventually(lambda: ask(server, {"x": [ROW]}, "iris").get("class_ids") == ["2"])
