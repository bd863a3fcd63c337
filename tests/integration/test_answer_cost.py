# SPDX-License-Identifier: Apache-2.0
"""Answers say what they have cost, over every door, and metrics what each tenant has had."""

import json
import re
import socket

import grpc
import httpx
import numpy as np
import pytest
from tests.gen_ai_times import AFTER_FIRST, DURATION, TO_FIRST, added, times_on
from tests.integration.kserve.served import M, request
from tests.models.costly import MS
from tests.waiting import PATIENCE_S, eventually

from forebay.protocols.kserve.messages import SERVICE


@pytest.fixture(scope="module", params=["thread", "process", "fronts"])
def served(request, launch, models, tmp_path_factory):
    kind, fronts = request.param, []
    if kind == "fronts":
        kind, fronts = "process", ["--fronts", "2"]
    path = tmp_path_factory.mktemp("costs") / "forebay.yaml"
    config = {
        "models": [{"target": str(models / "costly.py"), "workers": 1, "worker_kind": kind}],
        "http": {"api_keys": {"team-a": "key-a", "team-b": "key-b"}},
    }
    path.write_text(json.dumps(config))
    return launch(
        None,
        "--config",
        str(path),
        "--grpc-port",
        "0",
        "--answer-cost",
        "--access-log",
        "--cost-log",
        str(path.parent / "costs"),
        *fronts,
    )


def headers(key, **more):
    return {"x-api-key": key, **more}


def cost(said):
    found = re.fullmatch(r"worker_ms=(\d+\.\d{3});rows=(\d+)", said)
    assert found is not None
    return float(found[1]), int(found[2])


def test_an_answer_says_what_it_has_cost_on_both_lanes(served):
    fast = served.client.post("/models/costly", json=1, headers=headers("key-a"))
    worker_ms, rows = cost(fast.headers["forebay-cost"])
    assert worker_ms >= MS
    assert rows == 1
    body = json.dumps([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    infer = {"inputs": [{"name": "input", "shape": [6], "datatype": "FP64", "data": json.loads(body)}]}
    split = served.client.post("/v2/models/costly/infer", json=infer, headers=headers("key-a"))
    worker_ms, rows = cost(split.headers["forebay-cost"])
    assert worker_ms >= 6 * MS  # of both batches
    assert rows == 6


def test_an_error_that_a_worker_was_busy_for_says_so_and_one_before_that_does_not(served):
    failed = served.client.post("/models/costly", json=10, headers=headers("key-a"))
    assert failed.status_code == 500
    assert cost(failed.headers["forebay-cost"])[0] >= MS
    wrong = served.client.post("/models/costly", json="x", headers=headers("key-x"))
    assert wrong.status_code == 401
    assert "forebay-cost" not in wrong.headers


def test_a_stream_ends_with_what_it_has_cost(served):
    text = served.client.post("/models/parts", json=1, headers=headers("key-a")).text
    events = text.strip().split("\n\n")
    assert events[:3] == ["data: 0", "data: 1", "data: 2"]
    worker_ms, rows = cost(events[3].removeprefix("event: cost\ndata: "))
    assert worker_ms >= 3 * MS
    assert rows == 1


def test_a_stream_of_bytes_says_it_in_a_trailer_to_clients_that_are_told_where_it_ends(served):
    address = served.url.removeprefix("http://")
    host, _, port = address.partition(":")
    ends = {}
    for version in (b"1.1", b"1.0"):
        with socket.create_connection((host, int(port)), PATIENCE_S) as client:
            head = b"POST /models/bytes HTTP/%b\r\nHost: %b\r\nX-API-Key: key-a\r\nConnection: close\r\n"
            client.sendall(head % (version, address.encode()) + b"Content-Length: 1\r\n\r\n1")
            ends[version] = b"".join(iter(lambda client=client: client.recv(1 << 16), b""))
    head, _, body = ends[b"1.1"].partition(b"\r\n\r\n")
    assert b"\r\ntrailer: forebay-cost" in head
    parts, _, trailer = body.partition(b"\r\n0\r\n")
    assert parts.count(b"part\n") == 3
    name, _, said = trailer.decode().partition(": ")
    assert name == "forebay-cost"
    assert cost(said.removesuffix("\r\n\r\n"))[0] >= 3 * MS
    head, _, body = ends[b"1.0"].partition(b"\r\n\r\n")
    assert body == b"part\n" * 3
    assert b"trailer" not in head


def test_a_stream_of_requests_over_grpc_says_what_all_of_them_have_cost(served):
    message = request("costly", np.array([1.0, 2.0]), datatype="FP64")
    address = re.search(r"gRPC.*?(127\.0\.0\.1:\d+)", served.log)
    assert address is not None
    with grpc.insecure_channel(address[1]) as channel:
        call = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=M.ModelInferRequest.SerializeToString,
            response_deserializer=M.ModelStreamInferResponse.FromString,
        )(iter([message] * 3), metadata=(("x-api-key", "key-a"),), timeout=PATIENCE_S)
        assert len([*call]) == 3
        worker_ms, rows = cost(dict(call.trailing_metadata())["forebay-cost"])
    assert worker_ms >= 6 * MS
    assert rows == 6


def test_trailers_over_grpc_and_the_access_log_say_it(served):
    message = request("costly", np.array([1.0, 2.0]), datatype="FP64")
    address = re.search(r"gRPC.*?(127\.0\.0\.1:\d+)", served.log)
    assert address is not None
    with grpc.insecure_channel(address[1]) as channel:
        rpc = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=M.ModelInferRequest.SerializeToString,
            response_deserializer=M.ModelInferResponse.FromString,
        )
        _, call = rpc.with_call(message, metadata=(("x-api-key", "key-a"),), timeout=PATIENCE_S)
    said = dict(call.trailing_metadata())["forebay-cost"]
    worker_ms, rows = cost(said)
    assert worker_ms >= 2 * MS
    assert rows == 2
    eventually(lambda: f'"cost_ms":{worker_ms}' in served.log.replace(" ", ""), "the line of the call")


def ask_for_words(served, key, *, stream=False):
    asked = {"model": "words", "stream": stream, "messages": [{"role": "user", "content": "to be"}]}
    return served.client.post("/v1/chat/completions", json=asked, headers=headers(key))


def tokens_had(served, tenant):
    """The tokens that a tenant had so far, as the metrics say."""
    text = served.client.get("/metrics", headers=headers("key-a")).text
    found = re.findall(r'forebay_tenant_tokens_total\{endpoint="(.*?)",kind="(.*?)",tenant="(.*?)",.*?\} (\S+)', text)
    return {(name, kind): float(count) for name, kind, whose, count in found if whose == tenant}


def test_tokens_are_in_the_bill(served):
    before = tokens_had(served, "team-b")
    whole = ask_for_words(served, "key-b")
    assert whole.json()["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    worker, _, tokens = whole.headers["forebay-cost"].partition(";prompt_tokens=")
    assert cost(worker)[0] >= 2 * MS
    assert tokens == "7;completion_tokens=4"
    streamed = ask_for_words(served, "key-b", stream=True).text
    assert re.search(r"\n: forebay-cost worker_ms=\d+\.\d{3};rows=1;prompt_tokens=7;completion_tokens=4\n\n$", streamed)
    vectors = served.client.post(
        "/v1/embeddings", json={"model": "vectors", "input": ["one", "three"]}, headers=headers("key-b")
    )
    assert vectors.headers["forebay-cost"].endswith(";prompt_tokens=8;completion_tokens=0")

    def more():
        had = tokens_had(served, "team-b")
        return {key: count - before.get(key, 0.0) for key, count in had.items()}

    expected = {("words", "prompt"): 14, ("words", "completion"): 8}
    expected |= {("vectors", "prompt"): 8, ("vectors", "completion"): 0}
    eventually(lambda: more() == expected, "the metrics tell them")  # fronts tell them with what they hand on next
    line = r'"path": ?"/v1/chat/completions".*"prompt_tokens": ?7, ?"completion_tokens": ?4\b'
    eventually(lambda: len(re.findall(line, served.log)) == 2, "the access log has them")

    def written():
        costs = served.client.get("/costs", params={"since_s": 600}, headers=headers("key-b")).json()
        mine = [one for one in costs if (one["tenant"], one["model"]) == ("team-b", "words")]
        return [(one["prompt_tokens"], one["completion_tokens"]) for one in mine] == [(14, 8)]

    eventually(written, "the files have them")


def test_opentelemetry_is_told_the_same_by_one_server_and_by_several_fronts(served):  # Issue 48
    def times():
        return times_on(served.client.get("/metrics", headers=headers("key-a")).text, "words")

    before = times()
    for number in range(12):  # connections of their own, of which each front gets some
        with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client:
            asked = {"model": "words", "stream": number % 2 == 0, "messages": [{"role": "user", "content": "to be"}]}
            asked |= {"n": 0} if number % 3 == 2 else {}
            client.post("/v1/chat/completions", json=asked, headers=headers("key-b"))
    found = added(before, times())
    assert {kind: count for kind, (count, _) in found.items()} == {
        **{(what, "chat", ""): 8 for what in (DURATION, TO_FIRST, AFTER_FIRST)},
        (DURATION, "chat", "invalid_argument"): 4,
    }
    whole_s, first_s, each_s = (found[what, "chat", ""][1] for what in (DURATION, TO_FIRST, AFTER_FIRST))
    assert whole_s > first_s >= 8 * MS / 1000
    assert each_s == pytest.approx((whole_s - first_s) / 2)  # the second part is two tokens


def test_costs_are_asked_for_over_http(served):
    served.client.post("/models/costly", json=1, headers=headers("key-b"))

    def told():
        costs = served.client.get("/costs", params={"since_s": 600}, headers=headers("key-b")).json()
        return any(one["tenant"] == "team-b" and one["worker_s"] >= MS / 1000 for one in costs)

    eventually(told, "what it has cost is written")
    wrong = served.client.get("/costs", params={"since_s": "x"}, headers=headers("key-b"))
    assert wrong.status_code == 400
    assert "since_s" in wrong.text
    assert served.client.get("/costs").status_code == 401


def test_metrics_tell_what_each_tenant_has_had(served):
    def had():
        text = served.client.get("/metrics", headers=headers("key-a")).text
        found = re.findall(r'forebay_tenant_worker_seconds_total\{endpoint="costly",tenant="(.*?)",.*?\} (\S+)', text)
        return {name: float(seconds) for name, seconds in found}, text

    before, _ = had()
    said = served.client.post("/models/costly", json=1, headers=headers("key-b")).headers["forebay-cost"]
    after, text = had()
    assert after["team-b"] - before.get("team-b", 0.0) == pytest.approx(cost(said)[0] / 1000, abs=1e-6)
    assert after.get("team-a") == before.get("team-a")
    assert 'forebay_tenant_waiting_samples{endpoint="costly",tenant="team-b",version="1"} 0.0' in text
    assert 'forebay_tenant_queue_seconds_count{endpoint="costly",tenant="team-b",version="1"}' in text
