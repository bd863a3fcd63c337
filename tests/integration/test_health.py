# SPDX-License-Identifier: Apache-2.0
"""Models that say how they are: readiness follows, and a worker process that stays unhealthy is replaced."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import MODELS

KINDS = ["inline", "thread", "process"]
NEVER = ("--max-health-failures", "1000000000")


class Health:
    """The file that the models of health.py read."""

    def __init__(self, folder):
        self.path = folder / "state"
        self.env = {"HEALTH": str(self.path)}
        self.says("ok")

    def says(self, what):
        new = self.path.with_suffix(".new")
        new.write_text(what)
        new.rename(self.path)

    def calls(self):
        try:
            return self.path.with_suffix(".calls").read_text()
        except FileNotFoundError:
            return ""


@pytest.fixture
def health(tmp_path):
    return Health(tmp_path)


def why(server):
    """Why the server is not ready; empty if it is."""
    answer = server.client.get("/readyz")
    return "" if answer.status_code == 200 else answer.text


def serve_model(serve, name, kind, health, *options):
    return serve(f"health.py:{name}", "--worker-kind", kind, "--health-s", "0.1", *options, env=health.env)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Health(tmp_path_factory.mktemp("health"))


@pytest.fixture(scope="module", params=KINDS)
def server(request, launch, shared):
    return launch("health.py", "--worker-kind", request.param, "--health-s", "0.1", *NEVER, env=shared.env)


def test_readiness_is_what_the_models_say(server, shared, eventually):
    names = "told", "awaits"
    eventually(lambda: why(server) == "")  # on a busy machine a call may be late
    for says, told in {
        "false": "healthy returned False",
        "raise": "the GPU is gone",
        "none": "healthy returned None",
    }.items():
        shared.says(says)
        eventually(lambda told=told: why(server).count(told) == 3)
        for name in names:
            assert f"model '{name}' has no healthy worker: worker 0 is not healthy: " in why(server)
            assert server.client.get(f"/v2/models/{name}/ready").status_code == 503
            assert server.client.get(f"/models/{name}").json()["ready"] is False
            assert server.metric("forebay_workers_unhealthy", endpoint=name) == 1
            assert server.call(name, 0.0).status_code == 200, "it goes on to answer what it is given"
        shared.says("ok")
        eventually(lambda: why(server) == "")
    for name in names:
        eventually(lambda name=name: server.metric("forebay_workers_unhealthy", endpoint=name) == 0)
        assert server.metric("forebay_worker_restarts_total", endpoint=name) == 0


@pytest.mark.parametrize("name, sample", [("told", 0.002), ("counts", 3)])
def test_busy_workers_are_asked_too_and_never_beside_a_batch(server, shared, eventually, name, sample):
    stop = threading.Event()
    told = set()

    def client():
        with server.connect() as wire:
            while not stop.is_set():
                wire.send(wire.request("POST", f"/models/{name}", str(sample).encode()))
                told.add(wire.read().status if name == "told" else wire.read_head().status)
                while name != "told" and wire.read_chunk():
                    pass

    with ThreadPoolExecutor(2 if name == "told" else 1) as executor:  # streams that overlap leave no pause
        clients = [executor.submit(client) for _ in range(executor._max_workers)]
        try:
            asked = shared.calls().count(name)
            eventually(lambda: shared.calls().count(name) > asked + 3)
        finally:
            stop.set()
        for one in clients:
            one.result()
    assert told == {200}
    assert "busy" not in shared.calls()


def test_a_process_that_stays_unhealthy_is_replaced_and_unready_until_it_says_that_it_is_well(
    serve, health, eventually
):
    server = serve_model(serve, "Told", "process", health, "--max-health-failures", "2")
    first = server.call("told", 0.0).json()
    health.says("false")
    eventually(lambda: server.metric("forebay_worker_restarts_total") >= 1)
    assert "worker 0 is replaced after 2 failed checks" in server.log
    health.says("ok")
    eventually(lambda: why(server) == "")
    assert server.call("told", 0.0).json() != first


@pytest.mark.parametrize("name, kind", [("Told", "thread"), ("Told", "process"), ("Awaits", "inline")])
def test_a_hook_that_hangs_has_failed_and_its_worker_answers_again(serve, health, eventually, name, kind):
    server = serve_model(serve, name, kind, health, *NEVER, "--stuck-s", "0.05")
    health.says("hang")
    eventually(lambda: "healthy did not return within 0.1 s" in why(server))
    health.says("ok")
    eventually(lambda: why(server) == "", "another thread, process or coroutine takes the place of the one that hangs")
    assert server.call(name.lower(), 0.0).status_code == 200


def test_a_hook_that_hangs_fails_each_period_so_its_process_is_replaced(serve, health, eventually):
    server = serve_model(serve, "Told", "process", health, "--max-health-failures", "3")
    health.says("hang")
    eventually(lambda: "worker 0 is replaced after 3 failed checks: healthy did not return" in server.log)
    health.says("ok")
    eventually(lambda: why(server) == "")


def test_a_process_that_dies_in_its_hook_is_replaced(serve, health, eventually):
    server = serve_model(serve, "Told", "process", health)
    health.says("exit")
    eventually(lambda: server.metric("forebay_worker_restarts_total") >= 1)
    health.says("ok")
    eventually(lambda: why(server) == "")
    assert server.call("told", 0.0).status_code == 200


def test_one_of_two_workers_is_enough_to_be_ready(serve, tmp_path, eventually):
    path = tmp_path / "model.py"
    path.write_text(
        "import os, fcntl, forebay\n\nclass Rival(forebay.Model):\n"
        "    def load(self):\n        self.lock = open(__file__)\n        self.has_it = True\n"
        "        try:\n            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "        except BlockingIOError:\n            self.has_it = False\n"
        "    def predict(self, batch: list[int]) -> list[int]: return batch\n"
        "    def healthy(self): return self.has_it\n"
    )
    server = serve(path, "--workers", "2", "--health-s", "0.1", *NEVER)
    eventually(lambda: server.metric("forebay_workers_unhealthy") == 1 and why(server) == "")


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_models_of_a_graph_are_asked(serve, health, eventually, tmp_path, kind):
    (tmp_path / "health.py").write_text((MODELS / "health.py").read_text())
    path = tmp_path / "graph.py"
    path.write_text(
        "import forebay\nfrom health import Told\n\ntold = forebay.node(Told)\n\n@forebay.compose\n"
        "def asked(seconds: float) -> int:\n    return told(seconds)\n"
    )
    server = serve(path, "--worker-kind", kind, "--health-s", "0.1", *NEVER, env=health.env)
    assert server.call("asked", 0.0).status_code == 200
    health.says("false")
    eventually(lambda: "its node 'told' has no healthy worker: worker 0 is not healthy: healthy r" in why(server))
    health.says("ok")
    eventually(lambda: why(server) == "")
