# SPDX-License-Identifier: Apache-2.0
"""The timeline of a running server: over HTTP, and with `forebay trace`."""

import concurrent.futures
import itertools
import json
import re
import signal
import subprocess
import threading
from collections import Counter
from statistics import mean

import httpx
import pytest
from tests.conftest import FOREBAY
from tests.unit.observe.chrome_trace import check
from tests.waiting import PATIENCE_S, timeouts

from forebay.transports.http.trace_page import RECORDINGS

GRAPH = """
import time, forebay

@forebay.node(worker_kind="thread", workers=2)
def detect(x: float) -> float:
    time.sleep(x)
    return x

@forebay.node(worker_kind="process", workers=1)
def read(x: float) -> float:
    time.sleep(x)
    return x

@forebay.compose
def ocr(x: float) -> float:
    return read(detect(x))
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "graph.py"
    path.write_text(GRAPH)
    return path


class Load:
    """Clients that call one after the other while it is open."""

    def __init__(self, url, sample, clients=4):
        self.url, self.sample = url, sample
        self.statuses = set()
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._call, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_error):
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)

    def _call(self, client):
        with httpx.Client(timeout=PATIENCE_S) as calls:
            for number in itertools.count():
                if self.over.is_set():
                    return
                answer = calls.post(self.url, json=self.sample, headers={"x-request-id": f"c{client}-{number}"})
                self.statuses.add(answer.status_code)


def recorded(server, is_enough):
    """What the server records, each time for longer, until that is enough."""
    for seconds in timeouts(0.5):
        answer = server.client.get("/trace", params={"seconds": seconds})
        if is_enough(events := check(answer.content)):
            return answer, events
    raise AssertionError("nothing was recorded")


def test_a_request_is_followed_through_the_nodes_of_a_graph_into_their_workers(serve, graph):
    server = serve(graph)

    def is_enough(events):
        steps = Counter(event["args"]["id"] for event in events if event.get("cat") == "request")
        return sum(count == 3 for count in steps.values()) > 10

    with Load(f"{server.url}/models/ocr", 0.002) as load:
        answer, events = recorded(server, is_enough)
    assert load.statuses == {200}
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"ocr", "ocr/detect", "ocr/read"}
    steps = {}
    for event in events:
        if event.get("cat") == "request":
            steps.setdefault(event["args"]["id"], []).append(names[event["pid"]])
    followed = [ways for ways in steps.values() if len(ways) == 3]
    assert all(ways == ["ocr", "ocr/detect", "ocr/read"] for ways in followed)
    assert all(id.startswith("c") for id in steps), "the ids are those that the clients gave"  # noqa: A001
    phases = {(names[event["pid"]], event["name"]) for event in events if event.get("cat") == "phase"}
    assert phases == {
        (node, phase) for node in ("ocr/detect", "ocr/read") for phase in ("preprocess", "predict", "postprocess")
    }
    workers = {
        event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"].startswith("worker")
    }
    here = f"(pid {server.process.pid})"
    assert {worker for worker in workers if here in worker} == {f"worker 0 {here}", f"worker 1 {here}"}
    assert len(workers) == 3, "and a process"
    assert json.loads(answer.content)["otherData"]["endpoints"]["ocr/detect"]["slots"] == 2


def phases_of(events):
    """How long phases took, by their names."""
    found = {}
    for event in events:
        if event.get("cat") == "phase":
            found.setdefault(event["name"], []).append(event["dur"])
    return found


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_the_time_of_a_model_is_told_by_phases(serve, tmp_path, kind):
    path = tmp_path / "model.py"
    path.write_text(
        "import time, forebay\n\nclass Shout(forebay.Model):\n"
        "    def preprocess(self, text: str) -> str:\n        time.sleep(0.01)\n        return text\n\n"
        "    def predict(self, batch: list[str]) -> list[str]:\n        time.sleep(0.02)\n        return batch\n"
    )
    server = serve(path, "--worker-kind", kind)
    with Load(f"{server.url}/models/shout", "hello", clients=1):
        _, events = recorded(server, lambda events: len(phases_of(events)) == 3)
    by_phase = phases_of(events)
    assert set(by_phase) == {"preprocess", "predict", "postprocess"}
    assert min(by_phase["preprocess"]) >= 10_000
    assert min(by_phase["predict"]) >= 20_000
    assert min(by_phase["postprocess"]) < 10_000


def test_the_command_says_where_the_time_goes_and_how_many_workers_are_needed(serve, graph, cli, tmp_path):
    server = serve(graph)
    trace = tmp_path / "out.json"
    with Load(f"{server.url}/models/ocr", 0.03, clients=6):
        told = cli("trace", server.url, "--seconds", "1.5", "-o", trace, "--qps", "100")
    assert told.returncode == 0, told.stderr
    events = check(trace.read_text())
    assert "Perfetto" in told.stderr or "perfetto" in told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["mean/p95", "in", "ms", "requests", "queue", "pre", "process", "post", "batch", "busy"]
    rows = {line.split()[0]: line.split() for line in lines[1:3]}
    assert set(rows) == {"ocr/detect", "ocr/read"}
    assert "bottleneck: ocr/read" in told.stdout, "two threads do what one process does"
    assert "on the critical path (ocr/detect, ocr/read)" in told.stdout
    assert "requests more wait after each second" in told.stdout
    # P142: what is predicted is what the nodes took, 30 ms and a little more, and no more than that came out of them
    predicted = float(told.stdout.split("it lets up to ")[1].split()[0])
    pids = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    batches = {name: [one for one in events if one.get("cat") == "batch" and one["pid"] == pids[name]] for name in rows}
    took_s = {name: mean(one["dur"] for one in found) / 1e6 for name, found in batches.items()}
    assert min(took_s.values()) >= 0.03
    assert predicted == pytest.approx(1 / took_s["ocr/read"], rel=0.15)
    begins = [one["ts"] / 1e6 for one in batches["ocr/read"]]
    assert (len(begins) - 1) / (begins[-1] - begins[0]) < 1.15 * predicted
    # P141: so many workers do that 100 times a second
    counts = [{int(100 * took_s[name]) + more for more in (0, 1, 2)} for name in ("ocr/detect", "ocr/read")]
    assert any(f"ocr/detect {n}, ocr/read {m}" in told.stdout for n in counts[0] for m in counts[1])
    # P143: what a request takes in the nodes when it waits nowhere, beside what it takes at best when it is alone
    average_ms = float(told.stdout.split("without waiting, a request takes ")[1].split()[0])
    assert average_ms == pytest.approx(1000 * sum(took_s.values()), rel=0.15)
    assert 0.06 <= min(server.call("ocr", 0.03).elapsed.total_seconds() for _ in range(5)) < 2 * average_ms / 1000


def test_a_server_without_work_is_told_so(serve, graph, cli, tmp_path):
    server = serve(graph)
    told = cli("trace", server.url, "--seconds", "0.2", "-o", tmp_path / "t.json")
    assert told.returncode == 0
    assert "no batch ran within" in told.stdout


def test_a_key_is_needed_where_the_server_has_one(serve, graph, cli, tmp_path):
    server = serve(graph, "--api-key", "sesame")
    assert server.client.get("/trace?seconds=0.1").status_code == 401
    out = tmp_path / "t.json"
    told = cli("trace", server.url, "--seconds", "0.2", "-o", out)
    assert (told.returncode, told.stdout) == (2, "")
    assert "answers 401: API key missing" in told.stderr
    assert not out.exists()
    assert cli("trace", server.url, "--seconds", "0.2", "-o", out, "--api-key", "sesame").returncode == 0
    assert out.exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "0.09", "601", "nan", "inf", "ten", ""])
def test_a_time_that_is_none_is_refused(launch, seconds):
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    answer = server.client.get("/trace", params={"seconds": seconds})
    assert answer.status_code == 400
    assert "seconds: expected a number from 0.1 to 600, got" in answer.json()["error"]["message"]


def test_recordings_share_the_timeline_but_their_number_is_limited(launch, at_once):
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    answers = at_once(*[lambda: httpx.get(f"{server.url}/trace?seconds=2", timeout=PATIENCE_S)] * 6)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, 200, 200, 200, 429, 429]


def test_a_client_that_goes_away_ends_its_recording(launch, eventually):
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    wires = []

    def is_full():
        wire = server.connect()
        wires.append(wire.send(wire.request("GET", "/trace?seconds=500")))
        return server.client.get("/trace?seconds=0.1").status_code == 429

    eventually(is_full)
    for wire in wires:
        wire.socket.close()
    eventually(lambda: server.client.get("/trace?seconds=0.1").status_code == 200)


def test_a_server_that_stops_hands_over_what_it_has_recorded(serve, graph, eventually):
    server = serve(graph)
    answers = []

    def record():
        while (answer := httpx.get(f"{server.url}/trace?seconds=300", timeout=PATIENCE_S)).status_code == 429:
            pass  # the one that looks below had its place
        answers.append(answer)

    recordings = [threading.Thread(target=record, daemon=True) for _ in range(RECORDINGS)]
    for recording in recordings:
        recording.start()
    # as many run as may: all of them have begun
    eventually(lambda: server.client.get("/trace?seconds=0.1").status_code == 429)
    assert server.call("ocr", 0.0).status_code == 200
    server.signal()
    assert server.wait() == 0
    for recording in recordings:
        recording.join(PATIENCE_S)
    for answer in answers:
        assert answer.status_code == 200
        assert any(event.get("cat") == "batch" for event in check(answer.content))
    assert len(answers) == RECORDINGS


@pytest.mark.parametrize(
    "url, sentence",
    [
        ("127.0.0.1:1", "does not answer: "),
        ("http://127.0.0.1:1", "does not answer: "),
        ("http://[", "is not a URL"),
        ("http://no such host/", "is not a URL"),
    ],
)
def test_a_wrong_url_is_one_sentence_and_status_2(cli, url, sentence):
    told = cli("trace", url, "--seconds", "0.1")
    assert told.returncode == 2
    assert sentence in told.stderr
    assert told.stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_before_anything_is_recorded(cli, tmp_path):
    for output, why in ((tmp_path / "no" / "t.json", f"there is no folder {tmp_path / 'no'}"), (tmp_path, "a folder")):
        told = cli("trace", "http://127.0.0.1:1", "-o", output)
        assert told.returncode == 2
        assert why in told.stderr
        assert "does not answer" not in told.stderr


def test_what_is_no_server_of_ours_or_a_file_that_cannot_be_written_is_told(launch, cli, tmp_path):
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    told = cli("trace", f"{server.url}/nowhere", "--seconds", "0.1", "-o", tmp_path / "t.json")
    assert told.returncode == 2
    assert "answers 404: nothing is served at /nowhere/trace" in told.stderr
    told = cli("trace", server.url, "--seconds", "0.1", "-o", "/dev/full")
    assert told.returncode == 2
    assert "/dev/full cannot be written: No space left on device" in told.stderr
    assert "no batch ran" in told.stdout
    told = cli("trace", server.url, "--seconds", "900")
    assert told.returncode == 2
    assert "answers 400: seconds: expected a number from 0.1 to 600, got '900'" in told.stderr
    for wrong in ("0", "x", "nan"):
        assert cli("trace", server.url, "--qps", wrong).returncode == 2


def test_an_interrupted_recording_keeps_what_it_has(serve, graph, tmp_path, eventually):
    server = serve(graph)
    path = tmp_path / "trace.json"
    command = [*FOREBAY, "trace", server.url, "--seconds", "5m", "-o", path]
    with (
        Load(f"{server.url}/models/ocr", 0.001) as load,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trace,
    ):
        assert trace.stderr is not None
        assert "Ctrl+C ends it early" in trace.stderr.readline()
        eventually(lambda: load.statuses == {200})
        trace.send_signal(signal.SIGINT)
        said, errors = trace.communicate(timeout=PATIENCE_S)
    assert (trace.returncode, "finishing the recording" in errors) == (0, True), errors
    assert re.search("bottleneck|nothing was saturated|no batch ran", said)
    check(path.read_bytes())


def test_a_recording_is_ended_by_its_id_alone(serve, graph, eventually):
    server = serve(graph)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        asked = threads.submit(server.client.get, "/trace", params={"seconds": 500, "id": "a"})
        assert server.client.post("/trace", params={"id": "b"}).status_code == 404
        assert server.client.post("/trace").status_code == 404
        assert server.client.post("/trace", params={"id": "x" * 65}).status_code == 400
        assert (
            server.client.post("/trace", params={"id": "a"}, headers={"sec-fetch-site": "cross-site"}).status_code
            == 403
        )
        assert not asked.done()
        eventually(lambda: server.client.post("/trace", params={"id": "a"}).status_code == 204)
        check(asked.result(PATIENCE_S).content)
