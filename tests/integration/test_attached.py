# SPDX-License-Identifier: Apache-2.0
"""Workers that attach: from another environment, under load, killed, stopped, refused; through the CLI and sockets."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.processes import freeze
from tests.waiting import PATIENCE_S

import forebay
from forebay.cli.main import main
from forebay.observe.logs import model_log
from forebay.surfaces.native.attached_models import MAX_DESERTED
from forebay.surfaces.native.describe import describe
from forebay.workers.wire import frames
from forebay.workers.wire.address import parse_address
from forebay.workers.wire.worker_connection import WorkerConnection, WorkerRefused

ROOT = Path(__file__).parents[2]
OTHER = ROOT / ".venv/environments/other/bin/python"
OTHER_NUMPY = "1.26.4" if sys.version_info < (3, 13) else "2.1.0" if sys.version_info < (3, 14) else "2.3.2"
RUN = "import sys; from forebay.cli.main import main; sys.exit(main())"

MODEL = """
import os, time, forebay

class It(forebay.Model):
    name = "{name}"
    {settings}

    def predict(self, batch: list[float | str]) -> list[tuple[float | str, int]]:
        self.work(batch)
        return [(sample, os.getpid()) for sample in batch]

    def work(self, batch):  # for seconds, or until a file is there
        time.sleep(max((sample for sample in batch if not isinstance(sample, str)), default=0.0))
        while not all(os.path.exists(sample) for sample in batch if isinstance(sample, str)):
            time.sleep(0.005)
"""

VERSIONS = """
import msgspec, numpy, forebay

class Versions(forebay.Model):
    \"\"\"Says which packages made the answer.\"\"\"

    def predict(self, batch: list[list[float]]) -> list[tuple[float, str, str]]:
        return [(float(numpy.sum(sample)), numpy.__version__, msgspec.__version__) for sample in batch]
"""


class Plain(forebay.Model):
    """Described by a worker of the test, which runs nothing."""

    def predict(self, batch: list[float]) -> list[float]:
        return batch


class Worker:
    """A `forebay worker` with what it says."""

    def __init__(self, file, address, *options, python=sys.executable, env=None, prefix=()):
        command = [*prefix, str(python), "-c", RUN, "worker", str(file), "--connect", address, *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})}
        )
        self.lines = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                with self._said:
                    self.lines.append(line)
                    self._said.notify_all()

    @property
    def log(self):
        return "".join(self.lines)

    @property
    def pid(self):
        return self.process.pid

    def says(self, words):
        with self._said:
            assert self._said.wait_for(lambda: words in self.log, PATIENCE_S), self.log
        return self

    def ready(self):
        return self.says("ready; attached to")

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self

    def wait(self):
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@pytest.fixture
def attach(tmp_path):
    """Starts workers of a model written for the test: `attach(server, "name")`."""
    with contextlib.ExitStack() as stack:

        def start(where, name, *options, settings="", **more):
            text = name if "\n" in name else MODEL.format(name=name, settings=settings)
            file = tmp_path / f"model_{abs(hash(text))}.py"
            file.write_text(text)
            address = where if isinstance(where, str) else where.door
            worker = Worker(file, address, *options, **more)
            stack.callback(worker.stop)
            return worker

        yield start


def door_of(server):
    """Notes where workers attach, as the server says it after it is ready."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"workers attach at (\S+)\n", server.log)):
        assert time.monotonic() < deadline, server.log
        time.sleep(0.005)
    server.door = found[1]
    return server


@pytest.fixture
def opened(serve, tmp_path):
    """Starts a server of its own with a door and nothing else to serve."""

    def start(*options, **more):
        return door_of(serve(None, "--attach", f"unix:{tmp_path}/s", *options, **more))

    return start


@pytest.fixture(scope="module")
def common(launch, tmp_path_factory):
    """A server for all who need nothing special of it; each has a name of its own there."""
    return door_of(launch(None, "--attach", f"unix:{tmp_path_factory.mktemp('common')}/s"))


def joined(server, name, count, eventually):
    """Waits until so many workers of a name are here."""
    eventually(lambda: workers_of(server, name).get("alive") == count, f"{count} workers of {name}")


def workers_of(server, name):
    return server.client.get(f"/models/{name}").json().get("workers", {})


# ---------------------------------------------------------------------------------------------------------------------
# Joining and leaving


def test_a_file_says_whether_a_worker_is_ready_and_well(opened, attach, tmp_path, eventually):
    health = tmp_path / "health"
    address = f"unix:{tmp_path}/s"
    worker = attach(address, "it", "--health-file", str(health)).says("waiting for a server")
    assert not health.exists()
    server = opened()
    eventually(health.exists)
    os.utime(health, (0, 0))
    eventually(lambda: health.stat().st_mtime > 0)
    server.stop()
    eventually(lambda: not health.exists())
    opened()
    eventually(health.exists)
    assert worker.signal().wait() == 0
    assert not health.exists()


def test_an_endpoint_appears_with_its_first_worker_and_others_share_it(opened, attach, eventually):
    server = opened()
    assert server.client.get("/readyz").json()["problems"] == [
        "no model is served yet: none of its workers has attached"
    ]
    assert server.call("it", 0).status_code == 404
    wire = server.connect()
    assert wire.ask("POST", "/", b"0").status == 405
    first = attach(server, "it").ready()
    joined(server, "it", 1, eventually)
    assert server.call("it", 0).json() == [0.0, first.pid]
    assert wire.ask("POST", "/", b"0").json() == [0.0, first.pid]
    assert server.client.get("/readyz").status_code == 200
    assert "/models/it" in server.client.get("/openapi.json").json()["paths"]
    assert server.call("it", {"no": "number"}).status_code == 422
    given = {"name": "input", "datatype": "BYTES", "shape": [2], "data": ["0", "0.0"]}  # either a number or a text
    told = server.client.post("/v2/models/it/infer", json={"inputs": [given]}).json()
    assert told["outputs"][0]["data"] == [f"[0.0,{first.pid}]"] * 2
    second = attach(server, "it").ready()
    joined(server, "it", 2, eventually)
    assert {server.call("it", 0).json()[1] for _ in range(4)} == {first.pid, second.pid}
    other = attach(server, "other").ready()
    joined(server, "other", 1, eventually)
    assert server.call("other", 0).json()[1] == other.pid
    assert wire.ask("POST", "/", b"0").status == 405  # a name is needed now that there are two
    assert [model["name"] for model in server.client.get("/models").json()["models"]] == ["it", "other"]
    assert first.signal().wait() == 0
    joined(server, "it", 1, eventually)
    assert server.call("it", 0).json()[1] == second.pid
    assert workers_of(server, "it")["left"] == 1
    wire.socket.close()


def test_joining_and_leaving_under_load_loses_nothing(opened, attach, eventually):
    server = opened("--max-batch-size", "4")
    workers = [attach(server, "it", "--threads", "2").ready()]
    joined(server, "it", 1, eventually)
    stop = threading.Event()
    answers = []

    def client():
        with server.connect() as wire:
            while not stop.is_set():
                answers.append(wire.ask("POST", "/models/it", b"0.004"))

    def all_have_answered():
        return {answer.json()[1] for answer in list(answers)} == {worker.pid for worker in workers}

    with ThreadPoolExecutor(8) as executor:
        clients = [executor.submit(client) for _ in range(8)]
        try:
            for count in (2, 3):
                workers.append(attach(server, "it").ready())
                joined(server, "it", count, eventually)
            eventually(all_have_answered)
            for worker in workers[:2]:
                assert worker.signal().wait() == 0
            joined(server, "it", 1, eventually)
            os.kill(workers[2].pid, signal.SIGKILL)  # the last one: what it held waits for the next
            workers.append(attach(server, "it").ready())
            joined(server, "it", 1, eventually)
            eventually(all_have_answered)
        finally:
            stop.set()
        for one in clients:
            one.result()
    assert {answer.status for answer in answers} == {200}
    assert server.metric("forebay_in_flight") == 0


def test_a_worker_told_to_leave_answers_what_it_runs(common, attach, tmp_path, eventually):
    until = tmp_path / "until"
    worker = attach(common, "leaver").ready()
    joined(common, "leaver", 1, eventually)
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(common.call, "leaver", str(until))
        eventually(lambda: workers_of(common, "leaver")["idle"] == 0)
        worker.signal()
        until.touch()
        assert worker.wait() == 0
        assert asked.result().json() == [str(until), worker.pid]


def test_a_second_signal_ends_a_worker_at_once(common, attach, tmp_path, eventually):
    until = tmp_path / "until"
    worker = attach(common, "hurried").ready()
    joined(common, "hurried", 1, eventually)
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(common.call, "hurried", str(until))
        eventually(lambda: workers_of(common, "hurried")["idle"] == 0)
        other = attach(common, "hurried").ready()  # before: a model without workers is not waited for that long
        worker.signal()
        # Two signals that come before the worker has looked are one: signal until it ends, which it does not by itself.
        eventually(lambda: worker.signal().process.poll() is not None)
        assert worker.wait() == 1
        until.touch()
        assert asked.result().json() == [str(until), other.pid]


def test_what_a_killed_worker_was_running_is_handed_on(common, attach, tmp_path, eventually):
    until = tmp_path / "until"
    first = attach(common, "killed").ready()
    joined(common, "killed", 1, eventually)
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(common.call, "killed", str(until))
        eventually(lambda: workers_of(common, "killed")["idle"] == 0)
        first.signal(signal.SIGKILL)
        second = attach(common, "killed").ready()
        until.touch()
        assert asked.result().json() == [str(until), second.pid]
    assert common.metric("forebay_in_flight") == 0


def test_what_a_stopped_worker_was_running_is_handed_on_and_it_comes_back(opened, attach, eventually):
    server = opened("--worker-hang-s", "2")  # so long that the other one, beside busy processes, owes no answer
    first, second = (attach(server, "it").ready() for _ in range(2))
    joined(server, "it", 2, eventually)
    freeze(first.pid)
    assert {server.call("it", 0).json()[1] for _ in range(3)} == {second.pid}  # idle workers take turns
    assert "owes an answer for 2 s" in server.log
    joined(server, "it", 1, eventually)
    first.signal(signal.SIGCONT)  # finds itself hung up on, and dials again
    joined(server, "it", 2, eventually)
    eventually(lambda: server.call("it", 0).json()[1] == first.pid)
    eventually(lambda: server.call("it", 0).json()[1] == second.pid)


def test_when_all_have_left_requests_wait_for_the_grace_period(opened, attach, eventually):
    server = opened("--worker-grace-s", "2")
    worker = attach(server, "it").ready()
    joined(server, "it", 1, eventually)
    worker.signal().wait()
    eventually(lambda: server.client.get("/readyz").status_code == 503)
    assert server.client.get("/readyz").json()["problems"] == ["model 'it' has no worker"]
    answer = server.call("it", 0)  # waits, and is then refused
    assert answer.status_code == 503
    assert "no worker of 'it' is attached" in answer.json()["error"]["message"]
    started = time.monotonic()
    assert {server.call("it", 0).status_code for _ in range(10)} == {503}  # at once: each alone would wait for 2 s
    assert time.monotonic() - started < 18
    attach(server, "it").ready()
    joined(server, "it", 1, eventually)
    assert server.call("it", 0).status_code == 200
    assert server.client.get("/readyz").status_code == 200


def test_a_server_that_comes_back_finds_its_workers(opened, attach, eventually, tmp_path):
    early = attach(f"unix:{tmp_path}/s", "it").says("waiting for a server")
    server = opened()
    joined(server, "it", 1, eventually)
    once = attach(server, "other", "--once").ready()
    server.signal()
    assert server.wait() == 0
    assert not (tmp_path / "s").exists()
    assert once.wait() == 0
    again = opened()
    joined(again, "it", 1, eventually)
    assert again.call("it", 0).json()[1] == early.pid
    assert early.signal().wait() == 0


def test_a_server_that_stops_lets_attached_workers_finish(opened, attach, tmp_path, eventually):
    until = tmp_path / "until"
    server = opened()
    attach(server, "it").ready()
    joined(server, "it", 1, eventually)
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(server.call, "it", str(until))
        eventually(lambda: workers_of(server, "it")["idle"] == 0)
        server.signal()
        eventually(lambda: "draining" in server.log)
        until.touch()
        assert asked.result().status_code == 200
    assert server.wait() == 0


def test_threads_run_batches_side_by_side(common, attach, eventually, at_once):
    settings = "barrier = __import__('threading').Barrier(2, timeout=60); max_batch_size = 1"
    text = MODEL.format(name="threads", settings=settings)
    attach(common, text.replace("self.work(batch)", "self.barrier.wait()"), "--threads", "2").ready()
    eventually(lambda: workers_of(common, "threads").get("slots") == 2)
    found = at_once(*[lambda: common.call("threads", 0)] * 2)  # each waits in predict for the other
    assert [answer.status_code for answer in found] == [200, 200]


# ---------------------------------------------------------------------------------------------------------------------
# What a model can do, it can do in an attached worker


RICH = """
import forebay

class Rich(forebay.Model):
    batchable = {batchable}

    def predict(self, batch: list[{kind}]){answer}:
        {body}
"""


def test_bytes_arrays_and_streams_travel(common, attach, eventually):
    server = common
    attach(server, RICH.format(batchable=False, kind="bytes", answer=" -> list[bytes]", body="return batch")).ready()
    joined(server, "rich", 1, eventually)
    for size in (10, 65_536, 3_000_000):
        body = os.urandom(size)
        assert server.client.post("/models/rich", content=body).content == body
    stream = "import forebay\n\nclass Count(forebay.Model):\n    def predict(self, batch: list[int]):\n"
    stream += "        for step in range(max(batch)):\n            yield [step] * len(batch)\n"
    attach(server, stream).ready()
    joined(server, "count", 1, eventually)
    assert server.call("count", 40).text == "".join(f"data: {step}\n\n" for step in range(40))
    rows = RICH.replace("Rich", "Rows").format(
        batchable=True, kind="int", answer=" -> list[int]", body="return [n + 1 for n in batch]"
    )
    attach(server, rows).ready()
    joined(server, "rows", 1, eventually)
    assert server.call("rows", list(range(200))).json() == list(range(1, 201))


def test_a_model_that_fails_fails_its_request_and_the_trace_is_in_the_servers_log(common, attach, eventually):
    server = common
    text = RICH.format(batchable=False, kind="int", answer="", body="raise ValueError('dawn')")
    attach(server, text.replace("Rich", "Failing")).ready()
    joined(server, "failing", 1, eventually)
    answer = server.call("failing", 1, via="a proxy")
    assert answer.status_code == 500
    assert "dawn" not in answer.text
    eventually(lambda: "dawn" in server.log)


def test_nothing_is_left_in_shared_memory(opened, attach, eventually):
    server = opened()
    worker = attach(server, RICH.format(batchable=False, kind="bytes", answer=" -> list[bytes]", body="return batch"))
    worker.ready()
    joined(server, "rich", 1, eventually)
    assert len(server.client.post("/models/rich", content=bytes(600_000)).content) == 600_000
    links = [str(link.readlink()) for link in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    assert sum("memfd:forebay-arena" in link for link in links) >= 2  # both ways, and in no folder
    assert not any("/dev/shm/" in link for link in links)  # F26
    server.signal()
    assert server.wait() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Other environments


@pytest.fixture(scope="module")
def other():
    assert OTHER.exists(), "make setup builds the environments of tests/environments"
    return {"python": OTHER, "env": {"PYTHONPATH": str(ROOT / "src")}}


def test_a_worker_of_another_environment_shares_the_endpoint(common, attach, eventually, other):
    """Another virtual environment with other package versions is the test."""
    server = common
    attach(server, VERSIONS).ready()
    attach(server, VERSIONS, **other).ready()
    joined(server, "versions", 2, eventually)
    found = {tuple(server.call("versions", [0.5, 1.5]).json()) for _ in range(8)}
    assert {total for total, *_ in found} == {2.0}
    assert len({numpy for _, numpy, _ in found}) == 2
    assert len({msgspec for *_, msgspec in found}) == 2


def test_a_model_has_an_interpreter_of_its_own(serve, tmp_path, other):
    file = tmp_path / "versions.py"
    file.write_text(VERSIONS + "\nprint('noise on the standard output')\n")
    server = serve(file, "--python", str(OTHER), "--workers", "2", env=other["env"])
    assert server.call("versions", [1]).json()[1:] == [OTHER_NUMPY, "0.20.0"]
    assert server.call("versions", "x").status_code == 422
    document = server.client.get("/openapi.json").json()
    operation = document["paths"]["/models/versions"]["post"]
    assert operation["description"] == "Says which packages made the answer."
    assert operation["requestBody"]["content"]["application/json"]["schema"]["items"] == {"type": "number"}


def test_one_file_serves_several_environments(serve, tmp_path, other):
    (tmp_path / "versions.py").write_text(VERSIONS)
    (tmp_path / "it.py").write_text(MODEL.format(name="it", settings=""))
    python = os.path.relpath(OTHER, tmp_path)
    (tmp_path / "forebay.yaml").write_text(
        f"models:\n  - target: versions.py:Versions\n    python: {python}\n    max_wait_ms: 0\n"
        "  - target: it.py\n    worker_kind: thread\n    threads: 2\n    max_batch_size: 7\n"
        "http: {port: 1, host: 127.0.0.1}\nattach: unix:workers.socket\n"
    )
    server = serve(tmp_path, "--timeout-ms", "7000", env=other["env"])  # the command line beats the file's port
    assert server.call("versions", [1]).json()[1] == OTHER_NUMPY
    assert server.call("it", 0).json()[1] == server.process.pid
    about = server.client.get("/models/it").json()
    assert (about["workers"]["slots"], about["batching"]["max_batch_size"], about["timeout_ms"]) == (2, 7, 7000)
    assert (tmp_path / "workers.socket").is_socket()


# ---------------------------------------------------------------------------------------------------------------------
# Who is not let in


@pytest.fixture(scope="module")
def own(launch, tmp_path_factory):
    """A server with a model of its own, a TCP door and a secret."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "secret").write_text("a secret of the tests\n")
    server = launch(
        "single.py", "--attach", "tcp:127.0.0.1:0", "--attach-secret", f"@{folder}/secret", "--worker-hello-s", "0.3"
    )
    server.secret = f"@{folder}/secret"
    return door_of(server)


def test_over_tcp_the_secret_opens_the_door(own, attach, eventually):
    worker = attach(own, "guest", "--secret", own.secret).ready()
    joined(own, "guest", 1, eventually)
    assert own.call("guest", 0).json()[1] == worker.pid
    body = b"[" + b"1," * 300_000 + b"1]"
    assert (
        own.client.post("/models/guest", content=body, headers={"content-type": "application/json"}).status_code == 422
    )
    assert worker.signal().wait() == 0
    by_variable = attach(own, "guest", env={"FOREBAY_SECRET": own.secret}).ready()
    joined(own, "guest", 1, eventually)
    assert by_variable.signal().wait() == 0


def sentence(worker):
    """The one line of a worker that gave up."""
    assert worker.wait() == 2, worker.log
    assert len(worker.lines) == 1, worker.log
    return worker.lines[0]


def test_without_the_secret_nobody_is_let_in(own, attach, eventually):
    without = attach(own, "thief")
    wrong = attach(own, "thief", env={"FOREBAY_SECRET": "not the secret of the tests"})
    assert "this server asks for a secret; give the worker the same one: --secret @FILE" in sentence(without)
    assert "its secret is not this server's" in sentence(wrong)
    eventually(lambda: "was refused: its secret is not this server's" in own.log)
    assert own.call("thief", 0).status_code == 404


GATED = """
import os, pathlib, time, forebay

class It(forebay.Model):
    name = "{name}"

    def load(self):
        pathlib.Path("{here}").touch()
        while not os.path.exists("{gate}"):
            time.sleep(0.005)

    def predict(self, batch: list[int]) -> list[str]:
        return ["{who}"] * len(batch)
"""


def test_a_name_of_the_servers_own_cannot_be_taken_while_its_model_is_loaded(serve, attach, tmp_path, eventually):
    names = ("early", "late")

    def files(name, who):
        return tmp_path / f"here-{name}-{who}", tmp_path / f"gate-{name}-{who}"

    def model(name, who):
        here, gate = files(name, who)
        return GATED.format(name=name, who=who, here=here, gate=gate)

    project = tmp_path / "project"
    project.mkdir()
    (project / "base.py").write_text(MODEL.format(name="base", settings=""))
    for name in names:
        (project / f"{name}.py").write_text(model(name, "own"))

    def serve_these(*targets):
        lines = [f"  - {{target: {target}.py, worker_kind: thread}}" for target in targets]
        (project / "forebay.yaml").write_text("\n".join(["models:", *lines, f"attach: unix:{tmp_path}/s"]))

    serve_these("base")
    server = door_of(serve(project))
    late = attach(server, model("late", "guest"))  # has said what it is, and loads
    eventually(files("late", "guest")[0].exists)
    serve_these("base", *names)
    files("late", "own")[1].touch()
    server.signal(signal.SIGHUP)
    eventually(files("early", "own")[0].exists)
    early = attach(server, model("early", "guest"))
    files("early", "guest")[1].touch()
    assert "the name 'early' is taken by a model of the server's own" in sentence(early)
    files("early", "own")[1].touch()
    eventually(lambda: "reloaded in" in server.log)
    files("late", "guest")[1].touch()
    assert "the name 'late' is taken by a model of the server's own" in late.says("taken").log
    assert late.wait() == 2
    for name in names:
        assert server.call(name, 0).json() == "own"


def test_names_belong_to_one_description(common, own, attach, eventually):
    taken = sentence(attach(own, "sleepy", "--secret", own.secret))
    assert "the name 'sleepy' is taken by a model of the server's own; give the worker's another `name`" in taken
    first = attach(common, "name").ready()
    joined(common, "name", 1, eventually)
    with common.connect() as wire:
        assert wire.ask("POST", "/models/name", b"0").json()[1] == first.pid
        second = sentence(attach(common, "name", settings="version = '2'"))
        assert "the name 'name' is taken by workers that describe their model otherwise" in second
        assert "(its version: '2' and not '1')" in second
        eventually(lambda: "the name 'name' is taken" in common.log)
        assert first.signal().wait() == 0
        joined(common, "name", 0, eventually)
        third = attach(common, "name", settings="version = '2'").ready()
        joined(common, "name", 1, eventually)
        assert wire.ask("POST", "/models/name", b"0").json()[1] == third.pid
    assert common.client.get("/models/name").json()["version"] == "2"


@pytest.mark.parametrize("schema", [{"type": "object", "properties": []}, {"anyOf": [7]}, {"$ref": 7}])
def test_a_schema_that_is_none_is_refused_with_a_sentence(common, schema):
    told = msgspec.to_builtins(describe(Plain))
    told["input"]["schema"] = schema
    with pytest.raises(WorkerRefused, match=r"the schema of its input or output is not a JSON Schema$"):
        WorkerConnection(parse_address(common.door), {"worker": "a worker of the test", "model": told})


def test_of_names_whose_workers_have_all_left_those_go_first_that_were_left_first(opened, eventually):
    """A worker that joined under one name after the other made `/models` longer for ever."""
    server = opened("--worker-grace-s", "0")
    address = parse_address(server.door)
    told = msgspec.to_builtins(describe(Plain))

    def join(name):
        worker = WorkerConnection(address, {"worker": f"a worker of {name:>20}", "model": {**told, "name": name}})
        worker.send(["ready", False])
        eventually(lambda: workers_of(server, name).get("alive") == 1)
        return worker

    def leave(worker, name):
        worker.close()
        eventually(lambda: workers_of(server, name)["alive"] == 0)

    stays = join("stays")
    leave(join("first"), "first")
    leave(join("second"), "second")
    leave(join("first"), "first")
    for number in range(MAX_DESERTED - 1):
        leave(join(f"one{number}"), f"one{number}")
    others = join("other")
    eventually(lambda: server.call("second", 0).status_code == 404)
    eventually(lambda: "stopped serving model 'second': its workers left" in server.log)
    assert server.call("first", 0).status_code == 503
    assert len(server.client.get("/models").json()["models"]) == MAX_DESERTED + 2
    again = join("second")
    for worker in (stays, others, again):
        worker.close()


def test_a_model_that_does_not_load_ends_its_worker_and_not_the_server(common, attach):
    server = common
    worker = attach(server, "heavy", settings="def load(self): raise OSError('no weights')")
    assert worker.wait() == 1
    assert "no weights" in worker.log
    assert "Traceback" in worker.log
    assert server.call("heavy", 0).status_code == 404
    assert server.client.get("/healthz").status_code == 200
    keyed = attach(server, "it", settings="batch_key = staticmethod(len)")
    assert "it.batch_key runs in the server" in sentence(keyed)


def test_strangers_at_the_door_disturb_nobody(own, eventually):
    host, port = own.door.removeprefix("tcp:").split(":")
    begun = len(own.lines)
    for said, reason in [
        (b"GET / HTTP/1.1\r\n\r\n", "bytes was announced"),
        (b"\0\0\0\0", "the batching protocol, which cannot prove"),
        (frames.encode(["hello", 99, {}]), "version 99"),
        (b"", "did not say what it is within 0.3 s"),
    ]:
        with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
        eventually(lambda reason=reason: reason in "".join(own.lines[begun:]))
    assert own.call("sleepy", 0).status_code == 200


def test_a_worker_that_speaks_the_batching_protocol_joins_at_the_same_door(common, eventually):
    server = common
    with socket.socket(socket.AF_UNIX) as worker:
        worker.settimeout(PATIENCE_S)
        worker.connect(server.door.removeprefix("unix:"))
        worker.sendall(b"\0\0\0\0")
        joined(server, "batching", 1, eventually)
        with ThreadPoolExecutor() as executor:
            asked = executor.submit(server.client.post, "/models/batching", content=b"hi")
            size = int.from_bytes(worker.recv(4), "big")
            jobs = msgspec.msgpack.decode(worker.recv(size))
            (job,) = jobs
            assert jobs[job] == b"hi"
            answer = msgspec.msgpack.encode({job: b"ok"})
            worker.sendall(len(answer).to_bytes(4, "big") + answer)
            assert asked.result().content == b"ok"


# ---------------------------------------------------------------------------------------------------------------------
# One sentence with the cure, exit status 2


@pytest.fixture
def mistake(capsys):
    def run(*arguments):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as error:
            status = error.code
        said = capsys.readouterr()
        assert (status, said.out) == (2, "")
        assert said.err.count("\n") == 1, said.err
        return said.err

    return run


@pytest.mark.parametrize(
    "options, cure",
    [
        (["--attach", "/tmp/socket"], "did you mean unix:/tmp/socket?"),
        (["--attach", "unixx:s"], "did you mean unix:s?"),
        (["--attach", "tcp:localhost:99999"], "or tcp:HOST:PORT, got"),
        (["--attach", "tcp:0.0.0.0:9100"], "so set a secret: --attach-secret @FILE"),
        (["--attach", "unix:" + "x" * 200], "200 bytes, the kernel takes at most 107"),
        (
            ["--attach", "unix:s", "--attach-secret", "short"],
            "expected a secret of at least 16 bytes, got 5; make one with",
        ),
        (["--attach", "unix:s", "--attach-secret", "@/nowhere"], "the secret in /nowhere cannot be read"),
        (["--attach", "unix:s", "--worker-hang-s", "-1"], "expected seconds >= 0"),
        (["--atach", "unix:s"], "did you mean --attach?"),
        ([], "let workers attach with --attach ADDRESS, or name a server that has models with --owner ADDRESS"),
    ],
)
def test_what_is_wrong_with_serve_is_one_sentence(mistake, options, cure, monkeypatch):
    monkeypatch.delenv("FOREBAY_SECRET", raising=False)
    assert cure in mistake("serve", *options)


def test_the_log_of_a_command_ends_with_the_test_that_ran_it():
    """Else each later record of this process, also of other threads, would be an error: its stream is closed."""
    assert logging.getLogger("forebay").handlers == []
    assert model_log.level is None
    assert not any(isinstance(one, model_log.ModelHandler) for one in logging.getLogger().handlers)


@pytest.mark.parametrize(
    "options, cure",
    [
        (["model.py", "--connect", "localhost:1"], "did you mean tcp:localhost:1?"),
        (["model.py", "--connect", "unix:s", "--secret", "short"], "expected a secret of at least 16 bytes"),
        (["modle.py", "--connect", "unix:s"], "did you mean model.py?"),
        (["", "--connect", "unix:s"], "TARGET: expected a Python file, got ''"),
        ([".", "--connect", "unix:s"], "expected a Python file, got a folder (.)"),
        (["model.py:Is", "--connect", "unix:s"], "has no forebay.Model named Is; there is It"),
        (["model.py"], "the following arguments are required: --connect"),
        (["two.py", "--connect", "unix:s"], "two.py has 2 models (A, B) and a worker runs one: two.py:A"),
        (["model.py", "--connect", "unix:s", "--threads", "0"], "expected a whole number from 1 to 1024, got '0'"),
    ],
)
def test_what_is_wrong_with_worker_is_one_sentence(mistake, options, cure, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREBAY_SECRET", raising=False)
    Path("model.py").write_text(MODEL.format(name="it", settings=""))
    two = "import forebay\nclass A(forebay.Model):\n    def predict(self, batch): ...\nclass B(A):\n    pass\n"
    Path("two.py").write_text(two)
    assert cure in mistake("worker", *options)


@pytest.mark.parametrize(
    "text, cure",
    [
        (
            "models:\n  - target: it.py\n    worker: 2\n",
            "forebay.yaml:3: worker: unknown key; did you mean workers?",
        ),
        ("models:\n  - target: it.py\nhtpp: {}\n", "forebay.yaml:3: htpp: unknown key; did you mean http?"),
        (
            "models:\n  - target: it.py\n    workers: 0\n",
            "forebay.yaml:2: workers is 0, so workers dial in, and they need a door: --attach ADDRESS",
        ),
        (
            "models:\n  - target: it.py\n    workers: -1\n",
            "forebay.yaml:3: workers: expected a whole number from 0 to 1024, a range such as 1:8",
        ),
        (
            "models:\n  - target: it.py\n    workers: two\n",
            "forebay.yaml:3: workers: expected a whole number from 0 to 1024",
        ),
        ("models:\n  - workers: 2\n", "forebay.yaml:2: target: expected a Python file"),
        ("models: []\n", "forebay.yaml:1: models: expected a list with at least one model"),
        ("", "forebay.yaml:1: models: expected a list with at least one model"),
        ("5", "forebay.yaml:1: expected a mapping of keys to values, got 5"),
        (
            "models:\n  - target: it.py\nattach: here\n",
            "forebay.yaml:3: attach: expected unix:PATH or tcp:HOST:PORT, got 'here'",
        ),
        ("models:\n  - target: it.py\n    python: ./none\n", "none cannot be run: No such file or directory"),
        ("models:\n  - target: it.py\n    python: env\n    worker_kind: thread\n", "needs worker kind process"),
        ("models:\n  - target: it.py\n  - target: it.py\n", "two models are named 'it'"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence_with_its_line(mistake, text, cure, tmp_path):
    (tmp_path / "it.py").write_text(MODEL.format(name="it", settings=""))
    (tmp_path / "forebay.yaml").write_text(text)
    assert cure in mistake("check", tmp_path)


def test_an_interpreter_that_cannot_serve_is_explained(mistake, tmp_path, other, monkeypatch):
    file = tmp_path / "it.py"
    file.write_text(MODEL.format(name="it", settings=""))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = mistake("check", file, "--python", OTHER)
    assert (
        said
        == f"forebay: {OTHER} has no forebay, which a worker needs; install it there: {OTHER} -m pip install forebay\n"
    )
    assert f"did you mean {OTHER}?" in mistake("check", file, "--python", OTHER.parents[1])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert "did you mean It?" in mistake("check", f"{file}:Itt", "--python", OTHER)
    file.write_text("import numpie\n" + VERSIONS)
    assert "it.py:1 imports 'numpie', which is not installed here" in mistake("check", file, "--python", OTHER)


def test_what_is_in_the_way_of_the_socket_is_left_alone(opened, cli, tmp_path, eventually):
    (tmp_path / "file").write_text("precious")
    found = cli("serve", "--attach", f"unix:{tmp_path}/file", "--http-port", "0")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "is not a socket; choose another path or remove it" in found.stderr
    assert (tmp_path / "file").read_text() == "precious"
    server = opened()
    found = cli("serve", "--attach", server.door, "--http-port", "0")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "another server listens on" in found.stderr
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    server.process.kill()  # leaves its socket behind
    server.wait()
    assert (tmp_path / "s").is_socket()
    assert opened().client.get("/healthz").status_code == 200


def test_a_worker_without_a_server_says_so_once(mistake, cli, tmp_path):
    file = tmp_path / "it.py"
    file.write_text(MODEL.format(name="it", settings=""))
    found = cli("worker", file, "--connect", f"unix:{tmp_path}/s", "--once")
    assert found.returncode == 1
    assert "there is no server at unix:" in found.stderr
    assert "start it with: forebay serve --attach ADDRESS" in found.stderr
