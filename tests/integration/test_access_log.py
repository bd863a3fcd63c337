# SPDX-License-Identifier: Apache-2.0
"""The access log lists every call, with what is known of it.  # F55"""

import json

import pytest
from tests.waiting import eventually

MODEL = """
import time
from collections.abc import Iterator
import forebay

class Doubles(forebay.Model):
    name = "doubles"

    def predict(self, batch: list[int]) -> list[int]:
        return [2 * sample for sample in batch]

class Fails(forebay.Model):
    name = "fails"

    def predict(self, batch: list[int]) -> list[int]:
        raise ValueError("no")

class Counts(forebay.Model):
    name = "counts"
    max_batch_size = 1

    def predict(self, batch: list[int]) -> Iterator[list[int]]:
        for number in range(batch[0]):
            time.sleep(0.01)
            yield [number]
"""


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    path = tmp_path_factory.mktemp("access") / "model.py"
    path.write_text(MODEL)
    return launch(path, "--worker-kind", "thread", "--access-log", "--log-format", "json", "--cors-origin", "http://a")


def line(server, request, status=None):
    """The line of a call, once it is there: the newest of this method and path."""

    def find():
        return [
            one
            for one in server.records
            if one["logger"] == "forebay.access" and f"{one['method']} {one['path']}" == request
        ]

    eventually(lambda: any(status in {None, one["status"]} for one in find()))
    return [one for one in find() if status in {None, one["status"]}][-1]


def answered(server, answer):
    """The line of a call that has an answer."""

    def find():
        return [one for one in server.records if one.get("request_id") == answer.headers["x-request-id"]]

    eventually(find)
    (found,) = find()
    return found


@pytest.mark.parametrize("headers", [{}, {"x-request-id": "mine"}, {"origin": "http://a"}])
def test_a_call_of_a_model_has_all_that_is_known_of_it(server, headers):
    answer = server.client.post("/models/doubles?secret=1", json=21, headers=headers)
    assert answer.text == "42"

    found = answered(server, answer)
    expected = {"message": "POST /models/doubles 200", "model": "doubles", "status": 200, "bytes": 2, "code": "ok"}
    assert found.items() >= {"level": "info", "batch_size": 1, **expected}.items()
    assert 0.0 <= found["queue_ms"] <= found["ms"]
    assert found["client"].startswith("127.0.0.1:")


def test_calls_that_no_model_answers_are_listed(server):
    server.client.get("/nowhere")
    assert line(server, "GET /nowhere").items() >= {"status": 404, "model": None}.items()
    server.client.delete("/models/doubles")
    assert line(server, "DELETE /models/doubles")["status"] == 405
    server.client.get("/healthz")
    assert line(server, "GET /healthz").items() >= {"status": 200, "code": "ok"}.items()
    server.client.post("/models/doubles", content="nonsense", headers={"content-type": "application/json"})
    found = line(server, "POST /models/doubles", 400)
    assert (found["code"], found["model"]) == ("invalid_argument", "doubles")
    server.client.post("/models/fails", json=1)
    assert line(server, "POST /models/fails", 500)["batch_size"] == 1
    with server.connect() as wire:
        wire.send(b"GET / HTTP/9\r\n\r\n")
        assert wire.read().status == 400
    assert line(server, "GET /", 400)["request_id"]
    with server.connect() as wire:
        wire.send(wire.head("POST", "/models/doubles", f"content-length: {1 << 40}"))
        assert wire.read().status == 413
    assert line(server, "POST /models/doubles", 413)["ms"] is None


@pytest.mark.parametrize("path", ["/nowhere%0Aat%20all", "/models/doubles%1b", "/v2/models/%C3%BC"])
def test_a_path_is_listed_as_it_was_asked_for(server, path):
    assert server.client.post(f"{path}?secret=1", json=1).status_code == 404
    assert line(server, f"POST {path}")["status"] == 404


@pytest.mark.parametrize("origin", [{}, {"origin": "http://a"}])
@pytest.mark.parametrize(
    "path, sent, status, code",
    [
        ("/models/doubles", "nonsense", 400, "invalid_argument"),
        ("/models/doubles", '"word"', 422, "invalid_argument"),
        ("/models/fails", "1", 500, "internal"),
        ("/models/nobody", "1", 404, "not_found"),
        ("/v2/models/nobody/infer", "{}", 404, "not_found"),
        ("/nowhere", "1", 404, "not_found"),
        ("/metrics", "1", 405, "method_not_allowed"),
    ],
)
def test_both_lanes_say_the_same_of_an_error(server, origin, path, sent, status, code):
    def codes():
        return [one["code"] for one in server.records if (one.get("path"), one.get("status")) == (path, status)]

    before = len(codes())
    headers = {"content-type": "application/json", **origin}
    assert server.client.post(path, content=sent, headers=headers).status_code == status
    eventually(lambda: len(codes()) > before)
    assert codes()[-1] == code


def test_an_answer_to_head_has_no_bytes(server):
    assert server.client.get("/healthz").content
    server.client.head("/healthz")
    assert line(server, "GET /healthz")["bytes"] > 0
    assert line(server, "HEAD /healthz")["bytes"] == 0


@pytest.mark.parametrize("origin", [(), ("origin: http://a",)])
def test_a_stream_that_was_called_off_is_listed(server, origin):
    whole = server.client.post("/models/counts", json=3)
    assert answered(server, whole)["bytes"] == len(whole.content)
    seen = len([one for one in server.records if one.get("code") == "cancelled"])
    with server.connect() as wire:
        head = wire.head("POST", "/models/counts", "content-type: application/json", "content-length: 4", *origin)
        wire.send(head + b"1000")
        wire.read_head()
        wire.read_chunk()
    eventually(lambda: len([one for one in server.records if one.get("code") == "cancelled"]) > seen)
    found = [one for one in server.records if one.get("code") == "cancelled"][-1]
    assert found.items() >= {"path": "/models/counts", "status": 200, "model": "counts"}.items()
    assert found["bytes"] > 0
    assert found["request_id"]


def test_nothing_is_listed_where_nobody_asked(launch, models):
    server = launch("zoo.py", "--worker-kind", "thread", "--log-format", "json")
    server.client.get("/nowhere")
    assert json.dumps(server.records).count("forebay.access") == 0
