# SPDX-License-Identifier: Apache-2.0
"""Traces: spans of calls and batches, in memory and as a collector gets them."""

import contextlib
import http.server
import re
import socket
import threading
import uuid
from concurrent import futures
from typing import Any

import grpc
import pytest
import yaml
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ConfigError
from forebay.observe.logs.access_log import CallListeners, EndedCall
from forebay.observe.traces.otel import Tracing, provider, tracing
from forebay.observe.traces.timeline import BatchRecord, Step, Timeline
from forebay.types.server_state import here

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MODEL = """
import forebay

class Doubles(forebay.Model):
    def predict(self, batch: list[int]) -> list[int]:
        return [2 * sample for sample in batch]

class Adds(forebay.Model):
    def predict(self, batch: list[int]) -> list[int]:
        return [1 + sample for sample in batch]

doubles, adds = forebay.node(Doubles), forebay.node(Adds)

@forebay.compose
def both(x: int) -> int:
    return adds(doubles(x))
"""


@pytest.fixture
def memory():
    """A provider that keeps the spans, and where it keeps them."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


class Watched:
    name, slots, waiting, in_flight = "m", 1, 0, 0


def batch(*ids, name="m"):
    endpoint: Any = type("", (Watched,), {"name": name})()
    steps = tuple(Step(one, 1.0, 1, one) for one in ids)
    return BatchRecord(endpoint, steps, 2.0, 2.5, 3.5, 4.0, "0", 7, [], 0, 0)


def call(request_id, **more):
    return EndedCall("POST", "/models/m", **{"started": 0.5, "ended": 4.5, "status": 200, "code": "ok", "model": "m",
                                            "request_id": request_id, "run_id": request_id, **more})  # fmt: skip


@pytest.mark.parametrize("first", ["call", "batch"])
def test_a_call_has_its_queue_batch_and_run_below(memory, first):
    provider, exporter = memory
    spans = Tracing(provider)
    told = [lambda: spans.called(call("a")), lambda: spans.called(call("b")), lambda: spans.ran(batch("a", "b"))]
    for tell in told if first == "call" else reversed(told):
        tell()
    found = exporter.get_finished_spans()
    for mine in {span.context.trace_id for span in found}:
        by_name = {span.name: span for span in found if span.context.trace_id == mine}
        top, run = by_name["POST /models/m"], by_name["batch m"]
        assert top.parent is None
        assert by_name["queue m"].parent.span_id == run.parent.span_id == top.context.span_id
        assert by_name["model m"].parent.span_id == run.context.span_id
        assert run.attributes["forebay.batch_size"] == 2
        lengths = {name: round((span.end_time - span.start_time) / 1e9, 3) for name, span in by_name.items()}
        assert lengths == {"POST /models/m": 4.0, "queue m": 1.0, "batch m": 2.0, "model m": 1.0}
    linked = [link.context.trace_id for span in found for link in span.links]
    assert len({span.context.trace_id for span in found}) == 2
    assert set(linked) <= {span.context.trace_id for span in found}
    assert linked


def test_the_callers_trace_goes_on_and_its_wish_not_to_be_sampled_holds(memory):
    provider, exporter = memory
    spans = Tracing(provider)
    spans.called(call("a", parent=f"00-{TRACE}-{PARENT}-01"))
    spans.ran(batch("a"))
    spans.called(call("b", parent=f"00-{TRACE}-{PARENT}-00"))
    spans.ran(batch("b"))
    spans.called(call("c", parent="nonsense"))
    spans.called(EndedCall("GET", "/metrics", status=200))
    top, *below, other = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in (top, *below)} == {TRACE}
    assert f"{top.parent.span_id:016x}" == PARENT
    assert other.attributes["forebay.request_id"] == "c"
    assert other.parent is None


def test_what_is_kept_is_bounded(memory, monkeypatch):
    monkeypatch.setattr("forebay.observe.traces.otel.KEPT", 10)
    spans = Tracing(memory[0])
    for number in range(100):
        spans.ran(batch(f"r{number}"))
        spans.called(call(f"c{number}"))
    assert len(spans._waiting) == len(spans._calls) == 10


class Collector(http.server.BaseHTTPRequestHandler):
    server: Any

    def do_POST(self):
        self.server.got(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def collecting(protocol):
    """A collector that speaks OTLP: the spans it got, and the environment that leads there."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    spans = []

    def got(body):
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            name = {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"]
            spans.extend((name, span) for scope in resource.scope_spans for span in scope.spans)

    environment = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    if protocol == "grpc":
        server = grpc.server(futures.ThreadPoolExecutor(1))
        export = grpc.unary_unary_rpc_method_handler(
            lambda body, _context: got(body) or ExportTraceServiceResponse().SerializeToString()
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Export": export})])
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield spans, environment
        server.stop(0).wait()
        return
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        vars(server)["got"] = got
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        yield spans, environment
        server.shutdown()
        thread.join()


@pytest.fixture(params=["http/protobuf", "grpc"])
def collector(request):
    """A collector of either kind."""
    with collecting(request.param) as made:
        yield made


def test_a_collector_gets_the_spans_of_a_graph(collector, serve, tmp_path):
    spans, environment = collector
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    server = serve(f"{path}:both", "--worker-kind", "thread", "--otel", env=environment)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = server.client.post("/models/both", json=20, headers=headers)
    assert answer.json() == 41
    wanted = {
        f"{what} {node}" for node in ("both", "both/doubles", "both/adds") for what in ("queue", "batch")
    } | {"POST /models/both", "model both/doubles", "model both/adds"}  # fmt: skip
    eventually(lambda: {span.name for _, span in spans} >= wanted)
    assert {name for name, _ in spans} == {"forebay"}
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    (top,) = [span for _, span in spans if span.name == "POST /models/both"]
    assert top.parent_span_id.hex() == PARENT
    given = {one.key: one.value for one in top.attributes}
    assert given["forebay.request_id"].string_value == answer.headers["x-request-id"]
    assert given["http.response.status_code"].int_value == 200


def test_calls_whose_clients_name_them_alike_keep_their_traces_apart(serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    traces = [uuid.uuid4().hex for _ in range(2)]
    with collecting("http/protobuf") as (spans, environment):
        server = serve(f"{path}:both", "--worker-kind", "thread", "--otel", env=environment)
        for trace in traces:
            headers = {"traceparent": f"00-{trace}-{PARENT}-01", "x-request-id": "theirs"}
            assert server.client.post("/models/both", json=20, headers=headers).status_code == 200

        def found(trace):
            return sorted(span.name for _, span in spans if span.trace_id.hex() == trace)

        nodes = ("both", "both/doubles", "both/adds")
        wanted = [f"{what} {node}" for node in nodes for what in ("queue", "batch")]
        wanted += ["POST /models/both", "model both/doubles", "model both/adds"]
        eventually(lambda: [found(trace) for trace in traces] == [sorted(wanted)] * 2)
        ids = [
            one.value.string_value for _, span in spans for one in span.attributes if one.key == "forebay.request_id"
        ]
        assert ids == ["theirs"] * 2
        server.stop()


def test_without_a_collector_calls_are_answered_and_the_server_ends(serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    server = serve(f"{path}:Adds", "--worker-kind", "thread", "--otel", env=environment)
    assert server.call("adds", 1).json() == 2
    server.signal()
    assert server.wait() == 0


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("collector_is", ["silent", "down"])
def test_a_collector_that_takes_nothing_does_not_hold_up_the_end(collector_is, protocol, serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if collector_is == "silent":  # the kernel accepts, and nobody ever reads
            listening.listen()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        variables = {"ENDPOINT": address, "PROTOCOL": protocol, "TIMEOUT": str(10 * PATIENCE_S)}
        environment = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
        server = serve(f"{path}:Adds", "--worker-kind", "thread", "--otel", env=environment)
        assert server.call("adds", 1).json() == 2
        server.signal()
        assert server.wait() == 0
        assert "the last spans are lost: the collector did not accept them within 3 s" in server.log


def test_traces_end_while_the_last_ones_are_still_on_their_way():
    from opentelemetry.sdk.trace import TracerProvider

    sending, may_end = threading.Event(), threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self):
            sending.set()
            assert may_end.wait(PATIENCE_S)
            super().shutdown()

    with tracing(Stuck()):
        pass
    assert sending.is_set()
    may_end.set()


def test_a_protocol_that_is_none_is_told(cli, tmp_path, monkeypatch):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    found = cli("serve", f"{path}:Adds", "--otel")
    assert found.returncode == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL: expected grpc or http/protobuf, got 'smoke'" in found.stderr


@pytest.mark.parametrize(
    "name, value, protocol",
    [
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "grpc"),
    ],
)
def test_a_variable_that_says_what_is_not_possible_is_told(name, value, protocol, monkeypatch):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(ConfigError, match=r"^the OTEL_\* variables cannot be followed: "):
        provider()


@pytest.mark.parametrize("name, value", [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")])
def test_who_wants_no_traces_has_none(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with tracing():
        assert not here(CallListeners).told
        assert not here(Timeline).told


def test_ports_tell_nothing_once_the_traces_have_ended(memory):
    with tracing(memory[0]):
        assert here(CallListeners).told
        assert here(Timeline).told
    assert not here(CallListeners).told
    assert not here(Timeline).told


PIPELINE = """
import os

from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

from forebay.remote_servers.servers import parent

class Work(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (values,) = input_dicts.values()
        return {"x": values["x"]}, False, None, ""

    def process(self, feed_batch, typical_logid=0):
        return {"parent": parent.get(), "padding": feed_batch[0]["x"]}

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Work(name="work", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.fixture(scope="module")
def traced_pipeline(tmp_path_factory):
    """A pipeline with both ports, and the spans that its collector got."""
    from tests.conftest import Server

    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "server.py").write_text(PIPELINE)
    config = {"http_port": 18081, "dag": {"is_thread_op": True}, "op": {"work": {"run_process": True}}}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with collecting("http/protobuf") as (spans, environment):
        given = {**environment, "XDG_STATE_HOME": str(folder)}
        server = Server(folder / "server.py", "--otel", "--access-log", env=given)
        try:
            yield server.wait_ready(), spans
        finally:
            server.stop()


@pytest.mark.parametrize("way", ["HTTP", "gRPC"])
@pytest.mark.parametrize("size", [1, 100_000])  # large ones are read beside the loop
def test_a_pipelines_calls_have_batches_below_and_their_trace_goes_on(traced_pipeline, way, size):
    from forebay.surfaces.pipeline.protocol.messages import PATH, Request, Response

    server, spans = traced_pipeline
    del spans[:]
    traceparent = f"00-{uuid.uuid4().hex}-{PARENT}-01"
    if way == "HTTP":
        body = {"key": ["x"], "value": ["1" * size]}
        answer = server.client.post("/svc/prediction", json=body, headers={"traceparent": traceparent}).json()
        given = dict(zip(answer["key"], answer["value"], strict=True))
    else:
        address = re.search(r"gRPC at ([\d.:]+)", server.log)
        assert address is not None
        with grpc.insecure_channel(address[1]) as channel:
            asked = Request(key=["x"], value=["1" * size]).SerializeToString()
            found = channel.unary_unary(PATH)(asked, metadata=(("traceparent", traceparent),), timeout=PATIENCE_S)
        answer = Response.FromString(found)
        given = dict(zip(answer.key, answer.value, strict=True))
    assert given["parent"] == traceparent
    wanted = {f"{what} {node}" for node in ("svc", "svc/work") for what in ("queue", "batch")} | {"model svc/work"}
    mine = eventually(lambda: {s.name: s for _, s in spans if s.trace_id.hex() == traceparent[3:35]})
    eventually(lambda: {s.name for _, s in spans if s.trace_id.hex() == traceparent[3:35]} >= wanted)
    (top,) = [s for _, s in spans if s.parent_span_id.hex() == PARENT]
    assert top.name == ("POST /svc/prediction" if way == "HTTP" else PATH.removeprefix("/")), mine
    batches = [s for _, s in spans if s.name.startswith("batch")]
    assert {s.parent_span_id for s in batches} == {top.span_id}


NUCLEUS = """
class Handler:
    def __init__(self, config):
        pass

    def handle_get(self):
        return "hello"
"""
VENTU = """
from ventu import Ventu

class Echo(Ventu):
    def batch_inference(self, batch):
        return batch

def create_model():
    from pydantic import BaseModel
    class Text(BaseModel):
        text: str
    return Echo(Text, Text)
"""


@pytest.mark.parametrize("surface", ["nucleus", "ventu"])
def test_projects_of_others_have_the_same_spans(surface, serve, tmp_path):
    (tmp_path / "handler.py").write_text(NUCLEUS if surface == "nucleus" else VENTU)
    (tmp_path / "nucleus.yaml").write_text(yaml.safe_dump({"type": "python", "path": "handler.py"}))
    target = tmp_path if surface == "nucleus" else tmp_path / "handler.py"
    method, path = ("GET", "/") if surface == "nucleus" else ("POST", "/inference")
    with collecting("http/protobuf") as (spans, environment):
        server = serve(target, "--otel", env={**environment, "HOME": str(tmp_path)})
        body = None if surface == "nucleus" else {"text": "hello"}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert server.client.request(method, path, json=body, headers=headers).status_code == 200

        def mine():
            return {one.name.partition(" ")[0]: one for _, one in spans if one.trace_id.hex() == TRACE}

        eventually(lambda: {method, "queue", "batch", "model"} <= mine().keys())
        assert mine()["batch"].parent_span_id == mine()[method].span_id
        server.stop()
