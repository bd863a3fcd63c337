# SPDX-License-Identifier: Apache-2.0
"""One server as an owner and several fronts that share its port: clients cannot tell, whatever ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2
from tests.forked import COMMAND, Forked
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

from forebay.protocols.kserve.messages import messages

KEY = "a key of these tests"
CLIENTS = 16
PATIENT = ["--owner-grace-s", f"{PATIENCE_S:g}", "--timeout-ms", f"{1000 * PATIENCE_S:g}"]
"""On a busy machine an owner may take long until it is there again."""


def parts_of(server):
    """The processes of a server by their number: 0 is the owner."""
    found = {}
    for child in children_of(server.process.pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            told = next((one for one in variables if one.startswith(b"FOREBAY_NODE_PART=")), b"")
            if told:
                found[json.loads(told.partition(b"=")[2])["number"]] = child
    return found


def folder_of(server):
    """Where the sockets of its parts are."""
    told = Path(f"/proc/{parts_of(server)[0]}/environ").read_bytes().split(b"\0")
    return json.loads(next(one for one in told if one.startswith(b"FOREBAY_NODE_PART=")).partition(b"=")[2])["folder"]


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid):
    """The processes that the threads of a process have started."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [int(one) for one in thread.read_text().split()]
    return found


def below(pid):
    """All processes that a process has started, and theirs."""
    children = children_of(pid)
    return [*children, *(one for child in children for one in below(child))]


@pytest.fixture(scope="module")
def divided(launch):
    """A server with two fronts."""
    return launch("owned.py", "--fronts", "2", *PATIENT)


@pytest.fixture(scope="module")
def whole(launch):
    """The same server in one process."""
    return launch("owned.py", *PATIENT)


class Load:
    """Clients that ask until they are told to stop, each over a connection that it opens anew when it breaks."""

    def __init__(self, server):
        self.answers, self.broken = [], [0] * CLIENTS
        self._server, self._stop = server, threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)

    def __enter__(self):
        self._asking = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        eventually(lambda: len(self.answers) > 10 * CLIENTS)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._pool.shutdown()
        for one in self._asking:
            one.result()

    def go_on(self):
        """Wait until some more were answered."""
        before = len(self.answers)
        eventually(lambda: len(self.answers) > before + 10 * CLIENTS)

    @property
    def wrong(self):
        return [one for one in self.answers if one[0] != 200 or one[1] != one[2]]

    def _ask(self, number):
        with httpx.Client(base_url=self._server.url, timeout=PATIENCE_S) as client:
            count = 0
            while not self._stop.is_set():
                sample = number * 1_000_000.0 + count
                count += 1
                try:
                    answer = client.post("/models/clip", json=sample)
                except httpx.TransportError:
                    self.broken[number] += 1
                    continue
                told = answer.json()[0] if answer.status_code == 200 else answer.text
                self.answers.append((answer.status_code, told, sample))


# ---------------------------------------------------------------------------------------------------------------------
# What clients see

PAGES = [
    *("/", "/models", "/models/clip", "/models/clip/versions/1", "/models/missing", "/nothing", "/healthz", "/readyz"),
    *(
        "/docs",
        "/docs/swagger-ui.css",
        "/openapi.json",
        "/ui",
        "/ui/",
        "/ui/graph/clip",
        "/v1/models",
        "/v1/models/clip",
    ),
    *(
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/clip",
        "/v2/models/clip/ready",
        "/v2/models/clip/config",
    ),
    *("/v2/models/missing/ready", "/v2/nothing", "/v2/logging", "/models/clip/?query=1", "/docs/docs-init.js"),
]
CALLS = [
    ("/models/clip", b"broken", {}),
    ("/models/clip", b"1.5", {"content-type": "text/plain"}),
    ("/models/fails", b'"refuse"', {}),
    ("/models/fails", b'"break"', {}),
    ("/models/missing", b"1.5", {}),
    ("/models/clip/versions/2", b"1.5", {}),
    ("/models/clip/versions/1/load", b"", {}),
    ("/models/clip/weights", b"{}", {}),
    ("/v2/repository/index", b"{}", {}),
    ("/v2/repository/models/clip/load", b"{}", {}),
    ("/v2/models/missing/infer", b"{}", {}),
    ("/v1/chat/completions", b"{}", {}),
    ("/readyz", b"", {}),
]


def seen(answer):
    """An answer without what no two have in common."""
    text = re.sub(rb'"created":\d+|"(batches|requests)":\d+|"mean_batch_size":[^,}]+', b"", answer.content)
    changing = {"date", "content-length"}
    return answer.status_code, text, {name: one for name, one in answer.headers.items() if name not in changing}


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_page_is_that_of_one_server(divided, whole, method):
    headers = {"x-request-id": "of-the-test"}
    for path in PAGES:
        ours, theirs = (seen(server.client.request(method, path, headers=headers)) for server in (divided, whole))
        assert ours == theirs, path


def test_an_answer_is_that_of_one_server(divided, whole):
    for path, body, headers in CALLS:
        told = {"content-type": "application/json", "x-request-id": "of-the-test", "via": "a proxy", **headers}
        ours, theirs = (seen(server.client.post(path, content=body, headers=told)) for server in (divided, whole))
        assert ours == theirs, path


def test_a_request_goes_through_one_queue_whichever_front_takes_it(divided, tmp_path):
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(divided.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)

        def ask():
            with divided.connect() as wire:
                return wire.ask("POST", "/models/gate", json.dumps(str(gate)).encode(), headers=JSON).status

        others = [pool.submit(ask) for _ in range(3)]
        eventually(lambda: divided.client.get("/models/gate").json()["waiting"] == 3)
        gate.touch()
        assert [first.result().status_code, *(one.result() for one in others)] == [200] * 4


JSON = ("content-type: application/json",)


def test_what_a_model_raises_is_logged_once(divided):
    with divided.connect() as wire:  # to one front, which logs before it answers
        for name in ("once", "next"):
            assert wire.ask("POST", "/models/fails", b'"break"', headers=(*JSON, f"x-request-id: {name}")).status == 500

    def records(name):
        return [one for one in divided.records if one.get("request_ids") == [name]]

    eventually(lambda: records("next"))
    (record,) = records("once")
    assert record["trace"].startswith("Traceback")


@pytest.mark.parametrize("length", [10, 70_000, 3_000_000])
def test_bodies_of_any_length_arrive_whole(divided, length):
    assert divided.call("fails", "ab" * length).json() == "ab" * length


def test_a_stream_comes_part_by_part(divided, tmp_path):
    gate = tmp_path / "gate"
    with divided.client.stream("POST", "/models/slow", json=[str(gate), 3]) as answer:
        lines = answer.iter_lines()
        assert next(lines) == 'data: "part 0"'
        gate.touch()
        assert [line for line in lines if line] == ['data: "part 1"', 'data: "part 2"']


def test_a_stream_whose_owner_dies_ends_with_an_error(divided, tmp_path):
    with divided.client.stream("POST", "/models/slow", json=[str(tmp_path / "gate"), 3]) as answer:
        lines = answer.iter_lines()
        assert next(lines) == 'data: "part 0"'
        os.kill(parts_of(divided)[0], signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[0] == "event: error"
    assert "the owner process that held the request died" in rest[1]
    eventually(lambda: divided.client.get("/readyz").is_success)


def test_the_dashboard_tells_what_happens_as_it_happens(divided):
    with divided.client.stream("GET", "/ui/events") as answer:
        told = answer.iter_text()
        assert "event:" in next(told)
        divided.call("clip", 1.0)
        eventually(lambda: '"clip"' in next(told))
    eventually(lambda: any(row[1] for row in divided.client.get("/ui/history").json()["samples"][-1][2]))


def test_a_client_that_leaves_leaves_nothing_behind_at_the_owner(divided):
    folder = folder_of(divided)

    def forwarded():  # connections that the owner has taken
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return len([one for one in lines if one[-1] == f"{folder}/http" and one[5] == "03"])

    eventually(lambda: forwarded() == 0)  # those of tests before
    with divided.connect() as wire:
        wire.send(wire.request("GET", "/ui/events"))
        wire.read_head()
        assert forwarded() == 1
    eventually(lambda: forwarded() == 0)


RAW = {
    "old": b"GET /readyz HTTP/1.0\r\n\r\n",
    "no host": b"GET /readyz HTTP/1.1\r\n\r\n",
    "foreign host": b"GET /models/missing HTTP/1.1\r\nhost: foreign.example\r\n\r\n",
    "absolute": b"GET http://localhost/models/missing?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "escaped": b"GET /models/cl%69p/ready%20 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "expects": b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
    b"content-length: 2\r\n\r\n{}",
    "too long": b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99000000\r\n\r\n"
    + b"1" * 1_000_000,
}


@pytest.mark.parametrize("what", RAW)
def test_what_is_odd_is_answered_as_by_one_server(divided, whole, what):
    found = []
    for server in (divided, whole):
        with server.connect() as wire:
            with contextlib.suppress(OSError):  # it is refused before all of it was sent
                wire.send(RAW[what])
            answer = wire.read()
            if answer.status == 100:
                answer = wire.read()
            body = re.sub(rb'"request_id":"[^"]*"', b"", answer.body)
            found.append((answer.status, body, sorted(answer.headers.keys() - {"date", "x-request-id"})))
    assert found[0] == found[1]


def test_a_body_without_a_length_is_forwarded_as_it_comes(divided):
    def pieces():
        yield b'{"ready"'
        yield b": true}"

    answer = divided.client.post("/v2/repository/index", content=pieces())
    assert {one["name"] for one in answer.json()} == {"clip", "gate", "slow", "fails"}
    assert divided.client.post("/v2/repository/index", content=iter([b"{"])).status_code == 400


def test_https_is_that_of_one_server(serve, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    server = serve("owned.py", "--fronts", "2", "--certfile", str(tmp_path / "both.pem"), ca=authority)
    assert server.call("clip", 1.5).json()[0] == 1.5
    assert server.client.get("/readyz").json() == {"status": "ready"}


LENT = """
import forebay
from pathlib import Path

class Lent(forebay.Model):
    repository = "all"

    def load(self, path: Path):
        self.factor = float((path / "factor").read_text())

    def predict(self, batch: list[float]) -> list[float]:
        return [self.factor * one for one in batch]
"""


def test_models_that_are_loaded_when_they_are_asked_for(serve, tmp_path):
    for name, factor in (("double", 2), ("triple", 3)):
        (tmp_path / "all" / name / "1").mkdir(parents=True)
        (tmp_path / "all" / name / "1" / "factor").write_text(str(factor))
    (tmp_path / "lent.py").write_text(LENT)
    more = ["--max-models", "1", "--worker-kind", "thread", "--fronts", "2", "--grpc-port", "0"]
    server = serve(tmp_path / "lent.py", *more)
    for _ in range(3):  # each takes the place of the other
        for name, factor in (("double", 2.0), ("triple", 3.0)):
            assert server.call(name, 5.0).json() == factor * 5.0
            with Asking(server) as ask:
                assert ask.infer(4.0, model=name).outputs[0].shape == [1]
    assert server.metric("forebay_requests_total", code="ok") >= 2


def test_models_of_workers_that_attach_join_all_fronts(serve, models, tmp_path):
    door = f"unix:{tmp_path}/door"
    server = serve(None, "--attach", door, "--fronts", "2")
    assert server.client.get("/readyz").status_code == 503
    command = [*COMMAND, "worker", f"{models}/owned.py:Clip", "--connect", door]
    with Forked(command, stderr=subprocess.DEVNULL) as worker:
        try:
            eventually(lambda: server.client.get("/readyz").is_success)
            for _ in range(8):
                with server.connect() as wire:
                    assert wire.ask("POST", "/models/clip", b"1.5", headers=JSON).json()[0] == 1.5
        finally:
            worker.kill()


# ---------------------------------------------------------------------------------------------------------------------
# gRPC


class Asking:
    """A client of the Open Inference Protocol with a connection of its own."""

    def __init__(self, server):
        port = eventually(lambda: re.search(r"gRPC at \S+:(\d+)", server.log))[1]
        # With a pool of its own it does not share the connection of the client before.
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()

    def __call__(self, method, **fields) -> Any:
        """The answer, or the status and its text."""
        message = getattr(messages(), f"{method}Request")(**fields)
        asked = self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            told = asked(message.SerializeToString(), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return error.code(), error.details()
        return getattr(messages(), f"{method}Response").FromString(told)

    def infer(self, *values, model="clip"):
        return self(
            "ModelInfer",
            model_name=model,
            inputs=[
                {"name": "input", "datatype": "FP64", "shape": [len(values)], "contents": {"fp64_contents": values}}
            ],
        )

    def is_serving(self):
        asked = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        return health_pb2.HealthCheckResponse.FromString(asked(b"", timeout=PATIENCE_S)).status == 1


@pytest.fixture(scope="module")
def divided_grpc(launch):
    return launch("owned.py", "--fronts", "2", "--grpc-port", "0", "--manage", *PATIENT)


def test_grpc_is_that_of_one_server(divided_grpc, launch):
    whole = launch("owned.py", "--grpc-port", "0", "--manage", *PATIENT)
    with Asking(divided_grpc) as ours, Asking(whole) as theirs:
        for name, fields in (
            ("ServerLive", {}),
            ("ServerReady", {}),
            ("ServerMetadata", {}),
            ("ModelReady", {"name": "clip"}),
            ("ModelReady", {"name": "missing"}),
            ("ModelMetadata", {"name": "clip"}),
            ("ModelMetadata", {"name": "missing"}),
            ("ModelConfig", {"name": "clip"}),
            ("ModelInfer", {"model_name": "missing"}),
            ("RepositoryIndex", {}),
            ("RepositoryModelLoad", {"model_name": "missing"}),
            ("SystemSharedMemoryStatus", {}),
        ):
            assert ours(name, **fields) == theirs(name, **fields), name
        assert ours.is_serving()
        assert theirs.is_serving()


def test_models_are_managed_over_grpc_through_any_front(divided_grpc):
    for _ in range(4):
        with Asking(divided_grpc) as ask:
            ask("RepositoryModelUnload", model_name="clip")
            assert not divided_grpc.client.get("/v2/models/clip/ready").is_success
            ask("RepositoryModelLoad", model_name="clip")
            eventually(lambda ask=ask: ask.infer(1.0) and isinstance(ask.infer(1.0), messages().ModelInferResponse))


def test_calls_are_counted_once_over_all_fronts(divided_grpc):
    before = divided_grpc.metric("forebay_requests_total", endpoint="clip", code="ok")
    for _ in range(10):
        with Asking(divided_grpc) as ask:
            assert isinstance(ask.infer(1.0), messages().ModelInferResponse)
    assert divided_grpc.metric("forebay_requests_total", endpoint="clip", code="ok") == before + 10


def test_statistics_over_grpc_have_what_fronts_have_refused(divided_grpc):
    def refused():
        with Asking(divided_grpc) as ask:
            return ask("ModelStatistics", name="clip").model_stats[0].inference_stats.fail.count

    before = refused()
    answer = divided_grpc.client.post("/models/clip", content=b"1.5", headers={"content-type": "text/plain"})
    assert not answer.is_success
    assert refused() == before + 1


def test_grpc_outlives_the_owner(divided_grpc):
    with Asking(divided_grpc) as ask:
        owner = parts_of(divided_grpc)[0]
        assert ask.is_serving()
        os.kill(owner, signal.SIGKILL)
        assert isinstance(ask.infer(1.0), messages().ModelInferResponse)  # it waits
        assert ask("ModelMetadata", name="clip").name == "clip"
        eventually(ask.is_serving)


def test_sockets_that_are_removed_are_made_again(divided_grpc):
    folder, counted = Path(folder_of(divided_grpc)), divided_grpc.metric("forebay_requests_total", endpoint="clip")
    names = {one.name for one in folder.iterdir()} - {"lock"}
    assert names == {"owner", "http", "grpc", "counts-1", "counts-2"}
    shutil.rmtree(folder)
    assert divided_grpc.client.get("/models/clip").is_success  # it waits
    eventually(lambda: {one.name for one in folder.iterdir()} == names)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in folder.iterdir()} == {0o600}
    before = parts_of(divided_grpc)
    os.kill(before[1], signal.SIGKILL)  # another front dials the owner there
    restarted(divided_grpc, before, 1)
    for _ in range(8):
        with Asking(divided_grpc) as ask:
            assert ask("ModelMetadata", name="clip").name == "clip"
            assert isinstance(ask.infer(1.0), messages().ModelInferResponse)
    assert divided_grpc.metric("forebay_requests_total", endpoint="clip") == counted + 8


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_requests_are_counted_once_over_all_fronts(serve):
    server = serve("owned.py", "--fronts", "2")
    for number in range(40):  # connections of their own, of which each front gets some
        with server.connect() as wire:
            headers = ("content-type: text/plain",) if number % 4 == 0 else JSON
            wire.ask("POST", "/models/clip", b"1.5", headers=headers)
            assert server.metric("forebay_requests_total", endpoint="clip") == number + 1
    for name, value in (
        ("forebay_requests_total", 30.0),
        ("forebay_request_seconds_count", 30.0),
        ("forebay_queue_seconds_count", 30.0),
        ("forebay_batch_size_sum", 30.0),
    ):
        more = {"code": "ok"} if name == "forebay_requests_total" else {}
        assert server.metric(name, endpoint="clip", **more) == value, name
    assert server.metric("forebay_requests_total", endpoint="clip", code="invalid_argument") == 10.0
    assert server.metric("forebay_workers", endpoint="clip") == 1.0
    (told,) = server.client.get("/v2/models/clip/stats").json()["model_stats"]
    counted = {name: one["count"] for name, one in told["inference_stats"].items()}
    assert (counted["success"], counted["fail"], told["execution_count"]) == (30, 10, 30)


def test_what_fronts_have_counted_outlives_them(divided):
    assert divided.call("clip", 1.5).status_code == 200
    counted = divided.metric("forebay_requests_total", endpoint="clip")
    before = parts_of(divided)
    for number in (1, 2):
        os.kill(before[number], signal.SIGKILL)
    restarted(divided, before, 1, 2)
    eventually(lambda: answers(divided))
    divided.client.close()  # its connection was with one of them
    divided.client = httpx.Client(base_url=divided.url, timeout=PATIENCE_S)
    assert divided.call("clip", 1.5).status_code == 200
    assert divided.metric("forebay_requests_total", endpoint="clip") == counted + 1


# ---------------------------------------------------------------------------------------------------------------------
# What ends


def restarted(server, before, *numbers):
    """Wait until these parts are other processes than before."""
    eventually(lambda: all(parts_of(server).get(number, before[number]) != before[number] for number in numbers))


def test_kill_9_of_a_front_costs_its_own_connections_only(divided):
    with Load(divided) as load:
        before = parts_of(divided)
        os.kill(before[1], signal.SIGKILL)
        restarted(divided, before, 1)
        load.go_on()
    assert "front 1 ended by signal 9; restarting it" in divided.log
    assert load.wrong == []
    assert 0 in load.broken  # who had the other front
    assert max(load.broken) <= 2  # the one that broke, and one more that was not accepted yet
    assert parts_of(divided)[0] == before[0]


def test_kill_9_of_the_owner_fails_no_request(divided):
    with Load(divided) as load:
        before = parts_of(divided)
        os.kill(before[0], signal.SIGKILL)
        restarted(divided, before, 0)
        load.go_on()
    assert load.wrong == []
    assert load.broken == [0] * CLIENTS
    assert [parts_of(divided)[number] for number in (1, 2)] == [before[number] for number in (1, 2)]


def test_sigterm_under_load_drops_nothing_and_leaves_nothing(serve):
    server = serve("owned.py", "--fronts", "2")
    answers, lost = [], []
    connected = threading.Barrier(CLIENTS + 1)

    def ask(number):
        try:
            with server.connect() as wire:
                connected.wait(PATIENCE_S)
                while True:  # a client that sends only while the server has not said close
                    wire.send(wire.request("POST", "/models/clip", b"%d.0" % number, headers=JSON))
                    answer = wire.read()
                    answers.append((answer.status, answer.json()[0] == number))
                    if answer.headers.get("connection") == "close":
                        return
        except Exception as error:
            lost.append(repr(error))

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, number) for number in range(CLIENTS)]
        connected.wait(PATIENCE_S)
        eventually(lambda: len(answers) > 10 * CLIENTS)
        processes = below(server.process.pid)
        server.signal()
        for one in asking:
            one.result()
    assert server.wait() == 0
    assert lost == []
    assert set(answers) == {(200, True)}
    assert [pid for pid in processes if is_there(pid)] == []
    assert not list(Path("/dev/shm").glob(f"forebay-{server.process.pid}-*"))
    assert "Traceback" not in server.log


@pytest.mark.parametrize("options", [["--fronts", "2"], []])
def test_a_drain_waits_for_requests_that_are_open_unless_there_is_a_second_signal(serve, tmp_path, options):
    server = serve("owned.py", *options)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.call, "gate", str(tmp_path / "gate"))
        eventually((tmp_path / "gate.begun").exists)
        server.signal(signal.SIGINT)
        eventually(lambda: not answers(server))
        assert server.process.poll() is None
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        assert server.log.count("SIGINT: draining") == 1
        assert "SIGTERM" not in server.log
        with contextlib.suppress(httpx.TransportError):
            assert first.result().status_code == 503


def answers(server):
    """Whether a new connection is taken."""
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def test_the_death_of_the_node_process_leaves_no_process_behind(serve):
    server = serve("owned.py", "--fronts", "2")
    processes = below(server.process.pid)
    assert len(processes) >= 3 + 4  # three parts, four workers
    server.signal(signal.SIGKILL)
    eventually(lambda: not any(map(is_there, processes)))
    eventually(lambda: not list(Path("/dev/shm").glob(f"forebay-{server.process.pid}-*")))


def test_readiness_is_that_of_the_owner(divided):
    with httpx.Client(base_url=divided.url, timeout=PATIENCE_S) as client:
        assert client.get("/readyz").json() == {"status": "ready"}
        os.kill(parts_of(divided)[0], signal.SIGKILL)
        eventually(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/healthz").status_code == 200
        eventually(lambda: client.get("/readyz").status_code == 200)


def test_a_server_is_not_ready_while_its_owner_hangs(divided):
    owner = parts_of(divided)[0]
    os.kill(owner, signal.SIGSTOP)
    try:
        assert httpx.get(f"{divided.url}/readyz", timeout=PATIENCE_S).status_code == 503
    finally:
        os.kill(owner, signal.SIGCONT)
    eventually(lambda: httpx.get(f"{divided.url}/readyz").is_success)


def test_an_owner_that_hangs_is_replaced(serve):
    server = serve("owned.py", "--fronts", "2", "--process-hang-s", "3", *PATIENT)
    before = parts_of(server)
    os.kill(before[0], signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        handed_on = pool.submit(server.call, "clip", 1.5)
        forwarded = pool.submit(httpx.get, f"{server.url}/models/clip", timeout=PATIENCE_S)
        restarted(server, before, 0)
        assert handed_on.result().json()[0] == 1.5  # sent once more
        assert forwarded.result().status_code in {200, 503}  # it is not sent again if the one that hung has it
    assert f"owner hangs: its process {before[0]} did not answer for 3 s; killing it" in server.log
    assert [parts_of(server)[number] for number in (1, 2)] == [before[number] for number in (1, 2)]


def test_what_is_forwarded_does_not_wait_for_an_owner_that_hangs(serve):
    server = serve("owned.py", "--fronts", "1", "--process-hang-s", "0", "--owner-grace-s", "0")
    owner = parts_of(server)[0]
    os.kill(owner, signal.SIGSTOP)
    try:
        answer = httpx.get(f"{server.url}/models/clip", timeout=PATIENCE_S)
    finally:
        os.kill(owner, signal.SIGCONT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    eventually(lambda: httpx.get(f"{server.url}/models/clip").is_success)


# ---------------------------------------------------------------------------------------------------------------------
# What changes


CHANGING = """
import forebay

class Changing(forebay.Model):
    def predict(self, batch: list[float]) -> list[str]:
        return ["{text}"] * len(batch)
"""


def test_a_reload_under_load_fails_no_request(serve, tmp_path):
    file = tmp_path / "changing.py"
    file.write_text(CHANGING.format(text="first"))
    server = serve(file, "--fronts", "2")
    told, stop = [], threading.Event()

    def ask():
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            while not stop.is_set():
                answer = client.post("/models/changing", json=1.0)
                told.append((answer.status_code, answer.text))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        eventually(lambda: told)
        file.write_text(CHANGING.format(text="second"))
        server.signal(signal.SIGHUP)
        eventually(lambda: told[-1] == (200, '"second"'))
        stop.set()
        for one in asking:
            one.result()
    assert "settings that need a restart" not in server.log
    assert set(told) == {(200, '"first"'), (200, '"second"')}


def test_models_are_managed_through_any_front_with_a_key(serve, tmp_path):
    server = serve("owned.py", "--fronts", "2", "--api-key", KEY)
    for _ in range(8):  # connections of their own
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            for path in ("/models/clip/versions/1/load", "/models/clip", "/v2/repository/models/clip/load"):
                assert client.post(path, json={}).status_code == 401, path
            for path in ("/models", "/metrics", "/trace", "/ui/events"):
                assert client.get(path).status_code == 401, path
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers={"x-api-key": KEY}) as client:
        assert client.post("/models/clip/versions/1/load").status_code == 200
        assert client.post("/v2/repository/models/gate/unload", json={}).status_code == 200
        eventually(lambda: client.post("/models/gate", json="x").status_code in {404, 503})
        assert client.post("/v2/repository/models/gate/load", json={}).status_code == 200
        (tmp_path / "open").touch()
        eventually(lambda: client.post("/models/gate", json=str(tmp_path / "open")).status_code == 200)


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def test_a_bad_project_is_said_once(cli, tmp_path):
    (tmp_path / "bad.py").write_text("import forebay\n\nclass Bad(forebay.Model):\n    max_batch_size = 0\n")
    ours, theirs = (cli("serve", tmp_path / "bad.py", *more, "--http-port", "0") for more in (["--fronts", "2"], []))
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr)
    assert ours.returncode == 2


def test_a_model_that_cannot_be_loaded_is_said_once(cli, tmp_path):
    text = "import forebay\n\nclass Bad(forebay.Model):\n    def load(self):\n        raise ValueError('no file')\n"
    (tmp_path / "bad.py").write_text(text + "    def predict(self, batch: list[float]) -> list[float]:\n        ...\n")
    ours, theirs = (cli("serve", tmp_path / "bad.py", *more, "--http-port", "0") for more in (["--fronts", "2"], []))
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr)
    assert "ValueError: no file" in ours.stderr


def test_a_port_that_is_taken_is_said(cli, divided, models):
    for more in (["--fronts", "2"], []):
        ended = cli("serve", models / "owned.py", *more, "--http-port", divided.port)
        assert ended.returncode == 2
        assert ended.stderr.endswith(f":{divided.port} is in use already; choose another port, 0 takes a free one\n")


def test_http_and_grpc_have_ports_of_their_own(cli, models):
    port = free_port()
    ended = cli("serve", models / "owned.py", "--fronts", "1", "--http-port", port, "--grpc-port", port)
    assert ended.returncode == 2
    assert f":{port} is in use already; choose another port" in ended.stderr


@pytest.mark.parametrize(
    "options, said",
    [
        (["--fronts", "0"], "expected a whole number from 1 to 64, got"),
        (["--fronts", "999"], "expected a whole number from 1 to 64, got"),
        (["--fronts", "many"], "expected a whole number from 1 to 64, got"),
        (["--fronts", "2", "--owner", "unix:x"], "--owner names another server that has them; leave one of them out"),
        (["--fronts", "2", "--cluster", "local"], "and --cluster places its parts on many; leave one out"),
        (["--fronts", "2", "--shared-memory"], "with --fronts a request may reach another; leave one out"),
    ],
)
def test_what_is_not_possible_is_said(cli, models, options, said):
    ended = cli("serve", models / "owned.py", *options)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_project_of_another_server_is_not_divided(cli, tmp_path):
    (tmp_path / "nucleus.yaml").write_text("base_image: python\n")
    ended = cli("serve", tmp_path, "--fronts", "2")
    assert ended.returncode == 2
    assert "is a nucleus project, which is served whole: leave out --fronts" in ended.stderr


def test_a_file_may_say_it(serve, tmp_path, models):
    (tmp_path / "forebay.yaml").write_text(f"target: {models}/owned.py\nfronts: 2\n")
    port = free_port()
    server = serve(tmp_path, port=port)
    assert sorted(parts_of(server)) == [0, 1, 2]
    assert server.port == port
    assert server.call("clip", 1.0).json()[0] == 1.0
