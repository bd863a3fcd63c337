# SPDX-License-Identifier: Apache-2.0
"""Models of the project that have no workers of their own: others dial in for them (`workers: 0`)."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tests.integration.test_attached import Worker, door_of, joined, sentence, workers_of

MODEL = """
import os, pathlib, forebay

class It(forebay.Model):
    name = "it"
    {settings}

    def load(self):
        with open("{loads}", "a") as file:
            file.write(f"{{os.getpid()}}\\n")

    def predict(self, batch: list[{type}]) -> list[tuple[int, int]]:
        if -1 in batch and len(batch) > 1:
            raise ValueError("it does not like company")
        return [(len(batch), os.getpid()) for _ in batch]
"""

PARITY = "batch_key = staticmethod(lambda sample: sample % 2)"

COMPOSED = """
@forebay.compose
def both(sample: int) -> tuple[int, int]:
    return forebay.node(It)(sample)
"""


@pytest.fixture
def write(tmp_path):
    """Writes the model, as the server and its workers may know it differently."""

    def file(name="model.py", settings="", type="int"):
        path = tmp_path / name
        path.write_text(MODEL.format(settings=settings, loads=tmp_path / "loads", type=type))
        return path

    return file


@pytest.fixture
def project(serve, tmp_path, write):
    """Starts a server whose model waits for workers."""

    def start(*options, settings="", **more):
        file = write(settings=settings)
        return door_of(serve(file, "--workers", "0", "--attach", f"unix:{tmp_path}/s", *options, **more))

    return start


@pytest.fixture
def work(request, write):
    """Starts workers for a server."""

    def start(server, *options, **model):
        file = write("worker.py", **model)
        worker = Worker(file, server.door, *options)
        request.addfinalizer(worker.stop)
        return worker

    return start


def test_it_is_known_from_the_start_and_answers_once_a_worker_has_joined(project, work, tmp_path, eventually):
    server = project("--worker-grace-s", "60")
    ready = server.client.get("/readyz")
    assert (ready.status_code, ready.json()["problems"]) == (503, ["model 'it' has no worker"])
    assert "/models/it" in server.client.get("/openapi.json").json()["paths"]
    assert server.client.get("/v2/models/it").json()["inputs"][0]["datatype"] == "INT64"
    assert server.client.get("/v2/models/it/ready").status_code == 503
    with ThreadPoolExecutor() as executor:
        waiting = executor.submit(server.call, "it", 1)
        eventually(lambda: server.metric("forebay_waiting_samples") == 1)
        worker = work(server).ready()
        assert waiting.result().json() == [1, worker.pid]
    assert server.client.get("/readyz").status_code == 200
    assert server.call("it", "no number").status_code == 422
    assert (tmp_path / "loads").read_text().split() == [str(worker.pid)]  # the server itself loads nothing
    assert worker.signal().wait() == 0
    joined(server, "it", 0, eventually)
    assert server.client.get("/readyz").status_code == 503


def test_without_a_worker_requests_wait_for_the_grace_period(project):
    server = project("--worker-grace-s", "0.2")
    refused = server.call("it", 1)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        503,
        "no worker of 'it' is attached; try again when one has joined",
    )


def test_how_requests_are_batched_is_what_the_project_says(project, work, eventually):
    """Its key, its limits and what it says of errors: what the worker's file says of them is not asked."""
    options = ("--idle", "wait", "--max-wait-ms", "300", "--isolate-errors")
    server = project(*options, settings=f"max_batch_size = 3; {PARITY}")
    work(server, settings="max_batch_size = 64; max_queue = 1; isolate_errors = False").ready()
    joined(server, "it", 1, eventually)
    with ThreadPoolExecutor(8) as executor:
        sizes = [answer.json()[0] for answer in executor.map(partial(server.call, "it"), range(6))]
        assert sizes == [3] * 6
        sizes = [answer.json()[0] for answer in executor.map(partial(server.call, "it"), [0, 1, 2])]
        assert sizes == [2, 1, 2]
        answers = list(executor.map(partial(server.call, "it"), [-1, 1, 3]))
    assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize(
    "options, model, words",
    [
        ((), {"type": "float"}, "the project describes 'it' otherwise (its input, its tensors); start the worker with"),
        (("--model-version", "2"), {}, "the project has workers dial in for version '1' of 'it', not '2'"),
    ],
)
def test_a_worker_that_describes_the_model_otherwise_is_told_how(project, work, options, model, words):
    server = project()
    assert words in sentence(work(server, *options, **model))
    assert server.client.get("/v2/models/it").json()["inputs"][0]["datatype"] == "INT64"


def test_a_worker_may_serve_under_the_name_that_the_project_gave(serve, work, write, tmp_path, eventually):
    write()
    two = [f"{{target: model.py, name: {name}, workers: 0}}" for name in ("one", "other")]
    (tmp_path / "forebay.yaml").write_text(f"models: [{', '.join(two)}]\nattach: unix:s\n")
    server = door_of(serve(tmp_path))
    assert "POST /models/other  version 1, batches of up to 64 (gather), workers dial in" in server.log
    worker = work(server, "--name", "other").ready()
    joined(server, "other", 1, eventually)
    assert server.call("other", 1).json() == [1, worker.pid]
    assert workers_of(server, "one")["alive"] == 0
    assert server.client.get("/readyz").json()["problems"] == ["model 'one' has no worker"]


def test_a_reload_keeps_the_workers(project, work, tmp_path, eventually):
    server = project("--worker-grace-s", "60", settings="max_batch_size = 3")
    worker = work(server).ready()
    joined(server, "it", 1, eventually)
    file = tmp_path / "model.py"
    file.write_text(re.sub("max_batch_size = 3", "max_batch_size = 4", file.read_text()))
    server.signal(signal.SIGHUP)
    eventually(lambda: "reloaded in" in server.log)
    assert server.client.get("/models/it").json()["batching"]["max_batch_size"] == 4
    assert server.call("it", 1).json() == [1, worker.pid]
    joined(server, "it", 1, eventually)


@pytest.mark.parametrize(
    "more, options, words",
    [
        ("", (), "workers is 0, so workers dial in, and they need a door: --attach ADDRESS"),
        (COMPOSED, ("--attach", "unix:s"), "graphs, servings, model files and models of a repository need at least 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(cli, write, more, options, words):
    file = write()
    file.write_text(file.read_text() + more)
    done = cli("check", file, "--workers", "0", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_server_says_how_many_workers_should_dial_in(serve, write, work, tmp_path, eventually):
    write(settings="max_batch_size = 1")
    (tmp_path / "forebay.yaml").write_text(
        "models: [{target: model.py, workers: {min: 0, max: 3, scale_down_s: 0.5, dial_in: true}}]\nattach: unix:s\n"
    )
    server = door_of(serve(tmp_path / "forebay.yaml", "--worker-grace-s", "0"))
    assert (server.client.get("/readyz").status_code, server.metric("forebay_workers_wanted")) == (503, 1)
    with ThreadPoolExecutor(4) as executor:
        waiting = [executor.submit(server.call, "it", 1) for _ in range(4)]  # nobody has come, and none is refused
        eventually(lambda: server.metric("forebay_waiting_samples") == 4)
        worker = work(server, settings="max_batch_size = 1")
        assert {one.result().status_code for one in waiting} == {200}
    eventually(lambda: server.metric("forebay_workers_wanted") == 0)
    worker.stop()
    eventually(lambda: workers_of(server, "it")["alive"] == 0)
    assert server.client.get("/readyz").status_code == 200
    with ThreadPoolExecutor(1) as executor:
        late = executor.submit(server.call, "it", 1)
        eventually(lambda: server.metric("forebay_workers_wanted") >= 1)
        work(server, settings="max_batch_size = 1")
        assert late.result().status_code == 200
