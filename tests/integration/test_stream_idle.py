# SPDX-License-Identifier: Apache-2.0
"""Streams whose model is silent: what their clients get at each door, and what becomes of the worker."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tests.conftest import MODELS
from tests.integration.kserve.served import M, request, stream
from tests.integration.test_attached import Worker, door_of, joined
from tests.models.pausing import FOREVER
from tests.waiting import PATIENCE_S, eventually

SILENT = "no part for 300 ms (stream_idle_ms)"
TARGETS = ["Pausing", "Patient", "Raw", "Chatty", "Stepping", "Hanging", "Left", "paused", "waiting"]
KINDS = {
    "inline": {"worker_kind": "inline"},
    "thread": {"worker_kind": "thread"},
    "fronts": {"worker_kind": "process", "fronts": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def server(request, launch, tmp_path_factory):
    """All models, in workers of one kind; processes are behind fronts."""
    models = [{"target": f"{MODELS / 'pausing.py'}:{name}"} for name in TARGETS]
    path = tmp_path_factory.mktemp("pauses") / "forebay.yaml"
    path.write_text(json.dumps({"models": models, "stuck_s": 0.2, **KINDS[request.param]}))
    found = launch(None, "--config", str(path), "--grpc-port", "0")
    found.kind = request.param
    return found


def events(server, model, sample, **headers):
    """What comes of a stream over HTTP: words, and the error that ends it."""
    with server.client.stream("POST", f"/models/{model}", json=sample, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for event in answer.read().decode().split("\n\n")[:-1]:
            data = json.loads(event.rpartition("data: ")[2])
            yield data["error"]["message"] if event.startswith("event: error") else data


def infer(server, model, sample, **more):
    """The same over gRPC."""
    port = eventually(lambda: re.search(r"gRPC at \S+:(\d+)", server.log))[1]
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as opened:
        asked = request(model, np.array([len(sample)], "i8"), datatype="BYTES")
        asked.raw_input_contents[0] = len(sample).to_bytes(4, "little") + sample.encode()
        for answer in stream(opened, [asked], **{"timeout": PATIENCE_S, **more}):
            told = M.ModelStreamInferResponse.FromString(answer)
            yield told.error_message or told.infer_response.raw_output_contents[0][4:].decode()


@pytest.mark.parametrize("model", ["pausing", "stepping", "paused"])
def test_a_stream_that_stops_speaking_ends_with_an_error_that_names_the_setting(server, model):
    before = server.metric("forebay_requests_total", endpoint=model, code="deadline_exceeded")
    word, error = events(server, model, FOREVER)
    assert (word, SILENT in error) == ("one", True), error
    word, error = infer(server, model, FOREVER)
    assert (word, SILENT in error) == ("one", True), error
    counted = lambda: server.metric("forebay_requests_total", endpoint=model, code="deadline_exceeded")  # noqa: E731
    eventually(lambda: counted() == before + 2)


def test_the_error_has_the_form_of_each_protocol(server):
    with server.client.stream("POST", "/models/pausing", json=FOREVER) as answer:
        assert '"code":"deadline_exceeded"' in answer.read().decode().partition("event: error")[2]
    body = {"model": "chatty", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        *_, last = answer.read().decode().strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("timeout", SILENT)
    with server.client.stream("POST", "/models/raw", json=FOREVER) as answer:
        parts = answer.iter_bytes()
        assert next(parts) == b"one"
        assert b"event: error" in (rest := b"".join(parts))  # as any error of a stream of bytes
        assert SILENT.encode() in rest


def test_a_worker_that_hangs_in_a_stream_is_replaced(server):
    if server.kind == "inline":
        pytest.skip("a model that hangs on the server's loop stops the server")
    word, error = events(server, "hanging", "hang")
    assert (word, SILENT in error) == ("one", True), error
    eventually(lambda: list(events(server, "hanging", "")) == ["one"])


def test_a_stream_goes_on_beyond_the_time_limit_of_its_first_part(server, tmp_path):
    if server.kind != "fronts":
        pytest.skip("one kind is enough for a test of three seconds")
    there = tmp_path / "there"
    with ThreadPoolExecutor() as pool:
        models = ["patient", "waiting"]
        open_ones = [
            pool.submit(lambda ask=ask, model=model: list(ask(server, model, str(there))))
            for model in models
            for ask in (events, infer)
        ]
        time.sleep(3.1)  # `timeout_ms` of both
        there.touch()
        assert [one.result(PATIENCE_S) for one in open_ones] == [["one", "two"]] * 4


def test_the_time_that_a_client_states_is_that_of_the_whole_stream(server):
    if server.kind == "inline":
        pytest.skip("two kinds are enough for a test of two seconds")
    for model in ("patient", "waiting"):
        word, error = events(server, model, FOREVER, **{"x-request-timeout-ms": "500"})
        assert word == "one"
        assert re.search(r"\btimed out after (500|49\d) ms", error), error
        try:
            error = [*infer(server, model, FOREVER, timeout=0.5)][-1]  # the server's clock was the first one
        except grpc.RpcError as failed:
            error = str(failed.code())
        assert re.search(r"\btimed out after (500|49\d) ms|DEADLINE_EXCEEDED", error), error


def test_a_model_that_streams_is_told_the_time_of_the_whole_answer(server):
    (left_s,) = events(server, "left", 1)
    assert 3600 - PATIENCE_S < left_s <= 3600
    (left_s,) = events(server, "left", 1, **{"x-request-timeout-ms": "20000"})
    assert left_s <= 20


def test_an_attached_worker_is_no_exception(serve, tmp_path, request):
    server = door_of(serve(None, "--attach", f"unix:{tmp_path}/s"))
    worker = Worker(f"{MODELS / 'pausing.py'}:Pausing", server.door)
    request.addfinalizer(worker.stop)
    joined(server, "pausing", 1, eventually)
    word, error = events(server, "pausing", FOREVER)
    assert (word, SILENT in error) == ("one", True), error
