# SPDX-License-Identifier: Apache-2.0
"""Limits of tenants, through the doors of a server."""

import json
import re
import signal
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.kserve.served import M, request
from tests.waiting import PATIENCE_S, eventually

from forebay.cli.main import main
from forebay.protocols.kserve.messages import SERVICE

FEW = {"rate": 0.001, "burst": 2}
"""Nothing of it comes back while a test runs."""
LIMITS = {
    "few": {"requests_per_s": FEW},
    "calls": {"requests_per_s": FEW},
    "rows": {"rows_per_s": {"rate": 1000, "burst": 1000}, "waiting_rows": 500},
    "spent": {"worker_seconds_per_min": {"rate": 0.001, "burst": 0.0001}},
}


@pytest.fixture
def config(models):
    return {
        "models": [{"target": str(models / "shared.py"), "workers": 1, "worker_kind": "thread"}],
        "http": {
            "cors_origins": ["http://page.example"],
            "api_keys": {name: f"key-{name}" for name in (*LIMITS, "free", "usual")},
        },
        "tenants": {
            **{name: {"limits": limits} for name, limits in LIMITS.items()},
            "free": {"weight": 2},
            "*": {"limits": {"requests_per_s": FEW}},
        },
    }


@pytest.fixture
def served(serve, config, tmp_path):
    path = tmp_path / "forebay.yaml"
    path.write_text(json.dumps(config))
    server = serve(None, "--config", str(path), "--grpc-port", "0")
    server.file = path
    return server


def post(server, name, **more):
    return server.client.post("/models/gate", headers={"x-api-key": f"key-{name}", **more}, json="x")


def refusals(server):
    page = server.client.get("/metrics", headers={"x-api-key": "key-free"}).text
    found = re.findall(r'^forebay_tenant_refused_total{.*?reason="(.*?)",tenant="(.*?)".*?} (.*)$', page, re.MULTILINE)
    return {(tenant, reason): float(count) for reason, tenant, count in found}


# F45: limits of a tenant, of those that no entry names, and of no others
def test_a_tenant_is_refused_beyond_its_limits_and_others_are_not(served):
    for name in ("few", "usual"):
        answers = [post(served, name, **{"x-request-id": "mine"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        refused = post(served, name)
        assert refused.status_code == 429
        left = [answer.headers["ratelimit"] for answer in (*answers, refused)]
        assert [one.partition(";t=")[0] for one in left] == [f'"requests";r={count}' for count in (1, 0, 0)]
        assert {answer.headers["ratelimit-policy"] for answer in (*answers, refused)} == {'"requests";q=2;w=2000'}
        assert 500 <= int(refused.headers["retry-after"]) <= 1000
        assert refused.json()["error"]["detail"]["limit"] == "requests"
        assert f"'{name}'" in refused.text
    free = [post(served, "free") for _ in range(4)]
    assert [answer.status_code for answer in free] == [200] * 4
    assert not any("ratelimit" in answer.headers for answer in free)
    page = served.client.get("/models/gate", headers={"x-api-key": "key-few"})
    assert page.headers["ratelimit"].startswith('"requests";r=0')
    assert post(served, "spent").status_code == 200
    eventually(lambda: post(served, "spent").status_code == 429, "its worker time is used up")
    found = refusals(served)
    assert found["few", "limit:requests"] == found["usual", "limit:requests"] == 1.0
    assert found["spent", "limit:worker_seconds"] >= 1.0


def test_calls_of_grpc_have_the_same_limits(served):
    (port,) = re.findall(r"gRPC at .*:(\d+)", served.log)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", M.ModelInferRequest.SerializeToString)
        tensor = request("gate", np.array([b"x"]), datatype="BYTES")
        tensor.raw_input_contents[0] = b"\x01\0\0\0x"
        key = (("x-api-key", "key-calls"),)
        for count in (1, 0):
            _, call = infer.with_call(tensor, metadata=key, timeout=PATIENCE_S)
            told = {str(name): str(value) for name, value in call.trailing_metadata()}
            assert told["ratelimit-policy"] == '"requests";q=2;w=2000'
            assert told["ratelimit"].startswith(f'"requests";r={count};')
        with pytest.raises(grpc.RpcError) as caught:
            infer(tensor, metadata=key, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the tenant 'calls' has used up its requests" in str(caught.value.details())
        error: Any = caught.value
        told = dict(error.trailing_metadata())
        assert told["ratelimit"].startswith('"requests";r=0;')
    assert post(served, "calls").status_code == 429


@pytest.mark.parametrize("way", ["large", "expects a word", "gzip", "of a page"])
def test_a_body_is_not_awaited_when_the_limit_is_reached_before(served, way):
    assert [post(served, "few").status_code for _ in range(2)] == [200, 200]
    headers = {
        "large": [],
        "expects a word": ["expect: 100-continue"],
        "gzip": ["content-encoding: gzip"],
        "of a page": ["origin: http://page.example"],
    }[way]
    size = 10 if way == "expects a word" else 300_000
    with served.connect("x-api-key: key-few\ncontent-type: application/json") as wire:
        answer = wire.send(wire.head("POST", "/models/gate", f"content-length: {size}", *headers)).read()
        assert answer.status == 429
        assert answer.error["detail"] == {"limit": "requests"}
        assert 500 <= int(answer.headers["retry-after"]) <= 3100
    with served.connect("x-api-key: key-few") as wire:  # what may come at once is read, and the connection goes on
        body = json.dumps("x" * 100_000).encode()
        assert [wire.ask("POST", "/models/gate", body).status for _ in range(2)] == [429, 429]
    assert refusals(served)["few", "limit:requests"] == 3.0


def test_a_body_is_not_awaited_while_worker_time_is_used_up(served):
    eventually(lambda: post(served, "spent").status_code == 429, "its worker time is used up")
    with served.connect("x-api-key: key-spent") as wire:
        answer = wire.send(wire.head("POST", "/models/gate", "content-length: 300000")).read()
        assert (answer.status, answer.error["detail"]) == (429, {"limit": "worker_seconds"})


TALK = """
import time
from pathlib import Path
from collections.abc import Iterator

import forebay


class Talk(forebay.Model):
    name = "talk"

    def predict(self, batch: list[str]) -> Iterator[list[str]]:
        yield batch
        while not Path(batch[0]).exists():
            time.sleep(0.005)
        yield batch
"""


def test_so_many_answers_are_streamed_at_a_time(serve, tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    path = tmp_path / "forebay.yaml"
    tenants = {"a": {"limits": {"open_streams": 1}}}
    models = [{"target": str(tmp_path / "talk.py"), "worker_kind": "thread"}]
    path.write_text(json.dumps({"models": models, "http": {"api_keys": {"a": "key-a"}}, "tenants": tenants}))
    http = serve(None, "--config", str(path)).client
    call = {"url": "/models/talk", "json": str(tmp_path / "end"), "headers": {"x-api-key": "key-a"}}
    with http.stream("POST", **call) as stream:
        assert stream.headers["ratelimit"] == '"open_streams";r=0'
        lines = stream.iter_lines()
        assert next(lines)
        refused = http.post(**call)
        assert refused.status_code == 429
        assert refused.json()["error"]["detail"]["limit"] == "open_streams"
        (tmp_path / "end").touch()
        assert list(lines)
    eventually(lambda: http.post(**call).status_code == 200, "the stream is over")


def test_limits_change_without_a_restart(served, config):
    assert [post(served, "few").status_code for _ in range(3)] == [200, 200, 429]
    config["tenants"]["few"] = {}
    config["tenants"]["free"] = {"limits": {"requests_per_s": {"rate": 0.001, "burst": 1}}}
    served.file.write_text(json.dumps(config))
    served.signal(signal.SIGHUP)
    eventually(lambda: "reloaded in" in served.log, "the reload")
    assert "settings that need a restart" not in served.log
    assert [post(served, "few").status_code for _ in range(3)] == [200] * 3
    assert [post(served, "free").status_code for _ in range(2)] == [200, 429]
    assert post(served, "usual").status_code == 200


def test_changed_limits_reach_every_front(serve, config, tmp_path):
    config["tenants"] = {"few": {}}
    path = tmp_path / "forebay.yaml"
    path.write_text(json.dumps(config))
    server = serve(None, "--config", str(path), "--fronts", "2")

    def statuses():
        found = set()
        for _ in range(8):
            with server.connect("x-api-key: key-few") as wire:  # each may reach another front
                found.add(wire.ask("POST", "/models/gate", b'"x"').status)
        return found

    def changed(limits):
        config["tenants"] = {"few": limits}
        path.write_text(json.dumps(config))
        server.signal(signal.SIGHUP)

    assert statuses() == {200}
    changed({"limits": {"requests_per_s": FEW}})
    eventually(lambda: statuses() == {429}, "both fronts have let in their part")
    changed({})
    eventually(lambda: statuses() == {200}, "both fronts have no limits any more")
    config["tenants"] = {"few": {"limits": 5}}
    path.write_text(json.dumps(config))
    server.signal(signal.SIGHUP)
    eventually(lambda: "cannot reload" in server.log, "the owner says what is wrong")
    assert statuses() == {200}
    assert server.log.count("cannot reload") == 1


def test_a_front_of_an_owner_says_that_its_limits_are_its_own(serve, config, tmp_path):
    owner = f"unix:{tmp_path}/owner"
    serve("shared.py", "--attach", owner, "--worker-kind", "thread", "--workers", "1")
    path = tmp_path / "forebay.yaml"
    path.write_text(json.dumps({one: config[one] for one in ("http", "tenants")}))
    front = serve(None, "--config", str(path), "--owner", owner)
    assert "tenants: this front lets in all of requests_per_s, rows_per_s and open_streams by itself" in front.log
    assert [post(front, "few").status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize(
    "limits, told",
    [
        ({"requests_per_s": {"burst": 5}}, "tenants.a.limits.requests_per_s: the key 'rate' is missing"),
        ({"requests_per_s": {"rate": 0}}, "tenants.a.limits.requests_per_s.rate: expected a number > 0"),
        ({"requests_per_s": {"rate": 1, "burst": 0.5}}, "tenants.a.limits.requests_per_s.burst: expected a number"),
        ({"requests_per_s": 5}, "tenants.a.limits.requests_per_s: expected a mapping of keys to values, got 5"),
        ({"rows_per_s": {"rate": float("nan")}}, "tenants.a.limits.rows_per_s.rate: expected a number > 0"),
        ({"request_per_s": {"rate": 1}}, "did you mean requests_per_s?"),
        ({"waiting_rows": 0}, "tenants.a.limits.waiting_rows: expected a whole number >= 1, got 0"),
        ({"open_streams": 1.5}, "tenants.a.limits.open_streams: expected "),
    ],
)
def test_limits_that_cannot_be_meant_are_told_with_their_place(models, tmp_path, capsys, limits, told):
    path = tmp_path / "forebay.yaml"
    text = {"models": [str(models / "shared.py")], "tenants": {"a": {"limits": limits}}}
    path.write_text(json.dumps(text))
    assert main(["check", "--config", str(path)]) == 2
    assert told in capsys.readouterr().err
