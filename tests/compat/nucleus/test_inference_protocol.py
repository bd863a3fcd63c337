# SPDX-License-Identifier: Apache-2.0
"""A handler in the Open Inference Protocol, at its socket."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import numpy as np
import pytest
from tests.integration.kserve.served import M, ask, refusal, region, request, stream
from tests.integration.kserve.served import infer as infer_over_grpc
from tests.ports import free_port
from tests.waiting import PATIENCE_S

HANDLER = """
    from fastapi import HTTPException

    class Handler:
        def handle_post(self, payload):
            if "bad" in payload:
                raise HTTPException(status_code=418, detail="no tea")
            return {"sum": [sum(row) for row in payload["x"]], "label": payload["name"][0] + "!", "more": {"a": 1}}
"""
BATCHED = """
    class Handler:
        def handle_post(self, payload):
            return [{"n": len(payload), "x": one["x"]} for one in payload]
"""
WAITING = """
    import os, time

    class Handler:
        def handle_post(self, payload):
            while "until" in payload and not os.path.exists(payload["until"][0]):
                time.sleep(0.01)
            return {"n": 1}
"""
X = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}
NAME = {"name": "name", "datatype": "BYTES", "shape": [1], "data": ["Ada"]}


def infer(server, *inputs):
    (about,) = httpx.post(f"{server.url}/v2/repository/index").json()  # T10: no body
    return httpx.post(f"{server.url}/v2/models/{about['name']}/infer", json={"inputs": inputs})


def outputs(answer):
    assert answer.status_code == 200, answer.text
    return {one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer.json()["outputs"]}


@pytest.fixture(scope="module")
def rpc_port():
    return free_port()


@pytest.fixture(scope="module")
def server(serve, rpc_port):
    return serve(HANDLER, None, "--grpc-port", str(rpc_port), "--shared-memory")


@pytest.fixture
def channel(server, rpc_port):
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as found:
        yield found


def asked(channel, name="Ada", **more):
    (about,) = ask(channel, "RepositoryIndex").models
    made = request(about.name, np.array([[1, 2, 3], [4, 5, 6]], "f4"), names=["x"], **more)
    data = name.encode()
    made.inputs.add(name="name", datatype="BYTES", shape=[1])
    made.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    return made


def outputs_of(answer):
    raw = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return {one.name: (one.datatype, [*one.shape], data) for one, data in raw}


def test_a_post_gets_lists_by_name_and_its_fields_are_outputs(server):
    assert httpx.get(f"{server.url}/v2/health/ready").json() == {"ready": True}
    assert outputs(infer(server, X, NAME)) == {
        "sum": ("FP64", [2], [6.0, 15.0]),
        "label": ("BYTES", [], ["Ada!"]),
        "more": ("BYTES", [], ['{"a":1}']),
    }


def test_what_the_handler_refuses_is_told_in_the_protocols_form(server):
    answer = infer(server, {**X, "name": "bad"})
    assert (answer.status_code, answer.json()) == (400, {"error": "no tea"})
    answer = infer(server, {**X, "shape": [7]})
    assert (answer.status_code, "expected 7 elements, got 6" in answer.json()["error"]) == (400, True)
    assert infer(server, NAME).status_code == 500


def test_calls_are_in_the_batches_of_posts(serve):
    batching, rpc_port = {"server_side_batching": {"max_batch_size": 1, "batch_interval_seconds": 1}}, free_port()
    server = serve(BATCHED, batching, "--grpc-port", str(rpc_port))
    assert outputs(infer(server, X)) == {"n": ("INT64", [], [1]), "x": ("FP64", [2, 3], [1, 2, 3, 4, 5, 6])}
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
        assert outputs_of(infer_over_grpc(channel, asked(channel)))["n"] == ("INT64", [], b"\1" + 7 * b"\0")


def test_calls_count_as_in_flight(serve, tmp_path, eventually):  # N95
    port = free_port()
    server = serve(WAITING, {"max_concurrency": 1, "threads_per_process": 2}, "--grpc-port", str(port))
    path = f"/v2/models/{httpx.post(f'{server.url}/v2/repository/index').json()[0]['name']}/infer"
    go = tmp_path / "go"
    waiting = {"inputs": [{"name": "until", "datatype": "BYTES", "shape": [1], "data": [str(go)]}]}
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client, ThreadPoolExecutor(1) as pool:
        try:
            call = pool.submit(client.post, path, json=waiting)
            eventually(lambda: server.request(path="/info").status_code == 503)
            assert server.request("POST", json={}).status_code == 503
            refused = infer(server, X)
            assert (refused.status_code, "too many requests" in refused.json()["error"]) == (503, True)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert refusal(lambda: infer_over_grpc(channel, asked(channel)))[0] == "UNAVAILABLE"
        finally:
            go.touch()
        assert call.result().status_code == 200
    assert infer(server, X).status_code == 200
    go.unlink()
    with pytest.raises(httpx.TimeoutException):  # a client that leaves frees its place
        httpx.post(server.url + path, json=waiting, timeout=0.2)
    eventually(lambda: infer(server, X).status_code == 200)
    go.touch()


def test_it_is_the_same_over_grpc(channel):
    expected = {
        "sum": ("FP64", [2], np.array([6.0, 15.0]).tobytes()),
        "label": ("BYTES", [], b"\4\0\0\0Ada!"),
        "more": ("BYTES", [], b'\7\0\0\0{"a":1}'),
    }
    assert outputs_of(infer_over_grpc(channel, asked(channel))) == expected
    made = asked(channel)
    made.inputs[0].name = "bad"
    assert refusal(lambda: infer_over_grpc(channel, made)) == ("INVALID_ARGUMENT", "no tea")
    (answer,) = map(M.ModelStreamInferResponse.FromString, stream(channel, [asked(channel, id="9")]))
    assert (answer.infer_response.id, outputs_of(answer.infer_response)) == ("9", expected)
    config = ask(channel, "ModelConfig", name=made.model_name).config
    assert not config.model_transaction_policy.decoupled


def test_tensors_may_lie_in_shared_memory(server, channel):
    with region(np.array([[1, 2, 3], [4, 5, 6]], "f4").tobytes()) as key:
        ask(channel, "SystemSharedMemoryRegister", name="given", key=key, byte_size=24)
        place = {"shared_memory_region": "given", "shared_memory_byte_size": 24}
        x = {"name": "x", "datatype": "FP32", "shape": [2, 3], "parameters": place}
        assert outputs(infer(server, x, NAME))["sum"] == ("FP64", [2], [6.0, 15.0])
