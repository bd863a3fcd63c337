# SPDX-License-Identifier: Apache-2.0
"""What the gRPC port and the HTTP port have in common: messages, names, sizes, schemas of the user's own."""

import asyncio
import importlib
import json
import pickle
import socket
import subprocess
import sys
import textwrap

import grpc
import pytest
from tests.compat.pipeline.fronts import PATIENCE_S, Echo, Fronts, status_of
from tests.ports import free_port

from forebay.errors import ConfigError
from forebay.server.app import App
from forebay.server.config import GrpcConfig, HttpConfig
from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.predictions import messages_of
from forebay.surfaces.pipeline.fronts import schema
from forebay.surfaces.pipeline.protocol.messages import OldRequest, Request
from forebay.transports.server import Server

PROTO = """
    syntax = "proto3";
    package tenants;
    import "google/protobuf/timestamp.proto";

    message Request {
      repeated string key = 1;
      repeated string value = 2;
      string name = 4;
      string method = 5;
      string tenant = 8;
      google.protobuf.Timestamp at = 9;
    }
    message Response {
      int32 err_no = 1;
      string err_msg = 2;
      repeated string key = 3;
      repeated string value = 4;
      int64 queue_position = 9;
    }
    service Tenants {
      rpc ask (Request) returns (Response);
      rpc other (Request) returns (Request);
    }
"""


@pytest.fixture(scope="module")
def echo():
    with Fronts(Echo("uci")) as fronts:
        yield fronts


@pytest.fixture
def fronts(echo):
    echo.inference.behave = echo.inference.echo
    return echo


def test_both_ports_answer_the_same(fronts):  # P6
    by_http = fronts.post("/uci/prediction", b'{"key":["x","y"],"value":["1","2"],"logid":9,"clientip":"c"}').json()
    seen_by_http = fronts.inference.last
    by_grpc = fronts.call(
        Request(key=["x", "y"], value=["1", "2"], logid=9, clientip="c", name="uci", method="prediction")
    )
    assert (by_http["key"], by_http["value"]) == (list(by_grpc.key), list(by_grpc.value)) == (["x", "y"], ["1", "2"])
    assert seen_by_http == fronts.inference.last  # P11, P12


def test_the_path_of_the_rpc(fronts):  # P7
    method = fronts.method("/baidu.paddle_serving.pipeline_serving.PipelineService/inference")
    assert method(b"\x0a\x01x\x12\x011", timeout=PATIENCE_S) == b"\x1a\x01x\x22\x011"  # P8


def test_old_clients_are_understood(fronts):  # P9
    old = OldRequest(key=["x"], value=["1"], name="uci", method="prediction", logid=77, clientip="10.0.0.1")
    assert list(fronts.call(old).value) == ["1"]
    expected = Request(key=["x"], value=["1"], name="uci", method="prediction", logid=77, clientip="10.0.0.1")
    assert fronts.inference.last == expected


def test_another_services_name_is_refused(fronts):  # P24
    answer = fronts.post("/wrong/prediction", b"{}")
    assert (answer.status_code, answer.json()["err_no"]) == (200, 3002)
    assert "service name" in answer.json()["err_msg"]
    response = fronts.call(Request(name="wrong"))
    assert (response.err_no, "wrong" in response.err_msg) == (3002, True)
    assert fronts.call(Request()).err_no == 0  # no name at all


def test_methods_that_are_not_allowed_are_refused():  # P26
    inference = Echo(name="uci")
    inference.methods = ["prediction", "health"]
    with Fronts(inference) as restricted:
        inference.error_codes = "v0.4"  # P91
        assert restricted.post("/uci/training", b"{}").json()["err_no"] == 2
        assert restricted.call(Request(name="wrong")).err_no == 7
        inference.error_codes = "v0.7"
        answer = restricted.post("/uci/training", b'{"method": "prediction"}')
        assert (answer.status_code, answer.json()["err_no"]) == (200, 3000)
        assert answer.json()["err_msg"] == "method error: this server has 'prediction' and 'health', not 'training'"
        assert restricted.call(Request(method="training")).err_no == 3000
        assert restricted.post("/uci/health", b"{}").json()["err_no"] == 0
        assert restricted.call(Request(method="prediction")).err_no == 0
        assert restricted.call(Request()).err_no == 0  # over gRPC none need be named


def test_without_a_name_every_name_will_do():  # P25
    with Fronts(Echo()) as unnamed:
        assert unnamed.post("/x/y", b"{}").json()["err_no"] == 0
        assert (unnamed.inference.last.name, unnamed.inference.last.method) == ("x", "y")


def test_names_cannot_forge_lines_of_the_log(fronts):  # P159
    answer = fronts.call(Request(name="a\nPROFILE\tpid:1"))
    assert "\n" not in answer.err_msg


def test_large_messages_pass_both_ports(fronts):  # P16, trap 14
    big, answer = "x" * (6 << 20), "y" * (5 << 20)

    async def behave(request):
        assert request.value[0] == big
        return fronts.inference.response_class(key=["x"], value=[answer])

    fronts.inference.behave = behave
    assert fronts.call(Request(key=["x"], value=[big])).value[0] == answer
    found = fronts.post("/uci/prediction", json.dumps({"key": ["x"], "value": [big]}).encode())
    assert found.json()["value"] == [answer]


@pytest.fixture
def proto(tmp_path):
    path = tmp_path / "tenants.proto"
    path.write_text(textwrap.dedent(PROTO))
    return path


def test_a_schema_of_the_users_own(proto, tmp_path):  # P17
    request_class, response_class = schema.load("tenants.proto", tmp_path)
    echo = Echo("svc", request_class, response_class)

    async def behave(request):
        return response_class(key=["tenant"], value=[request.tenant], queue_position=2**40)

    echo.behave = behave
    with Fronts(echo) as fronts:
        found = fronts.post("/svc/ask", b'{"tenant":"acme","unknown":1}').json()
        assert found == {
            "err_no": 0, "err_msg": "", "key": ["tenant"], "value": ["acme"], "queue_position": str(2**40)
        }  # fmt: skip
        assert (echo.last.name, echo.last.method, echo.last.tenant) == ("svc", "ask", "acme")
        data = request_class(tenant="acme").SerializeToString()
        for path in ("/baidu.paddle_serving.pipeline_serving.PipelineService/inference", "/tenants.Tenants/ask"):
            response = response_class.FromString(fronts.method(path)(data, timeout=PATIENCE_S))
            assert (response.value[0], response.queue_position) == ("acme", 2**40)
        assert fronts.post("/svc/ask", b'{"tenant":1}').status_code == 400
        assert status_of(lambda: fronts.method()(b"\xff"))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert status_of(lambda: fronts.method("/tenants.Tenants/other")(b""))[0] == grpc.StatusCode.UNIMPLEMENTED


def test_messages_of_such_a_schema_travel_to_our_workers(proto, tmp_path):
    request_class, _ = schema.load("tenants.proto", tmp_path)
    request = request_class(tenant="acme")
    assert pickle.loads(pickle.dumps(request)) == request
    reader = "import pickle, sys; print(pickle.load(sys.stdin.buffer).tenant)"
    done = subprocess.run([sys.executable, "-c", reader], input=pickle.dumps(request), capture_output=True, check=True)
    assert done.stdout == b"acme\n"


def test_a_generated_module(proto, tmp_path, monkeypatch):  # P17
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{tmp_path}", f"--python_out={tmp_path}", str(proto)]
    subprocess.run(command, check=True)
    request_class, response_class = schema.load("tenants_pb2.py", tmp_path)
    assert request_class(tenant="acme").tenant == "acme"
    assert schema.load("tenants_pb2", tmp_path) == (request_class, response_class)
    with Fronts(Echo("", request_class, response_class)) as fronts:
        assert fronts.post("/a/b", b'{"key":["x"],"value":["1"]}').json()["value"] == ["1"]
    monkeypatch.delitem(sys.modules, "tenants_pb2")
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    "name,text,says",
    [
        ("none.proto", None, "there is no file"),
        ("bad.proto", "message {", "cannot be compiled: .*bad.proto:1"),
        (
            "half.proto",
            'syntax = "proto3"; message Request {}',
            "has the messages Request; it needs a Request and a Resp",
        ),
        (
            "bare.proto",
            'syntax = "proto3"; message Request {} message Response {int32 err_no = 1;}',
            "no string err_msg",
        ),
        ("no_such_module_pb2", None, "cannot be imported: ModuleNotFoundError"),
        ("broken_pb2.py", "1 / 0", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_schemas_that_cannot_be_used(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        schema.load(name, tmp_path)


class Port:
    """A listener that notes what happens to it."""

    def __init__(self, notes, name, error=None):
        self.notes, self.name, self.error = notes, name, error

    async def start(self):
        if self.error is not None:
            raise self.error
        self.notes.append(f"{self.name} opened")
        return "127.0.0.1", 1

    async def stop(self, grace_s):
        await asyncio.sleep(0)
        self.notes.append(f"{self.name} closed")


def test_a_server_has_several_ports():
    notes = []

    def ready(_host, _port):
        notes.append("ready")
        server.fail(3)

    server = Server(
        App([]),
        Port(notes, "http"),
        more=[Port(notes, "rpc")],
        drain_s=1.0,
        ready=ready,
    )
    assert server.run() == 3
    assert notes[:3] == ["http opened", "rpc opened", "ready"]
    assert sorted(notes[3:]) == ["http closed", "rpc closed"]


def test_a_port_that_cannot_be_had_closes_the_others():
    notes = []
    refused = Port(notes, "rpc", ConfigError("it is in use"))
    server = Server(App([]), Port(notes, "http"), more=[refused], drain_s=1.0, ready=lambda _host, _port: None)
    with pytest.raises(ConfigError, match="in use"):
        server.run()
    assert notes == ["http opened", "http closed"]


def test_grpc_is_not_imported_where_it_is_not_needed():
    modules = "forebay.transports.server, forebay.transports.grpc.service, forebay.transports.grpc.listener"
    code = f"import sys, forebay.cli.serve, {modules}; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["messages", "sniff", "tensors", "literal", "rest"])
def test_the_protocol_is_imported_without_grpc_and_numpy(name):
    name = f"forebay.surfaces.pipeline.protocol.{name}"
    code = f"import sys, {name}; sys.exit(not {{'grpc', 'numpy'}}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ports_are_free_again_when_they_are_closed():  # P96
    ports = free_port(), free_port()
    with Fronts(Echo(), http=HttpConfig(port=ports[0]), rpc=GrpcConfig(port=ports[1])):
        pass
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_schema_that_cannot_be_used_is_told_with_its_place(tmp_path):
    (tmp_path / "config.yml").write_text("rpc_port: 18080\nproto: tenants.proto\n")
    config, _ = read(tmp_path / "config.yml")
    with pytest.raises(ConfigError, match=r"config\.yml:2: there is no file .*tenants\.proto"):
        messages_of(config)
