# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false
"""`build_dag_each_worker` as its user sees it: one server, whatever the number of processes behind it."""

import asyncio
import logging
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.compat.pipeline.conftest import post, values_of
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.dag.each_worker import GraphRunner
from forebay.surfaces.pipeline.figures.reports import Reporter, Reports
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.protocol.messages import PATH, SERVICE, Request, Response
from forebay.surfaces.pipeline.server import PipelineServer
from forebay.workers.processes.child import ReceivedItem
from forebay.workers.runner import WorkerContext

EACH = {"build_dag_each_worker": True}

SCRIPT = """
import os, time
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

folder = os.path.dirname(os.path.abspath(__file__))

class Tell(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        q = found["q"]
        if q == "wrong":
            raise ValueError("odd")
        if q.startswith("sleep"):
            time.sleep(float(q.split()[1]))
        if q.startswith("gate"):
            with open(os.path.join(folder, "ran"), "a") as ran:
                ran.write(q + "\\n")
            while not os.path.exists(os.path.join(folder, "gate")):
                time.sleep(0.01)
        return {"q": q, "pid": str(os.getpid()), "data_id": str(data_id)}, False, None, ""

request = RequestOp()
a = Tell(name="a", input_ops=[request])
b = Tell(name="b", input_ops=[a])
server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[b]))
server.prepare_server(os.path.join(folder, "config.yml"))
server.run_server()
"""


def told(answer):
    assert answer["err_no"] == 0, answer
    return dict(zip(answer["key"], answer["value"], strict=True))


def counters_at(port):
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("pd_")]
    return {name.replace("_total", ""): float(value) for name, value in lines if "_created" not in name}


def test_several_processes_are_one_server(pipeline, eventually, tmp_path):
    rpc_port, prometheus_port = free_port(), free_port()
    dag = {"tracer": {"interval_s": 1}, "enable_prometheus": True, "prometheus_port": prometheus_port}
    config = {**EACH, "rpc_port": rpc_port, "worker_num": 3, "dag": dag, "log_path": str(tmp_path / "logs")}
    server = pipeline(SCRIPT, config)
    assert "does nothing" not in server.log

    # P103: one client, one connection, one channel: every process serves some
    over_rest = [told(post(server, q="x")) for _ in range(200)]
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
        call = channel.unary_unary(PATH, Request.SerializeToString, Response.FromString)
        asked = [call(Request(key=["q"], value=["x"]), timeout=PATIENCE_S) for _ in range(200)]
    over_grpc = [values_of(one) for one in asked]
    pids = {one["pid"] for one in over_rest}
    assert len(pids) == 3
    assert {one["pid"] for one in over_grpc} == pids

    # P13: the ids of each are its own
    seen = over_rest + over_grpc
    ids = {pid: [int(one["data_id"]) for one in seen if one["pid"] == pid] for pid in pids}
    for mine in ids.values():
        first = mine[0]
        assert first in range(3)
        assert mine == list(range(first, first + 3 * len(mine), 3))

    # P95, P90: what went wrong is told with both ids, also when time was over
    wrong, late = (
        server.client.post(
            "/svc/prediction", json={"key": ["q"], "value": [q], "logid": 77}, headers={"X-Request-Timeout-Ms": "800"}
        ).json()
        for q in ("wrong", "sleep 2")
    )
    assert (wrong["err_no"], late["err_no"]) == (10000, 6000)
    failed = [int(re.findall(r"^\(data_id=(\d+) log_id=77\)", one["err_msg"])[0]) for one in (wrong, late)]

    # P159: nothing a client sent makes a line
    seen.append(told(post(server, "/svc/a%0APROFILE", q="x")))

    # P138: sums over all processes
    before = counters_at(prometheus_port)
    assert (before["pd_query_request_success"], before["pd_query_request_failure"]) == (401, 2)
    assert before['pd_inference_count{model="b"}'] == 401
    assert before["pd_query_request_duration_us"] > 800_000

    # P13, P138: a process that takes the place of another one goes on
    os.kill(int(over_rest[0]["pid"]), signal.SIGKILL)
    lost = ids.pop(over_rest[0]["pid"])
    again = []

    def replaced():
        again.append(told(post(server, q="x")))
        return len({one["pid"] for one in again[-12:]}) == 3

    eventually(replaced)
    (new,) = {one["pid"] for one in again} - pids
    later = [int(one["data_id"]) for one in again if one["pid"] == new]
    assert min(later) > max(lost)
    assert {one % 3 for one in later} == {lost[0] % 3}
    numbers = [int(one["data_id"]) for one in seen + again] + failed
    assert len(set(numbers)) == len(numbers)
    after = counters_at(prometheus_port)
    assert after["pd_query_request_success"] == 401 + len(again)
    assert all(after[name] >= value for name, value in before.items())

    server.stop()
    folder = tmp_path / "logs" / "PipelineServingLogs"
    # P148: a line with both ids for each request, whoever answered it
    lines = (folder / "pipeline.log").read_text().splitlines()
    found = [re.search(r"\(data_id=(\d+) log_id=(\d+)\) \S+ from \S+: err_no (\d+), [\d.]+ ms", line) for line in lines]
    assert sorted(int(one[1]) for one in found if one) == sorted(numbers)
    assert {(int(one[1]), one[2], one[3]) for one in found if one and one[2] != "0"} == {
        (failed[0], "77", "10000"),
        (failed[1], "77", "6000"),
    }
    assert not any(line.startswith("PROFILE") for line in lines)
    warnings = (folder / "pipeline.log.wf").read_text()
    assert "ValueError: odd" in warnings
    assert "from 127.0.0.1" not in warnings
    # P137: one block over all processes at a time
    text = (folder / "pipeline.tracer").read_text()
    blocks = text.split("DAGExecutor:")[1:]
    assert sum(int(count) for count in re.findall(r"Query count\[(\d+)\]", text)) == 403 + len(again)
    assert text.count("Op(a):") == text.count("Op(b):") == len(blocks)
    assert sorted(int(one) for ids in re.findall(r"Error req\[([\d, ]+)\]", text) for one in ids.split(",")) == sorted(
        failed
    )
    assert "chl0(In: ['@DAGExecutor'], Out: ['a']) size[0/6]" in text
    assert max(map(float, re.findall(r"prep\[([\d.]+) ms\]", text))) > 0


def test_what_no_process_answered_is_counted_and_logged_as_well(pipeline, tmp_path):
    # P138, P148, P91
    port = free_port()
    dag = {"enable_prometheus": True, "prometheus_port": port}
    config = {**EACH, "worker_num": 1, "dag": dag, "log_path": str(tmp_path), "error_codes": "v0.4"}
    server = pipeline(SCRIPT.replace('raise ValueError("odd")', "os._exit(3)"), config)
    body = {"key": ["q"], "value": ["wrong"], "logid": 78}
    died = server.client.post("/svc/prediction", json=body).json()
    assert died["err_no"] == 5, "9000 in the numbers of v0.4"
    assert died["err_msg"].startswith("(data_id=- log_id=78) the worker that held the request died")
    assert counters_at(port)["pd_query_request_failure"] == 1
    assert "(data_id=- log_id=78) prediction from" in (tmp_path / "PipelineServingLogs" / "pipeline.log").read_text()


def test_requests_whose_clients_left_leave_the_graph(pipeline, eventually, tmp_path):
    # P98
    server = pipeline(SCRIPT, {**EACH, "worker_num": 1, "op": {"b": {"concurrency": 3}}})

    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits()) as client:
            bodies = [{"key": ["q"], "value": [f"gate {number}"]} for number in range(100)]
            asked = [asyncio.ensure_future(client.post("/svc/prediction", json=body)) for body in bodies]
            await asyncio.to_thread(eventually, lambda: server.metric("forebay_in_flight", endpoint="svc") == 100)
            await asyncio.to_thread(eventually, (tmp_path / "ran").exists)
            for one in asked:
                one.cancel()
            await asyncio.wait(asked)

    asyncio.run(leave())  # one of them is in the op and three wait for it inside of the graph, which takes no more
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(post, server, q=f"gate {number}") for number in range(100, 104)]
        eventually(lambda: server.metric("forebay_in_flight", endpoint="svc") == 4)
        eventually(lambda: server.metric("forebay_waiting_samples", endpoint="svc") == 0, "the end of the others")
        (tmp_path / "gate").touch()
        answers = [told(one.result(PATIENCE_S))["q"] for one in asked]
    ran = (tmp_path / "ran").read_text().splitlines()
    assert sorted(ran[1:]) == sorted(answers * 2), "one had begun, of the others none ran"


@pytest.mark.parametrize("mode", [{}, EACH], ids=["one", "each"])
def test_the_ports_know_health_services_and_methods(pipeline, tmp_path, mode):
    # P18, P106, P26
    slow = SCRIPT.replace(
        "request = RequestOp()",
        "def init_op(self):\n"
        "    while not os.path.exists(os.path.join(folder, 'gate')): time.sleep(0.01)\n"
        "Tell.init_op = init_op\n"
        "request = RequestOp()",
    )
    port = free_port()
    server = pipeline(slow, {"rpc_port": port, "worker_num": 2, "methods": ["prediction"], **mode}, ready=False)
    serving = health_pb2.HealthCheckResponse
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        def status(service=""):
            request = health_pb2.HealthCheckRequest(service=service)
            return health.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status

        assert status() == serving.NOT_SERVING
        assert status(SERVICE) == serving.NOT_SERVING
        watching = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE_S)
        assert next(watching).status == serving.NOT_SERVING
        (tmp_path / "gate").touch()
        assert next(watching).status == serving.SERVING
        watching.cancel()
        server.wait_ready()
        assert status() == status(SERVICE) == serving.SERVING
        assert told(post(server, q="x"))["q"] == "x"
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        (listed,) = reflection.ServerReflectionInfo(iter(asked), timeout=PATIENCE_S)
        assert SERVICE in {service.name for service in listed.list_services_response.service}
        assert post(server, "/svc/other", q="x")["err_no"] == 3000
        call = channel.unary_unary(PATH, Request.SerializeToString, Response.FromString)
        assert call(Request(key=["q"], value=["x"], method="other"), timeout=PATIENCE_S).err_no == 3000
        assert call(Request(key=["q"], value=["x"], method="prediction"), timeout=PATIENCE_S).err_no == 0


def test_a_process_without_a_request_says_at_once_what_is_wrong(monkeypatch, caplog):
    # P148
    here, home = [], []
    top, log = logging.getLogger("forebay"), logging.getLogger("forebay.pipeline")
    handler: Any = logging.Handler()
    handler.emit = here.append
    monkeypatch.setattr(top, "handlers", [handler])
    monkeypatch.setattr(top, "propagate", False)
    caplog.set_level(logging.INFO, logger="forebay")
    reporter = Reporter({}, "info")
    with reporter:
        log.warning("before the first request")
        with reporter.answering():
            log.warning("beside %s", "an answer", extra={"op": object})
            logs.requests.info("the line of a request")
            (answer, report) = reporter.beside(b"answer")
            assert reporter.beside(b"answer") == b"answer", "there is nothing more to tell"
            try:
                raise ValueError("odd")
            except ValueError:
                log.exception("a request that was called off")
    assert answer == b"answer"
    assert [one.getMessage() for one in here] == ["before the first request", "a request that was called off"]
    assert "ValueError: odd" in here[1].trace
    log.error("afterwards")
    assert here[2].getMessage() == "afterwards"

    handler.emit = home.append
    Reports([], list).read(msgspec.msgpack.decode(msgspec.msgpack.encode(report)), None)
    assert [(one.name, one.getMessage(), one.levelname, one.op) for one in home] == [
        ("forebay.pipeline", "beside an answer", "WARNING", "<class 'object'>")
    ]


def test_no_batches_are_made(at_once):
    # P85
    sizes = []

    class Model:
        def predict(self, feed, fetch, batch, log_id):
            sizes.append(len(feed["x"]))
            return {"y": feed["x"]}

    class Ask(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            import numpy as np

            return {"x": np.ones((1, 2))}, False, None, ""

    op = Ask(
        name="ask", input_ops=[RequestOp()], batch_size=4, auto_batching_timeout=500, local_service_handler=Model()
    )
    server = PipelineServer()
    server.set_response_op(ResponseOp(input_ops=[op]))
    server.prepare_server(yml_dict={"rpc_port": 18080, "worker_num": 6, **EACH})
    runner = GraphRunner(server, 1)
    runner.open(WorkerContext(index=0))
    try:
        item = ReceivedItem(
            Request(key=["q"], value=["q"]).SerializeToString(),
            {"deadline": time.monotonic() + PATIENCE_S, "peer": ""},
            1,
        )
        for (outcome,) in at_once(*[lambda: runner.run([item])] * 6):
            values_of(Response.FromString(outcome))
    finally:
        runner.close()
    assert sizes == [1] * 6
