# SPDX-License-Identifier: Apache-2.0
"""Equal requests that wait at the same time run once, over each door; each client gets its answer and pays its part."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tests.integration.kserve.served import M
from tests.integration.kserve.served import request as infer_request
from tests.waiting import PATIENCE_S, eventually

from forebay.protocols.kserve.messages import SERVICE

KEYS = {"a": "key-a", "b": "key-b"}
INFER = {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}


@pytest.fixture(params=["tenant", "all"])  # the latter through fronts, which hand everything on
def served(request, serve, models, tmp_path):
    target = {"target": str(models / "shared.py"), "workers": 1, "worker_kind": "thread"}
    path = tmp_path / "forebay.yaml"
    models_told = [{**target, "single_flight": request.param}]
    path.write_text(json.dumps({"models": models_told, "http": {"api_keys": KEYS}}))
    fronts = ["--fronts", "2"] if request.param == "all" else []
    server = serve(None, "--config", str(path), "--grpc-port", "0", "--answer-cost", *fronts)
    server.gate, server.sharing = str(tmp_path / "gate"), request.param
    server.client.headers["x-api-key"] = KEYS["b"]
    return server


def test_equal_requests_run_once_over_each_door(served):
    def post(path, value, name="a"):
        return httpx.post(served.url + path, json=value, headers={"x-api-key": KEYS[name]}, timeout=PATIENCE_S)

    def waiting(count):
        eventually(lambda: served.metric("forebay_in_flight", endpoint="gate") == count, f"{count} are there")

    tensor = infer_request("gate", np.array([b"x"]), datatype="BYTES")
    tensor.raw_input_contents[0] = b"\1\0\0\0x"
    address = re.search(r"gRPC.*?(127\.0\.0\.1:\d+)", served.log)
    assert address is not None
    with ThreadPoolExecutor(20) as pool, grpc.insecure_channel(address[1]) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", M.ModelInferRequest.SerializeToString, bytes)
        holder = pool.submit(post, "/models/gate", served.gate)
        eventually(Path(served.gate + ".begun").exists, "the worker is at the gate")
        native = [pool.submit(post, "/models/gate", "x", name) for name in "aaabb"]
        other = pool.submit(post, "/models/gate", "y")
        kserve = [pool.submit(post, "/v2/models/gate/infer", INFER) for _ in range(3)]
        rows = [pool.submit(post, "/v1/models/gate:predict", {"instances": ["x"]}) for _ in range(3)]
        metadata: tuple[tuple[str, str | bytes], ...] = (("x-api-key", KEYS["a"]),)
        calls = [pool.submit(lambda: infer(tensor, timeout=PATIENCE_S, metadata=metadata)) for _ in range(3)]
        waiting(16)
        Path(served.gate).touch()
        answers = [one.result(PATIENCE_S) for one in (holder, *native, other, *kserve, *rows)]
        told = {one.result(PATIENCE_S) for one in calls}
    assert {one.status_code for one in answers} == {200}
    ran = [one.result().json() for one in native]
    is_for_all = served.sharing == "all"
    # One for each form of a request, and for each tenant where only those of one are shared.
    assert sorted(ran[0][1:]) == ["x"] * (4 if is_for_all else 5) + ["y"]
    assert all(one == ran[0] for one in (*ran, other.result().json()))
    assert len({one.result().content for one in kserve}) == len({one.result().content for one in rows}) == 1
    assert len(told) == 1
    shared = served.metric("forebay_shared_requests_total", endpoint="gate")
    assert shared == 2 + 2 + 2 + (4 if is_for_all else 3)
    costs = [
        float(one.result().headers["forebay-cost"].removeprefix("worker_ms=").split(";")[0]) for one in (*native, other)
    ]
    assert costs[0] == pytest.approx(costs[-1] / (5 if is_for_all else 3), rel=0.5)  # rows of tenants may cost unlike
