# SPDX-License-Identifier: Apache-2.0
"""The HTTP mode: as a WSGI application, with gunicorn, and with `run_http`."""

import io
import json
import re
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import httpx
import jsonschema_rs
import msgspec
import numpy as np
import pydantic
import pydantic.v1
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_30
from tests.waiting import PATIENCE_S

from forebay.surfaces.ventu import Ventu

HOME = {
    "health check": {"/health": "GET"},
    "metrics": {"/metrics": "GET"},
    "inference": {"/inference": "POST"},
    "API document": {"/apidoc/redoc": "GET", "/apidoc/swagger": "GET"},
}
JSON, MSGPACK = "application/json", "application/msgpack"


class Req(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"example": {"text": "hello"}})
    text: str = pydantic.Field(min_length=2)

    @pydantic.field_validator("text")
    @classmethod
    def no_spam(cls, text):
        if text == "spam":
            raise ValueError("no spam")
        if text == "bug":
            raise KeyError(text)
        return text


class Resp(pydantic.BaseModel):
    n: int = pydantic.Field(le=20)


class Lengths(Ventu):
    """Counts letters.

    And nothing else.
    """

    def inference(self, data):
        if data.text == "raise":
            raise RuntimeError("secret reason")
        if data.text == "exit":
            sys.exit(1)
        if data.text == "object":
            return Resp(n=6)
        if data.text == "numpy":
            return {"n": np.int64(5)}
        if data.text == "set":
            return {"n": 1, "other": object()}
        return {"n": len(data.text)}


@pytest.fixture(params=[False, True], ids=["json", "msgpack"])
def client(request, ask):
    """A client of a service in either serialisation, with `dumps` and `loads` of that."""
    codec = msgspec.msgpack if request.param else msgspec.json
    made = ask(Lengths(Req, Resp, use_msgpack=request.param))
    made.dumps, made.loads = codec.encode, codec.decode
    made.media = MSGPACK if request.param else JSON
    made.infer = lambda data: made.post(made.dumps(data), headers={"content-type": made.media})
    return made


# B60
def test_the_application_is_built_once_and_warms_up_once(ask):
    calls = []

    class Model(Lengths):
        def inference(self, data):
            calls.append(data.text)
            return {"n": 1}

    model = Model(Req, Resp)
    assert calls == []
    assert model.app is model.app
    assert calls == ["hello"]


# B61
def test_home_lists_the_paths(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == client.media
    assert client.loads(answer.content) == HOME


# B62
@pytest.mark.parametrize("wrong", ["answers", "raises", "exits"])
def test_health_tells_whether_the_example_still_has_its_answer(wrong, ask):
    class Expected(Resp):
        model_config = pydantic.ConfigDict(json_schema_extra={"example": {"n": 5}})

    class Turning(Lengths):
        state = ""

        def inference(self, data):
            if self.state == "raises":
                raise RuntimeError("gone")
            if self.state == "exits":
                sys.exit(1)
            return {"n": 6 if self.state else 5}

    model = Turning(Req, Expected)
    client = ask(model)
    for state, expected in (("", "OK"), (wrong, "Error"), ("", "OK")):
        model.state = state
        answer = client.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"inference": expected, "service": "OK"})


# B62
def test_health_is_well_without_an_example(ask):
    assert ask(Lengths(Resp, Resp)).get("/health").json() == {"inference": "OK", "service": "OK"}


# B63
def test_a_valid_request_is_answered_in_the_services_serialisation(client):
    answer = client.infer({"text": "häh"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == client.media
    assert client.loads(answer.content) == {"n": 3}


# B63
@pytest.mark.parametrize(
    "data,loc,kind",
    [
        ({"text": "h"}, ["text"], "string_too_short"),
        ({"txt": "hello"}, ["text"], "missing"),
        ([1], ["__root__"], "type_error"),
        (1, ["__root__"], "type_error"),
        ({"text": "spam"}, ["text"], "value_error"),
    ],
)
def test_an_invalid_request_gets_the_bare_list_of_errors(client, data, loc, kind):
    answer = client.infer(data)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == client.media
    [error] = client.loads(answer.content)
    assert (error["loc"], error["type"]) == (loc, kind)
    assert set(error) <= {"loc", "msg", "type", "ctx"}
    if kind == "value_error":
        assert error["ctx"] == {"error": "no spam"}
    if kind == "string_too_short":
        assert error["ctx"] == {"min_length": 2}


# B63
def test_schemas_of_the_first_pydantic_give_its_errors(ask):
    class Colour(Enum):
        RED = "red"

    class Old(pydantic.v1.BaseModel):
        text: pydantic.v1.constr(min_length=2)  # pyright: ignore[reportInvalidTypeForm]
        colour: Colour = Colour.RED

    client = ask(Lengths(Old, Resp))
    assert client.post(b'{"text": "h"}').json() == [
        {
            "loc": ["text"],
            "msg": "ensure this value has at least 2 characters",
            "type": "value_error.any_str.min_length",
            "ctx": {"limit_value": 2},
        }
    ]
    assert client.post(b"[1]").json() == [
        {"loc": ["__root__"], "msg": "Old expected dict not list", "type": "type_error"}
    ]
    [error] = client.post(b'{"text": "hey", "colour": "blue"}').json()
    assert error["ctx"] == {"enum_values": ["red"]}


# B64
def test_an_empty_body_is_an_object_without_fields(client):
    answer = client.post(b"")
    assert answer.status_code == 422
    [error] = client.loads(answer.content)
    assert (error["loc"], error["type"]) == (["text"], "missing")


# B64
@pytest.mark.parametrize("body", [b"\xc1", b'{"text', b"\xff\xfe\xfd", b"[" * 100_000, b"\x91" * 100_000])
def test_a_body_that_cannot_be_parsed_is_a_400_in_json(client, body):
    answer = client.post(body)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == JSON
    label = "MessagePack" if client.media == MSGPACK else "JSON"
    assert answer.json()["title"] == f"Invalid {label}"
    assert answer.json()["description"].startswith(f"Could not parse {label} body - ")


# B65
@pytest.mark.parametrize(
    "given,json_status,msgpack_status",
    [
        ("application/json", 200, 415),
        ("application/json; charset=utf-8", 200, 415),
        ("APPLICATION/JSON", 200, 415),
        ("application/msgpack", 415, 200),
        ("application/x-msgpack", 415, 200),
        ("text/csv", 415, 415),
        ("", 200, 200),
    ],
)
def test_a_service_reads_one_serialisation(client, given, json_status, msgpack_status):
    answer = client.post(client.dumps({"text": "abc"}), headers={"content-type": given})
    assert answer.status_code == (json_status if client.media == JSON else msgpack_status)
    if answer.status_code == 415:
        assert answer.headers["content-type"] == JSON
        assert answer.json() == {
            "title": "Unsupported media type",
            "description": f"{given} is an unsupported media type.",
        }


# B66
@pytest.mark.parametrize(
    "method,path,status,allow",
    [
        ("GET", "/inference", 405, "POST, OPTIONS"),
        ("PUT", "/inference", 405, "POST, OPTIONS"),
        ("POST", "/health", 405, "GET, OPTIONS"),
        ("HEAD", "/", 405, "GET, OPTIONS"),
        ("OPTIONS", "/inference", 200, "POST"),
        ("GET", "/nope", 404, None),
        ("GET", "/health/", 404, None),
        ("GET", "/apidoc/nope", 404, None),
    ],
)
def test_other_methods_and_paths(client, method, path, status, allow):
    answer = client.request(method, path)
    assert (answer.status_code, answer.content, answer.headers.get("allow")) == (status, b"", allow)


# B67
def test_a_result_that_does_not_fit_its_schema_is_a_500_with_the_errors(client):
    answer = client.infer({"text": "x" * 21})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == client.media
    assert [error["loc"] for error in client.loads(answer.content)] == [["n"]]


# B67
@pytest.mark.parametrize("text", ["raise", "exit", "bug", "set"])
def test_what_the_users_code_raises_is_a_500_that_tells_nothing(client, text):
    answer = client.infer({"text": text})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == JSON
    assert set(answer.json()) == {"title", "description"}
    assert "secret" not in answer.text
    assert client.infer({"text": "abc"}).status_code == 200


# B67
@pytest.mark.parametrize("text,n", [("object", 6), ("numpy", 5)])
def test_a_result_may_be_a_models_object_or_hold_numbers_of_numpy(client, text, n):
    answer = client.infer({"text": text})
    assert (answer.status_code, client.loads(answer.content)) == (200, {"n": n})


# B67
@pytest.mark.parametrize("base", [pydantic.BaseModel, pydantic.v1.BaseModel])
def test_an_object_is_sent_under_its_aliases(base, ask):
    class Aliased(base):
        inner: str = (pydantic if base is pydantic.BaseModel else pydantic.v1).Field(alias="outer")

    class Model(Ventu):
        def inference(self, data):
            return Aliased(outer="x")

    for use_msgpack in (False, True):
        codec = msgspec.msgpack if use_msgpack else msgspec.json
        answer = ask(Model(Resp, Aliased, use_msgpack)).post(codec.encode({"n": 1}))
        assert codec.decode(answer.content) == {"outer": "x"}


class Numbers(pydantic.RootModel[list[int]]):
    pass


class OldNumbers(pydantic.v1.BaseModel):
    __root__: list[int]


# B67
@pytest.mark.parametrize("use_msgpack", [False, True])
@pytest.mark.parametrize("schema", [Numbers, OldNumbers])
def test_an_object_that_is_a_list_is_sent_as_one(schema, use_msgpack, ask):
    class Model(Ventu):
        def inference(self, data):
            return schema.parse_obj([1, 2]) if schema is OldNumbers else schema([1, 2])

    codec = msgspec.msgpack if use_msgpack else msgspec.json
    answer = ask(Model(Resp, schema, use_msgpack)).post(codec.encode({"n": 1}))
    assert codec.decode(answer.content) == [1, 2]


# B67: as in data, and as objects of pydantic 2
@pytest.mark.parametrize("base", [pydantic.BaseModel, pydantic.v1.BaseModel])
def test_an_object_may_hold_numbers_that_are_not_finite(base, ask):
    class Score(base):
        score: float

    class Model(Ventu):
        def inference(self, data):
            return Score(score=float("inf"))

    answer = ask(Model(Resp, Score)).post(b'{"n": 1}')
    assert (answer.status_code, answer.content) == (200, b'{"score": Infinity}')


def references(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


class Inner(pydantic.BaseModel):
    parent: "Inner | None" = None
    kind: str = "inner"


class Point(pydantic.BaseModel):
    x: float = pydantic.Field(gt=0, lt=1, description="where")
    pair: tuple[int, str] = (1, "a")


class Rich(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"example": {"inner": {}}, "batch_size": 2})
    inner: Inner
    point: Point | None = None
    points: list[Point] = []
    either: Inner | Point | int = 1
    table: dict[str, Point] = {}
    unit: str | None = pydantic.Field(None, examples=["m"])


def other_point():
    class Point(pydantic.BaseModel):
        y: int

    class Rich(pydantic.BaseModel):
        point: Point

    return Rich


class OldInner(pydantic.v1.BaseModel):
    value: pydantic.v1.confloat(gt=0)  # pyright: ignore[reportInvalidTypeForm]


class Old(pydantic.v1.BaseModel):
    inner: OldInner
    more: list[OldInner] = []

    class Config:
        schema_extra = {"example": {"inner": {"value": 1}}}  # noqa: RUF012 - as projects write it


class Unchecked(Ventu):
    def health_check(self, batch=False):
        return None


# B68
@pytest.mark.parametrize("use_msgpack", [False, True])
@pytest.mark.parametrize(
    "request_schema,response_schema",
    [(Req, Resp), (Rich, Resp), (Rich, other_point()), (Inner, Inner), (Old, OldInner), (Old, Rich)],
    ids=lambda schema: schema.__name__,
)
def test_the_api_document_is_valid_and_every_reference_resolves(ask, request_schema, response_schema, use_msgpack):
    client = ask(Unchecked(request_schema, response_schema, use_msgpack, name="Rich service", version="7"))
    answer = client.get("/apidoc/openapi.json")
    assert answer.headers["content-type"] == JSON
    document = answer.json()
    jsonschema_rs.validate(OPENAPI_30, document)
    found = list(references(document))
    assert found
    for reference in found:
        head, name = reference.rsplit("/", 1)
        assert head == "#/components/schemas"
        assert name in document["components"]["schemas"]
    assert document["openapi"] == "3.0.3"
    assert document["info"] == {"title": "Rich service", "version": "7"}
    assert set(document["paths"]) == {"/", "/health", "/metrics", "/inference"}
    post = document["paths"]["/inference"]["post"]
    media = MSGPACK if use_msgpack else JSON
    asked = post["requestBody"]["content"][media]["schema"]["$ref"]
    answered = post["responses"]["200"]["content"][media]["schema"]["$ref"]
    assert asked.endswith(f"/{request_schema.__name__}")
    assert answered.endswith(response_schema.__name__)
    assert (asked == answered) == (request_schema is response_schema)
    assert set(post["responses"]) >= {"200", "422"}


class Endless(pydantic.BaseModel):
    upto: float = pydantic.Field(float("inf"), ge=float("-inf"))
    several: list[float] = [float("nan")]


# B68: browsers and others read no `Infinity`
def test_what_json_has_no_number_for_leaves_the_document_readable(ask):
    document = ask(Ventu(Endless, Resp)).get("/apidoc/openapi.json").content
    properties = msgspec.json.decode(document)["components"]["schemas"]["Endless"]["properties"]
    assert properties["upto"] == {"title": "Upto", "type": "number"}
    assert properties["several"]["default"] == [None]


# B68
def test_the_document_shows_summary_and_example(client):
    document = client.get("/apidoc/openapi.json").json()
    assert document["paths"]["/inference"]["post"]["summary"] == "Counts letters."
    assert document["components"]["schemas"]["Req"]["example"] == {"text": "hello"}


# B68
@pytest.mark.parametrize("path", ["/apidoc/redoc", "/apidoc/swagger"])
def test_the_page_of_the_document_works_offline(client, path):
    page = client.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]  # F134
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert "openapi.json" in links
    for link in links:
        if link != "data:,":
            assert "/" not in link
            answer = client.get(f"/apidoc/{link}")
            assert answer.status_code == 200
            assert link.endswith(".json") or answer.headers["x-content-type-options"] == "nosniff"


# B69
def test_metrics_have_the_known_names_and_count_the_known_things(client):
    steps = ("preprocess", "inference", "postprocess")
    lines = [f'single_process_time_count{{process="{step}"}}' for step in steps]
    assert [client.metric(line) for line in lines] == [1, 1, 1]  # the warm-up
    client.get("/health")
    assert [client.metric(line) for line in lines] == [2, 2, 2]
    for _ in range(2):
        client.infer({"text": "abc"})
    assert [client.metric(line) for line in lines] == [4, 4, 4]
    assert client.metric("validation_error_counter_total") == 0
    client.infer({"text": "x"})
    assert client.metric("validation_error_counter_total") == 1
    assert [client.metric(line) for line in lines] == [4, 4, 4]
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "# TYPE single_process_time summary" in page.text
    assert "# TYPE batch_process_time summary" in page.text
    assert "# TYPE process_worker gauge" in page.text
    assert "_bucket" not in page.text
    assert "quantile" not in page.text
    assert client.metric('single_process_time_sum{process="inference"}') > 0


# B70
def test_metrics_of_the_user_stand_in_the_same_page(ask):
    from prometheus_client import Counter

    class Model(Lengths):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.long = Counter("long_texts", "Texts that are long", registry=self.metric_registry)

        def preprocess(self, data):
            if len(data.text) > 10:
                self.long.inc()
            return data

    client = ask(Model(Req, Resp))
    client.post(b'{"text": "a long, long text"}')
    assert client.metric("long_texts_total") == 1


GUNICORN = """
import pydantic
from forebay.surfaces.ventu import Ventu

class Req(pydantic.BaseModel):
    text: str

class Resp(pydantic.BaseModel):
    n: int

class Model(Ventu):
    def inference(self, data):
        return {"n": len(data.text)}

def create_app():
    return Model(Req, Resp).app
"""


# B60, B70
def test_gunicorn_serves_it_with_merged_metrics(run, tmp_path, eventually):
    (tmp_path / "module.py").write_text(GUNICORN)
    server = run(
        *(sys.executable, "-m", "gunicorn", "-w", "2", "-b", "127.0.0.1:0", "--chdir", tmp_path),
        *("--worker-tmp-dir", tmp_path, "--no-control-socket", "module:create_app()"),
        prometheus_multiproc_dir=str(tmp_path / "metrics"),
    )
    found = eventually(lambda: re.search(r"Listening at: (http://\S+)", server.log.read_text()), server.log.read_text)
    with httpx.Client(base_url=found[1], timeout=PATIENCE_S) as client:
        sizes = [client.post("/inference", json={"text": "x" * n}).json()["n"] for n in range(5)]
        assert sizes == [0, 1, 2, 3, 4]
    for n in range(5):  # each over a connection of its own, so that both workers get some
        with httpx.Client(base_url=found[1], timeout=PATIENCE_S) as client:
            assert client.post("/inference", content=iter([b'{"text": "', b"x" * n, b'"}'])).json() == {"n": n}
    for _ in range(6):
        page = httpx.get(f"{found[1]}/metrics", timeout=PATIENCE_S).text
        assert 'single_process_time_count{process="inference"} 10.0' in page
    assert server.end() == 0


def test_a_body_over_the_limit_is_not_read():
    class Small(Lengths):
        max_body_bytes = 100

    class Stream(io.BytesIO):
        def read(self, size=-1, /):
            assert size is not None
            assert 0 <= size <= 101
            return super().read(size)

    began = []
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/inference", "CONTENT_LENGTH": "1000000"}
    [body] = Small(Req, Resp).app({**environ, "wsgi.input": Stream(b"x" * 1000)}, lambda *given: began.append(given))
    assert began[0][0].startswith("413 ")
    assert set(json.loads(body)) == {"title", "description"}


RUN_HTTP = """
import sys, threading, time
import pydantic
from forebay.surfaces.ventu import Ventu

class Req(pydantic.BaseModel):
    text: str

class Resp(pydantic.BaseModel):
    n: int

class Model(Ventu):
    together = threading.Barrier(2)
    max_body_bytes = 1000

    def inference(self, data):
        if data.text == "together":
            self.together.wait(60)
        if data.text == "slow":
            print("started", flush=True)
            time.sleep(0.5)
        if data.text == "raise":
            raise RuntimeError("secret")
        return {"n": len(data.text)}

Model(Req, Resp).run_http("127.0.0.1", int(sys.argv[1]))
print("ended", flush=True)
"""


# B60
def test_run_http_answers_side_by_side_keeps_connections_and_drains(run, tmp_path, port, eventually):
    file = tmp_path / "service.py"
    file.write_text(textwrap.dedent(RUN_HTTP))
    server = run(sys.executable, file, port)

    def is_up():
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    eventually(is_up, server.log.read_text)
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        # Each of the two waits for the other one.
        both = list(threads.map(lambda _: client.post("/inference", json={"text": "together"}), range(2)))
        assert [answer.status_code for answer in both] == [200, 200]
        assert client.post("/inference", json={"text": "abc"}).json() == {"n": 3}
        assert client.post("/inference", json={"text": "raise"}).status_code == 500
        assert client.post("/inference", json={"text": "x" * 2000}).status_code == 413
        assert client.post("/inference", content=iter([b"x" * 600] * 3)).status_code == 413
        assert client.post("/inference", content=b"").status_code == 422
        assert client.get("/nope").status_code == 404
        page = client.get("/metrics").text
        assert 'process_worker{protocol="http"} 1.0' in page
        assert "secret" not in server.log.read_text()  # nobody asked for a log
        slow = threads.submit(client.post, "/inference", json={"text": "slow"})
        eventually(lambda: "started" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert slow.result().json() == {"n": 4}
    assert server.wait() == 0
    assert "ended" in server.log.read_text()
