# SPDX-License-Identifier: Apache-2.0
"""The clients, against ports with a stand-in for the graph."""

import asyncio
import copy
import ipaddress
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.compat.pipeline.fronts import PATIENCE_S, Echo, Fronts

from forebay.errors import DeadlineExceeded, ForebayError, InvalidRequest, QueueFull, Unavailable
from forebay.server.config import GrpcConfig
from forebay.surfaces.pipeline.fronts.pipeline_client import (
    AsyncPipelineClient,
    ClientResult,
    PipelineClient,
    own_address,
    request_of,
)
from forebay.surfaces.pipeline.protocol import tensors
from forebay.surfaces.pipeline.protocol.messages import Response


@pytest.fixture(scope="module")
def module_fronts():
    with Fronts(Echo()) as fronts:
        yield fronts


@pytest.fixture
def fronts(module_fronts):
    module_fronts.inference.behave = module_fronts.inference.echo
    module_fronts.inference.entered.clear()
    module_fronts.inference.cancelled.clear()
    return module_fronts


@pytest.fixture
def client(fronts):
    with PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([fronts.endpoint])
        yield client


@pytest.fixture
def closed_port():
    """A port nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def answers(fronts, **fields):
    async def behave(request):
        return Response(**fields)

    fronts.inference.behave = behave


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


def test_texts_arrays_and_lists_become_texts(client, fronts):  # P126
    found = client.predict({"words": "i am sad | 0", "x": np.array([[0.5, 1]], "float32"), "ids": [1, 2]})
    assert dict(zip(found.key, found.value, strict=True)) == {
        "words": "i am sad | 0",
        "x": "array([[0.5, 1. ]], dtype=float32)",
        "ids": "array([1, 2])",
    }


@pytest.mark.parametrize("value", [1, 1.5, None, b"x", {"a": 1}, (1, 2)])
def test_other_values_cannot_be_sent(client, value):  # P126
    with pytest.raises(TypeError, match=r"only str and np\.ndarray type is supported"):
        client.predict({"x": value})


@pytest.mark.parametrize("feed,fetch", [("x", None), ([1], None), (None, None), ({}, "y"), ({}, {"y": 1})])
def test_arguments_of_a_wrong_type(client, feed, fetch):  # P125
    with pytest.raises(TypeError, match="must be a"):
        client.predict(feed, fetch)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_tensors(client, fronts, as_bytes):  # P126
    lod = np.array([[0, 2], [2, 3]])
    feed = {"x": np.arange(6, dtype="int16").reshape(3, 2), "x.lod": lod, "t": "text", "free.lod": np.zeros(2)}
    client.predict(feed, pack_tensor_format=True, use_tensor_bytes=as_bytes)
    sent = fronts.inference.last
    assert [tensor.name for tensor in sent.tensors] == ["x", "t", "free.lod"]
    assert [tensor.elem_type for tensor in sent.tensors] == ([13, 12, 13] if as_bytes else [4, 12, 3])
    assert not sent.key
    found = tensors.unpack_all(sent.tensors)
    np.testing.assert_array_equal(found["x"], feed["x"])
    np.testing.assert_array_equal(found["x.lod"], lod)
    assert found["t"] == "text"


def test_ids_are_lifted_out_of_the_dict_which_stays(client, fronts):  # P127, trap 20
    feed = {"x": "1", "logid": 55, "clientip": "10.0.0.1"}
    before = copy.deepcopy(feed)
    client.predict(feed)
    assert feed == before
    assert (fronts.inference.last.logid, fronts.inference.last.clientip) == (55, "10.0.0.1")
    assert list(fronts.inference.last.key) == ["x"]
    client.predict(feed, log_id=66)
    assert fronts.inference.last.logid == 66
    client.predict({"x": "1"})
    assert (fronts.inference.last.logid, fronts.inference.last.clientip) == (0, own_address())


def test_large_messages(client):  # P16
    big = np.random.default_rng(7).standard_normal(300_000).astype("float32")
    assert client.predict({"x": big})["x"].tobytes() == big.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# What comes back


def test_one_result_for_every_version(client, fronts):  # P129, trap 3
    answers(fronts, key=["price", "tags", "name"], value=["array([[18.9]], dtype=float32)", "['a', 1]", "a house"])
    found = client.predict({"x": "1"}, fetch=["price", "name", "none"])
    assert (found.err_no, found.err_msg, list(found.key)) == (0, "", ["price", "tags", "name"])
    assert found.value[2] == "a house"
    assert found["ecode"] == 0
    assert (found["price"].dtype, found["price"].tolist()) == (np.float32, [[np.float32(18.9)]])
    assert "price" in found
    assert "tags" not in found
    assert found.get("tags", 0) == 0
    assert list(found.keys()) == ["ecode", "price", "name"]
    assert len(found) == 3
    assert client.predict({"x": "1"})["tags"] == ["a", 1]
    assert "18.9" in repr(found)


def test_errors_of_the_pipeline(client, fronts):  # P129
    answers(fronts, err_no=6000, err_msg="too late")
    found = client.predict({"x": "1"})
    assert (found.err_no, found["ecode"], found["error_info"]) == (6000, 1, "too late")
    answers(fronts, err_no=71, err_msg="product")
    assert client.predict({"x": "1"})["ecode"] == 71


def test_old_code_that_evaluates_still_works(client, fronts):  # P129
    answers(fronts, key=["result"], value=["[[1, 2], [3, 4]]"])
    found = client.predict({"x": "1"})
    assert np.array(eval(found.value[0])).shape == (2, 2)


def test_tensors_in_answers(client, fronts):  # P129
    tensor = Response().tensors.add()
    tensors.pack(tensor, "y", np.array([1, 2], "uint8"))
    answers(fronts, tensors=[tensor])
    found = client.predict({"x": "1"})
    assert found["y"].tolist() == [1, 2]
    assert found.tensors[0].name == "y"


@pytest.mark.parametrize("text", ["__import__('os').abort()", "array([__import__('os').abort()])", "(lambda: 1)()"])
def test_a_hostile_server_runs_nothing_here(client, fronts, text):  # P130, P154
    answers(fronts, key=["y"], value=[text])
    assert client.predict({"x": "1"})["y"] == text


def test_golden_texts_are_equal_once_they_are_read():  # trap 24
    now, before = (ClientResult(Response(key=["y"], value=[f"[{one}]"])) for one in (repr(np.float32(1.5)), "1.5"))
    assert now.value != before.value
    assert now["y"] == before["y"] == [1.5]


def test_profiles_are_printed_and_nothing_else(client, fronts, capfd):  # P131, P136
    async def behave(request):
        pairs = dict(zip(request.key, request.value, strict=True))
        assert pairs == {"x": "1", "pipeline.profile": "1"}
        return Response(key=["y", "pipeline.profile"], value=["1", "PROFILE\tpid:1\tcall_0:1"])

    fronts.inference.behave = behave
    found = client.predict({"x": "1"}, profile=True)
    assert capfd.readouterr() == ("PROFILE\tpid:1\tcall_0:1\n", "")
    assert "pipeline.profile" not in found
    assert client.predict({"x": "1"}, profile=True, asyn=True).result(PATIENCE_S)["y"] == 1
    assert capfd.readouterr().out.count("PROFILE") == 1
    fronts.inference.behave = fronts.inference.echo
    client.predict({"x": "1"})
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------------------------------------------------------------
# Futures


def test_a_hundred_in_flight(client):  # P128
    futures = [client.predict({"x": str(n)}, asyn=True) for n in range(100)]
    assert [future.result()["x"] for future in futures] == list(range(100))
    assert all(future.done() for future in futures)
    seen = threading.Event()
    futures[0].add_done_callback(lambda _future: seen.set())
    assert seen.is_set()


def test_futures_give_up(client, fronts):  # P128
    fronts.inference.behave = fronts.inference.hang
    future = client.predict({"x": "1"}, asyn=True)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    assert fronts.inference.entered.wait(PATIENCE_S)
    assert future.cancel()
    assert fronts.inference.cancelled.wait(PATIENCE_S)


def test_futures_bring_errors(client, fronts):
    fronts.inference.fail(QueueFull("too many"))
    with pytest.raises(QueueFull, match="too many"):
        client.predict({"x": "1"}, asyn=True).result(PATIENCE_S)


def test_an_answer_that_cannot_be_printed_is_an_error_of_its_future(client, fronts, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    answers(fronts, key=["pipeline.profile"], value=["PROFILE"])
    with pytest.raises(AttributeError):
        client.predict({"x": "1"}, asyn=True).result(PATIENCE_S)


# ---------------------------------------------------------------------------------------------------------------------
# Servers that are there, and some that are not


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_hosts_have_names(fronts, host):  # P124, trap 21
    with PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([f"{host}:{fronts.grpc_port}"])
        assert client.predict({"x": "1"})["x"] == 1


def test_ipv6():  # P124
    with Fronts(Echo(), rpc=GrpcConfig(host="::1")) as fronts, PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([f"[::1]:{fronts.grpc_port}"])
        assert client.predict({"x": "1"})["x"] == 1


def test_servers_take_turns(fronts):  # P124
    with Fronts(Echo()) as other, PipelineClient(timeout=PATIENCE_S) as client:
        before = len(fronts.inference.seen)
        client.connect([fronts.endpoint, other.endpoint])
        for _ in range(10):
            client.predict({"x": "1"})
        assert (len(fronts.inference.seen) - before, len(other.inference.seen)) == (5, 5)


@pytest.mark.parametrize("asyn", [False, True])
def test_a_server_that_is_not_there_is_skipped(fronts, closed_port, asyn):
    with PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([closed_port, fronts.endpoint])
        for _ in range(4):
            found = client.predict({"x": "1"}, asyn=asyn)
            assert (found.result(PATIENCE_S) if asyn else found)["x"] == 1


def test_other_errors_are_not_tried_elsewhere(fronts):
    with Fronts(Echo()) as other, PipelineClient(timeout=PATIENCE_S) as client:
        client.connect([fronts.endpoint, other.endpoint])
        fronts.inference.fail(InvalidRequest("odd"))
        with pytest.raises(InvalidRequest, match="odd"):
            client.predict({"x": "1"})
        assert not other.inference.seen


async def in_coroutine(endpoint, feed, timeout_s):
    async with AsyncPipelineClient(timeout=timeout_s) as client:
        await client.connect([endpoint])
        return await client.predict(feed)


def in_thread(endpoint, feed, timeout_s, *, asyn):
    with PipelineClient(timeout=timeout_s) as client:
        client.connect([endpoint])
        found = client.predict(feed, asyn=asyn)
        return found.result(PATIENCE_S) if asyn else found


@pytest.mark.parametrize(
    "ask",
    [partial(in_thread, asyn=False), partial(in_thread, asyn=True), lambda *all: asyncio.run(in_coroutine(*all))],
    ids=["waits", "future", "coroutine"],
)
def test_a_call_that_is_refused_is_made_again_when_the_server_says_so(fronts, ask):  # F45
    came = []

    async def behave(request):
        came.append(time.monotonic())
        if len(came) == 1:
            error = QueueFull("the tenant 'a' has used up its requests")
            error.retry_at = came[0] + wait_s
            raise error
        return Response(key=request.key, value=request.value)

    wait_s, fronts.inference.behave = 0.3, behave
    assert ask(fronts.endpoint, {"x": "1"}, PATIENCE_S)["x"] == 1
    assert came[1] - came[0] >= 0.3 - 0.01  # milliseconds are rounded
    came.clear()
    wait_s = 3 * PATIENCE_S  # it would be too late then
    with pytest.raises(QueueFull, match="has used up") as refused:
        ask(fronts.endpoint, {"x": "1"}, PATIENCE_S)
    assert (len(came), refused.value.retry_at) == (1, 0.0)
    came.clear()
    wait_s = 0.01
    fronts.inference.fail(told := QueueFull("full"))
    told.retry_at = time.monotonic() + 0.01
    before = len(fronts.inference.seen)
    with pytest.raises(QueueFull, match="full") as refused:
        ask(fronts.endpoint, {"x": "1"}, PATIENCE_S)
    assert len(fronts.inference.seen) - before == 3
    assert refused.value.retry_at > 0.0


@pytest.mark.parametrize("asyn", [False, True])
def test_nobody_there(closed_port, asyn):  # P132
    started = time.monotonic()
    with PipelineClient(timeout=5.0) as client:
        client.connect([closed_port])
        ask = partial(client.predict, {"x": "1"}, asyn=asyn)
        with pytest.raises((Unavailable, DeadlineExceeded)):
            ask().result(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S


def test_time_is_up(client, fronts):  # P132
    fronts.inference.behave = fronts.inference.hang
    while not fronts.inference.entered.is_set():  # a busy machine may let the time pass before it is there
        with pytest.raises(DeadlineExceeded):
            client.predict({"x": "1"}, timeout=0.1)
    assert fronts.inference.cancelled.wait(PATIENCE_S)
    with PipelineClient(timeout=0.1) as hasty:
        hasty.connect([fronts.endpoint])
        with pytest.raises(DeadlineExceeded):
            hasty.predict({"x": "1"})


@pytest.mark.parametrize("endpoints,error", [("localhost:1", TypeError), (None, TypeError), ([], ValueError)])
def test_endpoints_of_a_wrong_type(endpoints, error):
    with pytest.raises(error, match="endpoints"):
        PipelineClient().connect(endpoints)


def test_before_and_after_it_is_connected(fronts):  # P133
    client = PipelineClient(timeout=PATIENCE_S)
    with pytest.raises(ForebayError, match="not connected"):
        client.predict({"x": "1"})
    client.connect([fronts.endpoint])
    assert client.predict({"x": "1"}).err_no == 0
    client.connect([fronts.endpoint])
    assert client.predict({"x": "1"}).err_no == 0
    client.close()
    with pytest.raises(ForebayError, match="not connected"):
        client.predict({"x": "1"})
    client.close()


def test_threads_share_a_client(client):  # P133
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda n: client.predict({"x": str(n)})["x"], range(200))
        assert list(found) == list(range(200))


def test_keys_go_with_every_call():
    with Fronts(Echo(), rpc=GrpcConfig(api_keys=("sesame",))) as fronts:
        with PipelineClient(timeout=PATIENCE_S, metadata=[("x-api-key", "sesame")]) as client:
            client.connect([fronts.endpoint])
            assert client.predict({"x": "1"}).err_no == 0
        with PipelineClient(timeout=PATIENCE_S) as client:
            client.connect([fronts.endpoint])
            with pytest.raises(InvalidRequest, match="API key missing"):
                client.predict({"x": "1"})


def test_coroutines(fronts, closed_port):  # P133
    async def run():
        async with AsyncPipelineClient(timeout=PATIENCE_S) as client:
            await client.connect([closed_port, fronts.endpoint])
            feeds = [{"x": str(n), "logid": n} for n in range(20)]
            found = await asyncio.gather(*(client.predict(feed, fetch=["x"]) for feed in feeds))
            assert [one["x"] for one in found] == list(range(20))
            fronts.inference.behave = fronts.inference.hang
            with pytest.raises(DeadlineExceeded):
                await client.predict({"x": "1"}, timeout=0.1)
            no_dict: Any = []
            with pytest.raises(TypeError, match="feed must be"):
                await client.predict(no_dict)

    asyncio.run(run())


def test_a_request_says_whose_it_is():
    # F43: as the original does, unless the dict says so
    own = request_of({"x": "1"}, as_tensors=False, as_npy=False).clientip
    assert not ipaddress.ip_address(own).is_unspecified
    assert request_of({"x": "1", "clientip": "10.0.0.1"}, as_tensors=False, as_npy=False).clientip == "10.0.0.1"


def test_a_result_can_be_copied_and_sent_to_other_processes():  # P129
    result = ClientResult(Response(key=["x", "y"], value=["array([1, 2])", "7"]), ["x"])
    for made in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert (made.err_no, list(made)) == (0, ["ecode", "x"])
        assert made["x"].tolist() == [1, 2]
