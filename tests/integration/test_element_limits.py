# SPDX-License-Identifier: Apache-2.0
"""Requests with too many elements are refused at every door, packed or not, in the protocol's own words (F73, F75)."""

import gzip
import json
import socket
from http.client import HTTPResponse

import httpx
import msgspec
import pytest

from forebay.types.json_segments import LONG_BYTES

MODEL = """
import forebay
from forebay.openai import CompletionRequest, TranscriptionRequest


class Sum(forebay.Model):
    def predict(self, samples: list[list[float]]) -> list[float]:
        return [sum(one) for one in samples]


class Each(Sum):
    batchable = True


class Letters(forebay.Model):
    batchable = True

    def predict(self, samples: list[list[str]]) -> list[int]:
        return [sum(map(len, one)) for one in samples]


class Text(forebay.Model):
    def predict(self, batch: list[CompletionRequest]) -> list[str]:
        return ["text"] * len(batch)


class Ear(forebay.Model):
    def predict(self, batch: list[TranscriptionRequest]) -> list[str]:
        return [str(one.file.size) for one in batch]
"""
MANY = [[1.0] * 50 for _ in range(60)]
TENSOR = {"name": "input", "datatype": "FP32", "shape": [60, 50], "data": MANY}
WIDE = {f"a{number}": 0 for number in range(1100)}
REFUSED = {
    "/models/sum": ([1.0] * 2600, 413, "body: expected at most 2500 elements in arrays"),
    "/v2/models/sum/infer": (
        {"inputs": [{**TENSOR, "parameters": WIDE}]},
        413,
        "expected at most 1000 objects and members",
    ),
    "/v1/models/sum:predict": ({"instances": MANY}, 413, "body: expected at most 2500 elements in arrays"),
    "/v1/completions": ({"model": "text", "prompt": [1] * 1100}, 413, "body: expected at most 1000 elements in arrays"),
}


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    file = tmp_path_factory.mktemp("limits") / "limited.py"
    file.write_text(MODEL)
    limits = ["--max-tensor-elements", "2500", "--max-elements", "1000"]
    return launch(file, "--worker-kind", "thread", "--grpc-port", "0", *limits)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("path", REFUSED)
def test_more_than_the_limit_is_refused(server, path, packed):
    asked, status, why = REFUSED[path]
    body = json.dumps(asked).encode()
    headers = {"content-type": "application/json"} | ({"content-encoding": "gzip"} if packed else {})
    answer = httpx.post(server.url + path, content=gzip.compress(body) if packed else body, headers=headers)
    assert answer.status_code == status
    assert why in answer.text


def test_the_same_request_is_refused_each_time(server):  # F73: a remembered head does not skip the count
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /models/sum HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client, socket.create_connection((host, int(port))) as other:
        for size, expected in ((2600, 413), (1200, 200)):
            body = json.dumps([1] * size).encode()
            for asking in (client, other) * 3:
                asking.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                with HTTPResponse(asking) as answer:
                    answer.begin()
                    assert (answer.status, bool(answer.read())) == (expected, True)


def test_msgpack_is_counted_and_texts_are_not_looked_into(server):
    headers = {"content-type": "application/msgpack"}
    answer = httpx.post(f"{server.url}/models/sum", content=msgspec.msgpack.encode([0] * 2600), headers=headers)
    assert (answer.status_code, "expected at most 2500 elements" in answer.text) == (413, True)
    prompt = ",[{:" * 2000
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "text", "prompt": prompt})
    assert answer.status_code == 200
    answer = httpx.post(f"{server.url}/models/sum", json=[1.0] * 1200)
    assert answer.json() == 1200.0


NUMBER = "1." + "0" * 300
ROWS = [[NUMBER] * 40 for _ in range(60)]
SUMS = [40.0] * 60
LONG = {
    "/v1/models/sum:predict": ({"instances": ROWS}, {"predictions": SUMS}),
    "/v1/models/sum/versions/1:predict": ({"signature_name": "serving_default", "inputs": ROWS}, {"outputs": SUMS}),
    "/models/each": (ROWS, SUMS),
    "/v2/models/sum/infer": ({"inputs": [{**TENSOR, "shape": [60, 40], "data": ROWS}]}, SUMS),
}


def test_a_recording_is_no_text_with_elements(server):
    file = {"file": ("a.wav", b"[," * 3000)}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": "ear"}, files=file)
    assert (answer.status_code, answer.json()["text"]) == (200, "6000")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("path", LONG)
def test_long_bodies_that_are_read_in_steps_are_answered(server, path, packed):
    asked, expected = LONG[path]
    body = json.dumps(asked).replace(f'"{NUMBER}"', NUMBER).encode()
    assert len(body) > LONG_BYTES
    headers = {"content-type": "application/json"} | ({"content-encoding": "gzip"} if packed else {})
    answer = httpx.post(server.url + path, content=gzip.compress(body) if packed else body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["outputs"][0]["data"] if path.startswith("/v2") else found) == expected
    broken = body[:-30] + b"x" + body[-29:]
    answer = httpx.post(server.url + path, content=broken, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert f"(byte {len(body) - 30})" in answer.text


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_long_msgpack_that_is_read_in_steps_is_answered(server, packed):
    body = msgspec.msgpack.encode([["x" * 1000] * 10] * 60)
    assert len(body) > LONG_BYTES
    headers = {"content-type": "application/msgpack", "accept": "application/json"}
    packing = {"content-encoding": "gzip"} if packed else {}
    content = gzip.compress(body) if packed else body
    answer = httpx.post(f"{server.url}/models/letters", content=content, headers=headers | packing)
    assert (answer.status_code, answer.json()) == (200, [10_000] * 60)
    for broken, why in (
        (body[:-1], "ends in the middle of a value"),
        (body + b"x", f"trailing characters (byte {len(body)})"),
    ):
        answer = httpx.post(f"{server.url}/models/letters", content=broken, headers=headers)
        assert answer.status_code == 400
        assert why in answer.text
    many = msgspec.msgpack.encode([["x" * 1000] + [""] * 50] * 600)
    answer = httpx.post(f"{server.url}/models/letters", content=many, headers=headers)
    assert (answer.status_code, "expected at most 2500 elements" in answer.text) == (413, True)
