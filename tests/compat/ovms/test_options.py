# SPDX-License-Identifier: Apache-2.0
"""The options of the original under `forebay serve` and `check`."""

import json

import httpx
import pytest
from tests.compat.ovms.conftest import config, one_node, write
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.cli.main import main
from forebay.cli.ovms import translated
from forebay.errors import ConfigError

HANDLER = """
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("output", b"served")]
    """

SAID = {
    "--config_path /c.json": "/c.json",
    "--config_path=/c.json --rest_port 8000": "/c.json --http-port 8000",
    "--config_path c --port 9000 --rest_port=8000": "c --grpc-port 9000 --http-port 8000",
    "--config_path c --port 9000": "c --grpc-port 9000 --http-port 0",
    "--config_path c --port 9000 --rest_port 0": "c --grpc-port 9000 --http-port 0",
    "--config_path c --port 0 --rest_port 8000": "c --http-port 8000",
    "--model_path m --model_name n": "m --name n",
    "--config_path c --log_level WARNING": "c --log-level warning",
    "--config_path c --log_level TRACE": "c --log-level debug",
    "--config_path c --file_system_poll_wait_seconds 5": "c --repository-poll-s 5",
    "--config_path c --grpc_bind_address 0.0.0.0 --rest_bind_address 0.0.0.0": "c --host=0.0.0.0",
    "--config_path c --rest_bind_address ::": "c --host=::",
    "--model_path m --model_name n --target_device GPU.1": "m --name n --devices gpu:1",
    "--config_path c --target_device CPU": "c",
    "--config_path c --api_key_file k": "c --api-key @k",
    "--config_path c --allowed_origins http://a,https://b:8": "c --cors-origin http://a --cors-origin https://b:8",
    "--config_path c --allowed_origins *": "c --cors-origin *",
    "--config_path c --metrics_enable": "c",
    '--config_path c --model_version_policy {"latest":{"num_versions":2}}': "c --versions latest:2",
    '--config_path c --model_version_policy {"all":{}}': "c --versions all",
    '--config_path c --model_version_policy {"specific":{"versions":[1,3]}}': "c --versions 1,3",
    "c --rest_port 8000 --threads 4": "--http-port 8000 c --threads 4",
}


@pytest.mark.parametrize("said", SAID)
def test_options_become_ours(said):  # O107, O108
    assert translated(["serve", *said.split()]) == (["serve", *SAID[said].split()], [])


@pytest.mark.parametrize("said", ["serve model.py --port 9000", "serve m.py --http_port 9000", "call --config_path x"])
def test_other_commands_are_left_alone(said):
    assert translated(said.split()) == (said.split(), [])


def test_what_is_not_used_is_said():  # O107
    _, warnings = translated(["serve", "--config_path", "c", "--log_path", "l", "--grpc_workers", "4", "--nireq", "3"])
    assert [one.partition(" is not used: ")[0] for one in warnings] == ["--log_path", "--grpc_workers", "--nireq"]


WRONG = {
    "--config_path c --port 0 --rest_port 0": "both 0",
    "--config_path c --port 0": "both 0",
    "--config_path c --port 9000 --rest_port 9000": "both 9000",
    "--config_path c --model_path m": "got both",
    "--model_path m": "no --model_name",
    "--model_name m": "no --model_path",
    "--config_path c --log_level LOUD": "TRACE, DEBUG",
    "--config_path c --port x": "whole number",
    "--config_path c --rest_prot 8": "did you mean --rest_port?",
    "--config_path c --grpc_bind_address a --rest_bind_address b": "both ports have one",
    "--config_path c --model_version_policy x": "num_versions",
    "--config_path c --target_device GPU": "got both",
    "--model_path m --model_name n --target_device HETERO:GPU,CPU": "'HETERO:GPU,CPU'; say .* in config.json",
    "--config_path c --allowed_origins http://a,b": "--allowed_origins: expected an origin .*, got 'b'",
    "--config_path": "expected one argument",
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_ends_with_a_sentence(said, capsys):  # O107
    with pytest.raises(ConfigError, match=WRONG[said]):
        translated(["serve", *said.split()])
    assert main(["serve", *said.split()]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_path_of_a_graph_is_that_graph_whatever_lies_beside_it(tmp_path):  # O108
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": HANDLER, "config.json": config(other={})})
    said, _ = translated(["serve", "--model_path", str(tmp_path), "--model_name", "g"])
    assert said == ["serve", str(tmp_path / "graph.pbtxt"), "--name", "g"]


def test_options_of_models_are_none_of_graphs(tmp_path):  # O108
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": HANDLER})
    with pytest.raises(ConfigError, match=r"--shape is for models, and .* has a graph.pbtxt"):
        translated(["serve", "--model_path", str(tmp_path), "--model_name", "g", "--shape", "auto"])
    assert main(["check", "--model_path", str(tmp_path), "--model_name", "g"]) == 0


@pytest.mark.parametrize("how", ["config", "model"])
def test_a_server_takes_the_options_of_the_original(serve, tmp_path, how):  # O107, O108
    write(tmp_path, {"config.json": config(g={}), "g/graph.pbtxt": one_node(), "g/model.py": HANDLER})
    port = free_port()
    named = ["--config_path", tmp_path / "config.json"]
    if how == "model":
        named = ["--model_path", tmp_path / "g", "--model_name", "g"]
    more = ["--port", str(port), "--log_level", "DEBUG", "--file_system_poll_wait_seconds", "0", "--grpc_workers", "2"]
    server = serve(None, *map(str, named), *more)
    assert f"gRPC at 127.0.0.1:{port}" in server.log
    assert "warning: --grpc_workers is not used" in server.log
    asked = {"inputs": [{"name": "input", "shape": [1], "datatype": "FP32", "data": [1]}]}
    answer = httpx.post(f"{server.url}/v2/models/g/infer", json=asked, timeout=PATIENCE_S).json()
    assert answer["outputs"][0]["data"] == [*b"served"]


def test_a_folder_of_versions_is_a_model(tmp_path, capsys):  # O108
    ov = pytest.importorskip("openvino")
    from tests.compat.ovms.test_openvino import save

    assert ov
    for version in (1, 2):
        save(tmp_path / f"add/{version}/add.xml")
    said = ["check", "--model_path", str(tmp_path / "add"), "--model_name", "plus"]
    assert main([*said, "--model_version_policy", json.dumps({"all": {}})]) == 0
    assert "plus" in capsys.readouterr().out
