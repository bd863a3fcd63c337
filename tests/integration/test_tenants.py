# SPDX-License-Identifier: Apache-2.0
"""Several tenants, told by the names of their API keys, share the workers and the queue of a model."""

import asyncio
import collections
import json
import re
import signal
import threading
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tests.integration.kserve.served import M, request
from tests.waiting import PATIENCE_S, eventually, reached

from forebay.cli.main import main
from forebay.protocols.kserve.messages import SERVICE

CAPACITY = 320
HEADER = "x-gateway-inference-fairness-id"
KEYS = {
    "one": "key-1",
    "two": "key-2",
    "five": "key-5",
    "flood": "key-f",
    "light": "key-l",
    "holder": "key-h",
    "hasty": "key-s",
}


@pytest.fixture
def served(serve, models, tmp_path):
    """A model with one worker, which a file holds up, and tenants of three weights."""
    (tmp_path / "light.txt").write_text("# two keys\nkey-l\nkey-m\n")
    config = {
        "models": [{"target": str(models / "shared.py"), "workers": 1, "worker_kind": "thread"}],
        "http": {"api_keys": {**KEYS, "light": "@light.txt"}, "tenant_header": HEADER},
        "tenants": {"two": {"weight": 2}, "five": {"weight": 5.0}, "light": {"class": 1}, "hasty": {"deadline_ms": 20}},
    }
    path = tmp_path / "forebay.yaml"
    path.write_text(json.dumps(config))
    server = serve(None, "--config", str(path), "--grpc-port", "0")
    server.file, server.gate = path, str(tmp_path / "gate")
    return server


def held(server):
    """Have the worker wait for the gate to open."""
    server.holder = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers={"x-api-key": "key-h"})
    server.thread = threading.Thread(target=server.holder.post, args=["/models/gate"], kwargs={"json": server.gate})
    server.thread.start()
    eventually(Path(server.gate + ".begun").exists, "the worker is at the gate")


def opened(server):
    Path(server.gate).touch()
    server.thread.join(PATIENCE_S)
    server.holder.close()


def waiting(server):
    return server.client.get("/models/gate", headers={"x-api-key": "key-1"}).json()["waiting"]


def client(server):
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits)


def asked(http, name, count, **headers):
    headers = {"x-api-key": KEYS[name]} | {one.replace("_", "-"): value for one, value in headers.items()}
    return [asyncio.ensure_future(http.post("/models/gate", json=name, headers=headers)) for _ in range(count)]


def batches(answers):
    """What ran in each batch, by its number."""
    return {int(number): batch for number, *batch in answers}


async def until_waiting(server, count):
    await asyncio.to_thread(eventually, lambda: waiting(server) == count, f"{count} wait")


def test_a_flood_is_refused_and_a_light_tenant_beside_it_is_not(served):
    async def run():
        async with client(served) as http:
            flood = asked(http, "flood", CAPACITY + 40)
            await reached(lambda: sum(one.done() for one in flood) == 40, "40 are refused")
            await until_waiting(served, CAPACITY)
            refused = [one.result() for one in flood if one.done()]
            assert {one.status_code for one in refused} == {429}
            assert all(1 <= int(one.headers["retry-after-ms"]) <= 30_000 for one in refused)
            assert all(1 <= int(one.headers["retry-after"]) <= 30 for one in refused)
            light = asked(http, "light", 20)
            await reached(lambda: sum(one.done() for one in flood) == 60, "20 had to leave")
            assert not any(one.done() for one in light)
            evicted = next(one.result() for one in flood if one.done() and "had to leave" in one.result().text)
            assert evicted.status_code == 429
            await until_waiting(served, CAPACITY)
            await asyncio.to_thread(opened, served)
            answers = [one.json() for one in await asyncio.gather(*light)]
            others = await asyncio.gather(*flood)
        return answers, collections.Counter(one.status_code for one in others)

    held(served)
    answers, others = asyncio.run(run())
    assert others == {429: 60, 200: CAPACITY - 20}
    page = served.client.get("/metrics", headers={"x-api-key": "key-1"}).text
    refused = re.findall(r'^forebay_tenant_refused_total{endpoint="gate",(.*?),version="1"} (.*)$', page, re.MULTILINE)
    assert refused == [('reason="share",tenant="flood"', "60.0")]
    # Each of its requests ran in one of the next batches, though hundreds had been there before.
    assert max(batches(answers)) < 12


def test_saturated_tenants_run_by_their_weights(served):
    async def run():
        async with client(served) as http:
            tasks = [
                task for name, count in (("one", 110), ("two", 105), ("five", 105)) for task in asked(http, name, count)
            ]
            await until_waiting(served, CAPACITY)
            await asyncio.to_thread(opened, served)
            return [answer.json() for answer in await asyncio.gather(*tasks)]

    held(served)
    answers = asyncio.run(run())
    ran = batches(answers)
    # All of them wait while 20 batches run. Shares are of the time of workers, which a busy machine divides unevenly,
    # so samples are only near 20, 40 and 100; in one line for all they would be 110, 50 and 0.
    had = collections.Counter(name for number in sorted(ran)[:20] for name in ran[number])
    assert had["one"] < had["two"] < had["five"]
    assert had["five"] > 60


# F45: what cannot meet its deadline is refused at once, whoever has said it
@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "key-1", "x-request-timeout-ms": "20"},
        {"x-api-key": "key-1", "request-timeout": "0.02"},
        {"x-api-key": "key-s"},
    ],
)
def test_what_would_be_late_is_refused_before_its_time_is_over(served, headers):
    def refused():
        answer = served.client.post("/models/gate", json="late", headers=headers)
        assert answer.status_code in {503, 504}  # as long as the worker is not late itself, it may be in time
        return answer.status_code == 503 and answer

    def usual():
        named = {"x-api-key": "key-2", "x-request-timeout-ms": "60000"}
        return served.client.post("/models/gate", json="usual", headers=named)

    assert usual().status_code == 200  # deadlines are kept from here on, and what a batch takes is known
    held(served)
    answer = eventually(refused, "one is refused at once")
    assert "after the deadline" in answer.text
    assert "retry-after" in answer.headers
    opened(served)
    assert usual().status_code == 200


def test_a_deadline_goes_along_to_the_owner_of_a_model(serve, tmp_path):
    socket_path = f"unix:{tmp_path}/owner.socket"
    owner = serve(
        "shared.py", "--attach", socket_path, "--worker-kind", "thread", "--workers", "1", "--deadline-ms", "20"
    )
    front = serve(None, "--owner", socket_path)
    gate = str(tmp_path / "gate")

    def ask(sample, **headers):
        return front.client.post("/models/gate", json=sample, headers=headers)

    def refused(**headers):
        answer = ask("late", **headers)
        assert answer.status_code in {503, 504}
        return answer.status_code == 503 and answer

    assert front.client.get("/models/gate").json()["deadline_ms"] == 20
    assert ask("usual", **{"x-request-timeout-ms": "60000"}).status_code == 200  # longer than the model's, and it holds
    with httpx.Client(base_url=owner.url, timeout=PATIENCE_S) as holder:
        thread = threading.Thread(target=holder.post, args=["/models/gate"], kwargs={"json": gate})
        thread.start()
        eventually(Path(gate + ".begun").exists, "the worker is at the gate")
        for headers in ({"x-request-timeout-ms": "20"}, {}):
            answer = eventually(lambda headers=headers: refused(**headers), "the owner refuses one at once")
            assert "after the deadline" in answer.text
        Path(gate).touch()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("value", ["-1", "0", "0.0", "nan", "inf", "1e3", "", "1 s", "1" + "0" * 30])
def test_times_that_are_none_are_refused(served, value):
    answer = served.client.post("/models/gate", json="x", headers={"x-api-key": "key-1", "request-timeout": value})
    assert answer.status_code == 400
    assert "Request-Timeout: expected" in answer.text


def test_years_are_held_to_the_longest_there_is(served):
    headers = {"x-api-key": "key-1", "request-timeout": "99999999999"}
    assert served.client.post("/models/gate", json="x", headers=headers).status_code == 200


def address(server):
    found = re.search(r"gRPC.*?(127\.0\.0\.1:\d+)", server.log)
    assert found is not None
    return found[1]


def test_calls_over_grpc_are_those_of_their_keys_tenants(served):
    message = request("gate", np.array([b"flood"]), datatype="BYTES")
    message.raw_input_contents[0] = len(b"flood").to_bytes(4, "little") + b"flood"

    def call(channel, key):
        rpc = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=M.ModelInferRequest.SerializeToString,
            response_deserializer=M.ModelInferResponse.FromString,
        )
        return rpc.future(message, metadata=[("x-api-key", key)], timeout=PATIENCE_S)

    held(served)
    with grpc.insecure_channel(address(served)) as channel:
        flood = [call(channel, "key-f") for _ in range(CAPACITY + 1)]
        eventually(lambda: sum(one.done() for one in flood) == 1, "one is too many")
        (refused,) = [one for one in flood if one.done()]
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        light = call(channel, "key-m")
        eventually(lambda: sum(one.done() for one in flood) == 2, "one had to leave")
        evicted = next(one for one in flood if one.done() and one is not refused)
        assert evicted.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "had to leave" in evicted.details()
        opened(served)
        assert light.result().outputs


def test_a_child_that_a_header_names_makes_room_for_another_one_of_its_key_and_has_no_class_of_its_own(served):
    async def run():
        async with client(served) as http:
            flood = asked(http, "one", CAPACITY, x_gateway_inference_fairness_id="heavy")
            await until_waiting(served, CAPACITY)
            quiet = asked(http, "one", 20, x_gateway_inference_fairness_id="quiet")
            await reached(lambda: sum(one.done() for one in flood) == 20, "20 had to leave")
            unnamed = asked(http, "one", 5)
            await reached(lambda: sum(one.done() for one in flood) == 25, "5 had to leave")
            await asyncio.to_thread(opened, served)
            codes = [one.status_code for one in await asyncio.gather(*quiet, *unnamed)]
            await asyncio.gather(*flood)
            return codes

    held(served)
    assert asyncio.run(run()) == [200] * 25
    page = served.client.get("/metrics", headers={"x-api-key": "key-1"}).text
    assert "heavy" not in page
    assert 'tenant="one"' in page


@pytest.mark.parametrize(
    "values, told",
    [
        (["x" * 129], "has 129 bytes"),
        (["\u00e4".encode()], "has other characters"),
        (["a\tb"], "has other characters"),
        (["a", "b"], "is there 2 times"),
        (["a", "a"], "is there 2 times"),
    ],
)
def test_a_header_that_names_no_child_is_an_error_of_the_protocol(served, values, told):
    headers = [("x-api-key", "key-1"), *((HEADER, value) for value in values)]
    answer = served.client.post("/models/gate", json="x", headers=headers)
    assert answer.status_code == 400
    assert told in answer.text
    if isinstance(values[0], str) and "\t" not in values[0]:
        with grpc.insecure_channel(address(served)) as channel:
            rpc = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            with pytest.raises(grpc.RpcError) as error:
                rpc(b"", metadata=tuple(headers), timeout=PATIENCE_S)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in error.value.details()


def test_triton_s_priority_is_a_class_and_none_above_that_of_the_key(served):
    tensor = {"name": "input", "shape": [1], "datatype": "BYTES"}
    answers = []

    async def run():
        async with client(served) as http:

            async def ask(name, priority):
                body = {"inputs": [{**tensor, "data": [name]}], "parameters": {"priority": priority}}
                answer = await http.post("/v2/models/gate/infer", json=body, headers={"x-api-key": "key-1"})
                answers.append((name, answer.status_code))

            asked = []
            for number, (name, priority) in enumerate([("last", 4), ("later", 3), ("usual", 0), ("urgent", 1)]):
                asked += [asyncio.ensure_future(ask(name, priority)) for _ in range(8)]
                await until_waiting(served, 8 * (number + 1))
            await asyncio.to_thread(opened, served)
            await asyncio.gather(*asked)
            wrong = [
                await http.post(
                    "/v2/models/gate/infer",
                    json={"inputs": [{**tensor, "data": ["x"]}], "parameters": {"priority": one}},
                    headers={"x-api-key": "key-1"},
                )
                for one in (-1, "high", 1.5)
            ]
            return [(one.status_code, "parameter 'priority': expected" in one.text) for one in wrong]

    held(served)
    assert asyncio.run(run()) == [(400, True)] * 3
    names = [name for name, _ in answers]
    assert {code for _, code in answers} == {200}
    assert set(names[:16]) == {"usual", "urgent"}  # the class of the key is 1, whatever a client wishes
    assert names[16:] == ["later"] * 8 + ["last"] * 8


def test_a_child_goes_along_to_the_owner_of_a_model(serve, tmp_path):
    socket_path = f"unix:{tmp_path}/owner.socket"
    config = tmp_path / "owner.yaml"
    config.write_text(json.dumps({"tenants": {"one": {"weight": 1}}}))
    owner = serve(
        "shared.py", "--config", str(config), "--attach", socket_path, "--worker-kind", "thread", "--workers", "1"
    )
    (tmp_path / "one.txt").write_text("key-1")
    front = serve(None, "--owner", socket_path, "--api-key-file", f"one={tmp_path}/one.txt", "--tenant-header", HEADER)
    gate = str(tmp_path / "gate")

    async def run():
        async with client(front) as http:
            heavy = asked(http, "one", 64, x_gateway_inference_fairness_id="heavy")
            await reached(lambda: owner.client.get("/models/gate").json()["waiting"] == 64, "they wait")
            quiet = asked(http, "one", 4, x_gateway_inference_fairness_id="quiet")
            await reached(lambda: owner.client.get("/models/gate").json()["waiting"] == 68, "they wait")
            await asyncio.to_thread(Path(gate).touch)
            found = [one.json() for one in await asyncio.gather(*quiet)]
            every = [one.json() for one in await asyncio.gather(*heavy)]
            return {int(one[0]) for one in found}, sorted({int(one[0]) for one in every})

    with httpx.Client(base_url=owner.url, timeout=PATIENCE_S) as holder:
        thread = threading.Thread(target=holder.post, args=["/models/gate"], kwargs={"json": gate})
        thread.start()
        eventually(Path(gate + ".begun").exists, "the worker is at the gate")
        quiet, heavy = asyncio.run(run())
        thread.join(PATIENCE_S)
    assert max(quiet) <= heavy[2], (quiet, heavy)  # though all of the others came before


def test_weights_and_classes_change_without_a_restart(served):
    config = json.loads(served.file.read_text())
    config["tenants"] = {"light": {"class": 3}, "flood": {"class": 0}}
    served.file.write_text(json.dumps(config))
    served.signal(signal.SIGHUP)
    eventually(lambda: "reloaded in" in served.log, "the reload")
    assert "settings that need a restart" not in served.log

    async def run():
        async with client(served) as http:
            light = asked(http, "light", 20)
            await until_waiting(served, 20)
            flood = asked(http, "flood", 20)
            await until_waiting(served, 40)
            await asyncio.to_thread(opened, served)
            return [one.json() for one in await asyncio.gather(*flood, *light)]

    held(served)
    ran = batches(asyncio.run(run()))
    order = [name for number in sorted(ran) for name in ran[number]]
    assert order.index("light") >= order.count("flood") - 7  # those that end it share its last batch
    assert set(ran[min(ran)]) == {"flood"}


@pytest.mark.parametrize(
    "tenants, keys, told",
    [
        ({"a": {"weight": 0}}, {"a": "k"}, "weight"),
        ({"a": {"class": 4}}, {"a": "k"}, "class"),
        ({"a": {"deadline_ms": 0}}, {"a": "k"}, "deadline_ms"),
        ({"a": {"deadline_ms": -5}}, {"a": "k"}, "deadline_ms"),
        ({"a": {"deadline_ms": float("nan")}}, {"a": "k"}, "deadline_ms"),
        ({"a": {"deadline_ms": 1e12}}, {"a": "k"}, "deadline_ms"),
        ({"a": {"wait": 1}}, {"a": "k"}, "wait"),
        ({"a b": {}}, {"a": "k"}, "expected a tenant name"),
        ({}, {"other": "k"}, "expected a tenant name"),
        ({}, {"a": "k", "b": "k"}, "share a key"),
        ({}, {"a": ""}, "a key"),
        ({}, {"a": "@none.txt"}, "none.txt"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_place(models, tmp_path, capsys, tenants, keys, told):
    path = tmp_path / "forebay.yaml"
    target = str(models / "shared.py")
    path.write_text(json.dumps({"models": [target], "http": {"api_keys": keys}, "tenants": tenants}))
    assert main(["check", "--config", str(path)]) == 2
    assert told in capsys.readouterr().err
