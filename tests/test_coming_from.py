# SPDX-License-Identifier: Apache-2.0
"""The pages for people from other servers: the same model in both. F59

Ours is the README's, which `test_docs.py` serves, and answers MLServer's request. Theirs is compiled; FastAPI, which
is here anyway, answers as well.
"""

from __future__ import annotations

import json
import re
import types
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import forebay.testing

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path for path in (ROOT / "docs/how-to/coming-from").glob("*.md")}
BLOCK = re.compile(r"```python\n# ([\w./]+\.py)\n(.*?)```", re.DOTALL)


def blocks(page):
    return dict(BLOCK.findall(page.read_text()))


def test_every_server_has_its_page():
    assert set(PAGES) >= {
        "bentoml",
        "fastapi",
        "kserve",
        "litserve",
        "mlserver",
        "mosec",
        "ovms",
        "ray",
        "torchserve",
        "triton",
    }


@pytest.mark.parametrize("name", PAGES)
def test_our_side_is_the_model_of_the_readme(name):
    assert blocks(PAGES[name])["iris.py"] == blocks(ROOT / "README.md")["iris.py"]


@pytest.mark.parametrize("name", PAGES)
def test_their_side_is_python(name):
    ((path, text),) = [block for block in blocks(PAGES[name]).items() if block[0] != "iris.py"]
    assert path.startswith(name)
    compile(text, path, "exec")


def test_the_fastapi_side_answers_what_ours_answers():
    pytest.importorskip("fastapi")
    module = types.ModuleType("fastapi_iris")
    exec(blocks(PAGES["fastapi"])["fastapi_iris.py"], vars(module))
    with TestClient(module.app) as client:
        assert client.post("/models/iris", json={"measures": [5.1, 3.5, 1.4, 0.2]}).json() == "setosa"


def test_ours_answers_the_request_that_mlserver_takes(tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "iris.py").write_text(blocks(ROOT / "README.md")["iris.py"])
    (body,) = re.findall(r"-d '(\{\"inputs\".*)'", PAGES["mlserver"].read_text())
    with forebay.testing.client(str(tmp_path / "iris.py")) as client:
        answer = client.request("POST", "/v2/models/iris/infer", body.encode(), {"content-type": "application/json"})
    (output,) = json.loads(answer.body)["outputs"]
    assert (output["name"], output["data"]) == ("output", ["setosa"])
