# SPDX-License-Identifier: Apache-2.0
"""The pipeline-ensemble example: trained from nothing, served as its script says, asked over REST and by its client."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.waiting import PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline-ensemble"
FILES = ("server.py", "config.yml", "client.py", "train.py", "reviews.txt")
JUDGED = {"a warm and funny film": True, "not bad at all": True, "i am very sad": False, "such a dull plot": False}

np = pytest.importorskip("numpy")
onnxruntime = pytest.importorskip("onnxruntime")
for name in ("onnx", "grpc"):
    pytest.importorskip(name)


def run(*command, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the example with both models trained."""
    folder = tmp_path_factory.mktemp("pipeline-ensemble")
    for name in FILES:
        shutil.copy(EXAMPLE / name, folder)
    trained = run("train.py", cwd=folder, OPENBLAS_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    shares = {name: int(share) for name, share in re.findall(r"^(\w+): (\d+)%", trained.stdout, flags=re.MULTILINE)}
    assert shares["bow"] > 70
    assert shares["cnn"] > 85
    assert shares["both"] > 85
    return folder


def test_a_bag_of_words_cannot_tell_what_is_not_bad(project):
    vocabulary = (project / "out" / "reviews.vocab").read_text().splitlines()
    likely = {}
    for model in ("bow", "cnn"):
        session = onnxruntime.InferenceSession(
            project / "out" / model / "model.onnx", providers=["CPUExecutionProvider"]
        )
        length = session.get_inputs()[0].shape[1]
        words = np.zeros((1, length), np.int64)
        words[0, :4] = [vocabulary.index(word) for word in ["not", "boring", "at", "all"]]
        likely[model] = float(session.run(None, {"words": words})[0][0, 1])
    assert likely["cnn"] > 0.5 > likely["bow"]


def wait_ready(process, url, log):
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"the server did not become ready:\n{log.read_text()}")


@pytest.fixture(scope="module")
def addresses(project):
    """REST and gRPC addresses of the example's server, which runs as long as the module's tests."""
    rest, rpc = free_port(), free_port()
    config = (project / "config.yml").read_text()
    config = config.replace("18071", str(rest)).replace("18080", str(rpc))
    (project / "config.yml").write_text(config)
    command = [sys.executable, "-m", "forebay", "serve", "server.py"]
    with (project / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=project, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_ready(process, f"http://127.0.0.1:{rest}", project / "log")
            yield f"http://127.0.0.1:{rest}", f"127.0.0.1:{rpc}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
    assert process.returncode == 0, (project / "log").read_text()


def judged(url, review):
    """Whether the pipeline likes a review, asked over REST."""
    answer = httpx.post(f"{url}/reviews/prediction", json={"key": ["words"], "value": [review]}).raise_for_status()
    found = answer.json()
    assert found["err_no"] == 0, found["err_msg"]
    assert found["key"] == ["prediction"]
    bad, good = (float(number) for number in re.findall(r"\d\.\d*(?:e-\d+)?", found["value"][0]))
    assert bad + good == pytest.approx(1, abs=1e-4)
    return good > bad


def test_over_rest_everybody_gets_the_opinion_on_his_own_review(addresses):
    url, _ = addresses
    reviews = list(JUDGED) * 8
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda review: judged(url, review), reviews))
    assert found == [JUDGED[review] for review in reviews]


def test_the_name_of_the_service_is_the_scripts(addresses):
    url, _ = addresses
    found = httpx.post(f"{url}/wrong/prediction", json={"key": ["words"], "value": ["fine"]}).json()
    assert found["err_no"] == 3002


def test_the_client_asks_over_grpc(addresses, project):
    _, address = addresses
    done = run("client.py", *JUDGED, cwd=project, PIPELINE=address)
    assert done.returncode == 0, done.stdout + done.stderr
    for line, (review, is_good) in zip(done.stdout.splitlines(), JUDGED.items(), strict=True):
        assert line.startswith("good" if is_good else "bad")
        assert line.endswith(review)
