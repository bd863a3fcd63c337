# SPDX-License-Identifier: Apache-2.0
"""Workers that die and models that misbehave: requests are answered, neighbours are left alone, service goes on."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.processes import freeze

SRC = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module", params=["process", "thread"])
def zoo(request, launch):
    return launch("zoo.py", "--worker-kind", request.param, "--max-body-bytes", "200000")


@pytest.fixture(scope="module")
def processes(launch):
    return launch("zoo.py:Failing", "--worker-kind", "process")


def test_a_worker_killed_under_load_costs_no_answer(serve, eventually):
    server = serve("single.py", "--workers", "2", "--max-batch-size", "4")
    stop = threading.Event()
    told, killed = [[] for _ in range(8)], set()

    def client(answers):
        with server.connect() as wire:
            while not stop.is_set():
                answers.append(wire.ask("POST", "/", b"0.005"))

    def working():
        """Processes that have answered, but for those that were killed."""
        return {answer.json()[1] for answers in told for answer in list(answers) if answer.status == 200} - killed

    def all_have_answers(more_than):
        eventually(lambda: all(len(answers) > had for answers, had in zip(told, more_than, strict=True)))

    with ThreadPoolExecutor(8) as executor:
        clients = [executor.submit(client, answers) for answers in told]
        try:
            for _ in range(3):
                pid = min(eventually(working))
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                had = [len(answers) for answers in told]
                eventually(lambda: server.metric("forebay_worker_restarts_total") == len(killed))
                eventually(lambda: server.metric("forebay_workers") == 2)
                # What had lost its worker is answered by now, so the next kill is not the second one for any of it.
                all_have_answers(more_than=had)
            eventually(lambda: len(working()) == 2)
        finally:
            stop.set()
        for one in clients:
            one.result()
    # Only a request that two workers had read when they died may be answered 503, and here there is none.
    assert {answer.status for answers in told for answer in answers} == {200}
    assert server.metric("forebay_in_flight") == 0
    assert server.client.get("/readyz").status_code == 200


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_decorator_that_is_a_plain_function_changes_nothing_of_how_a_method_is_called(launch, kind):
    server = launch("decorated.py", "--worker-kind", kind)
    for path, told in {"coroutine": "a!", "coroutine/length": 1, "hooks": "<A>!", "isolating": "a!"}.items():
        assert server.call(path, "a").json() == told
    for name in ("generator", "async-generator", "generator-with-hook", "steps"):
        answer = server.call(name, "a")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [line for line in answer.text.splitlines() if line.startswith("data:")] == ['data: "a0"', 'data: "a1"']


TRAINED = """
import pickle
from pathlib import Path
from forebay import Model

class Doubling:
    def transform(self, number): return 2 * number

class Pipeline(Model):
    def load(self): self.step = pickle.loads((Path(__file__).parent / "step.pickle").read_bytes())
    def predict(self, batch: list[int]) -> list[int]: return [self.step.transform(number) for number in batch]

if __name__ == "__main__":
    Path("step.pickle").write_bytes(pickle.dumps(Doubling()))
"""


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_what_a_file_has_pickled_as_a_script_is_found_where_it_is_served(serve, tmp_path, kind):
    file = tmp_path / "trained.py"
    file.write_text(TRAINED)
    subprocess.run([sys.executable, file], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": SRC})
    assert serve(file, "--worker-kind", kind).call("pipeline", 3).json() == 6


def test_a_lone_worker_that_dies_is_replaced_and_its_request_answered(serve, tmp_path, eventually):
    until = tmp_path / "until"
    server = serve("single.py")
    pid = server.client.post("/", json=0).json()[1]
    with ThreadPoolExecutor() as executor:
        asked = executor.submit(server.client.post, "/", json=str(until))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        eventually(lambda: server.metric("forebay_waiting_samples") == 0)
        os.kill(pid, signal.SIGKILL)
        until.touch()
        answer = asked.result()
    assert answer.status_code == 200
    assert answer.json()[1] != pid


def test_a_batch_that_a_worker_never_read_was_not_tried_there(serve, tmp_path, eventually):
    server = serve("single.py", "--workers", "2", "--max-batch-size", "1")
    ask = server.client.post
    with ThreadPoolExecutor() as executor:
        meet = tmp_path / "meet"
        both = [executor.submit(ask, "/", json=str(meet)) for _ in range(2)]
        eventually(lambda: server.metric("forebay_in_flight") == 2 and server.metric("forebay_waiting_samples") == 0)
        meet.touch()
        pids = {one.result().json()[1] for one in both}
        until = tmp_path / "until"
        asked = executor.submit(ask, "/", json=str(until))
        eventually(lambda: server.metric("forebay_in_flight") == 1 and server.metric("forebay_waiting_samples") == 0)
        idle = ask("/", json=0).json()[1]
        freeze(idle)  # it reads nothing more
        (busy,) = pids - {idle}
        os.kill(busy, signal.SIGKILL)
        eventually(lambda: server.metric("forebay_worker_restarts_total") == 1)
        os.kill(idle, signal.SIGKILL)
        until.touch()
        answer = asked.result()
    assert answer.status_code == 200, answer.text
    assert answer.json()[1] not in pids


def test_a_sample_that_kills_its_worker_is_told_so_after_two(processes, eventually):
    before = processes.metric("forebay_worker_restarts_total")
    answer = processes.call("failing", "die")
    assert answer.status_code == 503
    assert "died (twice)" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    ready = processes.client.get("/readyz")  # at once: a new worker takes longer than that
    assert (ready.status_code, ready.json()["problems"]) == (503, ["model 'failing' has no worker"])
    assert processes.client.get("/healthz").status_code == 200
    eventually(lambda: processes.client.get("/readyz").status_code == 200)
    assert processes.call("failing", "fine").json() == "fine"
    assert processes.metric("forebay_worker_restarts_total") == before + 2


@pytest.mark.parametrize("wish", ["exit", "interrupt"])
def test_an_exit_in_predict_does_not_end_the_service(zoo, wish, eventually):
    assert zoo.call("failing", wish).status_code in {500, 503}
    eventually(lambda: zoo.client.get("/readyz").status_code == 200)
    assert zoo.call("failing", "fine").json() == "fine"
    assert zoo.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("wish", ["raise", "too many", "none", "unsendable"])
def test_what_a_model_gets_wrong_is_500_and_the_worker_stays(zoo, wish):
    restarts = zoo.metric("forebay_worker_restarts_total", endpoint="failing")
    answer = zoo.call("failing", wish, via="a proxy")
    assert answer.status_code == 500
    assert "dawn" not in answer.text
    assert zoo.call("failing", "fine").json() == "fine"
    assert zoo.metric("forebay_worker_restarts_total", endpoint="failing") == restarts


def test_the_log_names_both_numbers_when_results_are_missing(zoo, eventually):
    zoo.call("failing", "too many", x_request_id="number-log")
    found = eventually(lambda: [r for r in zoo.records if "number-log" in r.get("request_ids", [])])
    assert "3 results for 1 sample" in found[0]["message"]


def test_batch_mates_of_a_failed_sample_are_answered(zoo, at_once):
    bad, good = at_once(lambda: zoo.call("pair", {"name": "bad"}), lambda: zoo.call("pair", {"name": "good"}))
    assert (bad.status_code, good.status_code, good.json()) == (500, 200, 2)


def test_a_stream_that_breaks_leaves_its_worker_usable(zoo):
    assert "event: error" in zoo.call("count", -1).text
    assert zoo.call("count", 2).text == "data: 0\n\ndata: 1\n\n"


def test_a_worker_that_dies_within_a_stream_ends_it_with_an_error(serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "import os, forebay\n\nclass Torn(forebay.Model):\n    def predict(self, batch):\n"
        "        yield [1] * len(batch)\n        yield [2] * len(batch)\n        os._exit(1)\n"
    )
    server = serve(path)
    text = server.call("torn", 0).text
    assert text.startswith("data: 1\n\n")
    assert "event: error" in text
    assert '"unavailable"' in text


def test_large_samples_and_answers_cross_to_processes_and_back(launch):
    server = launch("zoo.py", "--worker-kind", "process", "--max-body-bytes", "200000")
    body = bytes(range(256)) * 700
    assert server.client.post("/models/upper", content=body).content == body.upper()
    for size in (65_535, 65_536, 65_537, 3_000_000):
        assert server.call("large", size).content == bytes(size)


def test_workers_of_processes_have_nothing_left_in_shared_memory(serve):
    server = serve("zoo.py:Large", "--workers", "2")
    assert len(server.call("large", 500_000).content) == 500_000
    opened = Path(f"/proc/{server.process.pid}/fd")
    held = [str(link.readlink()) for link in opened.iterdir() if link.is_symlink()]
    assert sum("forebay-arena" in name for name in held) >= 4, "two a worker"
    assert not any(Path(name).exists() for name in held if "forebay-" in name), "none has a name that could be left"
    server.signal()
    assert server.wait() == 0


KEEPER = """
import hashlib
import forebay

kept = []

class Keeper(forebay.Model):
    def predict(self, batch: list[bytes]) -> list[list[str]]:
        kept.extend(batch)
        return [[hashlib.sha256(one).hexdigest() for one in kept]] * len(batch)
"""


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_large_bodies_arrive_as_they_were_sent_and_stay_so(serve, tmp_path, kind):  # F72
    path = tmp_path / "model.py"
    path.write_text(KEEPER)
    server = serve(path, "--worker-kind", kind)
    sent = []
    for size in (100, 700_000, 1 << 20, 5_000_001, 1_500_000, 3_000_000):
        body = random.Random(size).randbytes(size)
        sent.append(hashlib.sha256(body).hexdigest())
        how = {"content": body} if size % 2 else {"content": iter([body[: size // 3], body[size // 3 :]])}
        assert server.client.post("/models/keeper", **how).json() == sent


def test_a_client_that_leaves_within_a_large_body_leaves_nothing(serve, eventually):  # F72
    server = serve("zoo.py:Upper", "--worker-kind", "process")
    opened = Path(f"/proc/{server.process.pid}/fd")

    def bodies():
        held = [link for link in opened.iterdir() if link.is_symlink() and "forebay-body" in str(link.readlink())]
        return len({link.stat().st_ino for link in held})

    def whole():
        return server.client.post("/models/upper", content=b"a" * 2_000_000).content == b"A" * 2_000_000

    assert whole()
    eventually(lambda: bodies() == 1)  # kept for the next
    head = b"POST /models/upper HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n\r\n"
    with server.connect() as wire, server.connect() as other:
        wire.send(head + b"b" * 2_000_000)
        other.send(head + b"c" * 2_000_000)
        eventually(lambda: bodies() == 3)  # longer ones have places of their own
    for _ in range(3):
        assert whole()
    eventually(lambda: bodies() <= 3)


def test_files_of_one_server_import_what_lies_beside_them_and_not_beside_others(serve, tmp_path):
    model = "import forebay\nfrom helper import WHO\n\nclass Model(forebay.Model):\n"
    model += "    def predict(self, batch: list[int]) -> list[str]:\n        return [WHO for _ in batch]\n"
    targets = "".join(f"- target: {name}/it.py\n  name: {name}\n" for name in ("one", "two"))
    (tmp_path / "forebay.yaml").write_text(f"models:\n{targets}")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"WHO = {name!r}\n")
        (tmp_path / name / "it.py").write_text(model)
    server = serve(tmp_path, "--worker-kind", "process")
    assert [server.client.post(f"/models/{name}", json=1).json() for name in ("one", "two")] == ["one", "two"]
