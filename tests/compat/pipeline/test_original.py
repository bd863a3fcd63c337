# SPDX-License-Identifier: Apache-2.0
"""The original's client before our server, our client before the original's, and one script behind both."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import yaml
from tests.compat.pipeline.fronts import PATIENCE_S, Echo, Fronts
from tests.ports import free_port
from tests.waiting import eventually

from forebay.errors import ForebayError
from forebay.surfaces.pipeline.fronts.pipeline_client import PipelineClient
from forebay.surfaces.pipeline.predictors import PredictorSettings, client_for
from forebay.surfaces.pipeline.protocol.messages import Response

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv/environments/pipeline/bin/python"
DRIVER = HERE / "projects" / "original.py"
EITHER = HERE / "projects" / "either.py"

BOTH = ["original", "ours"]


def array(elements, dtype):
    """An array in a call, as the driver reads it."""
    return {"array": np.array(elements, dtype).tolist(), "dtype": dtype}


MATRIX = [[0.5, -1.25, 3.0], [1e-7, 1e20, 0.1]]
TENSORS = {
    dtype: array(MATRIX if dtype.startswith("float") else [[0, 1, 2], [3, 4, 100]], dtype)
    for dtype in ("int64", "float32", "int32", "float64", "int16", "uint16", "uint8", "int8", "bool")
} | {"float16": array([[0.5, -1.25, 3.0]], "float16")}

CALLS: dict[str, dict[str, Any]] = {
    "texts": {"feed": {"x": "0.1, -0.2", "y": "häuser 東京\n'\"", "none": ""}},
    "arrays and lists as texts": {
        "feed": {"x": array([1, 2, 3], "int64"), "ids": [1, 2], "y": array([0.5], "float32")}
    },
    "log id": {"feed": {"x": "1"}, "log_id": 66},
    "tensors": {"feed": TENSORS, "pack_tensor_format": True},
    "a tensor of text": {"feed": {"x": "a text", "y": array([[1, 2]], "int32")}, "pack_tensor_format": True},
    "tensors as bytes": {"feed": TENSORS, "pack_tensor_format": True, "use_tensor_bytes": True},
    "sequences": {
        "feed": {"x": array([[1], [2], [3]], "int64"), "x.lod": [0, 2, 2, 3]},
        "pack_tensor_format": True,
    },
    "a product error": {"feed": {"x": "1", "fail": "1"}},
    "an exception": {"feed": {"raise": "it is broken"}},
    "an answer of the wrong type": {"feed": {"echo": "1"}},
    "later": {"feed": {"x": "later"}, "asyn": True},
}
ECHOES = {"feed": {"echo": "1", **TENSORS}, "pack_tensor_format": True}


def by_original(endpoints, calls):
    """What the original's client gets: answers, and what old code makes of their texts."""
    with tempfile.TemporaryDirectory() as folder:  # for its logs
        ran = subprocess.run(
            [PYTHON, "-W", "ignore", DRIVER, "ask", *endpoints],
            input=json.dumps([{**call, "feed": {**call["feed"], "clientip": "10.0.0.1"}} for call in calls]),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd=folder,
        )
    assert ran.returncode == 0, ran.stderr
    return [(Response.FromString(bytes.fromhex(data)), arrays) for data, arrays in json.loads(ran.stdout)]


def by_ours(endpoints, calls):
    """The same by our client."""
    found: list[Any] = []
    with PipelineClient(timeout=PATIENCE_S) as client:
        client.connect(endpoints)
        for call in calls:
            feed = {
                name: np.array(value["array"], value["dtype"]) if isinstance(value, dict) else value
                for name, value in call["feed"].items()
            }
            options = {name: value for name, value in call.items() if name != "feed"}
            found.append(client.predict({**feed, "clientip": "10.0.0.1"}, **options))
        found = [one.result(PATIENCE_S) if call.get("asyn") else one for one, call in zip(found, calls, strict=True)]
    return [(one.message, [told(one[name]) for name in one.key]) for one in found]


def told(found):
    """An array as the driver tells it."""
    return [found.dtype.name, list(found.shape), found.tolist()] if isinstance(found, np.ndarray) else None


def of(response):
    """What must be equal: an error's words are the server's own, but for those of a product error."""
    text = response.err_msg if response.err_no == 71 else bool(response.err_msg)
    return response.err_no, text, list(response.key), list(response.value)


@contextlib.contextmanager
def original_server(script, folder, **config):
    """The original's server; its endpoint over gRPC and its port for HTTP."""
    rpc_port, http_port = free_port(), free_port()
    shutil.copy(script, folder / "server.py")
    (folder / "config.yml").write_text(yaml.safe_dump({"rpc_port": rpc_port, "http_port": http_port, **config}))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [PYTHON, "-W", "ignore", DRIVER, "serve", "server.py"],
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "SERVING_LOG_PATH": str(folder)},
            start_new_session=True,  # it ends its whole group where something fails
        )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        yield f"127.0.0.1:{rpc_port}", http_port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def servers(launch, tmp_path_factory):
    """Endpoint and HTTP port of the same script behind the original and behind ours."""
    if not PYTHON.exists():
        pytest.skip("the original is not installed; `make setup` does it")
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("original")
    rpc_port = free_port()
    shutil.copy(EITHER, ours / "server.py")
    (ours / "config.yml").write_text(yaml.safe_dump({"rpc_port": rpc_port, "http_port": 18081, "worker_num": 8}))
    server = launch(ours / "server.py", env={"XDG_STATE_HOME": str(ours / "state")})
    with original_server(EITHER, theirs, worker_num=8) as original:
        yield {"ours": (f"127.0.0.1:{rpc_port}", server.port), "original": original}


@pytest.fixture(scope="module")
def answers(servers):
    """What each client gets from each server for each call."""
    found = {}
    for client, ask in (("original", by_original), ("ours", by_ours)):
        for server in BOTH:
            endpoint, _ = servers[server]
            got = ask([endpoint], [*CALLS.values(), ECHOES])
            found[client, server] = dict(zip([*CALLS, "echoes"], got, strict=True))
    return found


@pytest.mark.parametrize("client, server", [pair for pair in itertools.product(BOTH, BOTH) if "ours" in pair])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_the_same_whose_client_asks_whose_server(answers, client, server, call):  # P8, P125, P126, P128
    usual, _ = answers["original", "original"][call]
    found, _ = answers[client, server][call]
    if call == "an answer of the wrong type":
        assert (found.err_no, usual.err_no) == (7000, 7000)
        return
    assert of(found) == of(usual)
    assert usual.err_no == {"a product error": 71, "an exception": 10000}.get(call, 0)


@pytest.mark.parametrize("client", BOTH)
def test_arrays_in_answers_are_what_old_code_evaluates(answers, client):  # P8, P60, P129
    usual, before = answers["original", "original"]["echoes"]
    found, now = answers[client, "ours"]["echoes"]
    assert list(found.key) == list(usual.key) == list(TENSORS)
    sent = [[value["dtype"], list(np.shape(value["array"])), value["array"]] for value in TENSORS.values()]
    assert now == sent
    # The original shortens the digits of its texts.
    assert [one[:2] for one in before] == [one[:2] for one in now]


def test_futures_of_the_original_client(servers):  # P8, P128
    endpoint, _ = servers["ours"]
    found = by_original([endpoint], [{"feed": {"x": f"{n}"}, "asyn": True} for n in range(50)])
    assert [dict(zip(one.key, one.value, strict=True))["x"] for one, _ in found] == [f"str {n}" for n in range(50)]


def test_the_original_client_asks_for_a_profile(servers):  # P8, P136
    endpoint, _ = servers["ours"]
    ((found, _),) = by_original([endpoint], [{"feed": {"x": "1"}, "profile": True}])
    pairs = dict(zip(found.key, found.value, strict=True))
    assert (pairs["x"], pairs["size"]) == ("str 1", "2")
    assert pairs["pipeline.profile"].startswith("PROFILE\tpid:")
    for event in ("prep#[tell|", "postp#[measure|", "prep#[join|", "call_"):
        assert event in pairs["pipeline.profile"]


def test_the_original_client_goes_round_our_servers():  # P8, P124
    if not PYTHON.exists():
        pytest.skip("the original is not installed; `make setup` does it")
    with Fronts(Echo()) as first, Fronts(Echo()) as second:

        def both_are_asked():  # by a client that may have reached only one of them yet
            before = len(first.inference.seen) + len(second.inference.seen)
            found = by_original([first.endpoint, second.endpoint], [{"feed": {"x": f"{n}"}} for n in range(20)])
            assert [one.value[0] for one, _ in found] == [f"{n}" for n in range(20)]
            assert len(first.inference.seen) + len(second.inference.seen) == before + 20
            return first.inference.seen and second.inference.seen

        eventually(both_are_asked)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/svc/prediction", {"key": ["x", "y"], "value": ["1", "ä"], "logid": 7}),
        ("/svc/other", {"key": ["x"], "value": ["1"], "name": "zzz", "logid": "8", "clientip": "10.0.0.1"}),
        ("/svc/prediction", {"tensors": [{"name": "x", "elem_type": 3, "shape": [2], "float64_data": [0.1, 2]}]}),
        ("/svc/prediction", {"key": ["fail"], "value": ["1"]}),
        ("/wrong/prediction", {"key": ["x"], "value": ["1"]}),
        ("/svc/prediction", {"key": ["x"], "value": ["1"], "more": [1]}),
        ("/svc/prediction", None),
    ],
)
def test_rest_answers_are_those_of_the_original(servers, path, body):  # P6, P19, P21, P22, P23, P24
    answers = []
    for name in BOTH:
        _, port = servers[name]
        data = b"" if body is None else json.dumps(body).encode()
        response = httpx.post(f"http://127.0.0.1:{port}{path}", content=data, timeout=PATIENCE_S)
        answer = response.json()
        if answer["err_no"] != 71:
            answer["err_msg"] = bool(answer["err_msg"])
        answers.append((response.status_code, answer))
    assert answers[0] == answers[1]


def test_the_original_server_is_a_model_of_ours(servers):  # P114
    endpoint, _ = servers["original"]
    settings = PredictorSettings(
        name="chained", client_type="pipeline_grpc", server_endpoints=[endpoint], timeout_ms=60_000
    )
    client = client_for(settings, concurrency_idx=None, process=False)
    try:
        found = client.predict({"x": "hello"}, log_id=9)
        assert (found["x"], found["log"]) == (["str hello"], ["9"])
        with pytest.raises(ForebayError, match="answers 71: refused"):
            client.predict({"fail": "1"})
    finally:
        client.close()


@pytest.fixture(scope="module")
def doubling():
    """Ports of a model behind the faces of the original's model servers, HTTP and gRPC, made of its own messages."""
    if not PYTHON.exists():
        pytest.skip("the original is not installed; `make setup` does it")
    command = [PYTHON, "-W", "ignore", DRIVER, "model"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.kill()


@pytest.fixture(params=["brpc", "grpc"])
def doubling_client(request, doubling):
    """A client of that model by each of its faces."""
    settings = PredictorSettings(
        name="doubling",
        client_type=request.param,
        endpoint_protocol="paddle",
        server_endpoints=[f"127.0.0.1:{doubling[request.param == 'grpc']}"],
        timeout_ms=60_000,
    )
    client = client_for(settings, concurrency_idx=None, process=False)
    yield client
    client.close()


@pytest.mark.parametrize("dtype", ["int64", "float32", "int32", "float16", "uint8", "int8"])
def test_a_model_server_reads_what_it_is_sent_in_its_own_messages(doubling_client, dtype):  # P109, P112
    given = np.array([[1, 2, 3], [4, 5, 60]], dtype)
    found = doubling_client.predict({"x": given, "x.lod": [0, 1, 2]}, ["y"], log_id=7)
    assert found["y"].dtype == given.dtype
    np.testing.assert_array_equal(found["y"], given * 2)
    assert found["y.lod"].tolist() == [0, 1, 2]


def test_texts_and_numbers_without_end_go_to_a_model_server(doubling_client):  # P109, P112
    found = doubling_client.predict({"a": np.array(["ä", "b"]), "b": np.array([np.nan, -np.inf], "f4")}, ["y", "z"])
    assert found["y"].tolist() == ["ää", "bb"]
    np.testing.assert_array_equal(found["z"], np.array([np.nan, -np.inf], "f4"))


def test_what_a_model_server_does_not_take_is_told_in_its_words(doubling_client):  # P92, P112
    with pytest.raises(ForebayError, match="answers -5100: elem_type 3 is not supported") as caught:
        doubling_client.predict({"x": np.zeros(2, "f8")}, ["y"])
    assert caught.value.detail is not None
    assert caught.value.detail["err_no"] == 9000
