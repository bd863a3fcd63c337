# SPDX-License-Identifier: Apache-2.0
"""From start to exit: nothing that was accepted is lost, and the exit status tells how it ended."""

import json
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

CLIENTS = 12


def processor_s(process):
    """Processor time a process has used, in seconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


class Load:
    """Clients that call over keep-alive connections until the server closes them, and count what became of it."""

    def __init__(self, server, sample):
        self.server = server
        self.sample = json.dumps(sample).encode()
        self.answered = 0
        self.statuses: set[int] = set()
        self.lost: list[str] = []
        self.lock = threading.Lock()
        self.are_connected = threading.Barrier(CLIENTS + 1)
        self.threads = [threading.Thread(target=self._client, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        self.are_connected.wait(PATIENCE_S)
        return self

    def __exit__(self, *_error):
        for thread in self.threads:
            thread.join(PATIENCE_S)

    def _client(self):
        try:
            with self.server.connect() as wire:
                self.are_connected.wait(PATIENCE_S)
                while True:
                    # A well-behaved client: it sends only while the server has not said close.
                    wire.send(wire.request("POST", "/models/sleepy", self.sample))
                    answer = wire.read()
                    with self.lock:
                        self.answered += 1
                        self.statuses.add(answer.status)
                    if answer.headers.get("connection") == "close":
                        assert wire.is_closed_by_server()
                        return
        except Exception as error:
            with self.lock:
                self.lost.append(repr(error))


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("sample", [0.0, 0.05])
def test_every_request_that_was_sent_before_or_while_it_drains_is_answered(serve, kind, sample, eventually):
    server = serve("single.py", "--worker-kind", kind, "--workers", "2", "--max-batch-size", "4")
    with Load(server, sample) as load:
        eventually(lambda: load.answered > 3 * CLIENTS)
        server.signal()
    assert server.wait() == 0
    assert load.lost == []
    assert load.statuses == {200}
    assert "Traceback" not in server.log


def test_a_drain_lets_a_stream_come_to_its_end(serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "import time, forebay\n\nclass Slow(forebay.Model):\n    def predict(self, batch):\n"
        "        for number in range(6):\n            time.sleep(0.05)\n            yield [number] * len(batch)\n"
    )
    server = serve(path)
    with server.connect() as wire:
        wire.send(wire.request("POST", "/", b"0"))
        wire.read_head()
        server.signal()
        parts = b""
        while part := wire.read_chunk():
            parts += part
        assert parts == b"".join(b"data: %d\n\n" % number for number in range(6))
        assert wire.is_closed_by_server()
    assert server.wait() == 0


@pytest.mark.parametrize("kind", ["process", "thread", "inline"])
def test_a_drain_does_not_wait_for_streams_that_were_left_nor_for_connections_that_are_idle(serve, kind, eventually):
    server = serve("streams.py", "--worker-kind", kind, "--drain-s", f"{10 * PATIENCE_S:g}")
    models = ("shared", "shared-async", "generated", "generated-async")
    for model in models:
        with server.connect() as wire:
            wire.send(wire.request("POST", f"/models/{model}", b'{"length": 1000000, "seconds": 0.001}'))
            wire.read_head()
            assert wire.read_chunk()
    eventually(lambda: not any(server.metric("forebay_in_flight", endpoint=model) for model in models))
    with server.connect() as idle:
        assert idle.ask("GET", "/readyz").status == 200
        server.signal()
        assert server.wait() == 0


def test_a_server_without_executors_ends_as_soon_as_it_has_drained(serve):
    program = "import sys; from forebay.cli import main, serve; serve.TELL_S = 86400.0; sys.exit(main.main())"
    server = serve("single.py", "--worker-kind", "thread", command=[sys.executable, "-c", program, "serve"])
    server.signal()
    assert server.wait() == 0


def test_new_connections_are_refused_while_it_drains(serve, tmp_path, eventually):
    until = tmp_path / "until"
    server = serve("single.py", "--worker-kind", "thread")
    with server.connect() as wire, server.connect() as idle:
        assert idle.ask("GET", "/readyz").status == 200
        wire.send(wire.request("POST", "/", json.dumps(str(until)).encode()))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        server.signal()
        # Who watches over a connection that is open is told at once; who dials is refused by the kernel.
        while (answer := idle.ask("GET", "/readyz")).status == 200:
            assert "connection" not in answer.headers
        assert answer.status == 503
        assert "draining" in answer.json()["problems"][0]
        assert answer.headers["connection"] == "close"

        def refused():
            try:
                server.connect().socket.close()
            except ConnectionError:
                return True
            return False

        eventually(refused)
        until.touch()
        assert wire.read().status == 200
    assert server.wait() == 0


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_drain_ends_in_time_whatever_still_runs(serve, kind, eventually):
    server = serve("single.py", "--worker-kind", kind, "--drain-s", "0.3")
    with server.connect() as wire, server.connect() as idle:
        idle.send(idle.request("GET", "/healthz"))
        assert idle.read().status == 200
        wire.send(wire.request("POST", "/", b"50"))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        started = time.monotonic()
        server.signal()
        status = server.wait()
        assert time.monotonic() - started < 30
    assert status == 0
    assert "the drain time is over; closing connections without their answer: 1" in server.log
    assert "Traceback" not in server.log


def test_a_second_signal_ends_the_drain(serve, eventually):
    server = serve("single.py")
    with server.connect() as wire:
        wire.send(wire.request("POST", "/", b"50"))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        server.signal()
        eventually(lambda: "draining" in server.log)
        started = time.monotonic()
        server.signal(signal.SIGINT)
        server.wait()
        assert time.monotonic() - started < 20
    assert "Traceback" not in server.log


def test_a_signal_while_models_load_ends_it(serve, tmp_path, eventually):
    path = tmp_path / "model.py"
    path.write_text(
        "import sys, time, forebay\n\nclass Slow(forebay.Model):\n    def load(self):\n"
        "        sys.stderr.write('loading\\n'); sys.stderr.flush(); time.sleep(30)\n\n"
        "    def predict(self, batch):\n        return batch\n"
    )
    server = serve(path, ready=False)
    eventually(lambda: "loading" in server.log)
    server.signal()
    assert server.wait(PATIENCE_S) == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_while_the_file_is_imported_ends_it(serve, tmp_path, eventually, number, status):
    begun = tmp_path / "begun"
    path = tmp_path / "model.py"
    path.write_text(f"import pathlib, time\n\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n")
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that ignores it would hand that on
    try:
        server = serve(path, ready=False)
    finally:
        signal.signal(signal.SIGINT, was)
    eventually(begun.exists)
    server.signal(number)
    assert server.wait() == status
    assert "Traceback" not in server.log


def test_a_server_with_nothing_to_do_does_nothing(serve, at_once):
    server = serve("single.py", "--worker-kind", "thread")
    at_once(*[lambda: server.client.post("/", json=0.01)] * 8)
    for _ in range(5):
        server.client.post("/", json=0)
    before = processor_s(server.process)
    time.sleep(0.5)
    assert processor_s(server.process) - before < 0.1


@pytest.mark.parametrize("own_s", [0.005, 0.0002])
def test_no_thread_keeps_the_interpreter_from_the_others_for_longer_than_a_millisecond(serve, tmp_path, own_s):
    """A server that would switch sooner anyway is left as it is."""
    (tmp_path / "model.py").write_text(
        "import sys\nfrom forebay import Model\n\n\nclass Interval(Model):\n"
        "    def predict(self, samples: list) -> list:\n        return [sys.getswitchinterval() for _ in samples]\n"
    )
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n\nsys.setswitchinterval({own_s})\n")
    server = serve(tmp_path / "model.py", "--worker-kind", "thread", env={"PYTHONPATH": str(tmp_path)})
    assert server.client.post("/", json=0).json() == pytest.approx(min(own_s, 0.001), rel=0.01)


FIRST_STEPS = """
import typing
import msgspec
import forebay
from forebay.openai import ChatRequest, TranscriptionRequest

Kind = typing.Literal["cat", "dog"]

class Animal(msgspec.Struct):
    kind: Kind
    name: typing.Annotated[str, msgspec.Meta(min_length=2)]
    age: typing.Annotated[int, msgspec.Meta(ge=3, le=40)]
    parents: list["Animal"]
    weight: float | None = None

class Typed(forebay.Model):
    def predict(self, batch: list[Animal]) -> list[str]:
        return [animal.name for animal in batch]

class Adult(forebay.Model):
    def predict(self, batch: list[typing.Annotated[float, msgspec.Meta(gt=18)]]) -> list[float]:
        return batch

class Talk(forebay.Model):
    def predict(self, batch: list[ChatRequest]) -> list[str]:
        return [request.messages[-1].text for request in batch]

class Hear(forebay.Model):
    name = "org/hear"
    def predict(self, batch: list[TranscriptionRequest]) -> list[str]:
        return [request.file.read().decode() for request in batch]

class Rows(forebay.Model):
    batchable = True
    def predict(self, batch: list[list[int]]) -> list[int]:
        return [sum(row) for row in batch]

class Echo(forebay.Model):
    def predict(self, batch):
        return batch
"""


def test_ready_is_said_once_every_model_is_loaded(serve, eventually):
    server = serve("zoo.py", "--worker-kind", "thread")
    assert server.client.get("/readyz").status_code == 200
    assert "ready at" in server.lines[0]
    eventually(lambda: "POST /models/typed" in server.log)


@pytest.mark.parametrize("name", ["typed", "adult", "rows", "echo", "talk"])
def test_a_server_that_is_ready_shows_its_pages_and_a_request_that_is_answered(serve, tmp_path, eventually, name):
    (tmp_path / "model.py").write_text(FIRST_STEPS)
    server = serve(f"{tmp_path}/model.py:{name.title()}", "--worker-kind", "thread")
    line = eventually(lambda: next((line for line in server.lines if "curl" in line), None))
    _, _, url, *rest = shlex.split(line)
    where = "/v1/chat/completions" if name == "talk" else f"/models/{name}"
    assert (url, rest[:3]) == (f"{server.url}{where}", ["-H", "content-type: application/json", "-d"])
    answer = server.client.post(url, content=rest[3], headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert name != "talk" or answer.json()["choices"][0]["message"]["content"] == "Hello"
    pages = next(line for line in server.lines if "dashboard" in line)
    for page in re.findall(r"http://\S+?(?=,|$)", pages.strip()):
        assert server.client.get(page, follow_redirects=True).status_code == 200


def test_a_model_that_hears_shows_a_form_with_a_file(serve, tmp_path, eventually):
    (tmp_path / "model.py").write_text(FIRST_STEPS)
    server = serve(f"{tmp_path}/model.py:Hear", "--worker-kind", "thread")
    line = eventually(lambda: next((line for line in server.lines if "curl" in line), None))
    _, _, url, *fields = shlex.split(line)
    assert fields == ["-F", "model=org/hear", "-F", "file=@FILE"]
    answer = server.client.post(url, data={"model": "org/hear"}, files={"file": b"words"})
    assert (answer.status_code, answer.json()["text"]) == (200, "words")


@pytest.mark.parametrize("options,is_warned", [((), True), (("--api-key", "@{keys}"), False)])
def test_a_server_that_others_can_reach_without_a_key_warns(serve, tmp_path, options, is_warned):
    (tmp_path / "keys").write_text("k\n")
    options = [one.format(keys=tmp_path / "keys") for one in options]
    server = serve("zoo.py:Echo", "--worker-kind", "thread", "--host", "0.0.0.0", *options)
    assert ("warning: all clients that reach 0.0.0.0 can call the models" in server.log) is is_warned


def test_a_model_that_hangs_while_it_loads_does_not_keep_the_server_from_stopping(serve, tmp_path, eventually):
    path = tmp_path / "hang.py"
    started = tmp_path / "started"
    path.write_text(
        "import pathlib, time\nfrom forebay import Model\n\n"
        "class Hang(Model):\n    def load(self):\n"
        f"        pathlib.Path({str(started)!r}).touch()\n        time.sleep(60)\n\n"
        "    def predict(self, batch):\n        return batch\n"
    )
    server = serve(path, "--worker-kind", "thread", ready=False)
    eventually(started.exists)
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0


FAILING = """
import forebay

class Failing(forebay.Model):
    def predict(self, batch):
        raise RuntimeError("attack at dawn")
"""


@pytest.mark.parametrize(
    "options,is_shown",
    [
        ((), True),
        (("--no-show-failures",), False),
        (("--api-key", "k"), False),
        (("--api-key", "k", "--reload"), True),
        (("--api-key", "k", "--show-failures"), True),
        (("--reload", "--no-show-failures"), False),
    ],
)
def test_what_a_model_raised_is_shown_where_it_is_developed(serve, tmp_path, options, is_shown):
    (tmp_path / "failing.py").write_text(FAILING)
    server = serve(tmp_path / "failing.py", "--worker-kind", "thread", *options)
    answer = server.call("failing", 1, x_api_key="k")
    assert answer.status_code == 500
    assert ("attack at dawn" in answer.text) is is_shown
    assert ("failing.py:6 in predict" in answer.text) is is_shown
