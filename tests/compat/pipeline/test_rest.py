# SPDX-License-Identifier: Apache-2.0
"""The REST gateway, at its socket."""

import json
import socket
from typing import Any

import grpc
import pytest
from tests.compat.pipeline.fronts import PATIENCE_S, Echo, Fronts, status_of

from forebay.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    RunnerFailed,
    Unavailable,
)
from forebay.server.config import GrpcConfig, HttpConfig
from forebay.surfaces.pipeline.protocol.messages import Request, Response, Tensor

ASKED = b'{"key":["x"],"value":["1"]}'


@pytest.fixture(scope="module")
def module_fronts():
    with Fronts(Echo("svc"), max_bytes=1 << 20) as fronts:
        yield fronts


@pytest.fixture
def fronts(module_fronts):
    module_fronts.inference.behave = module_fronts.inference.echo
    module_fronts.inference.entered.clear()
    module_fronts.inference.cancelled.clear()
    return module_fronts


def fault(answer):
    """The number of a fault; its body has the form of the gateway's."""
    body = answer.json()
    assert list(body) == ["error", "code", "message", "details"]
    assert body["error"] == body["message"]
    assert body["details"] == []
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, body["code"]


@pytest.mark.parametrize("method", ["prediction", "other", "v2", "1"])
def test_any_method_of_the_service(fronts, method):  # P19
    assert fronts.post(f"/svc/{method}", ASKED).json()["value"] == ["1"]
    assert fronts.inference.last.method == method


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"])
def test_the_content_type_does_not_matter(fronts, kind):  # P20
    headers = {} if kind is None else {"content-type": kind}
    assert fronts.post("/svc/prediction", ASKED, headers=headers).json()["value"] == ["1"]


@pytest.mark.parametrize("logid", [77, "77"])
def test_ids_are_numbers_or_texts(fronts, logid):  # P19, P11
    fronts.post("/svc/prediction", json.dumps({"logid": logid, "clientip": "10.0.0.1"}).encode())
    assert (fronts.inference.last.logid, fronts.inference.last.clientip) == (77, "10.0.0.1")  # P12


def test_answers_have_every_field(fronts):  # P21
    assert fronts.post("/svc/prediction", b"{}").json() == {
        "err_no": 0, "err_msg": "", "key": [], "value": [], "tensors": []
    }  # fmt: skip


def test_errors_of_the_pipeline_are_answers(fronts):  # P21, P91
    async def behave(request):
        return Response(err_no=8000, err_msg="no")

    fronts.inference.behave = behave
    answer = fronts.post("/svc/prediction", ASKED)
    assert (answer.status_code, answer.json()["err_no"], answer.json()["err_msg"]) == (200, 8000, "no")


def test_tensors_in_both_directions(fronts):
    async def behave(request):
        return Response(tensors=request.tensors)

    fronts.inference.behave = behave
    tensor = {"name": "x", "elem_type": 1, "shape": [2], "float_data": [0.5, 1.5]}
    answer = fronts.post("/svc/prediction", json.dumps({"tensors": [tensor]}).encode()).json()["tensors"]
    assert fronts.inference.last.tensors[0] == Tensor(name="x", elem_type=1, shape=[2], float_data=[0.5, 1.5])
    assert {name: answer[0][name] for name in tensor} == tensor


def test_the_path_counts_and_not_the_body(fronts):  # P22
    answer = fronts.post("/svc/prediction", b'{"name":"zzz","method":"zzz"}')
    assert answer.json()["err_no"] == 0
    assert (fronts.inference.last.name, fronts.inference.last.method) == ("svc", "prediction")


def test_empty_bodies_and_unknown_fields(fronts):  # P23
    for body in (b"", b" ", b'{"unknown":{"a":[1]}}'):
        assert fronts.post("/svc/prediction", body).json()["err_no"] == 0


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"key":"x"}', b"\xff\xfe"])
def test_bad_json(fronts, body):  # P23
    assert fault(fronts.post("/svc/prediction", body)) == (400, 3)


@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_verbs(fronts, verb):  # P23
    answer = fronts.client.request(verb, "/svc/prediction")
    assert (answer.status_code, answer.text) == (405, "Method Not Allowed\n")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/", "/svc", "/svc/", "//prediction", "/a/b/c", "/svc/prediction/", "/a%2Fb/c"])
def test_paths_that_are_no_services(fronts, path):  # P23
    answer = fronts.client.post(f"http://127.0.0.1:{fronts.http_port}{path}", content=ASKED)
    assert (answer.status_code, answer.text) == (404, "Not Found\n")


@pytest.mark.parametrize(
    "error,expected",
    [
        (QueueFull("too many"), (429, 8)),
        (DeadlineExceeded("too late"), (504, 4)),
        (Unavailable("loading"), (503, 14)),
        (InvalidRequest("odd"), (400, 3)),
        (InternalError("a defect"), (500, 13)),
    ],
)
def test_faults_of_the_transport(fronts, error, expected):  # P27
    fronts.inference.fail(error)
    answer = fronts.post("/svc/prediction", ASKED)
    assert fault(answer) == expected
    assert answer.json()["message"] == error.message


@pytest.mark.parametrize("error", [RunnerFailed("secret", trace="secret"), ZeroDivisionError("secret")])
def test_what_failed_inside_is_not_told(fronts, error):
    fronts.inference.fail(error)
    answer = fronts.post("/svc/prediction", ASKED)
    assert fault(answer) == (500, 13)
    assert "secret" not in answer.text


def test_long_bodies_are_refused(fronts):  # P16
    for body in (b"x" * ((1 << 20) + 1), iter([b"x" * (1 << 19)] * 3)):
        assert fault(fronts.post("/svc/prediction", body)) == (413, 8)


def test_the_time_a_client_gives(fronts):  # P90
    assert fronts.post("/svc/prediction", ASKED).status_code == 200
    assert fronts.inference.timeouts[-1] is None
    fronts.post("/svc/prediction", ASKED, headers={"x-request-timeout-ms": "1500"})
    assert fronts.inference.timeouts[-1] == 1.5
    assert fronts.post("/svc/prediction", ASKED, headers={"x-request-timeout-ms": "9" * 40}).status_code == 200
    for bad in ("0", "-1", "1.5", "soon"):
        assert fault(fronts.post("/svc/prediction", ASKED, headers={"x-request-timeout-ms": bad})) == (400, 3)


def test_nobody_works_for_a_client_that_is_gone(fronts):  # P98
    fronts.inference.behave = fronts.inference.hang
    with socket.create_connection(("127.0.0.1", fronts.http_port)) as connection:
        connection.sendall(b"POST /svc/prediction HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        assert fronts.inference.entered.wait(PATIENCE_S)
    assert fronts.inference.cancelled.wait(PATIENCE_S)


def test_the_peer_is_told(fronts):
    fronts.post("/svc/prediction", ASKED)
    assert fronts.inference.peers[-1].startswith("127.0.0.1:")


def test_pages_stand_beside_the_services():  # P149, trap 30
    with Fronts(Echo()) as fronts:
        assert fronts.client.get("/healthz").json() == {"status": "alive"}
        assert fronts.client.get("/readyz").status_code == 503
        assert "# HELP" in fronts.client.get("/metrics").text
        assert fronts.client.get("/models").json() == {"models": []}
        assert fronts.client.post("/healthz").status_code == 405
        for name in ("v2", "models", "metrics", "docs", "healthz"):
            assert fronts.post(f"/{name}/health", ASKED).json()["value"] == ["1"]
            assert fronts.inference.last.name == name


def test_keys():
    with Fronts(Echo(), http=HttpConfig(port=0, api_keys=("sesame",))) as fronts:
        answer = fronts.post("/a/b", ASKED)
        assert fault(answer) == (401, 16)
        assert answer.headers["www-authenticate"] == "Bearer"
        for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
            assert fronts.post("/a/b", ASKED, headers=headers).status_code == 200
        assert fronts.client.get("/healthz").status_code == 200
        assert fronts.client.get("/metrics").status_code == 401
    with Fronts(Echo(), http=HttpConfig(port=0, api_keys=("sesame",), public_metrics=True)) as fronts:
        assert fronts.client.get("/metrics").status_code == 200


def test_other_origins():
    with Fronts(Echo(), http=HttpConfig(port=0, cors_origins=("https://a.example",))) as fronts:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert (
            fronts.client.options("/a/b", headers=headers).headers["access-control-allow-origin"] == headers["origin"]
        )
        assert "access-control-allow-origin" in fronts.post("/a/b", ASKED, headers=headers).headers


def test_elements_are_counted_before_anything_is_made_of_them():  # F75
    """A value of `[[],[],...]` held the interpreter for seconds: protobuf reads JSON into Python objects first."""
    limits: Any = {"max_elements": 20, "max_tensor_elements": 30}
    http, rpc = HttpConfig(port=0, **limits), GrpcConfig(**limits)
    with Fronts(Echo("svc"), http=http, rpc=rpc) as fronts:
        text = "array([" + "1, " * 100 + "])"
        assert fronts.post("/svc/prediction", json.dumps({"key": ["x"], "value": [text]}).encode()).status_code == 200
        for body in ({"key": ["x"], "value": [[]] * 20}, {"tensors": [{"int64_data": [1] * 30}]}):
            answer = fronts.post("/svc/prediction", json.dumps(body).encode())
            assert fault(answer) == (413, 8)
            assert "body: expected at most 20 elements in arrays, got more" in answer.text
        request = Request(key=["x"], tensors=[Tensor(int64_data=[1] * 30)])
        fronts.call(request)
        request.tensors[0].int64_data.append(1)
        status, why = status_of(lambda: fronts.call(request))
        assert (status, why.split(": ")[1]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "expected at most 30 elements of tensors, got more",
        )
