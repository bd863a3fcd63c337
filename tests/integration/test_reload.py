# SPDX-License-Identifier: Apache-2.0
"""Code, configuration and model files change under load: nothing fails, and what is broken never answers."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading

import httpx
import pytest
from tests.conftest import FOREBAY
from tests.waiting import PATIENCE_S, eventually

MODEL = """
import forebay
{extra}

class Tells(forebay.Model):
    version = "{version}"

    def load(self):
        {load}

    def predict(self, batch):
        return ["{answer}"] * len(batch)
"""

CLIENTS = 4


def write(folder, answer, *, extra="", load="pass", version="1", name="model.py"):
    """Writes a file in one step, as editors do."""
    path = folder / name
    draft = folder / "draft"
    draft.write_text(MODEL.format(answer=answer, extra=extra, load=load, version=version))
    draft.replace(path)
    return path


class Load:
    """Clients that ask again and again over connections that stay, and note every answer."""

    def __init__(self, server, path="/models/tells", sample=b"1"):
        self.server = server
        self.path = path
        self.sample = sample
        self.answers = {}
        self.wrong = []
        self.is_over = False
        self.counting = threading.Lock()
        self.threads = [threading.Thread(target=self._client, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_error):
        self.is_over = True
        for thread in self.threads:
            thread.join(PATIENCE_S)

    def _client(self):
        try:
            with self.server.connect() as wire:
                while not self.is_over:
                    answer = wire.ask("POST", self.path, self.sample)
                    if answer.status != 200:
                        self.wrong.append((answer.status, answer.body))
                    with self.counting:
                        self.answers[answer.body] = self.answers.get(answer.body, 0) + 1
        except Exception as error:
            self.wrong.append(repr(error))

    def until(self, answer):
        """Waits until somebody got this answer."""
        wanted = answer if isinstance(answer, bytes) else f'"{answer}"'.encode()
        eventually(lambda: wanted in self.answers or self.wrong, f"an answer {answer}")


def states(server, name="tells"):
    models = {one["name"]: one for one in server.client.get("/models").json()["models"]}
    return [(one["version"], one["state"], one["weight"]) for one in models[name]["versions"]] if name in models else []


def ask(server, path="/models/tells"):
    return server.client.post(path, json=1).json()


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_an_edit_is_seen_and_no_request_fails(serve, tmp_path, kind):  # F51: there was no reload while developing
    (tmp_path / "helper.py").write_text("WORD = 'a'\n")
    extra = "import helper"
    path = write(tmp_path, '" + helper.WORD + "', extra=extra)
    server = serve(path, "--reload", "--worker-kind", kind)
    with Load(server) as load:
        load.until("a")
        (tmp_path / "helper.py").write_text("WORD = 'b'\n")  # of the same length, within the same second
        load.until("b")
        write(tmp_path, "c")
        load.until("c")
    assert load.wrong == []
    eventually(lambda: states(server) == [("1", "ready", 1)])
    assert server.metric("forebay_requests_total", endpoint="tells", code="ok") == sum(load.answers.values())
    assert "Traceback" not in server.log


BROKEN = {
    "syntax": ({"extra": "def ("}, "model.py:3"),
    "import": ({"extra": "import no_such_thing"}, "no_such_thing"),
    "raises": ({"load": "raise OSError('no weights')"}, "no weights"),
    "exits": ({"extra": "raise SystemExit(3)"}, "SystemExit"),
}


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_what_is_broken_is_told_and_the_old_code_goes_on(serve, tmp_path, kind):  # F51: SIGHUP drained
    server = serve(write(tmp_path, "good"), "--worker-kind", kind)
    with Load(server) as load:
        load.until("good")
        for name, (broken, reason) in BROKEN.items():
            before = len(server.lines)
            write(tmp_path, name, **broken)
            server.signal(signal.SIGHUP)
            eventually(lambda: any(reason in line for line in server.lines[before:]), f"{reason} in the log")  # noqa: B023
            (failed,) = [
                one for one in server.client.get("/models/tells").json()["versions"] if one["state"] == "failed"
            ]
            assert reason in failed["error"]
            assert ("worker processes that exit are not replaced until" in failed["error"]) is (
                kind == "process" and name != "raises"
            )
            assert ask(server) == "good"
        write(tmp_path, "better")
        server.signal(signal.SIGHUP)
        load.until("better")
    assert load.wrong == []
    assert set(load.answers) == {b'"good"', b'"better"'}
    eventually(lambda: states(server) == [("1", "ready", 1)])
    server.signal()
    assert server.wait() == 0


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("where", ["load", "extra"])
def test_what_hangs_while_it_loads_is_given_up(serve, tmp_path, kind, where):
    server = serve(write(tmp_path, "good"), "--worker-kind", kind, "--load-timeout-s", "0.5")
    write(tmp_path, "bad", **{where: "__import__('time').sleep(600)"})
    server.signal(signal.SIGHUP)
    eventually(lambda: ("1", "failed", 0) in states(server))
    eventually(lambda: "was not ready in time" in server.log)
    assert ask(server) == "good"
    server.signal()
    assert server.wait() == 0


def test_a_reload_that_is_asked_for_while_the_file_is_imported_comes_after_it(serve, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"
    waits = (
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)"
    )
    server = serve(write(tmp_path, "old", extra=waits), "--worker-kind", "thread", ready=False)
    eventually(begun.exists)
    write(tmp_path, "new")
    server.signal(signal.SIGHUP)
    go.touch()
    server.wait_ready()
    eventually(lambda: ask(server) == "new")
    server.signal()
    assert server.wait() == 0


def test_a_worker_that_is_killed_while_versions_change_costs_nobody_an_answer(serve, tmp_path):
    server = serve(write(tmp_path, "a"), "--worker-kind", "process", "--workers", "2")

    def workers():
        found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    with Load(server) as load:
        for answer in "bc":
            victim = workers()[0]
            write(tmp_path, answer)
            server.signal(signal.SIGHUP)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            load.until(answer)
    assert load.wrong == []


def test_a_stream_comes_to_its_end_from_the_version_that_began_it(serve, tmp_path):
    path, go = tmp_path / "model.py", tmp_path / "go"
    code = (
        "import time, pathlib, forebay\n\nclass Tells(forebay.Model):\n    def predict(self, batch):\n"
        f"        yield ['NAME'] * len(batch)\n        while not pathlib.Path({str(go)!r}).exists():\n"
        "            time.sleep(0.01)\n        yield ['NAME'] * len(batch)\n"
    )
    path.write_text(code.replace("NAME", "old"))
    server = serve(path, "--worker-kind", "thread")
    with server.connect() as wire:
        wire.send(wire.request("POST", "/models/tells", b"0"))
        wire.read_head()
        assert wire.read_chunk() == b'data: "old"\n\n'
        path.write_text(code.replace("NAME", "new"))
        server.signal(signal.SIGHUP)
        eventually(lambda: ("1", "leaving", 1) in states(server))
        go.touch()
        assert wire.read_chunk() == b'data: "old"\n\n'
        assert wire.read_chunk() == b""
        assert b'data: "new"' in wire.ask("POST", "/models/tells", b"0").body
    eventually(lambda: states(server) == [("1", "ready", 1)])


COMPOSED = """
import forebay
from helper import WORD

@forebay.node
def up(number: int) -> str:
    return WORD

@forebay.compose
def tells(number: int) -> str:
    return up(number)
"""

SERVING = """
from forebay import Serving
from helper import VALUE

tells = Serving.new(lambda options: lambda batch: batch.realize() * 0 + VALUE)
"""


def test_a_composition_and_a_serving_are_exchanged_as_models_are(serve, tmp_path):
    (tmp_path / "composed.py").write_text(COMPOSED)
    (tmp_path / "serving.py").write_text(SERVING)
    (tmp_path / "helper.py").write_text("WORD = 'a'\nVALUE = 7\n")
    targets = "models: [composed.py, {target: 'serving.py:tells', name: serving}]\n"
    (tmp_path / "forebay.yaml").write_text(targets)
    server = serve(tmp_path, "--worker-kind", "thread")
    with Load(server) as composed, Load(server, "/models/serving") as serving:
        composed.until("a")
        serving.until(b"7")
        (tmp_path / "helper.py").write_text("WORD = 'b'\nVALUE = 8\n")
        server.signal(signal.SIGHUP)
        composed.until("b")
        serving.until(b"8")
    assert composed.wrong == serving.wrong == []
    assert set(composed.answers) == {b'"a"', b'"b"'}
    eventually(lambda: states(server) == [("1", "ready", 1)])
    assert "Traceback" not in server.log


YAML = """
models:
{models}
http:
  max_connections: {most}
worker_kind: thread
"""


def test_a_configuration_is_read_anew(serve, tmp_path):
    for number in "12":
        write(tmp_path, number, name=f"v{number}.py", version=number)
    write(tmp_path, "other", name="other.py")

    def config(*models, most=1000):
        text = YAML.format(models="\n".join(f"  - {{{one}}}" for one in models), most=most)
        (tmp_path / "forebay.yaml").write_text(text)

    config("target: v1.py", "target: other.py, name: other")
    server = serve(tmp_path)
    assert ask(server, "/models/other") == "other"
    with Load(server) as load:
        config("target: v1.py, weight: 90", "target: v2.py, weight: 10", most=2000)
        server.signal(signal.SIGHUP)
        load.until("2")
        eventually(lambda: states(server) == [("1", "ready", 90), ("2", "ready", 10)])
        eventually(lambda: "changed settings that need a restart: --max-connections" in server.log)
        eventually(lambda: states(server, "other") == [])
        assert server.client.post("/models/other", json=1).status_code == 404
        assert ask(server, "/models/tells/versions/1") == "1"
        assert ask(server, "/models/tells/versions/2") == "2"
        assert server.client.get("/models/tells/versions/2").json()["version"] == "2"
        answers = [ask(server) for _ in range(50)]
        assert answers.count("1") > answers.count("2") > 0
        config("target: nowhere.py, worker_kind: process")
        server.signal(signal.SIGHUP)
        eventually(lambda: "nowhere.py" in server.client.get("/models").json().get("problem", ""))
        assert "worker processes that exit" not in server.log  # it has none: nothing was served from it
        (tmp_path / "forebay.yaml").write_text("modles: []\n")
        server.signal(signal.SIGHUP)
        eventually(lambda: "did you mean models" in server.client.get("/models").json().get("problem", ""))
        assert states(server) == [("1", "ready", 90), ("2", "ready", 10)]
        config("target: v2.py", "target: other.py, name: other")
        server.signal(signal.SIGHUP)
        eventually(lambda: states(server) == [("2", "ready", 1)] and states(server, "other") == [("1", "ready", 1)])
        assert "problem" not in server.client.get("/models").json()
    assert load.wrong == []
    assert server.metric("forebay_requests_total", endpoint="tells", version="2", code="ok") > 0


@pytest.mark.parametrize("broken", [{"extra": "def ("}, {"load": "raise OSError('no weights')"}])
def test_a_model_that_could_not_be_reloaded_leaves_with_its_error(serve, tmp_path, broken):
    write(tmp_path, "good")
    write(tmp_path, "other", name="other.py")

    def config(*models):
        (tmp_path / "forebay.yaml").write_text(YAML.format(models="\n".join(models), most=10))

    config("  - {target: model.py}", "  - {target: other.py, name: other}")
    server = serve(tmp_path)
    write(tmp_path, "bad", **broken)
    server.signal(signal.SIGHUP)
    eventually(lambda: ("1", "failed", 0) in states(server))
    config("  - {target: model.py, name: third}", "  - {target: other.py, name: other}")
    server.signal(signal.SIGHUP)
    eventually(lambda: states(server, "third") or server.client.get("/models").json().get("problem"))
    config("  - {target: other.py, name: other}")
    server.signal(signal.SIGHUP)
    eventually(lambda: states(server) == [] and states(server, "third") == [], "both are gone")
    for name in ("tells", "third"):
        assert server.client.post(f"/models/{name}", json=1).status_code == 404
    assert ask(server, "/models/other") == "other"


def test_other_projects_are_not_reloaded(cli, tmp_path):
    (tmp_path / "nucleus.yaml").write_text("service:\n  name: it\n")
    found = cli("serve", tmp_path, "--reload")
    assert "--reload is for forebay's own models" in found.stderr
    assert found.returncode != 0


def test_a_terminal_that_is_closed_ends_the_server(tmp_path):
    path = write(tmp_path, "a")
    terminal, inside = os.openpty()
    # The leader of a session of its own, as the program in a terminal's window is.
    command = ["setsid", "--ctty", *FOREBAY, "serve", str(path), "--http-port", "0"]
    plain = {**os.environ, "NO_COLOR": "1"}  # colours would stand around the URL
    server = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=plain)
    os.close(inside)
    said = b""
    while b"ready at" not in said:
        said += os.read(terminal, 4096)
    url = said.split(b"ready at ")[1].split()[0].decode()
    assert httpx.post(f"{url}/models/tells", json=1).json() == "a"
    os.close(terminal)
    assert server.wait() == 0


PID = """
import os
from pathlib import Path

import forebay


class Tells(forebay.Model):
    def predict(self, batch):
        return [[os.getpid(), "{answer}", Path("weights").read_text()] for _ in batch]
"""


def put_in_place(folder, answer):
    """Writes a project whose model tells a file of its working folder."""
    folder.mkdir()
    (folder / "model.py").write_text(PID.format(answer=answer))
    (folder / "weights").write_text(answer)


@pytest.mark.parametrize(
    "away", [shutil.rmtree, lambda folder: folder.rename(f"{folder}.old")], ids=["removed", "moved"]
)
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_folder_that_is_exchanged_while_it_is_worked_in_is_found_by_its_name(
    serve, tmp_path, monkeypatch, away, kind
):
    folder = tmp_path / "project"
    put_in_place(folder, "old")
    monkeypatch.chdir(folder)
    server = serve(None, "model.py", "--worker-kind", kind)
    monkeypatch.chdir(tmp_path)
    pid, *told = server.call("tells", 1).json()
    assert told == ["old", "old"]
    away(folder)
    put_in_place(folder, "new")
    if kind == "process":
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: (answer := server.call("tells", 1)).status_code == 200 and answer.json()[1:] == ["new", "new"]
        )
    server.signal(signal.SIGHUP)
    eventually(lambda: "reloaded in" in server.log)
    assert server.call("tells", 1).json()[1:] == ["new", "new"]


def test_a_worker_is_replaced_where_the_working_folder_is_gone(serve, tmp_path, monkeypatch):
    model = tmp_path / "model.py"
    model.write_text(PID.format(answer="").replace('Path("weights").read_text()', "''"))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    server = serve(None, str(model))
    monkeypatch.chdir(tmp_path)
    folder.rmdir()
    pid = server.call("tells", 1).json()[0]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: (answer := server.call("tells", 1)).status_code == 200 and answer.json()[0] != pid)
