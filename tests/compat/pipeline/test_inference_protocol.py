# SPDX-License-Identifier: Apache-2.0
"""A pipeline in the Open Inference Protocol, at its socket."""

import grpc
import httpx
import numpy as np
import pytest
from tests.integration.kserve.served import M, infer, refusal, region, stream
from tests.ports import free_port

SCRIPT = """
import numpy as np
from paddle_serving_server.pipeline.error_catch import CustomException
from paddle_serving_server.web_service import Op, WebService


class Doubled(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        if given["t"] == "dark":
            return {}, False, 71, "too dark"
        if given["t"].isdecimal():
            raise CustomException(int(given["t"]), "so it is", True)
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
def rpc_port():
    return free_port()


@pytest.fixture(scope="module")
def url(launch, tmp_path_factory, rpc_port):
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "config.yml").write_text(CONFIG.replace("PORT", str(rpc_port)))
    (folder / "web_service.py").write_text(SCRIPT.replace("CONFIG", str(folder / "config.yml")))
    return launch(folder / "web_service.py", "--shared-memory").url


@pytest.fixture
def channel(url, rpc_port):
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as found:
        yield found


def asked(text="hello", id=""):
    made = M.ModelInferRequest(model_name="svc", id=id)
    made.inputs.add(name="x", datatype="FP32", shape=[2, 2]).contents.fp32_contents.extend([1, 2, 3, 4])
    made.inputs.add(name="t", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return made


def outputs_of(answer):
    raw = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return {one.name: (one.datatype, [*one.shape], data) for one, data in raw}


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
        ([{**X, "shape": [3]}, T], 400, "expected 3 elements, got 4"),
    ):
        answer = httpx.post(f"{url}/v2/models/svc/infer", json={"inputs": inputs})
        assert list(answer.json()) == ["error"]
        assert (answer.status_code, told in answer.json()["error"]) == (status, True), answer.text
    assert httpx.get(f"{url}/v2/models/other").status_code == 404
    # The original's paths are as they were.
    assert httpx.post(f"{url}/v2/prediction", content=b'{"key":["x"],"value":["1"]}').json()["err_no"] != 0


def test_it_is_left_out_where_only_the_projects_own_paths_are_wanted(launch, tmp_path):  # P149
    (tmp_path / "config.yml").write_text(CONFIG.replace("PORT", str(free_port())))
    (tmp_path / "web_service.py").write_text(SCRIPT.replace("CONFIG", str(tmp_path / "config.yml")))
    url = launch(tmp_path / "web_service.py", "--no-extra-routes").url
    assert httpx.post(f"{url}/v2/models/svc/infer", json={"inputs": [X, T]}).status_code == 404
    assert httpx.get(f"{url}/v2/health/live").status_code == 404
    assert httpx.post(f"{url}/svc/prediction", content=b"{}").status_code == 200


ANSWERED = {
    "dark": (400, "INVALID_ARGUMENT", "too dark (err_no 71)"),
    "5000": (400, "INVALID_ARGUMENT", "(err_no 5000)"),
    "8000": (400, "INVALID_ARGUMENT", "(err_no 8000)"),
    "3002": (404, "NOT_FOUND", "(err_no 3002)"),
    "9000": (503, "UNAVAILABLE", "(err_no 9000)"),
    "6000": (504, "DEADLINE_EXCEEDED", "(err_no 6000)"),
    "7000": (500, "INTERNAL", "(err_no 7000)"),
    "10000": (500, "INTERNAL", "(err_no 10000)"),
}


@pytest.mark.parametrize("text", ANSWERED)
def test_errors_have_the_status_of_their_kind(url, channel, text):  # P43, P91, P92
    status, code, told = ANSWERED[text]
    answer = httpx.post(f"{url}/v2/models/svc/infer", json={"inputs": [X, {**T, "data": [text]}]})
    assert (answer.status_code, told in answer.json()["error"]) == (status, True), answer.text
    refused = refusal(lambda: infer(channel, asked(text)))
    assert (refused[0], told in refused[1]) == (code, True)


def test_so_they_are_over_grpc(channel):
    answer = infer(channel, asked(id="7"))
    found = outputs_of(answer)
    assert (answer.model_name, answer.id) == ("svc", "7")
    assert found["twice"] == ("FP32", [2, 2], np.array([2, 4, 6, 8], "f4").tobytes())
    assert found["text"] == ("BYTES", [], b"\5\0\0\0HELLO")
    made = asked()
    del made.inputs[1]
    status, text = refusal(lambda: infer(channel, made))
    assert (status, "err_no" in text) == ("INTERNAL", True), text


def test_each_request_of_a_stream_is_one_of_the_pipeline(channel):
    answers = [
        M.ModelStreamInferResponse.FromString(one) for one in stream(channel, [asked("a", "1"), asked("b", "2")])
    ]
    texts = {one.infer_response.id: outputs_of(one.infer_response)["text"][2][4:] for one in answers}
    assert texts == {"1": b"A", "2": b"B"}


@pytest.mark.parametrize("asked", ["unregister", "region/given/unregister", "region/given/register"])
def test_a_page_of_another_origin_does_not_touch_shared_memory(url, asked):  # F68
    headers = {"Origin": "http://elsewhere.example", "Content-Type": "text/plain"}  # asked without a preflight
    told = httpx.post(f"{url}/v2/systemsharedmemory/{asked}", headers=headers)
    assert told.status_code == 403
    assert "a page of 'http://elsewhere.example' calls" in told.json()["error"]


def test_tensors_may_lie_in_shared_memory(url, channel):
    with region(np.array([1, 2, 3, 4], "f4").tobytes()) as key:
        place = {"shared_memory_region": "given", "shared_memory_byte_size": 16}
        told = httpx.post(f"{url}/v2/systemsharedmemory/region/given/register", json={"key": key, "byte_size": 16})
        assert told.status_code == 200, told.text
        x = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": place}
        answer = httpx.post(f"{url}/v2/models/svc/infer", json={"inputs": [x, T]})
        assert answer.status_code == 200, answer.text
        assert [2, 4, 6, 8] in [one["data"] for one in answer.json()["outputs"]]
        made = asked()
        made.inputs[0].ClearField("contents")
        made.inputs[0].parameters["shared_memory_region"].string_param = "given"
        made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 16
        assert outputs_of(infer(channel, made))["twice"][2] == np.array([2, 4, 6, 8], "f4").tobytes()
