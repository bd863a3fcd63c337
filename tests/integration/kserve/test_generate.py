# SPDX-License-Identifier: Apache-2.0
"""Triton's generate extension: text in, text out, whole and in parts. Issue 48; facts from Triton's http_server.cc"""

import gzip
import json

import httpx
import pytest
from tests.waiting import eventually

MODEL = """
from collections.abc import Iterator
from pathlib import Path

import msgspec
import forebay

class Prompt(msgspec.Struct):
    text_input: str
    stop: list[str] = []
    max_tokens: int = 2
    loud: bool = False

class Written(msgspec.Struct):
    text_output: str
    tokens: list[int]

class Writes(forebay.Model):
    def predict(self, batch: list[Prompt]) -> list[Written]:
        return [self.write(one) for one in batch]

    def write(self, prompt: Prompt) -> Written:
        words = [word for word in prompt.text_input.split() if word not in prompt.stop][: prompt.max_tokens]
        text = " ".join(words)
        return Written(text.upper() if prompt.loud else text, [len(word) for word in words])

class Shouts(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]

class Says(forebay.Model):
    def predict(self, batch: list[str]) -> Iterator[list[str]]:
        (text,) = batch
        for word in text.split():
            if word == "fail":
                raise forebay.InvalidRequest("no more words")
            while word.startswith("/") and not Path(word).exists():
                yield [""]
            yield [word]

class Anything(forebay.Model):
    def predict(self, batch):
        return batch
"""


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    path = tmp_path_factory.mktemp("generate") / "model.py"
    path.write_text(MODEL)
    return launch(path, "--worker-kind", "thread", "--max-batch-size", "1", "--max-tensor-elements", "1000")


def post(server, model, body, what="generate", **more):
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    return httpx.post(f"{server.url}/v2/models/{model}/{what}", content=content, **more)


def events(answer):
    """What an answer in parts says, as an `EventSource` reads it."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, last = answer.text.split("\n\n")
    assert last == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


WRITES = {"model_name": "writes", "model_version": "1"}
SAYS = {"model_name": "says", "model_version": "1"}


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"text_input": "a bc def"}, {"text_output": "a bc", "tokens": [1, 2]}),
        ({"text_input": ["a bc"]}, {"text_output": "a bc", "tokens": [1, 2]}),
        ({"text_input": "a bc", "id": "42"}, {"id": "42", "text_output": "a bc", "tokens": [1, 2]}),
        ({"text_input": "a bc", "id": ""}, {"text_output": "a bc", "tokens": [1, 2]}),
        # Other members and those of parameters are inputs where the model has them; one element is no list.
        ({"text_input": "a bc", "parameters": {"max_tokens": 1}}, {"text_output": "a", "tokens": 1}),
        ({"text_input": "a bc", "max_tokens": 1, "loud": True}, {"text_output": "A", "tokens": 1}),
        ({"text_input": "a b, c", "stop": ["a", "x,y"]}, {"text_output": "b, c", "tokens": [2, 1]}),
        ({"text_input": "a]", "stop": [], "temperature": 0.5, "parameters": {"stream": False}},
         {"text_output": "a]", "tokens": 2}),
    ],
)  # fmt: skip
def test_members_are_inputs_and_parameters(server, body, expected):
    answer = post(server, "writes", body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {**WRITES, **expected}
    assert events(post(server, "writes", body, "generate_stream")) == [{**WRITES, **expected}]


@pytest.mark.parametrize("name", ["text_input", "input"])
def test_a_text_without_a_name_has_the_name_of_the_extension(server, name):
    expected = {"model_name": "shouts", "model_version": "1", "text_output": "HELLO"}
    for path in ("shouts/generate", "shouts/versions/1/generate"):
        assert httpx.post(f"{server.url}/v2/models/{path}", json={name: "hello"}).json() == expected
    assert post(server, "shouts", {name: ["hello", "x"]}).json()["text_output"] == ["HELLO", "X"]


def test_a_packed_body_is_read(server):
    body = gzip.compress(json.dumps({"text_input": "a bc " * 100_000, "id": "i"}).encode())
    packed = {"content-encoding": "gzip"}
    answer = post(server, "writes", body, headers=packed)
    assert answer.json() == {**WRITES, "id": "i", "text_output": "a bc", "tokens": [1, 2]}
    told = events(
        post(server, "says", gzip.compress(b'{"text_input": "a bc", "id": "i"}'), "generate_stream", headers=packed)
    )
    assert told == [{**SAYS, "id": "i", "text_output": "a"}, {**SAYS, "id": "i", "text_output": "bc"}]


def test_parts_come_as_they_are_made(server, tmp_path):
    gate = tmp_path / "gate"
    body = {"text_input": f"first {gate}", "id": "7"}
    with httpx.stream("POST", f"{server.url}/v2/models/says/generate_stream", json=body) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: ")) == {**SAYS, "id": "7", "text_output": "first"}
        gate.touch()
        told = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line]
        assert told[-1] == str(gate)


def test_a_client_that_leaves_ends_its_stream(server, tmp_path):
    body = {"text_input": f"first {tmp_path}/never"}
    with httpx.stream("POST", f"{server.url}/v2/models/says/generate_stream", json=body) as answer:
        next(answer.iter_lines())
    eventually(lambda: server.metric("forebay_in_flight", endpoint="says") == 0)


def test_an_error_after_the_first_part_is_an_event(server):
    answer = post(server, "says", {"text_input": "a fail"}, "generate_stream")
    assert answer.status_code == 200
    assert events(answer) == [{**SAYS, "text_output": "a"}, {"error": "no more words"}]
    answer = post(server, "says", {"text_input": "fail"}, "generate_stream")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert answer.json() == {"error": "no more words"}


def test_a_stream_is_of_one_text(server):
    answer = post(server, "says", {"text_input": ["a", "b"]}, "generate_stream")
    assert answer.status_code == 400
    assert answer.json()["error"].endswith("streams what it gives for one sample, and 2 came; send them one by one")


@pytest.mark.parametrize(
    "model, body, status, told",
    [
        ("writes", "", 400, "the call has no inputs; the model takes 'text_input'"),
        ("writes", {"abc": 1}, 400, "the call has no inputs"),
        ("writes", {"loud": True}, 400, "input 'text_input' is missing"),
        ("writes", "[1]", 400, "expected a generate request, which is an object"),
        ("writes", '{"text_input": "a"', 400, "expected a generate request"),
        ("writes", {"text_input": 1}, 400, "tensor 'text_input': expected a list of BYTES"),
        ("writes", {"text_input": {}}, 400, "tensor 'text_input': expected a list of BYTES"),
        ("shouts", {"text_input": 1}, 400, "tensor 'text_input': expected a list of BYTES"),
        ("shouts", {"text_input": []}, 400, "input 'text_input': expected the shape [-1], got [0]"),
        ("shouts", {"text_input": [["a"]]}, 400, "input 'text_input': expected one element or a flat list of all"),
        ("shouts", {"text": "a"}, 400, "the call has no inputs; the model takes 'text_input'"),
        ("writes", {"text_input": "a", "loud": "no"}, 400, "tensor 'loud': expected a list of BOOL"),
        ("writes", {"text_input": "a", "max_tokens": [[1]]}, 400, "input 'max_tokens'"),
        ("writes", {"text_input": "a", "id": 4}, 400, "id: expected a text, got 4"),
        ("writes", {"text_input": "a", "other": []}, 400, "'other' is not an input of the model"),
        ("writes", {"text_input": "a", "parameters": {"text_input": "b"}}, 400, "say it once"),
        ("writes", {"text_input": "a", "parameters": 1}, 400, "expected a generate request"),
        ("writes", {"text_input": "a", "timeout": "soon"}, 400, "parameter 'timeout'"),
        ("writes", {"text_input": "a", "stop": ["x"] * 2000}, 413, "1000"),
        ("writes", {f"p{n}": 1 for n in range(20_001)}, 413, "more than 20000 parameters"),
        ("says", {"text_input": "a b"}, 400, "streams its answers; ask it over gRPC, at generate_stream"),
        ("anything", {"text_input": "a"}, 404, "takes inputs of any name"),
        ("nobody", {"text_input": "a"}, 404, "nobody"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(server, model, body, status, told):
    answer = post(server, model, body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    assert list(answer.json()) == ["error"]
    assert told in answer.json()["error"]


def test_only_a_post_generates(server):
    answer = httpx.get(f"{server.url}/v2/models/writes/generate")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
