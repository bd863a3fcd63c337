# SPDX-License-Identifier: Apache-2.0
"""The Nucleus examples: copied as a user does, trained, served by the command, and asked by their own clients."""

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.models.saved_models import run_tensorflow
from tests.waiting import PATIENCE_S, eventually

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


compiles_protos = pytest.mark.skipif(
    not sys.prefix.isascii(), reason="grpcio-tools compiles nothing where a folder of sys.path is not ASCII"
)


@pytest.fixture
def copied(tmp_path):
    def copy(name):
        return Path(shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("out")))

    return copy


def train(project, *arguments):
    """Runs the project's script here: scikit-learn is imported once for all of them."""
    before, sys.argv = sys.argv, ["train.py", *map(str, arguments)]
    try:
        runpy.run_path(str(project / "train.py"), run_name="__main__")
    finally:
        sys.argv = before


@contextmanager
def serving(project, *options):
    """`forebay serve` of a project: yields where it is, as `HOST:PORT`."""
    state = ["--http-port", "0", "--state-dir", str(project.parent / "state")]
    command = [sys.executable, "-m", "forebay", "serve", str(project), *state, *options]
    log = project.parent / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        ready = re.compile(r"ready at \w+://(\S+)")
        eventually(lambda: process.poll() is not None or ready.search(log.read_text()))
        assert process.poll() is None, log.read_text()
        found = ready.search(log.read_text())
        assert found is not None
        yield found[1]
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def client_says_what_the_page_says(project, *arguments):
    command = [sys.executable, "client.py", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    page = (project / "README.md").read_text()
    assert [line for line in done.stdout.splitlines() if f"    {line}\n" not in page] == []


@compiles_protos
@needs("grpc_tools", "sklearn")
def test_grpc_iris(copied):
    project = copied("nucleus-grpc-iris")
    train(project)
    with serving(project) as address:
        client_says_what_the_page_says(project, address)


@compiles_protos
@needs("grpc_tools")
def test_grpc_primes(copied):
    project = copied("nucleus-grpc-primes")
    with serving(project) as address:
        client_says_what_the_page_says(project, address)


@needs("rapidocr_onnxruntime", "onnxruntime", "cv2")
def test_image_batching(copied):
    project = copied("nucleus-image-batching")
    with serving(project) as address:
        url = f"http://{address}"
        client_says_what_the_page_says(project, url)
        assert httpx.post(url, content=b"no picture").status_code == 400
        assert httpx.post(url, content=b"").status_code == 400


@needs("sklearn")
def test_model_caching(copied):
    project = copied("nucleus-model-caching")
    train(project)
    with serving(project) as address, httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client:

        def ask(name, *numbers):
            return client.post("/", params={"model": name}, json=numbers or [0] * 13)

        assert ask("iris", 5.2, 3.6, 1.4, 0.3).json() == {"class": "setosa", "loaded so far": ["iris"]}
        assert ask("iris", 1).json() == {"error": "4 numbers are needed"}
        assert set(client.get("/info").json()["model_metadata"]) == {"iris", "wine", "breast_cancer", "digits"}
        ask("wine")
        assert ask("digits", *[0] * 64).json()["loaded so far"] == ["iris", "wine", "digits"]
        assert ask("wine").json()["loaded so far"] == ["iris", "wine", "digits"]
        assert ask("iris", 5.2, 3.6, 1.4, 0.3).json()["loaded so far"] == ["iris", "wine", "digits", "iris"]


@needs("sklearn")
def test_live_reload(copied):
    project = copied("nucleus-live-reload")
    train(project, 1, 20)
    with (
        serving(project, "--repository-poll-s", "0.3") as address,
        httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client,
    ):

        def ask(**params):
            return client.post("/", params=params, json=[0] * 64).raise_for_status().json()

        first = ask()
        assert first["version"] == 1
        train(project, 2, 1000)
        eventually(lambda: ask()["version"] == 2)
        assert ask()["accuracy"] > 0.9 > first["accuracy"]
        assert ask(version="1") == first
        shutil.rmtree(project / "out" / "models" / "digits" / "2")
        eventually(lambda: ask() == first)


@needs("sklearn", "openvino")
def test_tensorflow(copied):
    project = copied("nucleus-tensorflow")
    train(project)
    run_tensorflow(str(project / "save.py"))
    with serving(project) as address, httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client:

        def ask(*numbers, **params):
            return client.post("/", params=params, json=numbers)

        found = ask(5.2, 3.6, 1.4, 0.3, model="iris").json()
        assert found == {"class": "setosa", "model": "iris", "version": "latest"}
        assert ask(*[0] * 64, model="digits", version="1").json()["class"] in range(10)
        refused = ask(1, model="iris")
        assert refused.status_code == 400
        assert "expected shape [-1, 4]: found shape [1, 1]" in refused.json()["error"]
        assert ask(1, model="rose").json() == {
            "error": "error: model 'rose' accessed with tag latest couldn't be found"
        }
        assert set(client.get("/info").json()["model_metadata"]) == {"iris-1", "wine-1", "digits-1"}
