# SPDX-License-Identifier: Apache-2.0
"""The client of `forebay.testing` gets what a client at a socket gets: the same requests go both ways."""

from __future__ import annotations

import asyncio
import json
import random
import re

import msgspec
import pytest
from tests.models import zoo

import forebay.testing

LIMIT = 200_000
OWN = {"date", "connection", "transfer-encoding", "x-request-id", "content-length"}
"""Headers that are of the socket, or different in every answer."""

SAMPLES = [
    ("echo", {"a": [1, 2.5, None, "é"]}),
    ("typed", {"name": "t", "points": [{"x": 1, "y": 2}] * 3}),
    ("typed", {"name": "t", "points": [{"x": 1, "z": 2}]}),
    ("typed", {"name": "t", "points": [{"x": "1", "y": 2}]}),
    ("typed", []),
    ("typed", None),
    ("pydantic", {"name": "Ann", "age": 3}),
    ("pydantic", {"name": "Ann", "age": -3}),
    ("pydantic", {"age": "x"}),
    ("doubles", list(range(100))),
    ("doubles", [1, "two", 3]),
    ("doubles", []),
    ("doubles", 7),
    ("doubles", list(range(5000))),
    ("later", 0.0),
    ("later", "soon"),
    ("large", 50_000),
    ("large", -1),
    ("count", 3),
    ("count", 0),
    ("count", -1),
    ("count", "x"),
    *(("failing", wish) for wish in ("raise", "exit", "interrupt", "too many", "none", "unsendable", "refuse", "fine")),
    ("narrow", {"name": "n"}),
    ("nobody", 1),
    ("ech0", 1),
]
BODIES = [
    b"",
    b"{",
    b"[1,",
    b'"\xff"',
    b"nan",
    b"1e999",
    b"1 2",
    b"\x00",
    b"[" * 2000,
    b'{"name": "t", "name": "u"}',
    b'{"a": "\\ud800"}',
    b" " * LIMIT + b"1",
    b"9" * 400,
]
HEADS = [
    {},
    {"content-type": "application/msgpack"},
    {"content-type": "application/msgpack", "accept": "application/msgpack"},
    {"content-type": "text/plain"},
    {"content-type": "image/png"},
    {"content-type": "application/json; charset=utf-8", "accept": "text/html"},
    {"accept": "application/json;q=0.1, application/msgpack"},
    {"x-request-timeout-ms": "soon"},
    {"x-request-timeout-ms": "20000"},
    {"content-encoding": "gzip"},
    {"x-request-id": "mine"},
    {"origin": "http://elsewhere.example", "content-type": "text/plain"},
]


def requests():
    """Give method, target, body and headers of many requests."""
    chance = random.Random(12)
    for model, sample in SAMPLES:
        body = json.dumps(sample).encode()
        yield "POST", f"/models/{model}", body, {"content-type": "application/json"}
        packed = {"content-type": "application/msgpack", "accept": "application/msgpack"}
        yield "POST", f"/models/{model}", msgspec.msgpack.encode(sample), packed
        for _ in range(3):  # with some bytes changed
            broken = bytearray(body)
            for _ in range(chance.randint(1, 3)):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            yield "POST", f"/models/{model}", bytes(broken), {"content-type": "application/json"}
    for model in ("echo", "typed", "upper", "doubles", "count"):
        for body in BODIES:
            yield "POST", f"/models/{model}", body, {"content-type": "application/json"}
        for head in HEADS:
            yield "POST", f"/models/{model}", b'["x"]', head
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "POST"):
        for target in ("/", "/models/ech0", "/modelz", "/healthz", "/readyz", "/openapi.json", "/docs/nothing"):
            yield method, target, b"", {}


def shown(status, headers, body):
    """What must be the same: the numbers of requests are the server's own."""
    kept = {name: value for name, value in headers.items() if name not in OWN}
    if headers.get("x-request-id") != "mine":
        body = re.sub(rb'"request_id":"[^"]*"', b'"request_id":""', body)
    else:
        kept["x-request-id"] = "mine"
    return status, kept, body


def at_socket(server, method, target, body, headers):
    answer = server.client.request(
        method,
        target,
        content=body,
        headers={**dict.fromkeys(["accept", "accept-encoding"], ""), "via": "a proxy", **headers},
    )
    return shown(answer.status_code, dict(answer.headers), answer.content)


def models():
    return forebay.testing.client(zoo.__file__, worker_kind="thread", max_body_bytes=LIMIT)


@pytest.fixture(scope="module")
def served(launch):
    return launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", str(LIMIT))


def is_mutant_of_a_stream_without_end(target, body):
    """A changed byte may ask for a stream that never ends, or for as many bytes as there are."""
    return target in {"/models/count", "/models/large", "/models/later"} and re.search(rb"-2|\d{6}", body) is not None


def test_the_client_of_a_test_gets_what_a_client_at_a_socket_gets(served):
    asked = [each for each in requests() if not is_mutant_of_a_stream_without_end(*each[1:3])]
    assert len(asked) > 300
    differences = []
    with models() as here:
        for each in asked:
            if each[0] == "HEAD" or (each[1] == "/models/failing" and b'"' not in each[2][:1]):
                continue
            answer = here.request(*each)
            mine, theirs = shown(answer.status, answer.headers, answer.body), at_socket(served, *each)
            if mine != theirs:
                differences.append((each, mine, theirs))
    assert differences == []


def test_the_async_client_gets_it_as_well(served):
    asked = [each for each in requests() if each[1] in {"/models/typed", "/models/doubles", "/models/nobody"}]

    async def ask():
        async with models() as here:
            return [await here.request(*each) for each in asked]

    for each, answer in zip(asked, asyncio.run(ask()), strict=True):
        assert shown(answer.status, answer.headers, answer.body) == at_socket(served, *each), each
