# SPDX-License-Identifier: Apache-2.0
"""A pipeline in the Open Inference Protocol, at its socket."""

import httpx
import pytest
from tests.ports import free_port

SCRIPT = """
import numpy as np
from paddle_serving_server.web_service import Op, WebService


class Doubled(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        kind = given["x"].dtype.name
        array = f"array({(given['x'] * 2).tolist()}, dtype='{kind}')"
        return {"twice": array, "text": given["t"].upper(), "kind": kind}, False, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Doubled(name="doubled", input_ops=[read_op])


service = Service(name="svc")
service.prepare_pipeline_config("CONFIG")
service.run_service()
"""
CONFIG = "http_port: 18081\nrpc_port: PORT\ndag:\n  is_thread_op: true\nop:\n  doubled:\n    concurrency: 1\n"
X = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
T = {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["hello"]}


@pytest.fixture(scope="module")
def url(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "config.yml").write_text(CONFIG.replace("PORT", str(free_port())))
    (folder / "web_service.py").write_text(SCRIPT.replace("CONFIG", str(folder / "config.yml")))
    return launch(folder / "web_service.py").url


def test_values_are_tensors_both_ways(url):
    assert httpx.get(f"{url}/v2/models/svc/ready").json() == {"name": "svc", "ready": True}
    answer = httpx.post(f"{url}/v2/models/svc/infer", json={"inputs": [X, T], "id": "7"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == "7"
    found = {one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer.json()["outputs"]}
    assert found["twice"] == ("FP32", [2, 2], [2, 4, 6, 8])
    assert found["text"] == ("BYTES", [], ["HELLO"])
    assert found["kind"][2] == ["float32"]


def test_what_fails_is_told_in_the_protocols_form(url):
    for inputs, status, told in (
        ([X], 500, "err_no"),
        ([{**X, "datatype": "UINT32"}, T], 400, "uint32"),
        ([{**X, "shape": [3]}, T], 400, "3 elements, and 4 came"),
    ):
        answer = httpx.post(f"{url}/v2/models/svc/infer", json={"inputs": inputs})
        assert list(answer.json()) == ["error"]
        assert (answer.status_code, told in answer.json()["error"]) == (status, True), answer.text
    assert httpx.get(f"{url}/v2/models/other").status_code == 404
    # The original's paths are as they were.
    assert httpx.post(f"{url}/v2/prediction", content=b'{"key":["x"],"value":["1"]}').json()["err_no"] != 0
