# SPDX-License-Identifier: Apache-2.0
"""Models behind other servers: in turn, the next one where one is down, all within one deadline."""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.compat.pipeline import op_items
from tests.compat.pipeline.fronts import Echo, Fronts
from tests.compat.pipeline.predictor_models import PRICES, X, describe, onnx_model
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.errors import ConfigError, DeadlineExceeded, ForebayError
from forebay.protocols.kserve import rest, rest_client, rpc
from forebay.protocols.kserve.infer_calls import InferRequest
from forebay.remote_servers import servers
from forebay.remote_servers.grpc_calls import GrpcCalls
from forebay.remote_servers.servers import PAUSE_S, Rotation, ServerAddress, parent
from forebay.surfaces.pipeline.ops.op import Op
from forebay.surfaces.pipeline.ops.runner import OpInstances, OpRun
from forebay.surfaces.pipeline.predictors import PredictorSettings, client_for, general_calls
from forebay.surfaces.pipeline.predictors import rpc_tensors as general_rpc
from forebay.surfaces.pipeline.protocol import tensors
from forebay.surfaces.pipeline.protocol.messages import Response
from forebay.workers.runner import WorkerContext

HERE = Path(__file__).parent
KSERVE = HERE.parents[2] / ".venv/environments/kserve/bin/python"


def number_of(caught):
    return caught.value.detail["err_no"]


@pytest.fixture
def remote():
    """Makes clients of endpoints, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(*endpoints, **given) -> Any:
            given.setdefault("timeout_ms", 20_000)
            settings = PredictorSettings(name="twice", server_endpoints=endpoints, **given)
            client = client_for(settings, concurrency_idx=None, process=False)
            stack.callback(client.close)
            return client

        yield make


class Face:
    """A server that answers POST requests as a function says; it can be stopped and come back."""

    def __init__(self, answer):
        self.answer = answer
        self.port = 0
        self.seen: list[Any] = []
        self.parents: list[Any] = []
        self.connections: list[socket.socket] = []
        self.start()

    def start(self):
        face = self

        class Exchange(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                face.connections.append(self.connection)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                face.seen.append((self.path, body))
                face.parents.append(self.headers["traceparent"])
                answer = face.answer(body, self.headers)
                status, data, headers = answer if isinstance(answer, tuple) else (200, answer, {})
                self.send_response(status)
                for name, value in {**headers, "Content-Length": len(data)}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Exchange)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.endpoint = f"127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def stop(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()
            while self.connections:  # those that clients keep
                with contextlib.suppress(OSError):
                    self.connections.pop().shutdown(socket.SHUT_RDWR)


@pytest.fixture
def face():
    """Makes such servers."""
    with contextlib.ExitStack() as stack:

        def make(answer=None):
            made = Face(answer or prices)
            stack.callback(made.stop)
            return made

        yield make


def prices(body, _headers):
    """What a server of the original's model answers. There is none that still runs, so this one stands in for it."""
    request = json.loads(body)
    (tensor,) = request["tensor"]
    rows = np.array(tensor["float_data"]).reshape(tensor["shape"])
    out = (rows @ [[1.0], [10.0], [100.0]]).ravel().tolist()
    answer = {"name": "out", "alias_name": "price", "elem_type": 1, "shape": [len(rows), 1], "float_data": out}
    return json.dumps({"outputs": [{"tensor": [answer], "engine_name": "general_infer_0"}], "err_no": 0}).encode()


@pytest.fixture
def described(tmp_path):
    describe(tmp_path, name="serving_client_conf.prototxt")
    return str(tmp_path / "serving_client_conf.prototxt")


# ---------------------------------------------------------------------------------------------------------------------
# Whose turn it is


def test_servers_are_asked_in_turn():  # P112
    rotation = Rotation(3)
    assert [rotation.order(0.0) for _ in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_one_that_is_down_is_asked_last_until_its_time_has_come():  # P112
    rotation = Rotation(3)
    rotation.failed(1, now=10.0)
    assert {tuple(rotation.order(10.5)) for _ in range(4)} == {(0, 2, 1), (2, 0, 1)}
    assert any(rotation.order(10.0 + PAUSE_S)[0] == 1 for _ in range(3))
    rotation.failed(1, now=20.0)
    rotation.answered(1)
    assert any(rotation.order(20.5)[0] == 1 for _ in range(3))


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["order", "failed", "answered"]), st.integers(0, 4), st.floats(0, 2)), max_size=30
    ),
)
def test_every_server_is_asked_once_whatever_happened_before(count, steps):  # P112
    rotation, now, down = Rotation(count), 0.0, dict[int, float]()
    for step, at, pause in steps:
        now += pause
        if step == "order":
            order = rotation.order(now)
            assert sorted(order) == list(range(count))
            is_down = [down.get(one, 0.0) > now for one in order]
            assert is_down == sorted(is_down)  # those that are up come first
        elif step == "failed":
            rotation.failed(at % count, now)
            down[at % count] = now + PAUSE_S
        else:
            rotation.answered(at % count)
            down.pop(at % count, None)


@pytest.mark.parametrize(
    "text, address, path",
    [
        ("127.0.0.1:9393", "127.0.0.1:9393", ""),
        ("localhost:1/iris", "localhost:1", "iris"),
        ("https://[::1]:8443/v2/models/iris/", "[::1]:8443", "v2/models/iris"),
    ],
)
def test_endpoints_are_read(text, address, path):
    found = ServerAddress.parse(text, "http")
    assert (found.address, found.path) == (address, path)


@pytest.mark.parametrize(
    "text, said",
    [("9393", "HOST:PORT"), ("a:b", "HOST:PORT"), ("", "HOST:PORT"), ("a:1?x", "HOST:PORT"), ("htp://a:1", "'http'")],
)
def test_what_is_no_endpoint_stops_the_start(remote, text, said):
    with pytest.raises(ConfigError, match=said):
        remote(text)


def test_one_that_does_not_answer_in_time_is_asked_last_as_well(monkeypatch):  # P112, P87
    monkeypatch.setattr(servers, "PAUSE_S", PATIENCE_S)
    asked = []

    def call(at, _deadline):
        asked.append(at)
        if at == 0:
            raise TimeoutError

    addresses = [ServerAddress("http", "localhost", port) for port in (1, 2)]
    both = servers.Servers(addresses, [0, 1], PATIENCE_S)
    with pytest.raises(DeadlineExceeded):
        both.ask(call)
    both.ask(call)
    both.ask(call)
    assert asked == [0, 1, 1]


# ---------------------------------------------------------------------------------------------------------------------
# The HTTP face of the original's model servers


def test_who_is_asked_is_told_the_trace(face, rpc_face, remote, described):
    over_http, over_grpc = face(), rpc_face(rpc_prices)
    clients = [remote(over_http.endpoint, client_config=described, fetch_list=["price"])]
    clients.append(remote(over_grpc.endpoint, client_config=described, fetch_list=["price"], **PADDLE_RPC))
    for told in ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""):
        token = parent.set(told)
        for client in clients:
            client.predict({"x": X})
        parent.reset(token)
        assert over_http.parents.pop() == over_grpc.parents.pop() == (told or None)


def test_a_remote_model_is_asked_by_aliases_and_told_its_own_names(face, remote, described):  # P112
    server = face()
    client = remote(server.endpoint, client_config=described, fetch_list=["price"])
    found = client.predict({"x": X.astype("f8")}, log_id=7)
    np.testing.assert_array_equal(found["price"], PRICES)
    assert (found["price"].dtype, found["price"].flags.writeable) == (np.float32, True)
    ((path, body),) = server.seen
    assert path == "/GeneralModelService/inference"
    assert json.loads(body) == {
        "tensor": [
            {"elem_type": 1, "shape": [2, 3], "name": "in", "alias_name": "x", "float_data": X.ravel().tolist()}
        ],
        "fetch_var_names": ["price"],
        "log_id": 7,
    }
    assert client.feed_names_ == ["x"]
    with pytest.raises(ForebayError) as caught:
        client.predict({"y": X})  # refused before anybody is asked
    assert number_of(caught) == 5000
    assert len(server.seen) == 1


def test_a_client_configuration_may_be_a_folder_and_must_be_there(face, remote, described, tmp_path):  # P112
    assert remote(face().endpoint, client_config=str(tmp_path)).fetch_names_ == ["price", "doubled"]
    with pytest.raises(ConfigError, match="cannot be read"):
        remote("127.0.0.1:1", client_config=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no serving_client_conf"):
        remote("127.0.0.1:1", client_config=str(tmp_path / "empty"))


def test_a_model_nobody_describes_is_asked_for_what_is_wanted(face, remote):  # P112
    client = remote(face().endpoint)
    np.testing.assert_array_equal(client.predict({"x": X}, ["price"])["price"], PRICES)
    with pytest.raises(ForebayError, match="name the results in fetch_list"):
        client.predict({"x": X})


def test_requests_go_round_and_past_a_server_that_is_down(face, remote, described, eventually):  # P112
    first, second = face(), face()
    client = remote(first.endpoint, second.endpoint, client_config=described, fetch_list=["price"])
    for _ in range(6):
        client.predict({"x": X})
    assert [len(first.seen), len(second.seen)] == [3, 3]
    first.stop()
    for _ in range(4):
        np.testing.assert_array_equal(client.predict({"x": X})["price"], PRICES)
    assert len(first.seen) == 3
    first.start()

    def is_back():
        client.predict({"x": X})
        return len(first.seen) > 3

    eventually(is_back, "the return of the first server")


def test_nobody_there_is_told_within_the_deadline_and_is_over_when_one_is_back(face, remote, described):  # P112
    server = face()
    client = remote(server.endpoint, f"127.0.0.1:{free_port()}", client_config=described, fetch_list=["price"])
    client.predict({"x": X})
    server.stop()
    started = time.monotonic()
    with pytest.raises(ForebayError, match="no model server can be reached") as caught:
        client.predict({"x": X})
    assert number_of(caught) == 9000
    assert time.monotonic() - started < 50
    server.start()
    np.testing.assert_array_equal(client.predict({"x": X})["price"], PRICES)


def test_a_silent_server_is_given_up_in_time(remote, described):  # P112, P87
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for client_type in ("brpc", "pipeline_grpc"):
            endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
            client = remote(
                endpoint, client_type=client_type, client_config=described, fetch_list=["price"], timeout_ms=300
            )
            started = time.monotonic()
            with pytest.raises(ForebayError) as caught:
                client.predict({"x": X})
            assert number_of(caught) in {6000, 9000}  # a gRPC server that greets nobody counts as one that is down
            assert time.monotonic() - started < 50
            assert client_type != "brpc" or number_of(caught) == 6000


@pytest.mark.parametrize(
    "beginning", ["HTTP/1.1 200 OK\r\nX-Slow: ", "HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n"]
)
def test_an_answer_that_comes_byte_by_byte_is_given_up_in_time(beginning, remote, described):  # P112, P87
    def trickle(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # until the client hangs up
            connection.sendall(beginning.encode())
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                connection.sendall(b"1")
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        client = remote(endpoint, client_config=described, fetch_list=["price"], timeout_ms=300)
        with pytest.raises(ForebayError, match=r"did not answer within 0\.3 s") as caught:
            client.predict({"x": X})
        assert number_of(caught) == 6000
        thread.join()


@pytest.mark.parametrize("own_process", [False, True])
def test_an_op_goes_round_and_past_a_server_that_is_silent(face, remote, described, own_process):  # P112, P87
    made: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = f"127.0.0.1:{silent.getsockname()[1]}", face().endpoint

        def make(_index):
            made.append(remote(*endpoints, client_config=described, fetch_list=["price"], timeout_ms=300))
            return made[-1]

        runner = OpInstances(Op("op"), OpRun(timeout_ms=300), client_for=make, own_process=own_process).runner()
        runner.open(WorkerContext())
        (late,) = runner.run([op_items.request({"x": X})])
        assert op_items.told(late)[0] == 6000
        (found,) = runner.run([op_items.request({"x": X})])
        np.testing.assert_array_equal(found["price"], PRICES)
        runner.close()
    assert len(made) == 1


@pytest.mark.parametrize(
    "answer, said",
    [
        (b'{"err_no": 5, "err_msg": "no such tensor"}', "answers 5: no such tensor"),
        (b"<html>", "HTTP 200: <html>"),
        ((500, b'{"error": "oh"}', {}), "HTTP 500"),
        ((503, b"", {}), "can be reached"),
        (b'{"outputs": []}', "gave nothing, and not price"),
        (b'{"outputs": [{"tensor": [{"alias_name": "price", "elem_type": 77}]}]}', "elem_type is 77"),
        (b'{"outputs": [{"tensor": [{"alias_name": "price", "shape": [2], "float_data": [1]}]}]}', "announced as"),
        (b'{"outputs": [{"tensor": [{"alias_name": "price", "shape": [-1], "float_data": [1]}]}]}', "announced as"),
        (b'{"outputs": [{"tensor": [{"alias_name": "price", "shape": [2000000000,2000000000]}]}]}', "announced as"),
    ],
)
def test_an_answer_that_is_none_has_a_number(face, remote, described, answer, said):  # P92
    client = remote(face(lambda _body, _headers: answer).endpoint, client_config=described, fetch_list=["price"])
    with pytest.raises(ForebayError, match=said) as caught:
        client.predict({"x": X})
    assert number_of(caught) == 9000


@pytest.mark.parametrize(
    "array",
    [np.arange(4).reshape(2, 2).astype(kind) for kind in ("i8", "f4", "i4", "f8", "i2", "f2", "u1", "i1", "?")]
    + [np.array([np.nan, np.inf, -np.inf], np.float32), np.array(["a", "b"]), np.zeros((2, 0), np.float32)],
)
def test_arrays_of_every_type_survive_the_json(array):  # P109
    var = general_calls.Var("x", "x")
    value = general_calls.Value(array, np.array([0, 1, len(array)]))
    sent = general_calls.msgspec.json.encode(general_calls.pack(var, value))
    found = general_calls.unpack(general_calls.msgspec.json.decode(sent, type=general_calls.GeneralTensor))
    assert found.array.dtype == array.dtype
    np.testing.assert_array_equal(found.array, array)
    assert found.lod is not None
    assert found.lod.tolist() == [0, 1, len(array)]


def test_many_threads_share_a_client(face, remote, described, at_once):  # P111
    client = remote(face().endpoint, face().endpoint, client_config=described, fetch_list=["price"])

    def ask(row):
        return lambda: [client.predict({"x": X[row : row + 1]})["price"][0, 0] for _ in range(20)]

    assert at_once(*(ask(at % 2) for at in range(8))) == [[PRICES[at % 2, 0]] * 20 for at in range(8)]


def test_an_op_may_ask_the_host_of_another(face, remote, tmp_path):  # P112, P113: both ends of the face
    host = client_for(
        PredictorSettings.of_op(
            "a", {"local_service_conf": {"model_config": str(onnx_model(tmp_path)), "client_type": "brpc"}}
        ),
        concurrency_idx=None,
        process=False,
    )
    try:
        found = host.predict({"x": X})
        np.testing.assert_array_equal(found["doubled"], 2 * PRICES)
    finally:
        host.close()


def test_an_answer_that_breaks_off_is_no_answer(remote, described):  # P112
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99"

    def answer(listener):
        for beginning in (head + b"\r\n\r\n{", head[:-2], head[:17], b"nonsense\r\n\r\n", b""):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(beginning)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        client = remote(f"127.0.0.1:{listener.getsockname()[1]}", client_config=described, fetch_list=["price"])
        for _ in range(5):
            with pytest.raises(ForebayError, match="the connection broke") as caught:
                client.predict({"x": X})
            assert number_of(caught) == 9000
        thread.join()


# ---------------------------------------------------------------------------------------------------------------------
# Their gRPC face

PADDLE_RPC = {"client_type": "grpc", "endpoint_protocol": "paddle"}


class RpcFace:
    """A server of the original's gRPC service; answers as a function of the request says, or with bytes."""

    def __init__(self, answer):
        self.answer = answer
        self.seen: list[Any] = []
        self.parents: list[Any] = []
        self.server = grpc.server(ThreadPoolExecutor(4))
        method = grpc.unary_unary_rpc_method_handler(self.infer)
        service, _, name = general_rpc.PATH.strip("/").rpartition("/")
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: method})])
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def infer(self, data, context):
        request = general_rpc.Request.FromString(data)
        self.seen.append(request)
        self.parents.append(dict(context.invocation_metadata()).get("traceparent"))
        found = self.answer(request)
        return found if isinstance(found, bytes) else found.SerializeToString()

    def stop(self):
        self.server.stop(None).wait(PATIENCE_S)


@pytest.fixture
def rpc_face():
    """Makes such servers."""
    with contextlib.ExitStack() as stack:

        def make(answer):
            made = RpcFace(answer)
            stack.callback(made.stop)
            return made

        yield make


def rpc_answer(*given, **fields):
    """An answer with these tensors from one engine."""
    response = general_rpc.Response(**fields)
    output = response.outputs.add(engine_name="general_infer_0")
    for one in given:
        output.tensor.add(**one)
    return response


def rpc_prices(request):
    """What the model of house prices answers."""
    (given,) = request.tensor
    rows = np.array(given.float_data).reshape(given.shape)
    out = (rows @ [[1.0], [10.0], [100.0]]).ravel().tolist()
    return rpc_answer(
        {"name": "out", "alias_name": "price", "elem_type": 1, "shape": [len(rows), 1], "float_data": out}
    )


def rpc_echo(request):
    """Gives back the first tensor as `y`."""
    return rpc_answer({"alias_name": "y"}) if not request.tensor else _as_y(request.tensor[0])


def _as_y(tensor):
    response = general_rpc.Response()
    made = response.outputs.add().tensor.add()
    made.CopyFrom(tensor)
    made.name = made.alias_name = "y"
    return response


def test_a_remote_model_is_asked_over_grpc(rpc_face, remote, described):  # P112
    server = rpc_face(rpc_prices)
    client = remote(server.endpoint, client_config=described, fetch_list=["price"], **PADDLE_RPC)
    found = client.predict({"x": X.astype("f8")}, log_id=7)
    np.testing.assert_array_equal(found["price"], PRICES)
    assert (found["price"].dtype, found["price"].flags.writeable) == (np.float32, True)
    (request,) = server.seen
    (sent,) = request.tensor
    assert (sent.name, sent.alias_name, sent.elem_type, list(sent.shape)) == ("in", "x", 1, [2, 3])
    assert list(sent.float_data) == X.ravel().tolist()
    assert (list(request.fetch_var_names), request.log_id) == (["price"], 7)
    with pytest.raises(ForebayError) as caught:
        client.predict({"y": X})  # refused before anybody is asked
    assert number_of(caught) == 5000
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "array",
    [np.arange(4).reshape(2, 2).astype(kind) for kind in ("i8", "f4", "i4", "f8", "i2", "f2", "u1", "i1", "?")]
    + [np.array([np.nan, np.inf, -np.inf], np.float32), np.array(["a", "bé"]), np.zeros((2, 0), np.float32)],
)
def test_arrays_of_every_type_survive_the_way(rpc_face, remote, array):  # P109, P112
    server = rpc_face(rpc_echo)
    found = remote(server.endpoint, **PADDLE_RPC).predict({"x": array, "x.lod": [0, 1, len(array)]}, ["y"])
    assert found["y"].dtype == array.dtype
    np.testing.assert_array_equal(found["y"], array)
    assert found["y.lod"].tolist() == [0, 1, len(array)]
    (sent,) = server.seen[0].tensor
    assert bool(sent.tensor_content) == (array.dtype.name in {"int16", "float16", "uint8", "int8"})


def test_bits_of_a_bf16_are_sent_as_they_are(rpc_face, remote, tmp_path):  # P109
    describe(tmp_path, feed="x", fetch="y", type=6, name="serving_client_conf.prototxt")
    server = rpc_face(
        lambda request: rpc_answer(
            {"name": "y", "tensor_content": request.tensor[0].tensor_content, "elem_type": 6, "shape": [2]}
        )
    )
    client = remote(server.endpoint, client_config=str(tmp_path), **PADDLE_RPC)
    assert client.predict({"x": np.array([1, 65535], np.uint16)}, ["price"])["price"].tolist() == [1, 65535]


def test_a_type_that_is_not_on_the_wire_is_the_described_one(rpc_face, remote, described):  # P112
    server = rpc_face(lambda request: rpc_answer({"alias_name": "price", "shape": [1], "float_data": [0.5]}))
    client = remote(server.endpoint, client_config=described, fetch_list=["price"], **PADDLE_RPC)
    assert client.predict({"x": X})["price"].tolist() == [0.5]


def test_grpc_requests_go_round_and_past_a_server_that_is_down(rpc_face, remote, described):  # P112
    first, second = rpc_face(rpc_prices), rpc_face(rpc_prices)
    endpoints = f"127.0.0.1:{free_port()}", first.endpoint, second.endpoint
    client = remote(*endpoints, client_config=described, fetch_list=["price"], **PADDLE_RPC)
    for _ in range(8):
        np.testing.assert_array_equal(client.predict({"x": X})["price"], PRICES)
    assert len(first.seen) + len(second.seen) == 8
    assert len(second.seen) >= 3
    first.stop()
    second.stop()
    with pytest.raises(ForebayError, match="no model server can be reached") as caught:
        client.predict({"x": X})
    assert number_of(caught) == 9000


def test_why_there_is_no_grpc_connection_is_told(rpc_face, remote, described):  # P92
    server = rpc_face(rpc_prices)
    endpoints = f"grpcs://{server.endpoint}", f"127.0.0.1:{free_port()}"
    client = remote(*endpoints, **PADDLE_RPC, client_config=described, fetch_list=["price"])
    with pytest.raises(ForebayError, match=r"(?i)handshak.*connection refused") as caught:
        client.predict({"x": X})
    assert number_of(caught) == 9000


def test_the_kernel_hangs_up_on_a_grpc_server_that_has_vanished(rpc_face, remote, described):  # P112
    face = rpc_face(rpc_prices)
    client = remote(face.endpoint, client_config=described, fetch_list=["price"], **PADDLE_RPC)
    client.predict({"x": X})
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == int(
                face.endpoint.rpartition(":")[2]
            ):
                found.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert found == [20_000]


def test_a_grpc_server_that_hangs_is_given_up_in_time(rpc_face, remote, described):  # P112, P87
    over = threading.Event()

    def hang(request):
        over.wait(PATIENCE_S)
        return rpc_prices(request)

    client = remote(
        rpc_face(hang).endpoint, client_config=described, fetch_list=["price"], **PADDLE_RPC, timeout_ms=1500
    )
    try:
        with pytest.raises(ForebayError, match=r"did not answer within 1\.5 s") as caught:
            client.predict({"x": X})
        assert number_of(caught) == 6000
    finally:
        over.set()


@pytest.mark.parametrize(
    "answer, said",
    [
        (rpc_answer(err_no=-5100, err_msg="Op Inference Error."), r"answers -5100: Op Inference Error\."),
        (b"\xff\xff", "cannot be read"),
        (general_rpc.Response(), "gave nothing, and not price"),
        (rpc_answer({"alias_name": "cost", "float_data": [1]}), "gave cost, and not price"),
        (rpc_answer({"alias_name": "price", "elem_type": 77}), "elem_type is 77"),
        (rpc_answer({"alias_name": "price", "shape": [2], "float_data": [1]}), "announced as"),
        (rpc_answer({"alias_name": "price", "shape": [-1], "float_data": [1]}), "announced as"),
        (rpc_answer({"alias_name": "price", "elem_type": 5, "shape": [1], "tensor_content": b"abc"}), "announced as"),
        (rpc_answer({"alias_name": "price", "shape": [2_000_000_000, 2_000_000_000]}), "announced as"),
    ],
)
def test_a_grpc_answer_that_is_none_has_a_number(rpc_face, remote, described, answer, said):  # P92
    server = rpc_face(lambda _request: answer)
    client = remote(server.endpoint, client_config=described, fetch_list=["price"], **PADDLE_RPC)
    with pytest.raises(ForebayError, match=said) as caught:
        client.predict({"x": X})
    assert number_of(caught) == 9000


def test_what_these_messages_have_no_place_for_is_told(rpc_face, remote):  # P92
    client = remote(rpc_face(rpc_echo).endpoint, **PADDLE_RPC)
    for array in (np.zeros(2, "c8"), np.array(["\ud800"])):
        with pytest.raises(ForebayError) as caught:
            client.predict({"x": array}, ["y"])
        assert number_of(caught) == 7000


PRICING = """
import numpy as np
from pathlib import Path
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Price(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {"x": np.array([given["x"].split(",")], dtype="float32")}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"price": str(float(fetch_data["price"][0, 0]))}, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp([Price(name="price", input_ops=[RequestOp()])]))
server.prepare_server(str(Path(__file__).with_name("config.yml")))
server.run_server()
"""


def test_an_op_of_a_pipeline_asks_over_grpc(pipeline, rpc_face):  # P112, P11
    face = rpc_face(rpc_prices)
    op = {"server_endpoints": [face.endpoint], "fetch_list": ["price"], "timeout": 20_000, **PADDLE_RPC}
    server = pipeline(PRICING, {"dag": {"is_thread_op": False}, "op": {"price": op}})
    body = {"key": ["x"], "value": ["1,2,3"], "logid": 77}
    found = server.client.post("/svc/prediction", json=body).json()
    assert (found["err_no"], found["value"]) == (0, [str(float(PRICES[0, 0]))]), found
    assert face.seen[0].log_id == 77


# ---------------------------------------------------------------------------------------------------------------------
# KServe v2, beside a server that is not ours


@pytest.fixture(scope="module")
def kserve(tmp_path_factory, eventually):
    """The ports of its two faces."""
    if not KSERVE.exists():
        pytest.skip("the server is not installed; `make setup` does it")
    ports = free_port(), free_port()
    folder = tmp_path_factory.mktemp("kserve")
    with (folder / "log").open("wb") as log:
        command = [KSERVE, "-W", "ignore", HERE / "projects" / "kserve_server.py", *map(str, ports)]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, "HOME": str(folder)})
    try:

        def is_ready():
            assert server.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{ports[0]}/v2/health/ready").status_code == 200

        eventually(is_ready, "the start of the server", 150)
        yield ports
    finally:
        server.terminate()
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(params=["http", "grpc"])
def kserve_client(request, kserve, remote):
    """Makes clients of that server by each of its faces."""
    port = kserve[request.param == "grpc"]

    def make(path="twice", before=(), **given):
        given = {
            "client_type": "grpc" if request.param == "grpc" else "brpc",
            "endpoint_protocol": "kserve_v2",
            **given,
        }
        return remote(*before, f"{request.param}://127.0.0.1:{port}/{path}", **given)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "twice", "v2/models/twice"])
def test_a_kserve_model_says_itself_what_it_takes(kserve_client, path):  # P112
    client = kserve_client(path)
    found = client.predict({"x": X.astype("f8")}, log_id=3)
    np.testing.assert_array_equal(found["y"], 2 * X)
    assert (found["y"].dtype, found["y"].flags.writeable) == (np.float32, True)
    assert (client.feed_names_, client.fetch_names_) == (["x"], ["y"])
    np.testing.assert_array_equal(client.predict({"x": X}, ["y"])["y"], 2 * X)


@pytest.mark.slow
@pytest.mark.parametrize("type, dtype", [(0, "i8"), (1, "f4"), (3, "f8"), (5, "f2"), (7, "u1"), (8, "i1"), (4, "i2")])
def test_a_kserve_model_may_be_described_by_us(kserve_client, tmp_path, type, dtype):  # P112
    describe(tmp_path, feed="x", fetch="y", type=type, name="serving_client_conf.prototxt")
    found = kserve_client(client_config=str(tmp_path)).predict({"x": X}, ["price"])
    assert found["price"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found["price"], 2 * X)


@pytest.mark.slow
def test_texts_come_back_as_bytes(kserve_client, tmp_path):  # P109
    describe(tmp_path, feed="x", fetch="y", type=20, name="serving_client_conf.prototxt")
    found = kserve_client(client_config=str(tmp_path)).predict({"x": np.array([["a", "bé"]])}, ["price"])
    assert found["price"].tolist() == [[b"a", "bé".encode()]]


@pytest.mark.slow
def test_what_a_kserve_server_refuses_is_told_in_its_words(kserve_client):  # P92
    with pytest.raises(ForebayError, match="it does not like -1") as caught:
        kserve_client().predict({"x": -np.ones((1, 3))})
    assert number_of(caught) == 9000
    with pytest.raises(ForebayError, match="none") as caught:
        kserve_client("none").predict({"x": X})
    assert number_of(caught) == 9000


@pytest.mark.slow
def test_a_kserve_server_that_is_down_is_passed_by(kserve_client):  # P112
    client = kserve_client(before=[f"127.0.0.1:{free_port()}/twice"])
    for _ in range(4):
        np.testing.assert_array_equal(client.predict({"x": X})["y"], 2 * X)


@pytest.mark.slow
def test_a_kserve_server_reads_raw_contents(kserve):  # P112
    request = InferRequest(model="twice", id="a", inputs=[from_array("x", X)])
    calls = GrpcCalls(ServerAddress("grpc", "127.0.0.1", kserve[1]))
    try:
        data = calls.call(rpc.INFER, rpc.encode_request(request), time.monotonic() + PATIENCE_S)
    finally:
        calls.close()
    answer = rpc.decode_response(data)
    np.testing.assert_array_equal(to_array(answer.outputs[0]), 2 * X)
    assert (answer.model, answer.id) == ("twice", "a")


@pytest.mark.slow
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("outputs", [(), ("y",)])
def test_a_kserve_server_reads_json_and_binary_tensors(kserve, binary, outputs):  # P112
    request = InferRequest(model="twice", id="a", inputs=[from_array("x", X)], outputs=outputs)
    body, headers = rest_client.encode_request(request, binary=binary)
    url = f"http://127.0.0.1:{kserve[0]}{rest_client.model_path('twice')}/infer"
    response = httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    length = response.headers.get(rest.LENGTH_HEADER)
    assert (length is not None) is binary
    answer = rest_client.decode_response(response.content, length)
    np.testing.assert_array_equal(to_array(answer.outputs[0]), 2 * X)
    assert answer.id == "a"


def test_a_server_without_binary_tensors_is_asked_in_json_from_then_on(face, remote):
    def answer(body, headers):
        if rest.LENGTH_HEADER in headers:
            return 400, b'{"error": "no such content type"}', {}
        (tensor,) = json.loads(body)["inputs"]
        return json.dumps({"outputs": [{**tensor, "name": "y"}]}).encode()

    server = face(answer)
    client = remote(f"{server.endpoint}/echo", client_type="brpc", endpoint_protocol="kserve_v2", fetch_list=["y"])
    for _ in range(2):
        # The description is asked for first; a server that refuses this says so.
        client._signature = None
        client._backend.signature = lambda: None
        np.testing.assert_array_equal(client.predict({"x": X})["y"], X)
    assert len(server.seen) == 3
    with pytest.raises(ForebayError, match="does not accept binary tensors, and input 'x' holds NaN"):
        client.predict({"x": np.full((1, 3), np.nan)})


def test_a_kserve_path_that_names_no_model_stops_the_start(remote):
    with pytest.raises(ConfigError, match="expected the path NAME"):
        remote("127.0.0.1:1/v2/a/b/c", client_type="grpc")


# ---------------------------------------------------------------------------------------------------------------------
# Another pipeline


def test_a_pipeline_gives_its_texts_in_lists(remote):  # P114
    echo = Echo()
    with Fronts(echo) as fronts:
        client = remote(fronts.endpoint, client_type="pipeline_grpc")
        assert client.takes_text
        assert client.predict({"q": "hello"}, log_id=55) == {"q": ["hello"]}
        assert echo.last.logid == 55
        assert client.predict({"x": np.array([1.5, 2.0])}) == {"x": ["array([1.5, 2. ])"]}
        assert client.predict([{"q": "a"}, {"q": "b"}]) == {"q": ["a", "b"]}
        for fetch, feed, number in ((["z"], {"q": "a"}, 5000), (None, {"q": 3}, 7000)):
            with pytest.raises(ForebayError) as caught:
                client.predict(feed, fetch)
            assert number_of(caught) == number


def test_tensors_go_to_a_pipeline_and_come_back(remote):  # P114
    echo = Echo()

    async def behave(request):
        response = Response()
        for name, array in tensors.unpack_all(request.tensors).items():
            tensors.pack(response.tensors.add(), name, array * 2)
        return response

    echo.behave = behave
    with Fronts(echo) as fronts:
        client = remote(fronts.endpoint, client_type="pipeline_grpc", pack_tensors=True)
        np.testing.assert_array_equal(client.predict({"x": X})["x"], 2 * X)
        np.testing.assert_array_equal(client.predict([{"x": X}, {"x": X}])["x"], np.concatenate([2 * X, 2 * X]))


@pytest.mark.parametrize("told, number", [(6000, 6000), (5000, 9000), (71, 9000)])
def test_the_error_of_a_pipeline_is_an_error_of_the_op(remote, told, number):  # P114, P92
    echo = Echo()

    async def behave(request):
        return Response(err_no=told, err_msg="it failed there")

    echo.behave = behave
    with Fronts(echo) as fronts:
        client = remote(f"127.0.0.1:{free_port()}", fronts.endpoint, client_type="pipeline_grpc")
        for _ in range(2):
            with pytest.raises(ForebayError, match=re.escape(f"{told}: it failed there")) as caught:
                client.predict({"q": "a"})
            assert number_of(caught) == number


OUTER = """
from paddle_serving_server.pipeline import PipelineServer, RequestOp, ResponseOp, Op

class Read(RequestOp):
    def unpack_request_package(self, request):
        return {"q": request.value[0]}, request.logid, None, ""

class Asks(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        return {"q": found["q"]}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"a": "outer " + fetch_data["q"][0]}, None, ""

op = Asks(name="asks", input_ops=[Read()], client_type="pipeline_grpc", server_endpoints=["ENDPOINT"])
server = PipelineServer("svc")
server.set_response_op(ResponseOp([op]))
server.prepare_server("config.yml")
server.run_server()
"""


def test_an_op_of_a_pipeline_asks_another_pipeline(serve, tmp_path, monkeypatch):  # P114
    with Fronts(Echo()) as fronts:
        (tmp_path / "server.py").write_text(OUTER.replace("ENDPOINT", fronts.endpoint))
        (tmp_path / "config.yml").write_text("http_port: 18081\nworker_num: 4\n")
        monkeypatch.chdir(tmp_path)
        server = serve(tmp_path / "server.py", env={"XDG_STATE_HOME": str(tmp_path / "state")})
        found = server.client.post("/svc/prediction", json={"key": ["q"], "value": ["hello"]}).json()
        assert (found["err_no"], found["key"], found["value"]) == (0, ["a"], ["outer hello"]), found
