# SPDX-License-Identifier: Apache-2.0
"""Graphs behind the real command, asked over HTTP as the Open Inference Protocol has it."""

import json
import queue
import re
import signal
import struct
from typing import Any

import grpc
import httpx
import pytest
from tests.compat.ovms.conftest import config, graph_text, one_node, python_node, write
from tests.integration.kserve.served import M
from tests.waiting import PATIENCE_S, eventually

LENGTH = "Inference-Header-Content-Length"
TOLD = """
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            (one,) = inputs
            content = bytes(one)
            if content == b"bad":
                raise ValueError("bad pixel")
            return [Tensor("output", content, shape=one.shape, datatype=one.datatype)]
    """
NUMBERS = """
    import numpy as np
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("output", np.array(inputs[0]))]
    """
ENDED = """
    from pathlib import Path
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("output", b"")]
        def finalize(self):
            Path(__file__).with_name("ended").touch()
    """


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    passing = 'node { calculator: "PassThroughCalculator" input_stream: "A:input" output_stream: "A:output" }'
    graphs = {name: {} for name in ("told", "numbers", "broken", "unwritten", "ended", "typed")}
    graphs["typed"] = {"base_path": "numbers", "metadata": {"inputs": {"input": {"datatype": "FP32", "shape": [-1]}}}}
    files = {
        "config.json": config(**graphs, passing={}),
        "broken/graph.pbtxt": "node {",
        "unwritten/graph.pbtxt": graph_text(
            ["OVMS_PY_TENSOR:input"], ["OVMS_PY_TENSOR:no"], python_node("n", ["A:input"], ["B:b"])
        ),
        "unwritten/model.py": TOLD,
        "passing/graph.pbtxt": graph_text(["OVMS_PY_TENSOR:input"], ["OVMS_PY_TENSOR:output"], passing),
    }
    for name, handler in (("told", TOLD), ("numbers", NUMBERS), ("ended", ENDED)):
        files |= {f"{name}/graph.pbtxt": one_node(), f"{name}/model.py": handler}
    return write(tmp_path_factory.mktemp("ovms"), files)


@pytest.fixture(scope="module")
def server(launch, folder):
    return launch(folder)


def post(server, name, *inputs, tail=b"", **more):
    body = json.dumps({"inputs": inputs, **more}).encode()
    headers = {"content-type": "application/json"}
    if tail:
        headers = {LENGTH: str(len(body))}
    return httpx.post(f"{server.url}/v2/models/{name}/infer", content=body + tail, headers=headers, timeout=PATIENCE_S)


def given(datatype, shape, **more):
    return {"name": "input", "datatype": datatype, "shape": shape, **more}


def raw(server, name, datatype, shape, content, **more):
    return post(
        server, name, given(datatype, shape, parameters={"binary_data_size": len(content)}), tail=content, **more
    )


@pytest.mark.parametrize(
    "datatype, values",
    [
        ("INT64", [2**63 - 1, -(2**63)]),
        ("UINT64", [2**64 - 1]),
        ("FP64", [1e-300, 0.1]),
        ("BOOL", [True, False]),
        ("INT8", [-1]),
    ],
)
def test_numbers_go_through_json_whole(server, datatype, values):  # O37, O42, T18
    answer = post(server, "numbers", given(datatype, [len(values)], data=values), id="7").json()
    assert answer["outputs"] == [{"name": "output", "datatype": datatype, "shape": [len(values)], "data": values}]
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("numbers", "1", "7")


@pytest.mark.parametrize(
    "datatype, shape, told",
    [
        ("INT32", [2], "input 'input': expected FP32, got INT32"),
        ("FLOAT", [2], "input 'input': expected FP32, got FLOAT"),
        ("FP32", [2, 1], "input 'input': expected the shape [-1], got [2, 1] (-1 is any length)"),
        ("FP32", [3], "tensor 'input' of FP32[3]: expected 12 bytes of data, got 8; shape and data must agree"),
    ],
)
def test_what_is_declared_of_a_graph_holds(server, datatype, shape, told):  # O120
    answer = raw(server, "typed", datatype, shape, bytes(8))
    assert (answer.status_code, answer.json()) == (400, {"error": told})
    assert raw(server, "typed", "FP32", [2], bytes(8)).status_code == 200


def test_texts_are_framed_in_json_and_raw_bytes_are_not(server):  # O35, O36, O42
    texts = ["abc", "", "é\0"]
    framed = b"".join(struct.pack("<I", len(one.encode())) + one.encode() for one in texts)
    answer = post(server, "told", given("BYTES", [3], data=texts), parameters={"binary_data_output": True})
    assert answer.content[int(answer.headers[LENGTH]) :] == framed
    assert post(server, "told", given("BYTES", [3], data=texts)).json()["outputs"][0]["data"] == texts
    assert post(server, "passing", given("BYTES", [3], data=texts)).json()["outputs"][0] == {  # O57
        "name": "output",
        "datatype": "BYTES",
        "shape": [3],
        "data": texts,
    }
    answer = raw(server, "told", "BYTES", [8], b"unframed", parameters={"binary_data_output": True})
    assert answer.content[int(answer.headers[LENGTH]) :] == b"unframed"


def test_types_of_ones_own_travel_raw_only(server):  # O34, O42
    answer = raw(server, "told", "my_string", [3], b"x" * 23, parameters={"binary_data_output": True})
    head = json.loads(answer.content[: int(answer.headers[LENGTH])])
    assert [head["outputs"][0][key] for key in ("datatype", "shape")] == ["my_string", [3]]
    for refused in (
        post(server, "told", given("my_string", [1], data=["a"])),
        raw(server, "told", "my_string", [3], b"x"),
        raw(server, "told", "FP16", [1], b"xy"),
    ):
        assert refused.status_code == 400
        assert set(refused.json()) == {"error"}
        assert refused.headers["content-type"] == "application/json"


def test_timestamps_go_through_json(server):  # O66, O71
    answer = post(server, "numbers", given("FP32", [1], data=[1]), parameters={"OVMS_MP_TIMESTAMP": 43166520112}).json()
    assert answer["parameters"] == {"OVMS_MP_TIMESTAMP": 43166520112}
    assert post(server, "numbers", given("FP32", [1], data=[1])).json()["parameters"]["OVMS_MP_TIMESTAMP"] > 2**50
    refused = post(server, "numbers", given("FP32", [1], data=[1]), parameters={"OVMS_MP_TIMESTAMP": "x"})
    assert refused.status_code == 400


def test_what_clients_send_to_any_server_is_no_side_packet(server):  # O92, O137, O90, O91
    numbers = given("FP32", [1], data=[1])
    reserved = {"triton_enable_empty_final_response": True, "sequence_id": 3, "priority": 1, "timeout": 10**7}
    assert post(server, "numbers", numbers, parameters=reserved).status_code == 200
    assert post(server, "numbers", numbers, parameters={"val": "x"}).status_code == 200
    assert post(server, "numbers", numbers, parameters={"val": 0.5}).status_code == 400
    assert post(server, "numbers", numbers, parameters={"py": "x"}).status_code == 412


@pytest.mark.parametrize(
    "name, asked, status, told",
    [
        ("told", given("BYTES", [1], data=["bad"]), 200, ""),
        ("told", given("UINT8", [3], data=[98, 97, 100]), 400, "node 'python_node': ValueError: bad pixel"),
        ("numbers", given("FP32", [2], data=[1]), 400, "'input' of the shape"),
        ("numbers", given("FP32", [-1], data=[1]), 400, "'input' has the shape [-1]"),
        ("numbers", {"name": "inptu", "datatype": "FP32", "shape": [1], "data": [1]}, 400, "did you mean 'input'"),
        ("nobody", given("FP32", [1], data=[1]), 404, "nobody"),
        ("python_node", given("FP32", [1], data=[1]), 404, "python_node"),
        ("unwritten", given("FP32", [1], data=[1]), 412, "writes its output 'no'"),
    ],
)
def test_errors_have_the_protocols_form(server, name, asked, status, told):  # O116, O122, O14, O51
    answer = post(server, name, asked)
    assert answer.status_code == status, answer.text
    if told:
        assert told in answer.json()["error"]


def test_the_server_is_ready_and_tells_what_is_not(server):  # O1, O109, O118, O119, O120, O43
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.get("/v2/models/numbers/ready").status_code == 200
        assert client.get("/v2/models/broken/ready").status_code in {404, 503}
        about = client.get("/v2/models/numbers").json()
        assert about["versions"] == ["1"]
        assert about["inputs"] == [{"name": "input", "datatype": "INVALID", "shape": []}]
        assert client.get("/v2/models/typed").json()["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1]}]
        told = {one["name"]: one for one in client.get("/models").json()["models"]}
        assert "broken/graph.pbtxt:1" in told["broken"]["versions"][0]["error"]


def test_a_signal_ends_graphs_with_finalize(serve, tmp_path):  # O12
    write(tmp_path, {"g/graph.pbtxt": one_node(), "g/model.py": ENDED})
    server = serve(tmp_path / "g/graph.pbtxt")
    assert post(server, "g", given("FP32", [1], data=[1])).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    assert (tmp_path / "g/ended").exists()


def test_a_signal_has_files_read_anew(serve, tmp_path):  # O111
    write(tmp_path, {"config.json": config(g={}), "g/graph.pbtxt": one_node(), "g/model.py": NUMBERS})
    server = serve(tmp_path)
    asked = given("FP32", [1], data=[1])
    assert post(server, "g", asked).json()["outputs"][0]["data"] == [1]
    write(tmp_path, {"g/model.py": NUMBERS.replace("np.array(inputs[0])", "np.array(inputs[0]) + 1")})
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: post(server, "g", asked).json()["outputs"][0]["data"] == [2], "the new handler")
    write(tmp_path, {"config.json": "{"})
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "config.json:1" in httpx.get(f"{server.url}/models").text, "why it could not be read")
    assert post(server, "g", asked).json()["outputs"][0]["data"] == [2]


def test_the_configuration_is_told_and_read_anew(serve, tmp_path):  # O112, O111, O115, O145
    write(tmp_path, {"config.json": config(a={}, b={}), "b/graph.pbtxt": "node {"})
    for name in "ab":
        write(tmp_path, {f"{name}/model.py": NUMBERS})
    write(tmp_path, {"a/graph.pbtxt": one_node()})
    server = serve(tmp_path, "--manage", "--repository-poll-s", "0")

    def told():
        found = httpx.get(f"{server.url}/v1/config").json()
        versions = {name: one["model_version_status"] for name, one in found.items()}
        assert all([one["version"] for one in each] == ["1"] for each in versions.values())
        return {name: (one["state"], one["status"]["error_code"]) for name, (one,) in versions.items()}

    def reload():
        return httpx.post(f"{server.url}/v1/config/reload", timeout=PATIENCE_S)

    assert told() == {"a": ("AVAILABLE", "OK"), "b": ("LOADING", "FAILED_PRECONDITION")}
    assert reload().status_code == 200
    write(tmp_path, {"b/graph.pbtxt": one_node()})
    assert reload().status_code == 201
    assert told() == {"a": ("AVAILABLE", "OK"), "b": ("AVAILABLE", "OK")}
    write(tmp_path, {"a/model.py": "1 / 0"})
    answer = reload()
    assert (answer.status_code, list(answer.json())) == (412, ["error"])
    assert "graph 'a' cannot be reloaded, it stays unchanged" in answer.json()["error"]
    assert told()["a"] == ("AVAILABLE", "FAILED_PRECONDITION")  # the old one answers, and it says why
    assert post(server, "a", given("FP32", [1], data=[1])).status_code == 200
    write(tmp_path, {"a/model.py": NUMBERS, "config.json": config(a={})})
    assert reload().status_code == 201
    eventually(lambda: told() == {"a": ("AVAILABLE", "OK"), "b": ("END", "OK")}, "the end of b")
    write(tmp_path, {"config.json": '{"model_config_list": [],\n"mediapipe_config_lst": []}'})
    assert reload().status_code == 412
    assert "config.json:2: mediapipe_config_lst" in reload().json()["error"]
    for what, status in (("unload", 404), ("load", 200)):
        done = httpx.post(f"{server.url}/v2/repository/models/a/{what}", timeout=PATIENCE_S)
        assert done.status_code == 200, done.text
        assert post(server, "a", given("FP32", [1], data=[1])).status_code == status


def test_who_may_not_manage_may_not_have_files_read_anew(server):
    answer = httpx.post(f"{server.url}/v1/config/reload")
    assert answer.status_code == 403
    assert "--manage" in answer.text
    assert httpx.get(f"{server.url}/v1/config/reload").status_code == 405


def test_graphs_have_no_versions(server):  # O117
    for version in ("1", "7"):
        url = f"{server.url}/v2/models/numbers/versions/{version}"
        answer = httpx.post(f"{url}/infer", json={"inputs": [given("FP32", [1], data=[1])]})
        assert answer.json()["model_version"] == "1"
        assert httpx.get(url).json()["versions"] == ["1"]
        assert httpx.get(f"{url}/ready").status_code == 200
    assert httpx.post(f"{server.url}/v2/models/nobody/versions/7/infer", json={}).status_code == 404


def test_a_server_that_stops_waits_for_no_stream_that_rests(tmp_path, serve):  # F97
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": TOLD})
    server = serve(tmp_path, "--name", "g", "--grpc-port", "0", "--drain-s", "3600")
    found = re.search(r"gRPC at ([\d.:]+)", server.log)
    assert found is not None
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.insecure_channel(found[1]) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter(asked.get, None))
        request = M.ModelInferRequest(model_name="g")
        request.inputs.add(name="input", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(b"x")
        asked.put(request.SerializeToString())
        assert M.ModelStreamInferResponse.FromString(next(call)).infer_response.raw_output_contents == [b"x"]
        server.signal()
        assert server.wait() == 0
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the server is stopping; open a new stream" in (ended.value.details() or "")
        asked.put(None)
