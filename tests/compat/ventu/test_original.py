# SPDX-License-Identifier: Apache-2.0
"""The same project under the original and under ours: the same answers, byte for byte where the wire is binary."""

import contextlib
import json
import re

import httpx
import msgspec
import pytest
from tests.waiting import PATIENCE_S

KINDS = pytest.mark.parametrize("kind", ["original", "ours"])


@pytest.fixture(params=["json", "msgpack"])
def codec(request):
    """The module of a serialisation, and the environment that has the project speak it."""
    return (msgspec.msgpack, {"MSGPACK": "1"}) if request.param == "msgpack" else (msgspec.json, {})


@pytest.fixture
def run_either(request):
    """Starts a project with either of the two."""
    return lambda kind: request.getfixturevalue(f"run_{kind}")


@pytest.fixture
def close_later():
    """Enters contexts that are left when the test ends."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


def bodies(codec):
    return {
        "valid": codec.encode({"text": "hello"}),
        "not ascii": codec.encode({"text": "häuser 東京"}),
        "with more": codec.encode({"text": "hello", "other": [1, None, 2.5]}),
        "a number for a text": codec.encode({"text": 12}),
        "short": codec.encode({"text": "x"}),
        "missing": codec.encode({"txt": "hello"}),
        "no text": codec.encode({"text": ["a"]}),
        "a list": codec.encode([1]),
        "a number": codec.encode(1),
        "nothing": codec.encode(None),
    }


# B61, B62, B63, B64, B65, B66, B67
def test_http_answers_are_those_of_the_original(
    run_original, run_ours, lengths, codec, eventually, free_ports, close_later
):
    codec, environment = codec
    ports = free_ports(2)
    servers = [
        run(lengths, "http", port, **environment) for run, port in zip((run_original, run_ours), ports, strict=True)
    ]
    clients = [close_later(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)) for port in ports]

    def is_up(client):
        try:
            return client.get("/").status_code == 200
        except httpx.TransportError:
            return False

    for client, server in zip(clients, servers, strict=True):
        eventually(lambda client=client: is_up(client), server.log.read_text)
    media = "application/msgpack" if codec is msgspec.msgpack else "application/json"
    # Left out: over HTTP, the original takes null for an object without fields.
    requests = [
        *(("GET", path, b"", {}) for path in ("/", "/health", "/inference", "/nope", "/health/", "/apidoc/nope")),
        *((method, "/", b"", {}) for method in ("POST", "HEAD", "OPTIONS", "DELETE")),
        *((method, "/inference", b"", {}) for method in ("PUT", "HEAD", "OPTIONS")),
        *(("POST", "/inference", body, {}) for name, body in bodies(codec).items() if name != "nothing"),
        ("POST", "/inference", codec.encode({"text": "x" * 101}), {}),
        ("POST", "/inference", b"", {}),
        ("POST", "/inference", b"", {"content-type": "text/csv"}),
        ("POST", "/inference", b'{"a', {}),
        ("POST", "/inference", b"\xc1", {}),
        ("POST", "/inference", codec.encode({"text": "hello"}), {"content-type": "text/csv"}),
        ("POST", "/inference", codec.encode({"text": "hello"}), {"content-type": "application/json; charset=utf-8"}),
        ("POST", "/inference", codec.encode({"text": "hello"}), {"content-type": "application/msgpack"}),
    ]
    for method, path, body, given in requests:
        headers = {"content-type": media, **given}  # the original's server takes a body without a type for text
        theirs, ours = (client.request(method, path, content=body, headers=headers) for client in clients)
        what = (method, path, body[:40], headers)
        assert ours.status_code == theirs.status_code, what
        assert ours.headers.get("allow") == theirs.headers.get("allow"), what
        assert ours.headers.get("content-type") == theirs.headers.get("content-type"), what
        if theirs.status_code == 400 and codec is msgspec.msgpack:
            assert ours.json().keys() == theirs.json().keys(), what  # each names the problem as its library does
            assert ours.json()["title"] == theirs.json()["title"], what
        elif theirs.headers.get("content-type") == "application/json" and theirs.content:
            assert ours.json() == theirs.json(), what
        else:
            assert ours.content == theirs.content, what
    # B69: the same numbers under the same names
    pages = [counts(client.get("/metrics").text) for client in clients]
    assert pages[1] == pages[0]


def counts(page):
    lines = [line for line in page.splitlines() if not re.search(r"_created|_sum", line)]
    return [line for line in lines if "# HELP" not in line]


# B43, B44, B45, B75, B81
def test_jobs_are_answered_byte_for_byte_as_the_original_does(
    run_original, run_ours, lengths, codec, front_at, tmp_path
):
    codec, environment = codec
    asked = bodies(codec)
    broken = {} if codec is msgspec.msgpack else {"empty": b"", "cut": b'{"a', "no": b"nul", "after": b"{} {}"}
    jobs = list({**asked, **broken}.values())
    batches = [jobs, [asked["valid"]], [asked["short"]], [asked["valid"], asked["short"]] * 9, jobs[::-1]]
    answers = []
    for run in (run_original, run_ours):
        front = front_at(str(tmp_path / f"{len(answers)}.socket"))
        worker = run(lengths, "unix", front.listener.getsockname(), **environment)
        front.accept()
        found = []
        for batch in batches:
            front.send(
                msgspec.msgpack.encode(
                    {f"{number:08}-1111-4111-8111-111111111111": job for number, job in enumerate(batch)}
                )
            )
            found.append(front.receive())
        answers.append(found)
        worker.kill()
    assert answers[1] == answers[0]


# B42, B46, B77, B81
@KINDS
def test_a_worker_joins_our_batching_service(kind, run_either, lengths, batching, port, eventually, run):
    service = batching("-protocol", "tcp", "-address", f"127.0.0.1:{port}", "-timeout", "5000")
    worker = run_either(kind)(lengths, "tcp", port)
    with httpx.Client(base_url=service, timeout=PATIENCE_S) as client:
        eventually(lambda: client.post("/inference", json={"text": "hello"}).status_code == 200, worker.log.read_text)
        assert client.post("/inference", json={"text": "hello"}).json() == {"n": 5, "batch": 1}
        refused = client.post("/inference", json={"text": "x"})
        assert refused.status_code == 422
        assert refused.json()[0]["type"] == "value_error.any_str.min_length"
        if kind == "ours":  # the original dies of it, and its clients wait for their timeout
            assert client.post("/inference", json={"text": "raise"}).status_code == 500
            assert client.post("/inference", json={"text": "hello"}).json() == {"n": 5, "batch": 1}
            assert worker.end() == 0


# B81
@KINDS
def test_a_worker_attaches_to_our_server(kind, run_either, lengths, attaching, eventually):
    url, address = attaching
    worker = run_either(kind)(lengths, "unix", address)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        eventually(lambda: client.get("/readyz").status_code == 200, worker.log.read_text)
        answer = client.post("/models/batching", content=json.dumps({"text": "hello"}).encode())
        assert (answer.status_code, json.loads(answer.content)) == (200, {"n": 5, "batch": 1})
        assert client.post("/models/batching", content=b'{"text": "x"}').status_code == 422
    worker.kill()
