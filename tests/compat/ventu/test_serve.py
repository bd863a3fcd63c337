# SPDX-License-Identifier: Apache-2.0
"""`forebay serve` of files written for the original."""

import asyncio
import json
import re
import signal
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from forebay.errors import ConfigError, ForebayError
from forebay.server.config import HttpConfig
from forebay.surfaces.contract import Options
from forebay.surfaces.ventu.media_codecs import MsgPack
from forebay.surfaces.ventu.runner import build
from forebay.surfaces.ventu.service_pages import Reply, ServicePages
from forebay.surfaces.ventu.surface import VentuSurface
from forebay.workers.processes.child import ReceivedItem
from forebay.workers.runner import WorkerContext

MODEL = """
    import pydantic
    from ventu import Ventu

    class Req(pydantic.BaseModel):
        text: str

    class Resp(pydantic.BaseModel):
        n: int

    class Lengths(Ventu):
        def batch_inference(self, batch):
            return [{"n": len(item.text)} for item in batch]
"""


@pytest.fixture
def write(tmp_path):
    """Writes a project file."""

    def make(text, name="project.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return make


def infer(server, *texts):
    """Sends texts at the same time."""
    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(lambda text: server.client.post("/inference", json={"text": text}), texts))


@pytest.mark.parametrize(
    "text,expected",
    [
        ("from ventu import Ventu", True),
        ("import ventu", True),
        ("import ventu as v", True),
        ("from ventu.ventu import Ventu", True),
        ("from forebay.surfaces.ventu import Ventu", True),
        ("from forebay.surfaces import ventu", True),
        ("def create():\n    from ventu import Ventu", True),
        ("import adventure", False),
        ("from . import ventu", False),
        ("ventu = 1", False),
        ("import forebay", False),
        ("import ventu\nthis is no python", False),
        ("import ventu\nraise SystemExit('this file was run')", True),
    ],
)
def test_files_are_told_by_their_imports_and_not_run(text, expected, write):
    assert VentuSurface().detect(str(write(text))) is expected
    assert VentuSurface().detect(f"{write(text)}:name") is expected


def test_what_is_no_python_file_is_not_ours(tmp_path, write):
    write("import ventu", "notes.txt")
    for target in (tmp_path, tmp_path / "notes.txt", tmp_path / "missing.py"):
        assert not VentuSurface().detect(str(target))


# B16, B54, B61, B62, B63, B64, B65, B66, B67
def test_an_unmodified_project_is_served_with_batches(launch, lengths, eventually):
    server = launch(lengths, "--max-batch-size", "4", "--max-wait-ms", "5000", "--timeout-ms", "10000")
    answers = infer(server, "four", "fives", "eleven.", "x")
    assert [answer.status_code for answer in answers] == [200, 200, 200, 422]
    assert [answer.json() for answer in answers[:3]] == [{"n": n, "batch": 3} for n in (4, 5, 7)]
    assert answers[3].json()[0]["loc"] == ["text"]

    client = server.client
    many = infer(server, "raise", "x" * 101, "fine", "okay")
    assert [answer.status_code for answer in many] == [500, 500, 200, 200]
    assert set(many[0].json()) == {"title", "description"}
    assert many[1].json()[0]["loc"] == ["n"]
    eventually(lambda: "Traceback" in server.log)  # of what raised; the answer did not tell

    with ThreadPoolExecutor(4) as threads:
        bodies = [b"", b"{", b"[1]", b"\xff"]
        codes = [
            answer.status_code for answer in threads.map(lambda one: client.post("/inference", content=one), bodies)
        ]
    assert codes == [422, 400, 422, 400]
    assert client.post("/inference", content=b"x", headers={"content-type": "text/csv"}).status_code == 415

    assert client.get("/").json()["inference"] == {"/inference": "POST"}
    assert client.get("/health").json() == {"inference": "OK", "service": "OK"}
    assert client.get("/inference").status_code == 405
    assert client.get("/nope").status_code == 404
    document = client.get("/apidoc/openapi.json").json()
    assert document["info"]["title"] == "Lengths"
    assert document["paths"]["/inference"]["post"]["summary"] == "Lengths of texts."
    assert client.get("/apidoc/swagger").status_code == 200
    assert client.get("/readyz").json() == {"status": "ready"}
    assert server.metric("validation_error_counter_total") == 3
    assert server.metric("forebay_requests_total", code="ok") >= 10


def test_check_says_what_would_be_served_and_runs_nothing(write, cli):
    path = write("import ventu\nraise SystemExit('this file was run')")
    done = cli("check", path, "--workers", "2")
    assert done.returncode == 0
    assert "POST /inference" in done.stdout + done.stderr
    assert "2 worker slots, " in done.stdout + done.stderr


def test_options_of_the_server_hold_here_too(serve, lengths):
    server = serve(
        lengths,
        "--api-key",
        "secret",
        "--public-metrics",
        "--cors-origin",
        "https://page.example",
        "--max-body-bytes",
        "100",
        "--no-extra-routes",
        "--worker-kind",
        "thread",
        "--idle",
        "go",
    )
    assert "always runs in processes" in server.log
    client = server.client
    assert (client.get("/").status_code, client.get("/metrics").status_code) == (401, 200)
    client.headers["x-api-key"] = "secret"
    assert client.get("/healthz").status_code == 404
    assert client.post("/inference", content=b"x" * 101).status_code == 413
    assert client.post("/inference", content=iter([b"x" * 60] * 2)).status_code == 413
    answer = client.post("/inference", json={"text": "abc"}, headers={"origin": "https://page.example"})
    assert answer.json() == {"n": 3, "batch": 1}
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "forebay_requests" not in client.get("/metrics").text


# B69, B70, B72
def test_metrics_of_all_workers_are_added_up(serve, lengths):
    server = serve(lengths, "--workers", "2", "--idle", "go", "--max-batch-size", "1")
    assert server.metric("process_worker", protocol="http") == 2
    assert server.metric("batch_process_time_count", process="inference") == 2  # each was warmed up
    for _ in range(8):
        assert server.client.post("/inference", json={"text": "abc"}).json() == {"n": 3, "batch": 1}
    assert server.metric("batch_process_time_count", process="inference") == 10
    server.signal()
    assert server.wait() == 0


# B11
def test_too_many_requests_get_the_status_of_the_batching_service(serve, lengths, tmp_path, eventually):
    started, until = tmp_path / "started", tmp_path / "until"
    env = {"STARTED": str(started), "UNTIL": str(until)}
    server = serve(lengths, "--max-batch-size", "1", "--max-queue", "1", env=env)
    with ThreadPoolExecutor(2) as threads:
        held = [threads.submit(server.client.post, "/inference", json={"text": "pause 0"})]
        eventually(started.exists)
        held.append(threads.submit(server.client.post, "/inference", json={"text": "waiting"}))
        eventually(lambda: server.metric("forebay_waiting_samples") == 1)
        full = server.client.post("/inference", json={"text": "too many"})
        until.touch()
        assert full.status_code == 429
        assert full.text
        assert "too many" not in full.text
        assert [one.result().status_code for one in held] == [200, 200]


@pytest.fixture(scope="module")
def small(launch, lengths, tmp_path_factory):
    """A server with one worker, one place in the queue and little patience, and the file that tells of a pause."""
    started = tmp_path_factory.mktemp("small") / "started"
    options = ("--max-batch-size", "1", "--max-queue", "1", "--timeout-ms", "1000")
    return launch(lengths, *options, env={"STARTED": str(started)}), started


# B12
def test_too_slow_requests_get_the_status_of_the_batching_service(small, eventually):
    server, started = small
    started.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(server.client.post, "/inference", json={"text": "pause 1.5"})
        eventually(started.exists)
        late = slow.result()
        assert (late.status_code, late.text) == (408, "Timeout!")
    eventually(lambda: server.client.post("/inference", json={"text": "abc"}).status_code == 200)


def test_a_client_that_goes_away_leaves_the_others_alone(small, eventually):
    server, started = small
    started.unlink(missing_ok=True)
    before = server.metric("forebay_requests_total", code="cancelled")
    with pytest.raises(httpx.TimeoutException), httpx.Client(timeout=httpx.Timeout(60, read=0.1)) as client:
        client.post(f"{server.url}/inference", json={"text": "pause 0.5"})
    eventually(lambda: server.metric("forebay_requests_total", code="cancelled") == before + 1)
    eventually(started.exists)
    eventually(lambda: server.client.post("/inference", json={"text": "abc"}).status_code == 200)


def test_a_worker_that_dies_is_replaced(small, eventually):
    server, _ = small
    assert server.client.post("/inference", json={"text": "die"}).status_code in {408, 500, 503}
    eventually(lambda: server.client.post("/inference", json={"text": "abc"}).status_code == 200)
    assert server.client.get("/health").json()["inference"] == "OK"


def test_a_factory_and_msgpack_are_found(write, serve):
    path = write(textwrap.dedent(MODEL) + "def create_app():\n    return Lengths(Req, Resp, use_msgpack=True).app")
    server = serve(path)
    answer = server.client.post("/inference", content=msgspec.msgpack.encode({"text": "abc"}))
    assert (answer.headers["content-type"], msgspec.msgpack.decode(answer.content)) == ("application/msgpack", {"n": 3})


# B72
def test_a_model_that_fails_its_warm_up_is_not_served(write, cli):
    text = (
        "class Wrong(Lengths):\n    def batch_inference(self, batch):\n        raise LookupError('no labels')\n"
        "Req.model_config['json_schema_extra'] = {'example': {'text': 'a'}}\nmodel = Wrong(Req, Resp)"
    )
    done = cli("serve", write(textwrap.dedent(MODEL) + text), "--http-port", "0")
    assert done.returncode == 1
    assert "no labels" in done.stderr


@pytest.fixture
def make(write, monkeypatch):
    """Builds the runner of a project in this process, and forgets about it afterwards."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def build_from(text, name=None, *, model=MODEL):
        return build(path=str(write(textwrap.dedent(model) + text)), name=name)

    yield build_from
    for module in ("ventu", "ventu.ventu", "ventu.config", "ventu.protocol"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    "text,name",
    [
        ("model = Lengths(Req, Resp, version='this')", None),
        ("model = again = Lengths(Req, Resp, version='this')", None),
        ("model = Lengths(Req, Resp)\nother = Lengths(Req, Resp, version='this')", "other"),
        ("def create_model():\n    return Lengths(Req, Resp, version='this')", None),
        ("def create_app():\n    return Lengths(Req, Resp, version='this').app", None),
        ("def mine():\n    return Lengths(Req, Resp, version='this')", "mine"),
        ("application = Lengths(Req, Resp, version='this').app", None),
    ],
)
def test_the_object_is_found_however_it_is_offered(text, name, make):
    runner = make(text, name)
    [about] = runner.run([ReceivedItem(b"", {"verb": "about"}, 1)])
    assert json.loads(about["document"])["info"]["version"] == "this"


@pytest.mark.parametrize(
    "text,name,message",
    [
        ("", None, "holds no Ventu object"),
        ("one = Lengths(Req, Resp)\ntwo = Lengths(Req, Resp)", None, "several Ventu objects: one, two"),
        ("model = Lengths(Req, Resp)", "modle", "has nothing named modle; did you mean model"),
        ("model = 1", "model", "model in .*: expected a Ventu object or a function that returns one, got 1"),
        ("import nothing_like_this", None, "imports 'nothing_like_this', which is not installed here"),
        ("1 / 0", None, "ZeroDivisionError"),
        ("raise SystemExit(3)", None, "SystemExit"),
    ],
)
def test_a_project_that_cannot_be_served_says_why(text, name, message, make):
    with pytest.raises(ForebayError, match=message):
        make(text, name)


def test_a_model_with_inference_only_is_asked_one_by_one(make):
    runner = make(
        "class Single(Ventu):\n    def inference(self, item):\n        return {'n': len(item.text)}\n"
        "model = Single(Req, Resp)"
    )
    runner.open(WorkerContext())
    items = [ReceivedItem(b'{"text": "a"}', {}, 1), ReceivedItem(b'{"text": "bb"}', {}, 1)]
    assert [msgspec.json.decode(body) for _, _, body in runner.run(items)] == [{"n": 1}, {"n": 2}]
    runner.close()


def test_the_project_of_the_guide_answers(make):
    guide = Path(__file__).parents[3] / "docs" / "how-to" / "ventu.md"
    [source] = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's, about the inner class Config
        runner = make(source, model="")
    runner.open(WorkerContext())
    [[status, _, body]] = runner.run([ReceivedItem(b'{"text": "a nice day"}', {}, 1)])
    assert (status, msgspec.json.decode(body)) == (200, {"positive": 1 / 3})


@pytest.mark.parametrize(
    "text",
    [
        "from ventu import Ventu as This",
        "from ventu.ventu import Ventu as This",
        "import ventu\nThis = ventu.Ventu",
        "from ventu.config import Config\nfrom ventu.protocol import BatchProtocol\nfrom ventu import Ventu as This",
    ],
)
def test_names_of_the_original_are_ours(text, make):
    runner = make(f"{text}\nmodel = This(Req, Resp, name='by another name')")
    [about] = runner.run([ReceivedItem(b"", {"verb": "about"}, 1)])
    assert json.loads(about["document"])["info"]["title"] == "by another name"


# F45
def test_examples_that_json_cannot_hold_are_described_and_served(make):
    text = """
import datetime
class Image(pydantic.BaseModel):
    data: bytes
    taken: datetime.datetime
    model_config = pydantic.ConfigDict(
        json_schema_extra={"example": {"data": b"\\xff\\x00", "taken": datetime.datetime(2026, 1, 2)}}
    )
class Sizes(Ventu):
    def batch_inference(self, batch):
        return [{"n": len(item.data)} for item in batch]
model = Sizes(Image, Resp, use_msgpack=True)
"""
    runner = make(text)
    runner.open(WorkerContext())
    [about] = runner.run([ReceivedItem(b"", {"verb": "about"}, 1)])
    page = ServicePages(MsgPack(), about["document"]).find("GET", "/apidoc/openapi.json")
    assert isinstance(page, Reply)
    document = json.loads(page.body)
    example = document["components"]["schemas"]["Image"]["example"]
    assert example == {"data": "/wA=", "taken": "2026-01-02T00:00:00"}
    [[status, _, body]] = runner.run([ReceivedItem(msgspec.msgpack.encode({"data": b"abc", "taken": 0}), {}, 1)])
    assert (status, msgspec.msgpack.decode(body)) == (200, {"n": 3})


# B68: the worker tells the server what it serves, and no frame holds such an integer
def test_bounds_and_defaults_beyond_64_bits_are_described(make):
    text = """
class Wide(pydantic.BaseModel):
    n: int = pydantic.Field(2**70, le=10**30)
    model_config = pydantic.ConfigDict(json_schema_extra={"example": {"n": 2**66}})
model = Ventu(Wide, Wide)
"""
    [about] = make(text).run([ReceivedItem(b"", {"verb": "about"}, 1)])
    wide = json.loads(msgspec.msgpack.decode(msgspec.msgpack.encode(about))["document"])["components"]["schemas"][
        "Wide"
    ]
    assert (wide["properties"]["n"]["maximum"], wide["example"]) == (10**30, {"n": 2**66})


# F46
@pytest.mark.parametrize(
    "call", ["run_unix('b.socket')", "run_tcp()", "run_http(port=0)", "sock.run('b.socket')"], ids=lambda call: call[:8]
)
@pytest.mark.parametrize("name", [None, "model"])
def test_a_file_that_runs_its_model_itself_is_served(call, name, make):
    text = f"model = Lengths(Req, Resp, version='this')\ntry:\n    model.{call}\nexcept Exception:\n    pass\n1 / 0"
    runner = make(text, name)
    [about] = runner.run([ReceivedItem(b"", {"verb": "about"}, 1)])
    assert json.loads(about["document"])["info"]["version"] == "this"
    assert about["left_out"] == call.partition("(")[0]


# F46
def test_a_file_that_runs_its_model_itself_answers_and_is_told_so(write, serve):
    server = serve(write(textwrap.dedent(MODEL) + "Lengths(Req, Resp).run_unix()"))
    assert server.client.post("/inference", json={"text": "abc"}).json() == {"n": 3}
    assert "skipped run_unix()" in server.log


# F46
def test_a_file_that_never_ends_is_named_after_a_while(write, caplog, monkeypatch):
    monkeypatch.setattr("forebay.surfaces.ventu.surface.SLOW_S", 0.01)
    path = write("import ventu, threading\nthreading.Event().wait()")
    app = VentuSurface().build(str(path), Options(http=HttpConfig())).app

    async def run():
        starting = asyncio.ensure_future(app.start())
        while not caplog.records:  # noqa: ASYNC110 - the log has no event to wait for
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait([starting])
        await app.drain(0.0)

    with caplog.at_level("WARNING", logger="forebay"):
        asyncio.run(run())
    assert "project.py is still loading" in caplog.text


EXAMPLE = "{}.model_config['json_schema_extra'] = {}\n"


# F49
@pytest.mark.parametrize(
    "text,name,message",
    [
        ("def (", None, r"project.py:14: invalid syntax$"),
        ("import nothing_like_this", None, "imports 'nothing_like_this', which is not installed here"),
        ("", None, r"holds no Ventu object; make one of its class: model = Lengths\(Request, Response\)$"),
        ("", "Lengths", r"Lengths in .*project.py is a class; make an object of it: model = Lengths\(Request, Re"),
        ("model = Lengths", None, r"holds no Ventu object; make one of its class: model = Lengths"),
        (
            "def mine(x):\n    return Lengths(Req, Resp)",
            "mine",
            "mine in .* needs arguments; expected a function wi",
        ),
        ("def create_model(x):\n    return x", None, "create_model in .* needs arguments"),
        (
            "model = Lengths(Req(text='a'), Resp)",
            None,
            r"a schema has to be a pydantic model class of the project, not Req\(text='a'\)",
        ),
        ("model = Lengths(pydantic.BaseModel, Resp)", None, "a schema has to be a pydantic model class .*, not <class"),
        ("model = Lengths(Req, None)", None, "a schema has to be a pydantic model class.*, not None"),
        ("model = Lengths(Req, Resp, port='x')", None, "port: Input should be a valid integer.*, found 'x'"),
        ("model = Lengths(Req, Resp, prot=1)", None, "prot: Extra inputs are not permitted.*; did you mean 'port'"),
        (
            EXAMPLE.format("Req", {"example": {"text": "a"}, "batch_size": "4"}) + "model = Lengths(Req, Resp)",
            None,
            "batch_size of Req: expected a whole number from 1 to 65536, got '4'",
        ),
        (
            EXAMPLE.format("Resp", {"example": {"n": 1}}) + "model = Lengths(Req, Resp)",
            None,
            "require request examples if response examples are provided: Resp has one and Req has none",
        ),
    ],
)
def test_what_a_person_wrote_wrong_is_one_sentence(text, name, message, make):
    with pytest.raises(ConfigError, match=message) as caught:
        make(text, name)
    assert "\n" not in caught.value.message
    assert "project.py" in caught.value.message


# F49
@pytest.mark.parametrize(
    "request_extra,response_extra,message",
    [
        (
            {"example": {"txt": "a"}},
            None,
            "the example of the request schema Req does not fit it: text: Field required",
        ),
        ({"examples": [{"txt": 1}]}, None, r"examples\[0\] of the request schema Req does not fit it: text: Field req"),
        (
            {"example": {"text": "a"}},
            {"example": {"m": 1}},
            "the example of the response schema Resp does not fit it: n: F",
        ),
        (
            {"example": {"text": "a"}},
            {"example": {"n": 2}},
            r"the example of Resp is not what the model answers: it does not match \{'n': 2\} != \{'n': 1\}",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["batch_inference", "inference"])
def test_a_wrong_example_is_named(request_extra, response_extra, message, kind, make):
    text = EXAMPLE.format("Req", request_extra)
    if response_extra is not None:
        text += EXAMPLE.format("Resp", response_extra)
    if kind == "inference":
        text += "class Lengths(Ventu):\n    def inference(self, item):\n        return {'n': len(item.text)}\n"
    runner = make(text + "model = Lengths(Req, Resp)")
    with pytest.raises(ConfigError, match=message) as caught:
        runner.open(WorkerContext())
    assert "project.py" in caught.value.message


# F49
def test_the_command_ends_with_2_and_without_a_traceback(write, cli):
    text = EXAMPLE.format("Req", {"example": {"txt": "a"}}) + "model = Lengths(Req, Resp)"
    done = cli("serve", write(textwrap.dedent(MODEL) + text), "--http-port", "0")
    assert done.returncode == 2
    assert "the example of the request schema Req does not fit it: text: Field required" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_costs_the_numbers_and_no_request(serve, lengths, small_disk, eventually):
    small_disk.fill()
    server = serve(lengths, "--workers", "1", env={"PROMETHEUS_MULTIPROC_DIR": str(small_disk.folder)})
    assert [answer.status_code for answer in infer(server, "four", "fives")] == [200, 200]
    assert server.client.get("/metrics").status_code == 200
    (line,) = [line for line in server.lines if "is full: " in line]
    assert f"the metrics folder {small_disk.folder} is full: No space left on device" in line
    assert server.client.get("/health").status_code == 200


def test_kill_9_leaves_no_folder_of_metrics(serve, lengths, eventually):
    # F26
    server = serve(lengths, "--workers", "1")
    folders = list(Path("/dev/shm").glob(f"forebay-{server.process.pid}-*"))
    assert [bool(list(folder.glob("*.db"))) for folder in folders] == [True]
    server.signal(signal.SIGKILL)
    eventually(lambda: not folders[0].exists())
