# SPDX-License-Identifier: Apache-2.0
"""Scripts behind real servers: started in every way, asked, stopped, killed."""

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from tests.compat.pipeline.conftest import post
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.errors import ConfigError
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.config import DagConfig, OpSettings
from forebay.surfaces.pipeline.fronts import schema
from forebay.surfaces.pipeline.protocol.messages import PATH, Request, Response
from forebay.types.settings import declared

ECHO = """
import os, sys, time
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Tag(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        joined = "+".join(input_dicts[name]["q"] for name in sorted(input_dicts))
        if joined.startswith("sleep"):
            time.sleep(float(joined.split()[1]))
        if joined.startswith("die"):
            os._exit(3)
        pids = "".join(one.get("pids", "") for one in input_dicts.values())
        return {"q": joined + self.name, "pids": f"{pids} {os.getpid()}:{self.concurrency_idx}"}, False, None, ""

request = RequestOp()
a = Tag(name="A", input_ops=[request])
b = Tag(name="B", input_ops=[a])
c = Tag(name="C", input_ops=[a])
d = Tag(name="D", input_ops=[b, c])
server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[d]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
"""
UNGUARDED = ECHO + "server.run_server()\n"
GUARDED = ECHO + "if __name__ == '__main__':\n    server.run_server()\n"
PROCESSES = {"dag": {"is_thread_op": False}}

SEED = """
from paddle_serving_server.pipeline import Op, RequestOp, ResponseOp
from paddle_serving_server.pipeline import PipelineServer
from paddle_serving_server.pipeline.proto import pipeline_service_pb2
from paddle_serving_server.pipeline.channel import ChannelDataEcode
import numpy as np
from paddle_serving_app.reader import IMDBDataset
import logging
_LOGGER = logging.getLogger()


class FakeModel:
    def __init__(self, score):
        self.score = score

    def predict(self, feed, fetch, batch, log_id):
        return {"prediction": np.array([[self.score, 1 - self.score]], dtype="float32") * len(feed["words"])}


class ImdbRequestOp(RequestOp):
    def init_op(self):
        self.imdb_dataset = IMDBDataset()
        self.imdb_dataset.load_resource('imdb.vocab')

    def unpack_request_package(self, request):
        dictdata = {}
        for idx, key in enumerate(request.key):
            if key != "words":
                continue
            words = request.value[idx]
            word_ids, _ = self.imdb_dataset.get_words_and_label(words)
            dictdata[key] = np.array(word_ids)
        return dictdata


class CombineOp(Op):
    def preprocess(self, input_data):
        combined_prediction = 0
        for op_name, data in input_data.items():
            _LOGGER.info("{}: {}".format(op_name, data["prediction"]))
            combined_prediction += data["prediction"]
        data = {"prediction": combined_prediction / 2}
        return data


read_op = ImdbRequestOp()
bow_op = Op(name="bow",
            input_ops=[read_op],
            local_service_handler=FakeModel(0.25),
            fetch_list=["prediction"],
            concurrency=1,
            timeout=-1,
            retry=1)
cnn_op = Op(name="cnn",
            input_ops=[read_op],
            local_service_handler=FakeModel(0.75),
            fetch_list=["prediction"],
            concurrency=1,
            timeout=-1,
            retry=1)
combine_op = CombineOp(
    name="combine",
    input_ops=[bow_op, cnn_op],
    concurrency=5,
    timeout=-1,
    retry=1)

# use default ResponseOp implementation
response_op = ResponseOp(input_ops=[combine_op])

server = PipelineServer()
server.set_response_op(response_op)
server.prepare_server('config.yml')
server.run_server()
"""


def pids_in(answer):
    return re.findall(r"(\d+):(\w+)", dict(zip(answer["key"], answer["value"], strict=True))["pids"])


def q_of(answer):
    assert answer["err_no"] == 0, answer
    return dict(zip(answer["key"], answer["value"], strict=True))["q"]


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def call_grpc(port, request, timeout_s=PATIENCE_S):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return Response.FromString(channel.unary_unary(PATH)(request.SerializeToString(), timeout=timeout_s))


@pytest.mark.parametrize(
    "text,config",
    [
        (UNGUARDED, {}),
        (GUARDED, PROCESSES),
        (UNGUARDED, PROCESSES),
        (UNGUARDED, {"build_dag_each_worker": True, "worker_num": 2}),
    ],
    ids=["threads", "processes, guarded", "processes, unguarded", "a graph each"],
)
def test_a_script_is_served_over_both_protocols_and_ends_when_told(pipeline, eventually, text, config):
    # P6, P96, P100, P101, P103, P107, trap 28
    rpc_port = free_port()
    server = pipeline(text, {"rpc_port": rpc_port, **config})
    over_rest = post(server, q="x")
    over_grpc = call_grpc(rpc_port, Request(key=["q"], value=["x"], name="svc"))
    assert q_of(over_rest) == "xAB+xACD"
    assert over_grpc.value[0] == "xAB+xACD"
    pids = {int(pid) for pid, _ in pids_in(over_rest)}
    if config is PROCESSES:
        # P51, P100: an op a process, none of them the server
        assert len(pids) == 4
        assert {index for _, index in pids_in(over_rest)} == {"0"}
        assert server.process.pid not in pids
    elif not config:
        assert pids == {server.process.pid}
        assert {index for _, index in pids_in(over_rest)} == {"None"}
    else:
        # P103: one connection, and every process serves some of its requests
        seen = [post(server, q="x") for _ in range(60)]
        assert len({pid for one in seen for pid, _ in pids_in(one)}) == 2
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert all(is_gone(pid) for pid in pids)
    with socket.socket() as probe:  # P96: the ports are free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", rpc_port))


def test_the_example_of_the_documentation_runs_as_printed(pipeline, tmp_path, monkeypatch):
    # P1, P25, P37, P58, P112 by a handler, trap 3, trap 13
    (tmp_path / "imdb.vocab").write_text("i\nam\nvery\nsad\n")
    monkeypatch.chdir(tmp_path)
    config = {"op": {"bow": {"client_type": "brpc", "timeout": 3000}, "combine": {"concurrency": 1}}}
    server = pipeline(SEED, config)
    answer = post(server, "/imdb/prediction", words="i am very sad | 0")
    assert (answer["err_no"], answer["key"]) == (0, ["prediction"])
    found = answer["value"][0]
    assert found.startswith("array(")
    assert re.findall(r"\d+\.\d*", found)[:2] == ["2.", "2."]
    wrong = post(server, "/imdb/prediction", words="no label")
    assert wrong["err_no"] == 8000


def test_the_page_about_it_shows_a_script_that_runs(pipeline):
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "pipeline-serving.md").read_text()
    (shown,) = re.findall(r"```python\n# server.py\n(.*?)```", page, re.DOTALL)
    ports = free_port()
    server = pipeline(shown.replace('"rpc_port": 18090', f'"rpc_port": {ports}'))
    (asked, told) = re.findall(r"curl -d '(.*)' http://127.0.0.1:18091(/\S+)\n", page)[0]
    answer = server.client.post(told, content=asked).text
    assert answer in page
    for key in re.findall(r"`((?:dag|op\.NAME)\.\w+)`", page):
        kind, _, name = key.rpartition(".")
        known = declared({"dag": DagConfig, "op.NAME": OpSettings}[kind])
        assert name in {setting.key for setting in known.values()}, key


WEB_SERVICE = """
from paddle_serving_server.web_service import WebService, Op
import sys

class Upper(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (_, found), = input_dicts.items()
        return {"q": found["q"].upper() + sys.argv[1]}, False, None, ""

class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Upper(name="upper", input_ops=[read_op])

service = Service(name="upper")
service.prepare_pipeline_config("CONFIG")
print("about to serve", flush=True)
service.run_service()
"""


def test_python_runs_a_script_as_well_and_its_processes_get_its_arguments(tmp_path, eventually):
    # P1, P3, P101: `python script.py`, with the names of the original or with ours
    port = free_port(followed_by=1)
    (tmp_path / "config.yml").write_text(f"http_port: {port}\nworker_num: 2\ndag:\n    is_thread_op: false\n")
    (tmp_path / "server.py").write_text(
        "from forebay.surfaces.pipeline import shim\nshim.install()\n"
        + WEB_SERVICE.replace("CONFIG", str(tmp_path / "config.yml"))
    )
    process = subprocess.Popen(
        [sys.executable, "server.py", "!"],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            eventually(lambda: _is_ready(client))
            answer = client.post("/upper/prediction", json={"key": ["q"], "value": ["a"]}).json()
            assert q_of(answer) == "A!"
            over_grpc = call_grpc(port + 1, Request(key=["q"], value=["b"]))
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, log
        assert out.startswith("about to serve\n")
        assert "upper <- @DAGExecutor" in log
        # P118: gRPC is there too, on the next port if that is free
        assert f"gRPC at 127.0.0.1:{port + 1}" in log
        assert over_grpc.value[0] == "B!"
    finally:
        process.kill()
        process.wait()


def _is_ready(client):
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("way", [("-m", "forebay", "serve", "server.py"), ("server.py",), ("-m", "server")])
def test_a_script_may_change_the_folder_it_works_in(tmp_path, eventually, way):
    # P101: its workers begin where it has begun
    port = free_port()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.yml").write_text(f"rpc_port: {port}\ndag:\n  is_thread_op: false\n")
    moved = "from forebay.surfaces.pipeline import shim\nshim.install()\n" + UNGUARDED.replace(
        "\nclass Tag", "\nos.chdir('inner')\nclass Tag"
    )
    (tmp_path / "server.py").write_text(moved.replace("os.path.dirname(os.path.abspath(__file__))", "''"))
    process = subprocess.Popen(
        [sys.executable, *way],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def answered():
            assert process.poll() is None
            try:
                return call_grpc(port, Request(key=["q"], value=["x"]), timeout_s=2)
            except grpc.RpcError:
                return None

        assert eventually(answered).value[0] == "xAB+xACD"
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_arguments_behind_two_dashes_are_the_scripts(pipeline, tmp_path):
    text = WEB_SERVICE.replace("CONFIG", str(tmp_path / "config.yml"))
    server = pipeline(text, None, "--", "?")
    assert q_of(post(server, "/upper/prediction", q="a")) == "A?"


def test_other_targets_take_no_arguments(cli, models):
    found = cli("check", models / "single.py", "--", "what")
    assert found.returncode == 2
    assert "'what' follows the target; only scripts of pipelines take arguments" in found.stderr


def test_a_graph_is_drawn_without_being_served(cli, tmp_path):
    (tmp_path / "config.yml").write_text("rpc_port: 18080\nop:\n    A: {concurrency: 3}\n")
    (tmp_path / "server.py").write_text(UNGUARDED)
    drawn = cli("check", tmp_path / "server.py", "--draw", "mermaid")
    assert drawn.returncode == 0, drawn.stderr
    assert "Tag, 3 x thread" in drawn.stdout
    assert "@DAGExecutor" in drawn.stdout


def test_without_an_http_port_there_is_only_grpc(tmp_path, eventually):
    # P117, P102, P18, trap 12
    port = free_port()
    (tmp_path / "config.yml").write_text(f"rpc_port: {port}\n")
    (tmp_path / "server.py").write_text(UNGUARDED)
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", "serve", "server.py"],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def answered():
            try:
                return call_grpc(port, Request(key=["q"], value=["x"]), timeout_s=2)
            except grpc.RpcError:
                return None

        assert eventually(answered).value[0] == "xAB+xACD"
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert f"ready at grpc://127.0.0.1:{port}" in log
        assert "gRPC: 4 ops" in log
        assert "POST" not in log
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_dies_is_replaced_and_its_requests_are_answered(pipeline, eventually):
    # P97, trap 8
    server = pipeline(UNGUARDED, PROCESSES)
    before = pids_in(post(server, q="x"))
    deadly = post(server, timeout_ms=15_000, q="die")
    assert deadly["err_no"] in {9000, 10000}
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(post, server, q="sleep 0.02 ") for _ in range(40)]
        os.kill(int(before[-1][0]), signal.SIGKILL)
        answers = [one.result(PATIENCE_S) for one in asked]
    assert {one["err_no"] for one in answers} <= {0, 9000, 10000}
    after = pids_in(eventually(lambda: (found := post(server, q="x"))["err_no"] == 0 and found))
    assert {pid for pid, _ in after}.isdisjoint({before[0][0], before[-1][0]})


def test_sigterm_under_load_leaves_no_request_without_an_answer(pipeline, eventually):
    # P96
    server = pipeline(UNGUARDED, {"worker_num": 4}, "--drain-s", "1")
    with ThreadPoolExecutor(12) as threads:

        def ask(number):
            # The last ones are still running when the grace period is over.
            try:
                return post(server, q=f"sleep {0.05 if number < 8 else 3} ")["err_no"]
            except httpx.TransportError:
                return "refused"

        asked = [threads.submit(ask, number) for number in range(12)]
        eventually(lambda: sum(one.done() for one in asked) + server.metric("forebay_in_flight", endpoint="svc") >= 12)
        server.signal(signal.SIGTERM)
        answers = [one.result(PATIENCE_S) for one in asked]
    assert server.wait() == 0
    assert set(answers) <= {0, 3001}, answers


def test_an_op_that_cannot_be_initialised_ends_the_start(pipeline):
    # P52, trap 9, trap 23
    broken = UNGUARDED.replace(
        "request = RequestOp()",
        "def init_op(self):\n    raise OSError('no such model')\nTag.init_op = init_op\nrequest = RequestOp()",
    )
    for config in ({}, PROCESSES):
        server = pipeline(broken, config, ready=False)
        assert server.wait() != 0
        assert re.search("op '[ABCD]' could not be initialised: OSError: no such model", server.log)
        assert "in init_op" in server.log
        assert "ready at" not in server.log


def test_python_ends_with_a_status_when_a_script_cannot_serve(tmp_path):
    # P52, P69
    def run(text):
        (tmp_path / "config.yml").write_text(f"rpc_port: {free_port()}\n")
        (tmp_path / "server.py").write_text("from forebay.surfaces.pipeline import shim\nshim.install()\n" + text)
        command = [sys.executable, "server.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    wrong = run(UNGUARDED.replace('name="B"', 'name="A"'))
    assert wrong.returncode == 1
    assert wrong.stderr == "forebay: the name 'A' is given to two ops; give each op a name of its own\n"
    broken = run(
        UNGUARDED.replace("class Tag(Op):", "class Tag(Op):\n    def init_op(self): raise OSError('no model')\n")
    )
    assert broken.returncode == 1
    assert re.search("forebay: op '[ABCD]' could not be initialised: OSError: no model", broken.stderr)
    assert "in init_op" in broken.stderr


def test_nothing_is_ready_before_every_op_is(pipeline, eventually, tmp_path):
    # P106
    gate = tmp_path / "gate"
    slow = UNGUARDED.replace(
        "request = RequestOp()",
        f"def init_op(self):\n    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "Tag.init_op = init_op\nrequest = RequestOp()",
    )
    port = free_port()
    server = pipeline(slow, {"http_port": port}, "--http-port", str(port), ready=False)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:

        def status(path, **more):
            try:
                return client.request("POST" if more else "GET", path, **more).status_code
            except httpx.TransportError:
                return None

        eventually(lambda: status("/readyz") == 503)
        assert status("/healthz") == 200
        assert status("/svc/prediction", json={"key": ["q"], "value": ["x"]}) == 503
        gate.touch()
        server.wait_ready()
        assert status("/readyz") == 200
        assert status("/svc/prediction", json={"key": ["q"], "value": ["x"]}) == 200


def test_grpc_takes_any_port_if_the_next_one_is_taken(pipeline):
    # P118
    http_port = free_port(followed_by=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", http_port + 1))
        server = pipeline(UNGUARDED, {"http_port": http_port}, port=http_port)
    (rpc_port,) = map(int, re.findall(r"gRPC at 127\.0\.0\.1:(\d+)", server.log))
    assert rpc_port not in {http_port, http_port + 1}
    assert call_grpc(rpc_port, Request(key=["q"], value=["x"])).value[0] == "xAB+xACD"


def test_a_port_in_use_ends_the_start_with_its_number(pipeline):
    # P119
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not even listening
        port = taken.getsockname()[1]
        server = pipeline(UNGUARDED, {"rpc_port": port}, ready=False)
        assert server.wait() == 2
    assert f"rpc_port is {port}, which is in use already at 127.0.0.1" in server.log


@pytest.mark.parametrize(
    "change,told",
    [
        (("server.prepare_server(", "a._input_ops.append(d); server.prepare_server("), "cycle"),
        (('name="B"', 'name="A"'), "'A' is given to two ops"),
    ],
    ids=["cycle", "names"],
)
def test_a_wrong_graph_ends_the_start_in_one_line_before_a_port_is_open(pipeline, change, told):
    # P69
    server = pipeline(UNGUARDED.replace(*change), ready=False)
    assert server.wait() == 2
    (line,) = [line for line in server.lines if told in line]
    assert line.startswith("forebay: ")
    assert "Traceback" not in server.log


def test_forebays_own_pages_stand_beside_a_service_of_any_name(pipeline):
    # P149, trap 30
    server = pipeline(UNGUARDED.replace('PipelineServer("svc")', 'PipelineServer("models")'))
    assert q_of(post(server, "/models/prediction", q="x")) == "xAB+xACD"
    assert server.client.get("/healthz").status_code == 200
    assert server.client.get("/readyz").status_code == 200
    # P76: what every op has done, and what waits before it
    assert server.metric("forebay_requests_total", endpoint="models/B", code="ok") == 1
    assert server.metric("forebay_waiting_samples", endpoint="models/B") == 0
    assert server.client.get("/models").json()["models"][0]["name"] == "models"


def test_the_start_tells_the_graph_and_the_configuration_without_secrets(pipeline):
    # P122, P151
    server = pipeline(UNGUARDED, {"op": {"A": {"local_service_conf": {"encryption_key": ""}}}, "log_level": "info"})
    told = "\n".join(record["message"] for record in server.records)
    assert told.count("configuration in force") == 1
    assert "level 2: B, C" in told
    assert "D <- B, C" in told


def test_log_files_are_written_where_the_variable_says_and_nowhere_else(pipeline, tmp_path, monkeypatch):
    # P148, P5, P11, P159
    monkeypatch.chdir(tmp_path)
    quiet = pipeline(UNGUARDED)
    post(quiet, q="x")
    quiet.stop()
    assert not list(tmp_path.rglob("*.log"))
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path / "logs"))
    server = pipeline(UNGUARDED)
    body = {"key": ["q"], "value": ["x"], "logid": 77, "clientip": "1\nPROFILE\tfake"}
    server.client.post("/svc/a%0APROFILE", json=body)
    server.client.post("/svc/prediction", json={"key": ["z"], "value": ["x"], "logid": 78})
    server.stop()
    folder = tmp_path / "logs" / "PipelineServingLogs"
    lines = (folder / "pipeline.log").read_text().splitlines()
    assert any("(data_id=0 log_id=77)" in line for line in lines)
    assert not any(line.startswith("PROFILE") for line in lines)
    warnings = (folder / "pipeline.log.wf").read_text()
    assert "KeyError" in warnings
    assert "log_id=77" not in warnings


TALKING = """
import logging, os
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Talking(Op):
    def init_op(self):
        logging.getLogger("mine").warning("said while it loads")

    def preprocess(self, input_dicts, data_id, log_id):
        logging.getLogger("mine").warning("said by a logger")
        logging.warning("said by the root")
        print("printed")
        return {"q": "x"}, False, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Talking(name="a", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.mark.parametrize("is_thread_op", [True, False], ids=["threads", "processes"])
def test_what_an_op_says_stands_once_in_the_log_files_with_its_requests(pipeline, tmp_path, is_thread_op):
    # P148
    server = pipeline(TALKING, {"log_path": str(tmp_path), "dag": {"is_thread_op": is_thread_op}})
    post(server, q="x")
    server.signal()
    assert server.wait() == 0
    folder = tmp_path / "PipelineServingLogs"
    for name in ("pipeline.log", "pipeline.log.wf"):
        lines = (folder / name).read_text().splitlines()
        for text, told in {"by a logger": "ids=", "by the root": "ids=", "while it loads": "model=svc/a"}.items():
            (line,) = [line for line in lines if f"said {text}" in line]
            assert told in line
    assert (folder / "pipeline.log").read_text().count("printed") == 1


@pytest.mark.parametrize("config", [{}, {"build_dag_each_worker": True, "worker_num": 2}], ids=["one", "each"])
def test_large_requests_and_answers_pass_both_ports_in_both_modes(pipeline, config):
    # P16, trap 14
    rpc_port = free_port()
    server = pipeline(UNGUARDED, {"rpc_port": rpc_port, **config})
    blob = "x" * 2_500_000  # which is answered twice: 6 MB in, 5 MB out
    expected = f"{blob}AB+{blob}ACD"
    assert q_of(post(server, q=blob, more=blob, rest="x" * 1_000_000)) == expected
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}", options) as channel:
        request = Request(key=["q", "more", "rest"], value=[blob, blob, "x" * 1_000_000])
        answer = Response.FromString(channel.unary_unary(PATH)(request.SerializeToString(), timeout=PATIENCE_S))
    assert answer.value[0] == expected


PROTO = """
syntax = "proto3";
package mine;
message Request {
  repeated string key = 1;
  repeated string value = 2;
  string name = 3;
  string method = 4;
  int64 logid = 5;
  string tenant = 9;
}
message Response {
  int32 err_no = 1;
  string err_msg = 2;
  repeated string key = 3;
  repeated string value = 4;
  int32 credit = 9;
}
"""
TENANTS = """
import os
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Tenant(RequestOp):
    def unpack_request_package(self, request):
        return {"tenant": request.tenant}, request.logid, None, ""

class Credit(ResponseOp):
    def pack_response_package(self, channeldata):
        response = self.response_class()
        response.key.append("tenant")
        response.value.append(channeldata.parse()["tenant"])
        response.credit = 42
        return response

server = PipelineServer("svc")
server.set_response_op(Credit(input_ops=[Op(name="a", input_ops=[Tenant()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.mark.parametrize("mode", [{}, {"build_dag_each_worker": True}], ids=["one", "each"])
def test_a_schema_of_ones_own_takes_the_place_of_the_usual_one(pipeline, tmp_path, mode):
    # P17
    (tmp_path / "mine.proto").write_text(PROTO)
    rpc_port = free_port()
    server = pipeline(TENANTS, {"rpc_port": rpc_port, "proto": "mine.proto", "worker_num": 1, **mode})
    answer = server.client.post("/svc/prediction", json={"tenant": "me"}).json()
    assert (answer["err_no"], answer["value"], answer["credit"]) == (0, ["me"], 42)
    request, response = schema.load("mine.proto", tmp_path)
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
        asked = channel.unary_unary(PATH)(request(tenant="you").SerializeToString(), timeout=PATIENCE_S)
    assert response.FromString(asked).credit == 42
    assert list(response.FromString(asked).value) == ["you"]


BARE_PROTO = """
syntax = "proto3";
package bare;
message Request {
  repeated string key = 1;
  repeated string value = 2;
}
message Response {
  int32 err_no = 1;
  string err_msg = 2;
  string out = 3;
}
"""
BARE = """
import os
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Out(ResponseOp):
    def pack_response_package(self, channeldata):
        return self.response_class(out=str(channeldata.parse()))

server = PipelineServer("svc")
server.set_response_op(Out(input_ops=[Op(name="a", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.mark.parametrize("mode", [{}, {"build_dag_each_worker": True}], ids=["one", "each"])
def test_a_schema_of_ones_own_needs_none_of_the_usual_fields_but_those_of_errors(pipeline, tmp_path, mode):
    # P17
    (tmp_path / "bare.proto").write_text(BARE_PROTO)
    server = pipeline(BARE, {"proto": "bare.proto", "worker_num": 1, "log_path": str(tmp_path / "logs"), **mode})
    for values in ({"q": "x"}, {"q": "x", "pipeline.profile": "1"}):
        assert post(server, **values) == {"err_no": 0, "err_msg": "", "out": "{'q': 'x'}"}


@pytest.mark.parametrize(
    "fields, said",
    [
        ("string out = 1;", "no int32 err_no and no string err_msg"),
        ("string err_no = 1; string err_msg = 2;", "no int32 err_no, in"),
        ("int32 err_no = 1; repeated string err_msg = 2;", "no string err_msg, in"),
    ],
)
def test_a_schema_whose_answers_cannot_tell_of_errors_is_refused(tmp_path, fields, said):
    # P17
    text = f'syntax = "proto3"; message Request {{}} message Response {{ {fields} }}'
    (tmp_path / "mute.proto").write_text(text)
    with pytest.raises(ConfigError, match=f"the Response of mute.proto has {said}"):
        schema.load("mute.proto", tmp_path)


def test_what_is_observed_goes_where_the_configuration_says(pipeline, tmp_path, eventually):
    # P134, P136, P137, P138
    port = free_port()
    dag = {"use_profile": True, "tracer": {"interval_s": 1}, "enable_prometheus": True, "prometheus_port": port}
    server = pipeline(UNGUARDED, {"dag": dag, "log_path": str(tmp_path / "logs")})
    for _ in range(5):
        post(server, q="x")
    asked = {"q": "x", "pipeline.profile": "1"}
    answer = post(server, **asked)
    assert answer["key"] == ["q", "pids", "pipeline.profile"]
    assert answer["value"][0] == "xAB+xACD"
    assert answer["value"][2].count("PROFILE\t") == 5
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).text
    assert "pd_query_request_success_total 6.0" in page
    tracer = tmp_path / "logs" / "PipelineServingLogs" / "pipeline.tracer"
    # A machine that is slow spreads them over several blocks.
    eventually(lambda: tracer.exists() and sum(map(int, re.findall(r"Query count\[(\d+)\]", tracer.read_text()))) == 6)
    server.stop()
    assert server.log.count("PROFILE\t") >= 30


def test_full_log_files_are_put_aside_and_what_clients_sent_makes_no_lines(tmp_path, monkeypatch):
    # P148, P159
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    handlers = logs.write_to(tmp_path, "info")
    try:
        for number in range(50):
            logs.requests.info("(data_id=%d) %s", number, "x\nPROFILE\tfake")
    finally:
        logs.end(handlers)
    files = sorted((tmp_path / "PipelineServingLogs").glob("pipeline.log*"))
    assert len(files) > 2
    assert all(file.stat().st_size <= 2000 for file in files)
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 50
    assert all("(data_id=" in line for line in lines)
    logs.requests.warning("nobody writes this any more")
    assert (tmp_path / "PipelineServingLogs" / "pipeline.log.wf").read_text() == ""


def test_one_of_two_servers_is_stopped_by_its_port(pipeline, cli, tmp_path):
    # P150
    state = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    ports = free_port(), free_port()
    first, second = (pipeline(UNGUARDED, {"rpc_port": port}) for port in ports)
    none = cli("pipeline", "stop", "--port", "1", env=state)
    assert (none.returncode, none.stdout) == (1, "")
    assert "no pipeline server" in none.stderr
    done = cli("pipeline", "stop", "--port", ports[1], env=state)
    assert done.returncode == 0
    assert "stopped" in done.stdout
    assert second.wait() == 0
    assert q_of(post(first, q="x")) == "xAB+xACD"
    killed = cli("pipeline", "kill", env=state)
    assert killed.returncode == 0
    assert first.wait() == -signal.SIGKILL
    assert cli("pipeline", "stop", env=state).returncode == 1
    assert not list((tmp_path / "state" / "forebay" / "pipeline").iterdir())
