# SPDX-License-Identifier: Apache-2.0
"""What a person gets wrong: one sentence with the file, the key, what was found and what is allowed, and status 2."""

import asyncio
import itertools
import os
import socket
import textwrap

import pytest
from tests.ports import free_port

from forebay.errors import ConfigError
from forebay.server.config import HttpConfig
from forebay.surfaces.contract import Options
from forebay.surfaces.lookup import build
from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.served_graph import ServedGraph
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.project import project_of
from forebay.surfaces.pipeline.server import PipelineServer
from forebay.surfaces.project_server import server_of

SCRIPT = """
import sys
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Op(name="a", input_ops=[RequestOp()])]))
server.prepare_server("config.yml")
server.run_server()
"""

DESCRIBED = """
feed_var { name: "x" alias_name: "x" feed_type: 1 shape: 13 }
fetch_var { name: "p" alias_name: "price" fetch_type: 1 shape: 1 }
fetch_var { name: "r" alias_name: "rooms" fetch_type: 1 shape: 1 }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with some files that are no models."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "empty/readme": "",
        "onnx/m.onnx": "garbage",
        "openvino/m.xml": "<garbage",
        "openvino/m.bin": "",
        "bad.prototxt": 'feed_var { name: "x"',
        "good.prototxt": DESCRIBED,
        "described/serving_server_conf.prototxt": DESCRIBED,
        "server.py": SCRIPT,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def start(folder, settings, name="a"):
    """Brings up an op with these settings, given as the lines below its name."""
    (folder / "config.yml").write_text(
        f"rpc_port: 18080\nop:\n  a:\n{textwrap.indent(textwrap.dedent(settings), '    ')}"
    )
    config, _ = read("config.yml")
    dag = wire("svc", ResponseOp(input_ops=[Op(name=name, input_ops=[RequestOp()])]), config)
    hosted = ServedGraph("svc", dag, config, lambda: pytest.fail("threads need no script"), itertools.count())

    async def run():
        hosted.open()
        try:
            await hosted.endpoint.start()
        finally:
            await hosted.endpoint.drain(0.0)
            await hosted.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            "local_service_conf:\n  model_config: nothere",
            "config.yml:5: op 'a': model_config: expected a folder, a file or module:callable, got 'nothere'",
        ),
        (
            "local_service_conf:\n  model_config: empty",
            "config.yml:5: op 'a': model_config is 'empty', which holds no model",
        ),
        (
            "local_service_conf:\n  model_config: onnx",
            "config.yml:5: op 'a': model_config is 'onnx', and m.onnx cannot be",
        ),
        (
            "local_service_conf:\n  model_config: openvino",
            "config.yml:5: op 'a': model_config is 'openvino', and m.xml can",
        ),
        (
            "local_service_conf:\n  client_type: brpc\n  model_config: onnx",
            "config.yml:6: op 'a': the model '{}/onnx' could not be started: model_config is '{}/onnx', and m.onnx",
        ),
        (
            "local_service_conf:\n  client_type: brpc\n  workdir: /not/there\n  model_config: onnx",
            "config.yml:6: op 'a': workdir is '/not/there', and no folder is there",
        ),
        (
            "local_service_conf:\n  model_config: no_such:model",
            "config.yml:5: op 'a': model_config: expected module:callable, got 'no_such:model'",
        ),
        (
            "local_service_conf:\n  model_config: onnx\n  devices: a,b",
            "config.yml:6: op.a.local_service_conf.devices: expected numbers",
        ),
        (
            "client_type: brcp\nserver_endpoints: ['127.0.0.1:1']",
            "config.yml:4: op.a.client_type: expected 'brpc', 'grpc', ",
        ),
        ("server_endpoints: ['']", "config.yml:4: op 'a': '' in server_endpoints: expected HOST:PORT"),
        ("server_endpoints: [nonsense]", "config.yml:4: op 'a': 'nonsense' in server_endpoints: expected HOST:PORT"),
        (
            "server_endpoints: ['127.0.0.1:1']\nclient_config: not.prototxt",
            "config.yml:5: op 'a': client_config is 'not.prototxt', which cannot be used: the description",
        ),
        (
            "server_endpoints: ['127.0.0.1:1']\nclient_config: bad.prototxt",
            "config.yml:5: op 'a': client_config is 'bad.prototxt', which cannot be used: bad.prototxt, line 1: ",
        ),
        (
            "server_endpoints: ['127.0.0.1:1']\nclient_config: empty",
            "config.yml:5: op 'a': client_config is 'empty', and no serving_client_conf.prototxt is in it",
        ),
        (
            "server_endpoints: ['127.0.0.1:1']\nclient_config: good.prototxt\nfetch_list: [prise]",
            "config.yml:6: op 'a': fetch_list names 'prise', the model gives price, rooms; did you mean 'price'?",
        ),
    ],
)
def test_what_an_op_is_told_about_its_model(folder, settings, said):
    # F44
    with pytest.raises(ConfigError) as caught:
        start(folder, settings)
    assert caught.value.message.startswith(said.replace("{}", str(folder)))
    assert not getattr(caught.value, "trace", "")


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            "server_endpoints: ['127.0.0.1:1']\nclient_config: good.prototxt\nfetch_list: [price, prise]",
            ["config.yml:6: op 'a': fetch_list names 'prise', the model gives price, rooms; did you mean 'price'?"],
        ),
        (
            "local_service_conf:\n  model_config: described\n  fetch_list: [x]",
            ["config.yml:6: op 'a': fetch_list names 'x', the model gives price, rooms"],
        ),
        ("local_service_conf:\n  model_config: described\n  fetch_list: [rooms]", []),
        ("local_service_conf:\n  model_config: onnx\n  fetch_list: [x]", []),  # one would have to load it
        ("server_endpoints: ['127.0.0.1:1']\nfetch_list: [x]", []),
    ],
)
def test_check_looks_for_wanted_results_in_descriptions(folder, settings, said):
    lines = textwrap.indent(settings, "    ")
    (folder / "config.yml").write_text(f"rpc_port: 18080\nop:\n  a:\n{lines}")
    assert build("server.py", Options(http=HttpConfig())).look() == said


def test_what_a_script_gives_its_op_has_no_line_in_the_file(folder):
    # F44
    (folder / "config.yml").write_text("rpc_port: 18080\n")
    config, _ = read("config.yml")
    last = Op(name="a", input_ops=[RequestOp()], client_type="brcp", server_endpoints=["127.0.0.1:1"])
    with pytest.raises(ConfigError, match=r"^op 'a': client_type: expected 'brpc', .*got 'brcp'"):
        wire("svc", ResponseOp(input_ops=[last]), config)


def test_ops_that_wait_for_each_other(folder):
    # F44
    class Joined(Op):
        def preprocess(self, input_dicts, data_id=None, log_id=None):
            return {}

    first = Joined(name="a", input_ops=[RequestOp()])
    second = Op(name="b", input_ops=[first])
    first._input_ops.append(second)
    config, _ = read({"rpc_port": 18080})
    with pytest.raises(
        ConfigError, match=r"ops wait for each other in a cycle: ('a' -> )?'b' -> 'a'( -> 'b')?; take"
    ) as caught:
        wire("svc", ResponseOp(input_ops=[second]), config)
    assert "input_ops" in caught.value.message
    assert "back edge" not in caught.value.message


@pytest.mark.parametrize(
    "settings, said",
    [
        ("rpc_port: 18080\nhttp_port: 18080", "config.yml:2: http_port is 18080, and so is rpc_port"),
        (
            "http_port: 18080\nrpc_port: 18082\ndag:\n  enable_prometheus: true\n  prometheus_port: 18082",
            "config.yml:5: dag.prometheus_port is 18082, and so is rpc_port",
        ),
    ],
)
def test_each_port_is_one_of_its_own(folder, settings, said):
    # F44
    (folder / "config.yml").write_text(settings)
    with pytest.raises(ConfigError) as caught:
        read("config.yml")
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize("key", ["rpc_port", "http_port"])
def test_a_port_that_is_taken_is_named_with_its_key(folder, key):
    # F44
    other = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (folder / "config.yml").write_text(
            f"{key}: {port}\n{'rpc_port' if key == 'http_port' else 'http_port'}: {other}\n"
        )
        server = PipelineServer("svc")
        server.set_response_op(ResponseOp(input_ops=[Op(name="a", input_ops=[RequestOp()])]))
        server.prepare_server("config.yml")
        project = project_of(server, lambda: pytest.fail("threads need no script"), Options(http=HttpConfig()))
        with pytest.raises(ConfigError) as caught:
            server_of(project, drain_s=0.0, ready=lambda _address: None).run()
    assert caught.value.message.startswith(f"config.yml:1: {key} is {port}, which is in use already")
    assert "0 takes" not in caught.value.message


def test_the_configuration_in_place_of_the_script(folder):
    # F44
    (folder / "config.yml").write_text("rpc_port: 18080\nop:\n  a:\n    concurrency: 1\n")
    with pytest.raises(
        ConfigError, match=r"config.yml is the configuration of a pipeline; .* forebay serve server.py$"
    ):
        build("config.yml", Options(http=HttpConfig()))
    (folder / "server.py").unlink()
    with pytest.raises(ConfigError, match=r"what can be served is the script that reads it$"):
        build("config.yml", Options(http=HttpConfig()))


@pytest.mark.parametrize(
    "more, config, said",
    [
        (
            "",
            "rpc_port: 18080\nop:\n  a:\n    local_service_conf:\n      model_config: empty\n",
            "config.yml:5: op 'a': ",
        ),
        (
            "",
            "rpc_port: 18080\nbuild_dag_each_worker: true\nop:\n  a:\n    server_endpoints: [x]\n",
            "config.yml:5: op 'a': ",
        ),
        (
            "",
            "rpc_port: 18080\ndag:\n  is_thread_op: false\nop:\n  a:\n    server_endpoints: [x]\n",
            "config.yml:6: op 'a': ",
        ),
        ("import surely_not_there", "", "server.py:1: No module named 'surely_not_there'; install "),
        ("from paddle_serving_app.reader import Sequential", "", "server.py:1: forebay offers only IMDBDataset"),
    ],
)
def test_the_command_says_so_and_ends_with_2(folder, cli, more, config, said):
    # F44
    (folder / "server.py").write_text(f"{more}\n{SCRIPT}" if more else SCRIPT)
    (folder / "config.yml").write_text(config.replace("18080", str(free_port())))
    found = cli(
        "serve", "server.py", "--log-level", "error", cwd=folder, env={**os.environ, "XDG_STATE_HOME": str(folder)}
    )
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    last = found.stderr.splitlines()[-1]
    assert last.startswith((f"forebay: {said}", f"forebay: {folder}/{said}")), last
