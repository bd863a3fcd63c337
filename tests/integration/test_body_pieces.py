# SPDX-License-Identifier: Apache-2.0
"""Bodies that a model takes as they arrive, while the client still sends."""

import contextlib
import json
import re
import subprocess
import threading
import time

import grpc
import pytest
from tests.conftest import MODELS, Wire
from tests.processes import peak_bytes, start_peak
from tests.waiting import PATIENCE_S, eventually

LIMIT = 24 << 20
NAMES = ["Echo", "Waiting", "Hanging", "Begun", "Early", "Told", "Blocking"]
KINDS = {
    "inline": {"worker_kind": "inline", "workers": 4},
    "thread": {"worker_kind": "thread", "workers": 2},
    "fronts": {"worker_kind": "thread", "workers": 2, "fronts": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def server(request, launch, tmp_path_factory):
    path = tmp_path_factory.mktemp("uploads") / "forebay.yaml"
    names = [*NAMES, *["Threaded"] * (request.param != "inline")]
    models = [{"target": f"{MODELS / 'uploads.py'}:{name}"} for name in names]
    path.write_text(json.dumps({"models": models, "http": {"max_body_bytes": LIMIT}, **KINDS[request.param]}))
    found = launch(None, "--config", str(path), "--grpc-port", "0")
    found.kind = request.param
    return found


@pytest.fixture
def file(tmp_path):
    """A file that is not there yet."""
    return tmp_path / "file"


@pytest.fixture
def wire(server):
    with server.connect() as opened:
        yield opened


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def begin(wire, model, piece):
    wire.send(wire.head("POST", f"/models/{model}", "transfer-encoding: chunked") + chunk(piece))


def begin_with(wire, model, file):
    """Send the name of a file, and wait until the model has taken it."""
    begin(wire, model, str(file).encode())
    eventually(file.with_suffix(".begun").exists)


@pytest.mark.parametrize("model", ["echo", "threaded/parts"])
def test_the_model_answers_while_its_client_still_sends(server, wire, model):
    if server.kind == "inline" and model != "echo":
        pytest.skip("it would block the server's loop")
    for _ in range(2):  # the connection goes on
        begin(wire, model, b"one")
        assert wire.read_head().headers["content-type"] == "text/event-stream"
        assert wire.read_chunk() == b'data: "one"\n\n'
        wire.send(chunk(b"two"))
        assert wire.read_chunk() == b'data: "two"\n\n'
        wire.send(END)
        assert wire.read_chunk() == b""


def test_a_body_of_a_known_length_comes_in_pieces_too(wire):
    wire.send(wire.head("POST", "/models/echo", "content-length: 6") + b"one")
    wire.read_head()
    assert wire.read_chunk() == b'data: "one"\n\n'
    wire.send(b"two")
    assert (wire.read_chunk(), wire.read_chunk()) == (b'data: "two"\n\n', b"")


def test_streams_of_several_clients_share_a_worker(server, wire):
    with Wire(server) as other, Wire(server) as third:
        opened = [wire, other, third]
        for one in opened:
            begin(one, "echo", b"one")
        for one in reversed(opened):
            one.read_head()
            assert one.read_chunk() == b'data: "one"\n\n'
            one.send(chunk(b"two") + END)
            assert (one.read_chunk(), one.read_chunk()) == (b'data: "two"\n\n', b"")


def test_no_two_bodies_are_in_one_batch(server, wire):
    with Wire(server) as other, Wire(server) as third:
        opened = [wire, other, third]
        for one in opened:
            one.send(one.head("POST", "/models/echo/size", "x-name: a", "content-length: 6") + b"one")
        for one in opened:
            one.send(b"two")
        assert [one.read().json() for one in opened] == [["a", 6]] * 3


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=a", ""])
@pytest.mark.parametrize("body", [b"", b"a", b"ab" * 500_000])
def test_any_body_of_any_type_is_taken_as_it_is(wire, kind, body):
    headers = ["x-name: me", *[f"content-type: {kind}"] * bool(kind)]
    assert wire.ask("POST", "/models/echo/size", body, headers=headers).json() == ["me", len(body)]


def test_a_packed_body_stays_packed(wire):
    answer = wire.ask("POST", "/models/echo/size", b"\x1f\x8babc", headers=["x-name: b", "content-encoding: gzip"])
    assert answer.json() == ["b", 5]


def test_curl_uploads_a_file(server, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"a" * 3_000_000)  # curl waits for a 100 Continue before it sends so much
    command = ["curl", "-sS", "-X", "POST", "-H", "x-name: c", "-T", str(path), f"{server.url}/models/echo/size"]
    assert json.loads(subprocess.check_output(command, timeout=PATIENCE_S)) == ["c", 3_000_000]


@pytest.mark.linux  # whose files tell the most memory that a process had
def test_the_server_reads_no_more_while_the_model_is_behind(server, wire, file):
    piece, count, sent = b"a" * (1 << 16), 320, 0

    def send():
        nonlocal sent
        for _ in range(count):
            wire.send(chunk(piece))
            sent += 1
        wire.send(END)

    begin_with(wire, "waiting", file)
    before = start_peak(server.process.pid)
    sending = threading.Thread(target=send)
    sending.start()

    def is_stuck():
        so_far = sent
        time.sleep(0.1)
        return so_far == sent

    eventually(is_stuck)  # the kernel holds what nobody reads, and may hold all
    assert peak_bytes(server.process.pid) - before < 4 << 20
    file.touch()
    assert wire.read().json() == count * len(piece)
    sending.join(PATIENCE_S)


def test_a_body_over_the_limit_is_refused(server, wire):
    wire.send(wire.head("POST", "/models/told", f"content-length: {LIMIT + 1}"))
    answer = wire.read()
    assert (answer.status, answer.error["code"]) == (413, "too_large")
    assert wire.is_closed_by_server()


@pytest.mark.parametrize("model", ["told", "begun"])
def test_a_body_that_grows_over_the_limit_ends_the_answer(server, wire, file, model):
    begin_with(wire, model, file)
    if model == "begun":
        assert wire.read_head().status == 200
        assert wire.read_chunk() == b'data: "begun"\n\n'
    with contextlib.suppress(ConnectionError):  # it may have been refused already
        for _ in range(26):
            wire.send(chunk(b"a" * (1 << 20)))
    if model == "begun":
        assert b"at most" in wire.read_chunk()
    else:
        assert wire.read().status == 413
        assert eventually(lambda: file.exists() and file.read_text()) == "the body is too long"


def test_a_client_that_leaves_ends_the_body_with_an_error(wire, file):
    begin_with(wire, "told", file)
    wire.socket.close()
    assert eventually(lambda: file.exists() and file.read_text()) == "the client went away"


def test_a_model_may_answer_before_it_has_all(server, wire):
    begin(wire, "early", b"one")
    assert wire.read().json() == "ONE"
    wire.send(chunk(b"x" * 1_000_000) + END)  # which nobody takes
    begin(wire, "early", b"two")
    assert wire.read().json() == "TWO"
    with contextlib.suppress(ConnectionError):  # too much for nothing
        for _ in range(30):
            wire.send(chunk(b"a" * (1 << 20)))
    wire.read_rest()


def test_a_model_that_takes_nothing_more_is_out_of_time(wire, file):
    begin_with(wire, "hanging", file)
    answer = wire.read()
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


def test_a_coroutine_that_reads_without_await_does_not_stop_the_server(server, wire):
    begin(wire, "blocking", b"abc")
    wire.send(END)
    answer = wire.read()
    if server.kind == "inline":
        assert answer.error["code"] == "internal"
        assert "`async for`" in answer.error["message"]
    else:
        assert answer.body == b"3"
    assert wire.ask("GET", "/healthz").status == 200


def test_other_doors_refuse_it_in_their_own_words(server):
    answer = server.client.post("/v2/models/early/infer", json={"inputs": []})
    assert (answer.status_code, "does not accept tensors" in answer.json()["error"]) == (404, True)
    answer = server.client.post("/v1/models/early:predict", json={"instances": ["a"]})
    assert (answer.status_code, "takes or returns bytes" in answer.json()["error"]) == (400, True)
    port = eventually(lambda: re.search(r"gRPC at \S+:(\d+)", server.log))[1]
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"\x0a\x05early", timeout=PATIENCE_S)
    wanted = "NOT_FOUND" if server.kind == "fronts" else "INVALID_ARGUMENT"  # a front does not know it
    assert refused.value.code().name == wanted


def test_the_document_describes_it(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    assert list(paths["/models/early"]["post"]["requestBody"]["content"]) == ["application/octet-stream"]
