# SPDX-License-Identifier: Apache-2.0
"""What HTTP clients rely on, whichever way their requests take through the server.

Every test runs three times: on the fast lane of `forebay serve`; on Starlette behind it on the same port (requests of
web pages go there, so these carry an Origin); and on forebay's ASGI application in a plain uvicorn.
"""

import gzip
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.waiting import PATIENCE_S, eventually

ORIGIN = "http://page.example"
OPTIONS = ["--worker-kind", "thread", "--max-body-bytes", "200000"]
ECHO = "/models/echo"


class Way:
    """A server and what a request needs to go a certain way through it."""

    def __init__(self, name, server, headers):
        self.name = name
        self.server = server
        self.headers = headers
        self.client = httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S)

    def wire(self):
        return self.server.connect("".join(f"{name}: {value}\r\n" for name, value in self.headers.items()))

    def post(self, model, content, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"/models/{model}", content=content, headers=named)

    def call(self, model, sample, **headers):
        return self.post(model, json.dumps(sample), **headers)

    def describe(self, model):
        return self.client.get(f"/models/{model}").json()


@pytest.fixture(scope="module", params=["fast", "behind", "asgi"])
def way(request, launch):
    headers = {}
    if request.param == "fast":
        server = launch("zoo.py", *OPTIONS)
    elif request.param == "behind":
        server = launch("zoo.py", *OPTIONS, "--cors-origin", ORIGIN)
        headers = {"origin": ORIGIN}
    else:
        server = launch("zoo.py", *OPTIONS, command=(sys.executable, str(Path(__file__).parent / "plain_uvicorn.py")))
    way = Way(request.param, server, headers)
    yield way
    way.client.close()


@pytest.fixture
def wire(way):
    with way.wire() as wire:
        yield wire


@pytest.fixture
def ours(way):
    """For promises about the listener, which is not ours in a plain uvicorn."""
    if way.name == "asgi":
        pytest.skip("a promise of forebay's own listener")


class Held:
    """Requests that keep a model's only worker busy until the end of the block: one runs, the others wait."""

    def __init__(self, way, model, folder, count=1):
        self.way, self.model, self.count = way, model, count
        self.until = folder / "until"
        errand = {"name": "held", "until": str(self.until)}
        self.threads = [threading.Thread(target=way.call, args=(model, errand), daemon=True) for _ in range(count)]

    def __enter__(self):
        for number, thread in enumerate(self.threads):
            thread.start()
            eventually(lambda number=number: self.way.describe(self.model)["waiting"] == number)
            eventually(lambda number=number: self.way.describe(self.model)["in_flight"] == number + 1)
        return self

    def __exit__(self, *_error):
        held = [thread.is_alive() for thread in self.threads]
        self.until.touch()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert all(held), "it did not wait for them"


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_a_sample_in_json_is_answered_in_json(way):
    answer = way.call("echo", {"a": [1, 2.5, None, "é"]})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"a": [1, 2.5, None, "é"]}
    assert "date" in answer.headers
    assert answer.headers["x-request-id"]


def test_a_slash_at_the_end_changes_nothing(way):
    assert way.call("echo/", {"a": 1}).json() == {"a": 1}
    for path in ["/models/", "/models/echo/", "/healthz/", "/openapi.json/"]:
        answer = way.client.get(path)
        assert answer.status_code == 200, path
        assert answer.json().keys() == way.client.get(path[:-1]).json().keys()
    assert way.call("echo//", {"a": 1}).status_code == 404


def test_what_is_wrong_with_a_sample_is_told_whole(way):  # F56
    told = way.call("typed", [{"name": "a", "points": []}]).json()["error"]
    assert told["message"].endswith(
        "a request is one sample here (a model with `batchable = True` takes arrays of them)"
    )
    told = way.call("typed", {"name": "a", "points": [{"x": 1}]}).json()["error"]
    assert told["detail"] == {"path": "$.points[0].y"}
    told = way.call("typed", {"nmae": "a", "points": []}).json()["error"]
    assert told["message"] == "Object contains unknown field `nmae`; did you mean `name`?"
    told = way.call("pydantic", {"name": 1, "age": -1}).json()["error"]
    assert [one["path"] for one in told["detail"]["errors"]] == ["$.name", "$.age"]


def test_the_formats_are_chosen_by_content_type_and_accept(way):
    packed = msgspec.msgpack.encode([1, "two"])
    plain = b'[1,"two"]'
    for content_type, body in [
        ("application/json; charset=utf-8", plain),
        ("Application/JSON", plain),
        ("application/vnd.api+json; profile=x", plain),  # F117
        ("application/msgpack", packed),
        ("application/x-msgpack", packed),
    ]:
        for accept, kind, wanted in [
            ("application/json", "application/json", plain),
            ("application/msgpack", "application/msgpack", packed),
            ("application/json;q=0.1, application/msgpack", "application/msgpack", packed),
            ("text/html, */*;q=0.1", "application/json", plain),
            ("*/*, application/json", "application/json", plain),
            ("*", "application/json", plain),  # F117
            ("application/*, application/msgpack", "application/msgpack", packed),
            ("application/msgpack, application/json", "application/msgpack", packed),
            ("application/json;q=0, */*", "application/msgpack", packed),
            ("application/msgpack;q=0.5, */*", "application/json", plain),
        ]:
            answer = way.post("echo", body, content_type=content_type, accept=accept)
            assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, kind, wanted)


def test_a_model_that_takes_and_returns_bytes_gets_the_body_untouched(way):
    answer = way.post("upper", b"a\x00\xffb", content_type="image/png")
    assert (answer.status_code, answer.content) == (200, b"A\x00\xffB")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_struct_and_pydantic_samples_are_answered_with_their_types(way):
    assert way.call("typed", {"name": "t", "points": [{"x": 1, "y": 2}] * 3}).json() == {"name": "t", "corners": 3}
    assert way.call("pydantic", {"name": "Ann", "age": 3}).json() == "Ann is 3"


def test_an_async_model_answers(way):
    assert way.call("later", 0.01).json() == 0.01


@pytest.mark.parametrize("count", [1, 8, 9, 100])
def test_an_array_of_samples_is_answered_in_order_however_many_batches_it_takes(way, count):
    assert way.call("doubles", list(range(count))).json() == [2 * number for number in range(count)]
    packed = way.post("doubles", msgspec.msgpack.encode(list(range(count))), content_type="application/msgpack")
    assert packed.json() == [2 * number for number in range(count)]


def test_an_array_of_samples_can_be_answered_in_msgpack(way):
    answer = way.call("doubles", list(range(20)), accept="application/msgpack")
    assert msgspec.msgpack.decode(answer.content) == [2 * number for number in range(20)]


def test_a_query_does_not_hide_a_model(way):
    assert way.client.post(f"{ECHO}?trace=1", content="3").json() == 3


def test_a_request_keeps_the_id_it_came_with(way):
    assert way.call("echo", 1, x_request_id="my-id.1").headers["x-request-id"] == "my-id.1"
    assert way.call("failing", "raise", x_request_id="my-id.2").json()["error"]["request_id"] == "my-id.2"
    assert way.call("nobody", 1, x_request_id="my-id.3").json()["error"]["request_id"] == "my-id.3"


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("PUT", ECHO, 405),
        ("POST", "/metrics", 405),
        ("PUT", "/v2/models/echo/infer", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/nobody/metadata", 404),
        ("POST", "/v1/models/echo:nothing", 404),
    ],
)
def test_an_error_of_a_page_keeps_the_id_as_well(way, method, path, status):
    answer = way.client.request(method, path, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    assert way.client.request(method, path).headers["x-request-id"] not in {"mine", ""}


def test_an_id_that_could_forge_headers_or_logs_is_replaced(wire):
    for bad in ["two words", "x" * 129, "tab\there", "\xff"]:
        answer = wire.ask("POST", ECHO, b"1", headers=[f"x-request-id: {bad}"])
        assert answer.status == 200
        assert answer.headers["x-request-id"] not in {bad, ""}


@pytest.mark.parametrize("target", [ECHO, "/nowhere"])
def test_an_id_that_could_forge_a_log_is_replaced_in_errors_as_well(wire, target):  # F7
    for bad in ["two words", "x" * 129, "\xe9"]:
        answer = wire.ask("POST", target, b"{", headers=[f"x-request-id: {bad}"])
        assert answer.status in {400, 404}
        assert answer.headers["x-request-id"] not in {bad, bad[:128], ""}
        assert answer.error["request_id"] == answer.headers["x-request-id"]


def test_a_large_answer_comes_whole(way):
    assert way.call("large", 5_000_000).content == bytes(5_000_000)


# ---------------------------------------------------------------------------------------------------------------------
# Streams


def test_a_generator_is_answered_as_events(way):
    answer = way.call("count", 3)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"  # F9
    assert answer.headers["x-request-id"]
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_parts_of_a_stream_come_as_they_are_made(wire):
    wire.send(wire.request("POST", "/models/count", b"-2"))
    assert wire.read_head().headers["transfer-encoding"] == "chunked"
    assert wire.read_chunk().startswith(b'data: "xxx')


def test_a_stream_leaves_its_connection_usable(wire):
    for _ in range(3):
        assert wire.ask("POST", "/models/count", b"2").body == b"data: 0\n\ndata: 1\n\n"
    assert wire.ask("POST", ECHO, b"1").body == b"1"


def test_an_empty_stream_is_an_answer_like_others(wire):
    answer = wire.ask("POST", "/models/count", b"0")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]


def test_an_error_within_a_stream_is_its_last_event_and_tells_no_secrets(way):
    answer = way.call("count", -1, x_request_id="broken")
    *parts, last = answer.text.strip().split("\n\n")
    assert parts == ["data: 0", "data: 1"]
    event, data = last.split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["request_id"] == "broken"
    assert "dawn" not in answer.text


def test_a_bad_sample_for_a_stream_has_a_status_of_its_own(way):
    assert way.post("count", b"nonsense").status_code == 400
    assert way.call("count", "x").status_code == 422


@pytest.mark.parametrize(
    "method, target, body", [("POST", "/models/count", b"2"), ("GET", "/models/count?limit=2", b"")]
)
def test_an_old_client_gets_a_stream_without_chunks(way, wire, method, target, body):
    if way.name == "asgi":
        pytest.skip("uvicorn itself sends chunks to HTTP/1.0 clients")
    wire.send(wire.request(method, target, body, version="1.0", headers=["accept: text/event-stream"]))
    answer = wire.read_head()
    assert "transfer-encoding" not in answer.headers
    assert wire.buffer + wire.read_rest() == b"data: 0\n\ndata: 1\n\n"


# ---------------------------------------------------------------------------------------------------------------------
# Connections


def test_a_connection_serves_many_requests_of_both_kinds(wire):
    for number in range(5):
        assert wire.ask("POST", ECHO, str(number).encode()).body == str(number).encode()
        assert wire.ask("GET", "/healthz").status == 200
        assert wire.ask("POST", ECHO, b"{").status == 400
        assert wire.ask("POST", "/models/nobody", b"1").status == 404


def test_a_client_that_says_close_is_answered_and_closed(wire):
    answer = wire.ask("POST", ECHO, b"1", headers=["connection: close"])
    assert (answer.body, answer.headers["connection"]) == (b"1", "close")
    assert wire.is_closed_by_server()


def test_an_http_1_0_client_is_answered_and_closed(wire):
    assert wire.ask("POST", ECHO, b"1", version="1.0").body == b"1"
    assert wire.is_closed_by_server()


@pytest.mark.parametrize("method, path, body", [("POST", ECHO, b"1"), ("GET", "/healthz", b"")])
def test_an_http_1_0_client_that_asks_to_keep_the_connection_waits_for_no_end(wire, method, path, body):
    answer = wire.ask(method, path, body, version="1.0", headers=["connection: Keep-Alive"])
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert wire.is_closed_by_server()


def test_pipelined_requests_are_answered_in_order(wire):
    wire.send(b"".join(wire.request("POST", ECHO, str(number).encode()) for number in range(50)))
    assert [wire.read().body for _ in range(50)] == [str(number).encode() for number in range(50)]
    assert wire.ask("POST", ECHO, b"51").body == b"51"


def test_pipelined_requests_of_all_kinds_are_answered_in_order(wire):
    asked = [
        ("POST", ECHO, b'"first"', 200),
        ("GET", "/healthz", b"", 200),
        ("POST", "/models/later", b"0.05", 200),
        ("GET", "/models", b"", 200),
        ("POST", ECHO, b"nonsense", 400),
        ("GET", "/nowhere", b"", 404),
        ("POST", "/models/count", b"2", 200),
        ("POST", "/models/nobody", b"1", 404),
        ("DELETE", ECHO, b"", 405),
        ("POST", "/models/upper", b"x" * 50_000, 200),
        ("GET", "/metrics", b"", 200),
        ("POST", ECHO, b'"last"', 200),
    ]
    for _ in range(3):
        wire.send(b"".join(wire.request(*each[:3]) for each in asked))
        answers = [wire.read() for _ in asked]
        assert [answer.status for answer in answers] == [status for *_, status in asked]
        assert (answers[0].body, answers[6].body, answers[-1].body) == (
            b'"first"',
            b"data: 0\n\ndata: 1\n\n",
            b'"last"',
        )
        assert answers[9].body == b"X" * 50_000


def test_a_pipelined_head_request_has_no_body_before_the_next_answer(wire):
    wire.send(wire.request("HEAD", "/models") + wire.request("POST", ECHO, b"1"))
    assert wire.read(has_body=False).status == 200
    assert wire.read().body == b"1"


def test_what_follows_close_is_not_answered(wire):
    wire.send(wire.request("POST", ECHO, b"1", headers=["connection: close"]) + wire.request("POST", ECHO, b"2"))
    assert wire.read().body == b"1"
    assert wire.is_closed_by_server()


def test_a_request_may_come_byte_by_byte(wire):
    for byte in wire.request("POST", ECHO, b'{"slow": true}'):
        wire.send(bytes([byte]))
    assert wire.read().json() == {"slow": True}


def test_a_body_may_come_after_its_head(wire):
    for number in range(3):
        wire.send(wire.head("POST", ECHO, "content-length: 2"))
        time.sleep(0.02)
        wire.send(b"[")
        time.sleep(0.02)
        assert wire.send(b"]").read().body == b"[]"
        assert wire.ask("POST", ECHO, str(number).encode()).body == str(number).encode()


def test_no_client_changes_how_the_requests_of_others_are_read(way):
    # The fast lane remembers heads it has read; what comes before a head must not be taken for one.
    blank = b"\r\n\r\n"
    with way.wire() as attacker:
        head = attacker.head("POST", ECHO, "content-length: 400")
        attacker.send(blank + head + b"1" * (400 - len(head)))
        time.sleep(0.05)
    with way.wire() as victim:
        head = victim.request("POST", ECHO, b"[1]")
        victim.send(blank + victim.request("POST", ECHO, b"[1]", headers=["x: " + "y" * (400 - len(head) - 5)]))
        answer = victim.read()
        assert (answer.status, answer.body) == (200, b"[1]")


def test_a_body_may_come_in_chunks(wire):
    for _ in range(2):
        wire.send(wire.head("POST", ECHO, "transfer-encoding: chunked"))
        for piece in [b"4;note=x\r\n[1, \r\n", b"2\r\n2]\r\n", b"0\r\ntrailer: y\r\n\r\n"]:
            wire.send(piece)
            time.sleep(0.01)
        assert wire.read().json() == [1, 2]


def test_a_client_that_asks_first_is_told_to_continue(wire):
    wire.send(wire.head("POST", ECHO, "expect: 100-continue", "content-length: 2"))
    assert wire.read().status == 100
    assert wire.send(b"12").read().body == b"12"
    assert wire.ask("POST", ECHO, b"3").body == b"3"


@pytest.mark.parametrize(
    "target, header, status",
    [
        (ECHO, "content-length: 200001", 413),
        (ECHO, "content-type: text/csv", 415),
        (ECHO, "x-request-timeout-ms: soon", 400),
        ("/models/nobody", "content-length: 2", 404),
    ],
)
def test_a_client_that_asks_first_need_not_send_what_is_refused(way, wire, target, header, status):
    length = [] if "length" in header else ["content-length: 2"]
    wire.send(wire.head("POST", target, "expect: 100-continue", header, *length))
    answer = wire.read()
    assert answer.status == status
    if way.name != "asgi":  # a foreign server reads on
        # The client may keep the body for itself, and its next request must not be taken for that.
        assert answer.headers["connection"] == "close"
        assert wire.is_closed_by_server()


def test_a_client_that_asks_first_and_has_no_body_may_go_on(wire):
    for _ in range(2):
        wire.send(wire.head("GET", "/models", "expect: 100-continue"))
        assert wire.read().status == 200


def test_a_client_that_asks_first_is_told_in_turn(wire):
    asked = wire.head("POST", ECHO, "expect: 100-continue", "content-length: 2")
    wire.send(wire.head("POST", ECHO, "content-length: 1") + b"1" + asked)
    assert wire.read().body == b"1"
    assert wire.read().status == 100
    assert wire.send(b"12").read().body == b"12"
    assert wire.ask("POST", ECHO, b"3").body == b"3"


def test_a_refusal_without_a_word_for_its_body_ends_what_came_behind_it(way, wire):
    if way.name == "asgi":
        pytest.skip("a foreign server reads on")
    refused = wire.head("POST", "/models/nobody", "expect: 100-continue", "content-length: 2")
    wire.send(refused + b"12" + wire.head("POST", ECHO, "content-length: 1") + b"1")
    answer = wire.read()
    assert (answer.status, answer.headers["connection"]) == (404, "close")
    assert wire.is_closed_by_server()


def test_a_request_to_upgrade_is_answered_as_if_it_had_not_asked(wire):
    headers = ["connection: upgrade", "upgrade: websocket", "sec-websocket-key: abc", "sec-websocket-version: 13"]
    assert wire.ask("GET", "/healthz", headers=headers).status == 200


# ---------------------------------------------------------------------------------------------------------------------
# Methods


@pytest.mark.parametrize("path", ["/models", ECHO, "/healthz", "/readyz", "/openapi.json", "/docs", "/"])
def test_head_is_get_without_a_body(wire, path):
    # Not for /metrics, whose length changes from scrape to scrape.
    got, headed = wire.ask("GET", path), wire.ask("HEAD", path)
    assert got.status == headed.status == 200
    assert got.headers["content-length"] == headed.headers["content-length"]
    assert got.headers["content-type"] == headed.headers["content-type"]


@pytest.mark.parametrize(
    "path, allowed", [(ECHO, {"GET", "HEAD", "POST", "OPTIONS"}), ("/readyz", {"GET", "HEAD", "OPTIONS"})]
)
def test_options_says_what_is_possible(wire, path, allowed):
    answer = wire.ask("OPTIONS", path)
    assert answer.status == 204
    assert set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ["/readyz", "/metrics", "/models", ECHO, "/models/nobody", "/v2/models/echo", "/"])
def test_no_cache_keeps_what_changes(wire, path):
    # Varnish went on to say that a server is ready for two minutes after it was not.
    assert wire.ask("GET", path).headers["cache-control"] == "no-store"


def test_what_stays_as_it_is_may_be_kept(wire):
    assert wire.ask("GET", "/docs/swagger-ui.css").headers["cache-control"] == "max-age=86400"


def test_the_server_as_a_whole_may_be_asked_what_is_possible(wire, ours):
    # The health check of Apache's proxy took a server for dead that says 404 (`hcmethod=OPTIONS`).
    answer = wire.ask("OPTIONS", "*")
    assert answer.status == 204
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST", "OPTIONS"}
    assert wire.ask("GET", "*").status == 404


@pytest.mark.parametrize(
    "method, path", [("PUT", ECHO), ("DELETE", ECHO), ("PATCH", "/models"), ("POST", "/healthz"), ("POST", "/models")]
)
def test_a_wrong_method_is_405_and_names_the_right_ones(wire, method, path):
    answer = wire.ask(method, path, b"1")
    assert answer.status == 405
    assert "GET" in answer.headers["allow"]
    assert "GET" in answer.error["message"]
    assert wire.ask("POST", ECHO, b"1").status == 200


def test_who_asks_none_of_several_models_is_told_where_they_are(way):
    answer = way.client.post("/", content=b"1")
    assert answer.status_code == 405
    told = answer.json()["error"]["message"]
    assert re.fullmatch(
        r"POST is not allowed here; use GET, HEAD, OPTIONS; models here are asked at "
        r"/models/[a-z]+ and /models/[a-z]+ and /models/[a-z]+ and so on",
        told,
    )


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("POST", "/v2", "GET, HEAD"),
        ("DELETE", "/v2/models/echo", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("GET", "/v2/repository/models/echo/load", "POST"),
    ],
)
def test_a_wrong_method_below_v2_is_405_and_names_the_right_one(wire, method, path, allowed):
    answer = wire.ask(method, path, b"")
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


# ---------------------------------------------------------------------------------------------------------------------
# What clients get wrong


@pytest.mark.parametrize("model", ["echo", "doubles"])
@pytest.mark.parametrize("body, position", [(b'[{"a": 1,, "b": 2}]', 9), (b"[1, 2", 5), (b"", 0), (b"[nonsense]", 1)])
def test_bad_json_is_400_and_says_where(way, model, body, position):
    answer = way.post(model, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_argument"
    assert error["message"] != "Input data was truncated"
    assert position <= error["detail"]["position"] <= position + 5  # of the parser's own counting


@pytest.mark.parametrize("body", [b"\xff\xfe", b'"\xff"', b'"\\ud800"'])
def test_what_is_not_unicode_is_the_clients_error(way, body):
    assert way.post("echo", body).status_code == 400


@pytest.mark.parametrize(
    "content_type, body", [("application/json", b"[" * 50_000), ("application/msgpack", b"\x91" * 50_000)]
)
@pytest.mark.parametrize("model", ["echo", "typed", "pydantic", "doubles"])
def test_a_nesting_bomb_is_the_clients_error(way, content_type, body, model):
    assert way.post(model, body, content_type=content_type).status_code in {400, 422}


def test_bad_msgpack_is_400(way):
    for body in [b"", b"\xc1", b"\x92\x01", b"\x01\x02"]:
        assert way.post("echo", body, content_type="application/msgpack").status_code == 400


@pytest.mark.parametrize(
    "model, sample, path",
    [
        ("typed", {"name": "t", "points": [{"x": 1, "y": 2}, {"x": "no", "y": 2}]}, "$.points[1].x"),
        ("typed", {"name": 3, "points": []}, "$.name"),
        ("typed", [], None),
        ("pydantic", {"name": "Ann", "age": -1}, "$.age"),
        ("doubles", [1, "two"], "$[1]"),
        ("doubles", [], "$"),
        ("doubles", 7, "$"),
    ],
)
def test_a_wrong_type_is_422_and_names_the_field(way, model, sample, path):
    answer = way.call(model, sample)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "invalid_argument"
    if path is not None:
        assert error["detail"]["path"] == path
        assert (
            path == "$"
            or path in error["message"]
            or path.removeprefix("$.") in error["message"]
            or "sample 1" in error["message"]
        )


def test_an_unknown_model_is_404_and_names_the_nearest(way):
    for model in ["ehco", "Echo", "echo//", "echo2"]:
        for answer in (way.call(model, 1), way.client.get(f"/models/{model}")):
            assert answer.status_code == 404
            assert "'echo'" in answer.json()["error"]["message"]


def test_an_unknown_path_is_404_and_names_the_nearest(way):
    answer = way.client.get("/healthy")
    assert answer.status_code == 404
    assert "/healthz" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, ours", [("/ping", "/healthz"), ("/livez", "/healthz"), ("/redoc", "/docs"), ("/dashboard", "/ui")]
)
def test_a_page_as_others_call_it_leads_to_ours(way, path, ours):
    message = way.client.get(path).json()["error"]["message"]
    assert message == f"nothing is served at {path}; did you mean {ours}?"


@pytest.mark.parametrize("path", ["/predict", "/inference", "/invocations"])
def test_who_posts_where_other_servers_answer_is_told_where_models_do(way, path):
    message = way.client.post(path, json=1).json()["error"]["message"]
    assert message.startswith(f"nothing is served at {path}; models here are asked at /models/")


@pytest.mark.parametrize(
    "content_type", ["text/csv", "application/x-www-form-urlencoded", "nonsense", "multipart/mixed"]
)
def test_a_wrong_media_type_is_415_and_names_the_right_ones(way, content_type):
    answer = way.post("echo", b"1", content_type=content_type)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["image/png", "application/octet-stream"])
def test_who_sends_a_bare_file_is_told_of_the_form(way, content_type):
    answer = way.post("echo", b"1", content_type=content_type)
    assert (answer.status_code, "-F FIELD=@FILE" in answer.json()["error"]["message"]) == (415, True)


def test_a_client_that_takes_neither_format_gets_406(way):
    assert way.call("echo", 1, accept="text/html").status_code == 406


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, identity"])
def test_a_packed_body_is_415_with_a_sentence_unless_the_model_takes_bytes(way, encoding):  # F7
    answer = way.post("echo", gzip.compress(b"1"), content_encoding=encoding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate, identity")
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert way.post("echo", b"1", content_encoding="identity").json() == 1
    assert way.post("upper", b"a", content_encoding=encoding).content == b"A"


def test_http_s_own_errors_have_codes_of_their_own(way):  # F9
    for answer, status, code in [
        (way.client.put(ECHO, content="1"), 405, "method_not_allowed"),
        (way.call("echo", 1, accept="text/html"), 406, "not_acceptable"),
        (way.post("echo", b" " * 200_001), 413, "too_large"),
        (way.post("echo", b"1", content_type="text/csv"), 415, "unsupported_media_type"),
        (way.post("echo", b"{"), 400, "invalid_argument"),
    ]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("packed", [False, True])
def test_an_array_of_more_samples_than_may_wait_is_413_before_it_is_cut(way, packed):  # F5
    count = 90_000
    body = b"\xdd" + count.to_bytes(4, "big") + bytes(count) if packed else b"[" + b"0," * count + b"0]"
    answer = way.post("doubles", body, content_type=f"application/{'msgpack' if packed else 'json'}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert "4096 samples" in answer.json()["error"]["message"]


def test_a_page_of_another_origin_may_not_post_what_its_browser_does_not_ask_about(way):  # F68
    page = {"origin": "http://evil.example"}
    for model, headers in [("echo", {}), ("upper", {"content-type": "text/plain"}), ("upper", {})]:
        answer = way.client.post(f"/models/{model}", content=b"1", headers=page | headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_page")
        assert "--cors-origin" in answer.json()["error"]["message"]
    own = {"origin": way.server.url}
    assert way.client.post(ECHO, content=b"1", headers=own).json() == 1
    assert way.client.post(ECHO, json=1, headers=page).json() == 1


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1.5", "", "000"])
def test_a_timeout_that_is_no_number_of_milliseconds_is_400(wire, value):
    answer = wire.ask("POST", ECHO, b"1", headers=[f"x-request-timeout-ms: {value}"])
    assert answer.status == 400
    assert "X-Request-Timeout-Ms" in answer.error["message"]


@pytest.mark.parametrize("value", [str(2**63 - 1), "1" + "0" * 15, "9" * 5000])
def test_a_timeout_of_any_length_is_held_to_the_longest_there_is(way, value):
    assert way.call("echo", 1, x_request_timeout_ms=value).json() == 1


def test_a_body_that_is_too_long_is_413_before_it_is_sent(wire):
    wire.send(wire.head("POST", ECHO, "content-length: 200001"))
    answer = wire.read()
    assert answer.status == 413
    assert "200000" in answer.error["message"]


def test_a_body_that_becomes_too_long_is_413(wire):
    wire.send(wire.head("POST", ECHO, "transfer-encoding: chunked"))
    piece = b"ffff\r\n" + bytes(0xFFFF) + b"\r\n"
    wire.send(piece * 4)
    assert wire.read().status == 413


def test_a_body_just_within_the_limit_is_taken(way):
    body = b'"' + b"x" * 199_998 + b'"'
    assert way.post("echo", body).content == body
    assert way.post("echo", b'"x' + body[1:]).status_code == 413


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(
    "lines, status",
    [
        (["POST {} HTTP/1.0", "transfer-encoding: chunked"], 400),
        (["POST {} HTTP/1.1", "host: localhost", "transfer-encoding: gzip, chunked"], 501),
        (["POST {} HTTP/1.1", "transfer-encoding: chunked"], 400),
        (["POST {} HTTP/1.1", "host: localhost", "host: localhost", "transfer-encoding: chunked"], 400),
        (["POST {} HTTP/1.1", "host: a b", "transfer-encoding: chunked"], 400),
    ],
)
@pytest.mark.parametrize("target", [ECHO, "/models/%65cho"])
def test_a_head_that_could_be_read_in_two_ways_is_refused_and_closed(wire, target, lines, status):  # F7
    wire.send("\r\n".join([*lines, "", ""]).format(target).encode() + b"1\r\n1\r\n0\r\n\r\n")
    answer = wire.read()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert wire.is_closed_by_server()


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("target", ["/models/echo", "/models/%65cho"])
def test_the_body_of_a_request_to_upgrade_is_a_body(way, wire, target):  # F3
    before = way.describe("diary")["batching"]["batches"]
    inner = wire.request("POST", "/models/diary", b'{"name": "smuggled"}')
    wire.send(wire.head("POST", target, "connection: upgrade", "upgrade: x", f"content-length: {len(inner)}"))
    wire.send(inner)
    answer = wire.read()
    assert (answer.status, answer.headers["connection"]) == (400, "close")  # the model did get it: it is no JSON
    assert "JSON" in answer.error["message"]
    assert wire.is_closed_by_server()
    assert way.describe("diary")["batching"]["batches"] == before


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("how", ["one line", "many lines", "a long target", "no end"])
def test_a_head_that_is_too_long_is_431(way, wire, how):
    if how == "a long target":
        head = wire.head("GET", "/" + "x" * 100_000)
    elif how == "many lines":
        head = wire.head("POST", ECHO, *[f"x-{number}: {'y' * 100}" for number in range(1000)])
    elif how == "no end":
        head = b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000
    else:
        head = wire.head("POST", ECHO, "x: " + "y" * 100_000, "content-length: 1") + b"1"
    try:
        wire.send(head[:50_000])
        time.sleep(0.05)  # so that the pieces are read one by one: both are within the limit, their sum is not
        wire.send(head[50_000:])
    except ConnectionError:
        pass  # the rest was not wanted any more
    answer = wire.read()
    assert answer.status == 431
    assert answer.error["message"]
    assert way.call("echo", 1).status_code == 200


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS at a plain port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"POST /models/echo HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /models/echo HTTP/1.1\r\ncontent-length: 1x\r\n\r\n1",
        b"POST /models/echo HTTP/1.1\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n1",
        b"POST /models/echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n",
    ],
)
def test_what_is_not_http_is_400_and_closed(wire, bytes_sent):
    wire.send(bytes_sent)
    answer = wire.read()
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.error["request_id"]
    wire.read_rest()


@pytest.mark.parametrize(
    "headers",
    [
        ["content-length: 1", "content-length: 2"],
        ["content-length: 3", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "content-length: 3"],
        ["transfer-encoding: chunked, identity"],
        ["transfer-encoding : chunked"],
    ],
)
def test_lengths_that_contradict_each_other_smuggle_no_second_request(way, wire, headers):
    before = way.describe("diary")["batching"]["batches"]
    inner = wire.request("POST", "/models/diary", b'{"name": "smuggled"}')
    wire.send(wire.head("POST", ECHO, *headers) + b"0\r\n\r\n" + inner)
    try:
        assert wire.read().status == 400
        assert wire.is_closed_by_server() or way.name == "asgi"
    except (EOFError, ConnectionError):
        assert way.name == "asgi"  # uvicorn may close without a word
    assert way.describe("diary")["batching"]["batches"] == before


# ---------------------------------------------------------------------------------------------------------------------
# Load, deadlines, clients that leave


def test_a_full_queue_is_429_at_once_with_retry_after(way, tmp_path):
    with Held(way, "narrow", tmp_path, 3):
        answer = way.call("narrow", {})
    assert answer.status_code == 429
    milliseconds = int(answer.headers["retry-after-ms"])
    assert int(answer.headers["retry-after"]) == -(-milliseconds // 1000) >= 1
    assert answer.json()["error"]["code"] == "resource_exhausted"
    assert way.call("narrow", {"name": "after"}).json() == "after"


def test_a_deadline_that_passes_while_a_sample_waits_is_504_and_it_never_runs(way, tmp_path):
    with Held(way, "diary", tmp_path):
        started = time.monotonic()
        answer = way.call("diary", {"name": "late"}, x_request_timeout_ms="50")
        assert time.monotonic() - started > 0.04
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert "50 ms" in answer.json()["error"]["message"]
    assert "late" not in way.call("diary", {}).json()


def test_a_deadline_that_passes_while_a_sample_runs_is_504_and_the_model_hears_of_it(way):
    def is_heard():  # a busy machine may let the time pass before it runs
        assert way.call("patient", {"s": 60}, x_request_timeout_ms="50").status_code == 504
        return way.call("patient", {}).json() == "cancelled"

    eventually(is_heard)


def test_a_model_hears_that_its_client_is_gone(way):
    with way.wire() as wire:
        wire.send(wire.request("POST", "/models/patient", b'{"s": 60}'))
        eventually(lambda: way.describe("patient")["in_flight"] == 1)
    eventually(lambda: way.describe("patient")["in_flight"] == 0)
    assert way.call("patient", {}).json() == "cancelled"


def test_the_sample_of_a_client_that_left_is_never_run(way, tmp_path):
    with Held(way, "diary", tmp_path):
        with way.wire() as wire:
            wire.send(wire.request("POST", "/models/diary", b'{"name": "gone"}'))
            eventually(lambda: way.describe("diary")["waiting"] == 1)
        eventually(lambda: way.describe("diary")["waiting"] == 0)
    assert "gone" not in way.call("diary", {"name": "after"}).json()


def test_a_batch_mate_of_a_client_that_left_is_answered(way, tmp_path):
    until = tmp_path / "until"
    with ThreadPoolExecutor() as executor:
        with way.wire() as wire:
            wire.send(wire.request("POST", "/models/pair", json.dumps({"until": str(until)}).encode()))
            eventually(lambda: way.describe("pair")["in_flight"] == 1)
            mate = executor.submit(way.call, "pair", {})
            eventually(lambda: way.describe("pair")["waiting"] == 0 and way.describe("pair")["in_flight"] == 2)
        eventually(lambda: way.describe("pair")["in_flight"] == 1)
        until.touch()
        assert mate.result().json() == 2


def test_a_batch_mate_of_a_bad_sample_is_answered(way):
    with ThreadPoolExecutor() as executor:
        bad, good = executor.map(lambda name: way.call("pair", {"name": name}), ["bad", "good"])
    assert (bad.status_code, good.status_code, good.json()) == (500, 200, 2)


def test_a_batch_mate_of_a_sample_that_cannot_be_read_is_answered(way):
    with ThreadPoolExecutor() as executor:
        bad, good = executor.map(lambda body: way.post("pair", body), [b'{"s": "x"}', b"{}"])
    assert (bad.status_code, good.status_code, good.json()) == (422, 200, 1)


def test_a_client_that_leaves_a_stream_ends_it(way):
    with way.wire() as wire:
        wire.send(wire.request("POST", "/models/count", b"-2"))
        wire.read_head()
        assert way.describe("count")["in_flight"] == 1
    eventually(lambda: way.describe("count")["in_flight"] == 0)
    assert way.call("count", 1).text == "data: 0\n\n"


def test_a_client_that_stops_reading_a_stream_and_leaves_frees_the_worker(way):
    with way.wire() as wire:
        wire.send(wire.request("POST", "/models/count", b"-2"))
        wire.read_head()
        time.sleep(0.3)  # until nothing more fits into the buffers on the way
    eventually(lambda: way.describe("count")["in_flight"] == 0)
    assert way.call("count", 1).text == "data: 0\n\n"


# ---------------------------------------------------------------------------------------------------------------------
# What models get wrong


@pytest.mark.parametrize("wish", ["raise", "too many", "none", "unsendable"])
def test_a_failing_model_is_500_and_its_traceback_stays_in_the_log(way, wish):
    request_id = f"{way.name}-{wish.replace(' ', '-')}"
    answer = way.call("failing", wish, x_request_id=request_id, via="1.1 proxy")
    assert answer.status_code == 500
    assert answer.json()["error"]["request_id"] == request_id == answer.headers["x-request-id"]
    assert answer.json()["error"]["code"] == "internal"
    for secret in ("dawn", "Traceback", "zoo.py"):
        assert secret not in answer.text
    found = eventually(lambda: [r for r in way.server.records if request_id in r.get("request_ids", [])])
    assert len(found) == 1
    if wish == "raise":
        assert "attack at dawn" in found[0]["trace"]
        assert "zoo.py" in found[0]["trace"]


@pytest.mark.parametrize("header", [None, "forwarded", "x_forwarded_for", "x_forwarded_proto", "x_real_ip", "via"])
def test_a_failing_model_says_what_it_raised_to_its_author_only(way, header):
    answer = way.call("failing", "raise", **({header: "10.0.0.1"} if header else {}))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "internal")
    if header is not None:
        assert "detail" not in error
        assert error["message"] == "the model failed; the server's log has the details under this request id"
        return
    assert error["message"].startswith("the model failed: ")
    assert "attack at dawn" in error["message"]
    assert [re.sub(r".*/|:\d+", "", frame) for frame in error["detail"]["frames"]] == ["zoo.py in predict"]


def test_a_model_may_refuse_a_sample_with_an_error_of_its_choice(way):
    answer = way.call("failing", "refuse")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "not this one")
    answer = way.call("failing", "busy")
    assert (answer.status_code, answer.json()["error"]["message"]) == (429, "come back later")
    assert "retry-after" in answer.headers


# ---------------------------------------------------------------------------------------------------------------------
# What the server tells about itself


def test_the_models_are_listed_and_described(way):
    listed = {each["name"]: each for each in way.client.get("/models").json()["models"]}
    assert {"echo", "typed", "count", "doubles"} <= listed.keys()
    assert listed["count"]["streams"]
    assert listed["doubles"]["batchable"]
    assert way.describe("echo")["version"] == "7"
    assert way.describe("typed")["description"].startswith("Counts corners")


def test_root_says_where_to_go_when_there_are_several_models(way):
    assert "echo" in way.client.get("/").json()["models"]


def test_probes_answer(way):
    assert way.client.get("/healthz").json() == {"status": "alive"}
    assert way.client.get("/readyz").json() == {"status": "ready"}


def test_metrics_count_every_outcome_once(way):
    labels = {"endpoint": "echo", "version": "7"}
    seen = {
        code: way.server.metric("forebay_requests_total", code=code, **labels) for code in ("ok", "invalid_argument")
    }
    way.call("echo", 1)
    way.call("echo", 2)
    way.post("echo", b"nonsense")
    way.post("echo", b"1", content_type="text/csv")
    assert way.server.metric("forebay_requests_total", code="ok", **labels) == seen["ok"] + 2
    assert (
        way.server.metric("forebay_requests_total", code="invalid_argument", **labels) == seen["invalid_argument"] + 2
    )
    assert way.server.metric("forebay_in_flight", endpoint="echo") == 0


def test_metrics_are_what_prometheus_reads(way):
    from prometheus_client.parser import text_string_to_metric_families

    answer = way.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family.type for family in text_string_to_metric_families(answer.text)}
    assert families["forebay_requests"] == "counter"
    assert families["forebay_batch_size"] == "histogram"
    assert way.client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text.endswith("# EOF\n")


def test_openapi_describes_the_types_of_every_model(way):
    document = way.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "post" in document["paths"]["/models/typed"]
    assert document["components"]["schemas"]["Shape"]["required"] == ["name", "points"]


def test_many_clients_at_once_are_all_answered_with_their_own(way):
    def ask(number):
        return [way.call("echo", [number, turn]).json() for turn in range(20)]

    with ThreadPoolExecutor(16) as executor:
        for number, answers in enumerate(executor.map(ask, range(16))):
            assert answers == [[number, turn] for turn in range(20)]
