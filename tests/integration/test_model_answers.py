# SPDX-License-Identifier: Apache-2.0
"""`forebay.Answer`: a model decides on status and headers of its own answer, whatever runs it."""

import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

ORIGIN = "http://page.example"
RUN = "import sys; from forebay.cli.main import main; sys.exit(main())"
NAMES = ("Teller", "Rows", "Blob", "Numbers", "Film", "Steps", "Talker")
FAST, SLOW = {}, {"origin": ORIGIN}


@pytest.fixture(scope="module", params=["inline", "thread", "process", "attached", "front"])
def server(request, launch, models, tmp_path_factory):
    file, door = models / "answers.py", f"unix:{tmp_path_factory.mktemp('door')}/socket"
    if request.param == "front":
        launch(file, "--attach", door)
        yield launch(None, "--owner", door, "--cors-origin", ORIGIN)
    elif request.param != "attached":
        yield launch(file, "--worker-kind", request.param, "--cors-origin", ORIGIN)
    else:
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", RUN, "worker", f"{file}:{name}", "--connect", door], stderr=subprocess.DEVNULL
            )
            for name in NAMES
        ]
        try:
            yield launch(models / "single.py", "--attach", door, "--cors-origin", ORIGIN)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(PATIENCE_S)


@pytest.fixture
def ask(server, eventually):
    """Asks a model once it is there."""

    def ask(model, lane=FAST, **sample):
        eventually(lambda: server.client.get(f"/models/{model}").status_code == 200, model)
        return server.client.post(f"/models/{model}", json=sample, headers=lane)

    return ask


def seen(answer, *names):
    return answer.status_code, *(answer.headers.get(name) for name in names), answer.content


@pytest.mark.parametrize("lane", [FAST, SLOW], ids=["fast lane", "Starlette"])
def test_a_model_sets_status_and_headers(ask, lane):
    for _ in range(2):  # the second time the head is known
        made = ask("teller", lane, body={"a": 1}, status=201, headers={"X-A": "b", "location": "/models/1"})
        assert seen(made, "x-a", "location", "content-type") == (201, "b", "/models/1", "application/json", b'{"a":1}')
        assert made.headers["x-request-id"]
        assert seen(ask("teller", lane, body="plain"), "x-a") == (200, None, b'{"it":"plain"}')
        # A body beside 2xx is held to no type.
        assert seen(ask("teller", lane, body="no such user", status=404)) == (404, b'"no such user"')
        assert seen(ask("teller", lane, media="text/html", status=503), "content-type") == (503, "text/html", b"<p>")
        assert seen(ask("blob", lane, status=404), "content-type") == (404, "application/octet-stream", b"\0raw")
        assert seen(ask("blob", lane, status=404, body=1), "content-type") == (404, "application/json", b"1")
    packed = ask("teller", {**lane, "accept": "application/msgpack"}, body=1, status=404)
    assert seen(packed, "content-type") == (404, "application/msgpack", b"\x01")
    size = 200_000  # beyond what stands in a frame
    assert ask("teller", lane, body={"a": "b" * size}, headers={"x-a": "b"}).headers["x-a"] == "b"


def test_another_method_of_http_has_an_answer_too(ask, server):
    assert ask("teller", body={"a": 1}).status_code == 200  # it is there
    got = server.client.get("/models/teller/got?status=303", follow_redirects=False)
    assert seen(got, "location") == (303, "/models", b'"got"')


WRONG = {
    "no status": {"status": 99},
    "no body": {"status": 204},
    "not modified": {"status": 304},
    "a text": {"status": "200"},
    "true": {"status": True},
    "a space": {"headers": {"a b": "c"}},
    "the length": {"headers": {"Content-Length": "5"}},
    "the framing": {"headers": {"transfer-encoding": "chunked"}},
    "the type": {"headers": {"content-type": "text/html"}},
    "a second answer": {"headers": {"x": "a\r\n\r\nHTTP/1.1 200 OK"}},
    "a number": {"headers": {"x": 5}},
    "no ASCII": {"headers": {"x": "größe"}},
    "many": {"headers": {f"x{number}": "" for number in range(33)}},
    "long": {"headers": {"x": "a" * 8192}},
    "another type": {"body": 5},
    "inside": {"body": "inside"},
    "nested": {"body": "nested"},
}


def test_a_wrong_answer_fails_its_own_request_and_no_other(ask, server):
    for why, sample in WRONG.items():
        assert ask("teller", **{"body": {}, **sample}).status_code == 500, why
        assert ask("film", **{"body": 1, **sample}).status_code == 500 or why == "another type", why
    assert ask("teller", body={"a": 1}, status=201).status_code == 201


def test_the_first_part_of_a_stream_may_set_them(ask):
    for lane in (FAST, SLOW):
        for model in ("film", "steps"):
            begun = ask(model, lane, body=1, status=206, headers={"x-a": "b", "cache-control": "max-age=5"}, parts=2)
            assert seen(begun, "x-a", "cache-control") == (206, "b", "max-age=5", b"data: 1\n\ndata: 2\n\n")
            assert begun.headers["content-type"] == "text/event-stream"
    late = ask("film", body=1, parts=3).text.split("\n\n")
    assert late[:2] == ["data: 1", "data: 2"]
    assert late[2].startswith("event: error")


def test_an_array_of_samples_has_one_status(ask, server):
    ask("rows")  # it is there
    post = server.client.post
    fine = post("/models/rows", json=[{"body": 1}, {"body": 2, "status": 201, "headers": {"x-a": "b"}}])
    assert seen(fine, "x-a") == (200, None, b"[1,2]")
    gone = post("/models/rows", json=[{"body": 1}, {"body": "gone", "status": 404}])
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, "gone")


def test_other_protocols_answer_with_errors_of_their_own(ask, server):
    assert ask("talker", body="ready").status_code in {400, 422}  # it is there
    assert seen(server.client.post("/models/numbers", json=5), "x-n") == (200, "5", b"5")

    def infer(number):
        tensor = {"name": "input", "datatype": "INT64", "shape": [1], "data": [number]}
        return server.client.post("/v2/models/numbers/infer", json={"inputs": [tensor]})

    def predict(number):
        return server.client.post("/v1/models/numbers:predict", json={"instances": [number]})

    def chat(text):
        body = {"model": "talker", "messages": [{"role": "user", "content": text}]}
        return server.client.post("/v1/chat/completions", json=body)

    assert infer(5).json()["outputs"][0]["data"] == [5]
    assert predict(5).json() == {"predictions": [5]}
    assert chat("5").json()["choices"][0]["message"]["content"] == "5"
    for number, status in {404: 404, 409: 412, 418: 400, 503: 503}.items():
        for answer in (infer(number), predict(number), chat(str(number))):
            assert answer.status_code == status, answer.text
            assert f"no {number}" in answer.text
    assert infer(500).status_code == predict(500).status_code == chat("500").status_code == 500
    assert "no 500" not in infer(500).text  # a failure of the model's stays in the log
