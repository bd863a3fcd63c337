# SPDX-License-Identifier: Apache-2.0
"""`forebay explain-refusal` says why a request was refused, by the id of its answer, over every door."""

import concurrent.futures
import itertools
import json
import re

import grpc
import httpx
import numpy as np
import pytest
from tests.integration.kserve.served import M, request
from tests.waiting import PATIENCE_S, eventually

from forebay.protocols.kserve.messages import SERVICE

SLOW = """
import time
import forebay

class Slow(forebay.Model):
    max_batch_size = 1
    max_queue = 2

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(0.05)
        return batch
"""


@pytest.fixture(scope="module", params=["nobody", "tenants", "fronts"])
def flooded(request, launch, tmp_path_factory):
    """A server with more clients than its queue takes, and the head that they send."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "slow.py").write_text(SLOW)
    keys = {"http": {"api_keys": {"team-a": "key-a", "team-b": "key-b"}}} if request.param != "nobody" else {}
    models = [{"target": "slow.py", "workers": 1, "worker_kind": "thread"}]
    (folder / "forebay.yaml").write_text(json.dumps({"models": models, **keys}))
    fronts = ["--fronts", "2"] if request.param == "fronts" else []
    server = launch(None, "--config", str(folder / "forebay.yaml"), "--grpc-port", "0", *fronts)
    return server, {"x-api-key": "key-a"} if keys else {}, request.param


def refused(server, path, headers, body, statuses):
    """The answer to one of several that come together, which was refused."""

    numbers = itertools.count()

    def ask(_number):
        own = {"x-request-id": f"{headers['x-request-id']}-{next(numbers)}"} if "x-request-id" in headers else {}
        return httpx.post(server.url + path, json=body, headers=headers | own, timeout=PATIENCE_S)

    def together():
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            return next((one for one in threads.map(ask, range(12)) if one.status_code in statuses), None)

    return eventually(together, "a refusal")


def explained(cli, server, headers, request_id):
    key = ["--api-key", headers["x-api-key"]] if headers else []
    done = cli("explain-refusal", request_id, server.url, *key)
    assert done.returncode == 0, done.stderr
    return done.stdout


INFER = {"inputs": [{"name": "input", "shape": [1], "datatype": "FP64", "data": [1.0]}]}


@pytest.mark.parametrize("path, body", [("/models/slow", 1.0), ("/v2/models/slow/infer", INFER)])
def test_a_request_to_a_full_queue_is_explained(cli, flooded, path, body):
    server, headers, kind = flooded
    answer = refused(server, path, headers, body, {429, 503} if path.startswith("/v2") else {429})
    said = explained(cli, server, headers, answer.headers["x-request-id"])
    assert ("to slow, version 1" in said) or kind == "fronts"
    assert "the queue takes 2" in said
    assert ("of team-a (class 1)" in said) is (kind != "nobody")
    assert ("reason: share" in said) is (kind != "nobody")
    assert "the client was asked to retry after" in said


def test_a_request_that_would_be_late_is_explained(cli, flooded):
    server, headers, kind = flooded
    late = {**headers, "x-request-timeout-ms": "8", "x-request-id": f"late-{kind}"}
    answer = refused(server, "/models/slow", late, 1.0, {503})
    assert answer.headers["x-request-id"].startswith(f"late-{kind}-")
    said = explained(cli, server, headers, answer.headers["x-request-id"])
    assert "reason: late" in said
    predicted = re.search(r"it had (\S+) ms left; its answer was predicted after (\S+) ms", said)
    assert predicted is not None, said
    assert float(predicted[1]) <= 8.0 < float(predicted[2])


@pytest.mark.parametrize("is_named", [True, False])
def test_a_call_over_grpc_is_found_by_the_id_in_its_trailers(cli, flooded, is_named):
    server, headers, _ = flooded
    address = re.search(r"gRPC.*?(127\.0\.0\.1:\d+)", server.log)
    assert address is not None
    message = request("slow", np.array([1.0]), datatype="FP64")
    with grpc.insecure_channel(address[1]) as channel:
        rpc = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=M.ModelInferRequest.SerializeToString,
            response_deserializer=M.ModelInferResponse.FromString,
        )

        def one_is_refused():
            own = [(("x-request-id", f"g-{number}"),) if is_named else () for number in range(12)]
            calls = [rpc.future(message, metadata=(*headers.items(), *one), timeout=PATIENCE_S) for one in own]
            return next((one for one in enumerate(calls) if one[1].exception() is not None), None)

        number, refused = eventually(one_is_refused, "a refusal")
    request_id = dict(refused.trailing_metadata())["x-request-id"]
    assert (request_id == f"g-{number}") is is_named
    assert "the queue takes 2" in explained(cli, server, headers, request_id)


def test_an_id_that_is_not_known_is_said_to_be_so(cli, flooded):
    server, headers, _ = flooded
    key = ["--api-key", headers["x-api-key"]] if headers else []
    done = cli("explain-refusal", "../x y", server.url, *key)
    assert done.returncode == 2
    assert "the last 64 of each tenant" in done.stderr
    if headers:
        assert server.client.get("/refusals/late").status_code == 401
