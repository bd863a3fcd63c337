# SPDX-License-Identifier: Apache-2.0
"""`forebay.start`: a server beside a program."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.models import model_files, zoo
from tests.waiting import PATIENCE_S

import forebay
from forebay.errors import ConfigError, ModelError, Unavailable

SRC = str(Path(__file__).parents[2] / "src")

SCRIPT = """
import forebay

class Shout(forebay.Model):
    def predict(self, batch):
        return [text.upper() for text in batch]

{guard}
    server = forebay.start(Shout, port=0, worker_kind="{kind}")
    print(server.url, flush=True)
    {then}
"""


PACKAGED = """
import forebay
from .marks import MARK

class Loud(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text + MARK for text in batch]

loud = forebay.node(Loud)

@forebay.compose
def louder(text: str) -> str:
    return loud(text)
"""


class Shout(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]


class Broken(forebay.Model):
    def load(self):
        raise OSError("no such weights")

    def predict(self, batch):
        return batch


def run(folder, **parts):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(**{"guard": "if __name__ == '__main__':", "kind": "thread", "then": "pass", **parts}))
    command = [sys.executable, str(path)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": SRC}
    )


def test_it_answers_within_its_with_and_not_after():
    before = threading.active_count()
    with forebay.start(Shout, port=0) as server:
        assert server.is_running
        assert server.url.startswith("http://127.0.0.1:")
        assert httpx.post(f"{server.url}/models/shout", json="a").json() == "A"
        assert repr(server) == f"<forebay server at {server.url}>"
    assert not server.is_running
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{server.url}/models/shout", json="a")
    server.stop()  # once more does nothing
    server.wait()
    assert threading.active_count() <= before


def test_a_file_is_served_as_the_command_serves_it():
    with forebay.start(zoo.__file__, port=0, worker_kind="thread", max_batch_size=3) as server:
        assert httpx.get(f"{server.url}/models/echo").json()["batching"]["max_batch_size"] == 3
        assert httpx.post(f"{server.url}/models/echo", json=[1]).json() == [1]


def test_two_servers_live_side_by_side():
    with forebay.start(Shout, port=0) as one, forebay.start(Shout, port=0) as other:
        assert one.url != other.url
        for server in (one, other):
            assert httpx.post(server.url, json="a").json() == "A"


def test_what_keeps_it_from_starting_is_raised():
    with pytest.raises(ModelError, match="no such weights"):
        forebay.start(Broken, port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        forebay.start(Shout, port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match="unknown setting prot; did you mean port"):
        forebay.start(Shout, prot=0)
    assert "forebay-server" not in [thread.name for thread in threading.enumerate()]


def test_where_threads_were_replaced_it_says_so_and_does_not_stand_still(monkeypatch):  # as gevent and eventlet do
    monkeypatch.setattr(threading, "get_ident", lambda: 1)  # each task has an ident of its own
    with pytest.raises(ConfigError, match=r"a server beside a program needs threads.*monkey patching by gevent"):
        forebay.start(Shout, port=0)
    monkeypatch.undo()
    assert "forebay-server" not in [thread.name for thread in threading.enumerate()]


def test_where_what_watches_processes_was_replaced_it_says_so(monkeypatch, models):  # the same, with threads left alone
    class Popen(subprocess.Popen):
        pass

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with forebay.start(models / "single.py", worker_kind="process", port=0) as server:  # a tool's own class is none
        assert server.url
    monkeypatch.setattr(Popen, "__module__", "gevent.subprocess")
    with pytest.raises(
        ConfigError, match=r"worker processes.*has replaced subprocess of this program: run it in threads"
    ):
        forebay.start(models / "single.py", worker_kind="process", port=0)
    with forebay.start(models / "single.py", worker_kind="thread", port=0) as server:
        assert server.url


def test_who_loads_a_version_while_another_thread_stops_the_server_is_told_so():
    begun, go = threading.Event(), threading.Event()

    class Slow(Shout):
        def load(self):
            begun.set()
            go.wait(PATIENCE_S)

    server = forebay.start(Shout, port=0)
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(server.load, Slow, name="shout", version="2")
        assert begun.wait(PATIENCE_S)
        stopping = threads.submit(server.stop)
        with pytest.raises(Unavailable, match="the server is draining"):
            loading.result(PATIENCE_S)
        go.set()
        stopping.result(PATIENCE_S)


def test_a_program_that_forgets_to_stop_it_ends_all_the_same(tmp_path):
    process = run(tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("http://")


THREAD = """
    import threading, urllib.request

    def ask():
        threading.main_thread().join()
        headers = {"content-type": "application/json"}
        print(urllib.request.urlopen(urllib.request.Request(server.url, b'"a"', headers)).read())

    threading.Thread(target=ask).start()
"""


def test_a_server_that_nobody_stops_answers_threads_that_outlive_the_main_one(tmp_path):
    process = run(tmp_path, then=THREAD)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("""b'"A"'\n""")


FORK = """
    import os, sys, warnings

    warnings.simplefilter("ignore")  # newer Pythons advise against what is done here
    if (child := os.fork()) == 0:
        print(server)
        try:
            server.unload("shout", "1")
        except RuntimeError as error:
            print(error)
        server.wait()
        sys.exit()  # as a program ends that forgets to stop it
    assert os.waitpid(child, 0) == (child, 0)
    print(server, server.is_running)
"""


def test_a_forked_child_has_no_server_to_wait_for_and_leaves_its_parents_alone(tmp_path):
    process = run(tmp_path, then=FORK)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    url, *told = out.splitlines()
    assert told[0] == "<forebay server, stopped>"
    assert told[1].startswith("it runs in the process that this one was forked from")
    assert told[2] == f"<forebay server at {url}> True"


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_a_model_may_stop_its_server(kind):
    class Last(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            server.stop()
            return batch

    server = forebay.start(Last, port=0, worker_kind=kind, drain_s=0.5)
    with contextlib.suppress(httpx.HTTPError):  # a thread is waited for, and waits
        httpx.post(server.url, json="a", timeout=PATIENCE_S)
    server.wait()
    assert not server.is_running


def test_a_model_on_the_loop_that_would_wait_for_it_fails_with_a_sentence(caplog):
    class Loads(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            server.load(Shout, name="shout")
            return batch

    with forebay.start(Loads, port=0, worker_kind="inline") as server:
        assert httpx.post(server.url, json="a", timeout=PATIENCE_S).status_code == 500
        assert list(httpx.get(f"{server.url}/models").json())
    assert "call it in another thread" in caplog.text


def test_a_script_is_served_by_processes_until_ctrl_c(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell may have it ignored
    process = run(tmp_path, kind="process", then="server.wait()")
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert httpx.post(process.stdout.readline().strip(), json="a").json() == "A"
    process.send_signal(2)
    assert process.wait(PATIENCE_S) == 0
    process.communicate()


def test_a_class_of_a_folder_that_is_no_package_is_imported_in_processes_as_here(tmp_path, monkeypatch):
    folder = tmp_path / "loud_folder" / "inner"
    folder.mkdir(parents=True)
    (folder / "marks.py").write_text("MARK = '?'")
    (folder / "models.py").write_text(PACKAGED + "from loud_folder.inner import marks\nassert marks.MARK is MARK\n")
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("loud_folder.inner.models")
    for target, name in ((models.Loud, "loud"), (models.louder, "louder")):
        with forebay.start(target, port=0, worker_kind="process") as server:
            assert httpx.post(f"{server.url}/models/{name}", json="a").json() == "a?"


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_model_without_a_file_of_its_own_starts_in_whatever_folder_a_program_stands(tmp_path, monkeypatch, kind):
    file = model_files.linear(tmp_path / "price.onnx")
    gone = tmp_path / "gone"
    gone.mkdir()
    for folder in ("/", gone):  # where a container begins, and what a deployment took away
        monkeypatch.chdir(folder)
        if folder == gone:
            gone.rmdir()
        with forebay.start(file, port=0, worker_kind=kind) as server:
            assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_classes_and_compositions_of_a_package_run_in_processes(tmp_path, monkeypatch):
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "marks.py").write_text("MARK = '!'")
    (package / "models.py").write_text(PACKAGED)
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("loud_package.models")
    for target, name in ((models.Loud, "loud"), (models.louder, "louder"), (f"{package}/models.py:Loud", "loud")):
        with forebay.start(target, port=0, worker_kind="process") as server:
            assert httpx.post(f"{server.url}/models/{name}", json="a").json() == "a!"


def test_a_script_that_would_start_itself_without_end_is_told_what_to_write(tmp_path):
    process = run(tmp_path, kind="process", guard="if True:")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "if __name__ == '__main__':" in err


COUNTING = """
import forebay
from prometheus_client import Counter

class Said(forebay.Model):
    def load(self):
        self.counted = Counter("texts", "What came")

    def predict(self, batch: list[str]) -> list[str]:
        self.counted.inc(len(batch))
        return [text + {suffix!r} for text in batch]
"""


def counts(server) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("texts_total"))


def test_two_servers_start_load_reload_and_stop_by_themselves(tmp_path, eventually):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, suffix in zip(folders, "ab", strict=True):
        folder.mkdir()
        (folder / "model.py").write_text(COUNTING.format(suffix=suffix))
    paths = [str(folder / "model.py") for folder in folders]
    with forebay.start(paths[0], port=0) as one:
        with forebay.start(paths[1], port=0) as other, ThreadPoolExecutor() as threads:
            # Each tells what its own workers counted, and records its own batches.
            assert [httpx.post(server.url, json="x").json() for server in (one, one, other)] == ["xa", "xa", "xb"]
            eventually(lambda: (counts(one), counts(other)) == (2.0, 1.0))
            recording = threads.submit(httpx.get, f"{other.url}/trace?seconds=1", timeout=PATIENCE_S)
            while not recording.done():
                httpx.post(one.url, json="x")
            assert '"said"' not in recording.result().text
            # One loads and reloads; the other stays what it was.
            one.load(Shout, name="shout")
            assert httpx.post(f"{one.url}/models/shout", json="x").json() == "X"
            assert httpx.post(f"{other.url}/models/shout", json="x").status_code == 404
            (folders[1] / "model.py").write_text(COUNTING.format(suffix="c"))
            other.reload()
            eventually(lambda: httpx.post(other.url, json="x").json() == "xc")
            assert httpx.post(f"{one.url}/models/said", json="x").json() == "xa"
        assert not other.is_running
        assert httpx.post(f"{one.url}/models/said", json="x").json() == "xa"
    assert not one.is_running
