# SPDX-License-Identifier: Apache-2.0
"""The examples for OpenVINO Model Server: what their READMEs say, with the command that they say it of."""

import importlib.util
import json
import shutil
from pathlib import Path

import httpx
import pytest
from tests.examples.test_examples import load_script
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_incrementer_adds_three(serve):  # O68, O101
    server = serve(EXAMPLES / "ovms-incrementer")
    asked = json.loads((EXAMPLES / "ovms-incrementer/request.json").read_text())
    answer = httpx.post(f"{server.url}/v2/models/python_graph/infer", json=asked, timeout=PATIENCE_S).json()
    (output,) = answer["outputs"]
    assert output == {"name": "last_number", "shape": [3], "datatype": "FP32", "data": [3, 4.5, 42]}


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("magika", "openvino")),
    reason="magika or openvino is missing",
)
def test_a_file_is_known_by_its_bytes(serve, tmp_path):  # O101
    folder = tmp_path / "ovms-file-type"
    shutil.copytree(EXAMPLES / "ovms-file-type", folder, ignore=shutil.ignore_patterns("out"))
    load_script(folder / "prepare.py", "example_ovms_prepare").main(folder / "out")
    client = load_script(folder / "client.py", "example_ovms_client")
    server = serve(folder, "--worker-kind", "thread")
    assert client.ask(server.url, (folder / "client.py").read_bytes()) == "python"
    assert client.ask(server.url, (folder / "README.md").read_bytes()) in {"markdown", "txt"}
    assert client.ask(server.url, (folder / "out/magika/1/model.onnx").read_bytes()) == "onnx"
    about = httpx.get(f"{server.url}/v2/models/magika", timeout=PATIENCE_S).json()
    assert [one["datatype"] for one in about["inputs"]] == ["INT32"]
