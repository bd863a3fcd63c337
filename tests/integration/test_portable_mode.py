# SPDX-License-Identifier: Apache-2.0
"""Servers whose Python lacks what CPython has on Linux only (`tests/portable`): nothing a client sees depends on it."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

MODELS = """
import os
from forebay import Model

class Echo(Model):
    def predict(self, batch: list[bytes]) -> list[bytes]: return batch

class Count(Model):
    def predict(self, batch: list[int]):
        for number in range(3):
            yield [number for _ in batch]

class Here(Model):
    def predict(self, batch: list[int]) -> list[tuple[int, bool]]:
        return [(os.getpid(), hasattr(os, "pidfd_open")) for _ in batch]
"""
PORTABLE = str(Path(__file__).parents[1] / "portable")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("portable") / "model.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def folder():
    """Where the server has its own folders; the path of a socket in there must stay short."""
    with tempfile.TemporaryDirectory(prefix="portable-") as found:
        yield Path(found)


def environment(folder):
    path = os.pathsep.join(filter(None, (PORTABLE, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "TMPDIR": str(folder)}


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_every_kind_of_worker_answers(launch, model, folder, kind):
    server = launch(model, "--worker-kind", kind, env=environment(folder))
    pid, has_linux = server.call("here", 0).json()
    assert not has_linux
    assert (pid == server.process.pid) == (kind != "process")
    body = os.urandom(3_000_000)
    for sent in (b"", b"x", body):
        answer = server.client.post("/models/echo", content=sent, headers={"content-type": "application/octet-stream"})
        assert (answer.status_code, answer.content) == (200, sent)
    lines = server.call("count", 3).text.splitlines()
    assert [line for line in lines if line.startswith("data:")] == ["data: 0", "data: 1", "data: 2"]


def test_a_killed_worker_is_replaced_and_no_worker_is_left_of_a_killed_server(serve, model, folder, eventually):  # F23
    server = serve(model, "--worker-kind", "process", env=environment(folder))
    first, _ = server.call("here", 0).json()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: server.metric("forebay_worker_restarts_total") == 1)
    second, _ = eventually(lambda: (found := server.call("here", 0)).status_code == 200 and found.json())
    assert second != first
    assert list(folder.glob(f"forebay-{server.process.pid}-*"))  # here a socket keeps its name
    server.signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: not is_there(second), "the end of the worker")
    eventually(lambda: not list(folder.glob(f"forebay-{server.process.pid}-*")), "the end of the folder")
    server.wait()
    assert "Traceback" not in server.log


def test_devices_and_shared_memory_of_linux_are_refused_by_a_sentence(cli, model, folder):
    env = {**os.environ, **environment(folder)}
    for flags, told in {
        ("--devices", "cpu:0"): "only Linux ties workers to some",
        ("--shared-memory",): "--shared-memory needs Linux",
    }.items():
        refused = cli("serve", model, "--http-port", "0", *flags, env=env)
        assert refused.returncode == 2
        assert told in refused.stderr
