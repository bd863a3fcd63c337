# SPDX-License-Identifier: Apache-2.0
"""What README and how-to pages show is served as it stands there and answers what they say."""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import cv2
import fastapi
import httpx
import joblib
import numpy as np
import pandas as pd
import pytest
import yaml
from starlette.testclient import TestClient
from tests import crds
from tests.waiting import PATIENCE_S

import forebay

ROOT = Path(__file__).parents[1]
SHOWN = {
    "README.md": {"iris.py": ("iris", {"measures": [5.1, 3.5, 1.4, 0.2]}, "setosa")},
    "docs/how-to/requests.md": {
        "thumbnails.py": ("thumbnails", {"image": "Y2F0"}, {"name": None, "bytes": 3, "sha": "9d989e8d"}),
        "greeter.py": ("greeter", "Ann", "Hello Ann"),
        "words.py": ("words/embed", "axe", [0.3, 1.0]),
        "uploads.py": ("digest", "a", "ac8d8342bbb2362d13f0a559a3621bb407011368895164b628a54f7fc33fc43c"),
        "users.py": ("users", "ada", {"name": "Ada Lovelace"}),
    },
    "docs/how-to/health-of-a-model.md": {"guarded.py": ("guarded", "", True)},
    "docs/how-to/openai.md": {"parrot.py": (), "agent.py": (), "ranker.py": (), "voice.py": ()},
    "docs/how-to/kserve.md": {"brightness.py": ("brightness", [[0.0, 1.0], [1.0, 2.0]], 1.0)},
    "docs/how-to/streams.md": {
        "count.py": ("count", 2, [0, 1]),
        "story.py": ("story", "a b", ["a", "b"]),
        "talk.py": (),
    },
    "docs/how-to/test-a-model.md": {"test_shout.py": ()},
    "docs/how-to/embed.md": {"shop.py": ()},
    "docs/how-to/compose-models.md": {
        "review.py": (
            "review",
            "A good day. A fine, kind host. So it was.",
            {
                "sentences": [
                    {"text": "A good day", "is_kind": True},
                    {"text": "A fine, kind host", "is_kind": True},
                    {"text": "So it was", "is_kind": False},
                ],
                "mood": "kind",
            },
        ),
        "triage.py": ("triage", "Where is my parcel, it is late", "We will read it: Where is m..."),
    },
    "docs/how-to/buckets-and-padding.md": {
        "tagger.py": ("tagger", {"ids": [8, 9, 10], "types": [0, 0, 1]}, {"tags": [1, 2, 3]}),
        "translate.py": (
            "translate",
            [{"text": "hello", "to": "de"}, {"text": "hello", "to": "fr"}],
            ["hello (de, 1 of 1)", "hello (fr, 1 of 1)"],
        ),
        "reciprocal.py": ("reciprocal", 4, 0.25),
    },
}
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


def blocks(page):
    return dict(BLOCK.findall((ROOT / page).read_text()))


@pytest.mark.parametrize("page", SHOWN)
def test_every_model_shown_is_tried_here(page):
    assert set(blocks(page)) == set(SHOWN[page])


@pytest.mark.parametrize("page,name", [(page, name) for page, shown in SHOWN.items() for name in shown if shown[name]])
def test_a_model_shown_answers_as_shown(page, name, tmp_path, serve):
    model, sample, expected = SHOWN[page][name]
    path = tmp_path / name
    path.write_text(blocks(page)[name])
    server = serve(path, "--worker-kind", "thread")
    answer = httpx.post(f"{server.url}/models/{model}", json=sample)
    assert answer.status_code == 200
    if answer.headers["content-type"] == "text/event-stream":
        assert [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line] == expected
    else:
        assert answer.json() == expected


@pytest.fixture(scope="module")
def tutored(tmp_path_factory, launch):
    """A server with the models of the tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name in ("shout.py", "count.py"):
        (folder / name).write_text(blocks("docs/tutorial.md")[name])
    (folder / "forebay.yaml").write_text("models: [shout.py, count.py]\nworker_kind: thread\n")
    return launch(folder)


@pytest.mark.parametrize(
    "name,said",
    [
        ("with_requests.py", "HELLO\n"),
        ("with_httpx.py", "100 HELLO 0\n"),
        ("with_retries.py", "HELLO\n"),
        ("with_streams.py", "0\n1\n2\n"),
    ],
)
def test_a_client_in_python_works_as_shown(tutored, tmp_path, name, said):
    text = blocks("docs/how-to/call-from-python.md")[name]
    (tmp_path / name).write_text(text.replace("http://127.0.0.1:8080", tutored.url))
    assert run_here(tmp_path, name) == said


@pytest.mark.parametrize("answers,said", [([503, 429, 200], "good\n"), ([503] * 9, "RuntimeError: no room\n")])
def test_a_client_that_retries_as_shown_waits_for_its_moment_and_gives_up(tmp_path, answers, said):
    """The server says when to come again; what it counts are the times between requests."""
    moments, statuses = [], iter(answers)

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            moments.append(time.monotonic())
            status = next(statuses)
            body = b'"good"' if status == 200 else b'{"error": {"message": "no room"}}'
            self.send_response(status)
            self.send_header("Retry-After-Ms", "60")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = blocks("docs/how-to/call-from-python.md")["with_retries.py"]
        (tmp_path / "a.py").write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{server.server_port}"))
        assert run_here(tmp_path, "a.py").endswith(said)
        server.shutdown()
    assert all(later - earlier > 0.05 for earlier, later in pairwise(moments))
    assert len(moments) == min(len(answers), 4)


def run_here(folder, name):
    """What a script prints; the end of its error where it fails."""
    command = [sys.executable, name]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return done.stderr if done.returncode else done.stdout


def test_a_pipeline_of_scikit_learn_takes_what_becomes_a_frame(tmp_path, serve):
    pytest.importorskip("sklearn")
    for name, text in blocks("docs/how-to/pandas-and-scikit-learn.md").items():
        (tmp_path / name).write_text(text)
    assert run_here(tmp_path, "train.py") == ""
    server = serve(tmp_path / "houses.py", "--worker-kind", "thread")
    known, less = {"area": 90, "city": "Bonn", "rooms": 3}, {"city": "Bonn", "area": 90}
    (predicted,) = joblib.load(tmp_path / "houses.joblib").predict(pd.DataFrame([known]))
    assert server.call("houses", known).json() == pytest.approx(predicted)
    assert server.call("houses", less).json() == server.call("houses", {**less, "rooms": None}).json()
    assert server.call("houses", {**known, "city": "Rome"}).status_code == 200
    assert "$.area" in server.call("houses", {**known, "area": "90"}).text
    page = (ROOT / "docs/how-to/pandas-and-scikit-learn.md").read_text()
    assert 'forebay call http://127.0.0.1:8080/models/houses \'{"area": 90, "city": "Bonn"}\'' in page


def test_images_and_files_are_taken_and_returned_as_shown(tmp_path, serve):
    pytest.importorskip("PIL", reason="Pillow is not installed")
    for name, text in blocks("docs/how-to/images-and-files.md").items():
        (tmp_path / name).write_text(text)
    (tmp_path / "forebay.yaml").write_text("models: [thumbnail.py, shade.py, pages.py]\nworker_kind: thread\n")
    server = serve(tmp_path)
    (tmp_path / "cat.png").write_bytes(png(80, 40))
    upload = (tmp_path / "upload.py").read_text()
    (tmp_path / "upload.py").write_text(upload.replace("http://127.0.0.1:8080", server.url))
    assert run_here(tmp_path, "upload.py") == ""
    small = cv2.imdecode(np.fromfile(tmp_path / "small.png", np.uint8), cv2.IMREAD_COLOR)
    assert small is not None
    assert small.shape == (32, 64, 3)
    as_text = base64.b64encode(png(80, 40)).decode()
    assert server.call("thumbnail", {"image": as_text}).headers["content-type"] == "image/png"
    for bad, why in [
        (b"no image", "that Pillow can read"),
        (png(9000, 6000), "at most 50000000 pixels, got 9000 x 6000"),
    ]:
        answer = server.client.post("/models/thumbnail", files={"image": bad})
        assert (answer.status_code, why in answer.text) == (400, True), answer.text
    post = server.client.post
    for body in ({"content": png(80, 40)}, {"files": {"any": png(80, 40)}}):
        assert post("/models/shade", **body).json() == 120.0
    assert post("/models/shade", content=b"no image").status_code == 400
    pages = [("pages", ("1.png", b"12")), ("pages", ("2.png", b"345"))]
    assert post("/models/pages", files=pages, data={"title": "rent"}).json() == {"title": "rent", "bytes": [2, 3]}


def png(width, height):
    return cv2.imencode(".png", np.full((height, width, 3), 120, np.uint8))[1].tobytes()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_yaml_that_a_page_shows_is_yaml_of_several_lines(page):
    for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        assert all(document is None or isinstance(document, dict | list) for document in yaml.safe_load_all(text)), text


def test_rules_and_board_ask_for_metrics_that_there_are(tmp_path):
    rules = ROOT / "docs/how-to/alerts.rules.yml"
    board = (ROOT / "docs/how-to/grafana-board.json").read_text()
    asked = re.findall(r"\bforebay_[a-z_]+", rules.read_text() + board)
    known = set(re.findall(r"`(forebay_[a-z_]+)`", (ROOT / "docs/reference/metrics.md").read_text()))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} <= known
    page = (ROOT / "docs/how-to/alerts.md").read_text()
    alerts = [rule["alert"] for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(Forebay\w+)`", page, re.MULTILINE) == alerts
    panels = json.loads(board)["panels"]
    queries = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    written = {"groups": [{"name": "a", "rules": [{"record": "a:b", "expr": query} for query in queries]}]}
    (tmp_path / "board.yml").write_text(yaml.safe_dump(written))
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus)")
    for file in (rules, tmp_path / "board.yml"):
        done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("is_keyed", [False, True])
def test_the_pod_monitor_shown_scrapes_the_pods_that_we_deploy(is_keyed):
    page = (ROOT / "docs/how-to/alerts.md").read_text()
    page = page.replace("# authorization", "authorization") if is_keyed else page
    shown = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (monitor,) = [one for one in shown if one.get("kind") == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert ("authorization" in endpoint, endpoint["path"]) == (is_keyed, "/metrics")
    pod = yaml.safe_load((ROOT / "examples/deploy/kubernetes/deployment.yaml").read_text())["spec"]["template"]
    assert endpoint["port"] in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    assert crds.FOLDER is None or crds.faults(monitor) == []


def test_the_call_shown_is_answered_by_the_ventu_model_shown(tmp_path, serve):
    pytest.importorskip("pydantic")
    page = "docs/how-to/ventu.md"
    path = tmp_path / "sentiment.py"
    path.write_text(blocks(page)["sentiment.py"])
    call = r"curl http://127.0.0.1:8080(\S+) -H '(\S+): (\S+)' -d '(.*)'"
    ((where, header, value, body),) = re.findall(call, (ROOT / page).read_text())
    answer = httpx.post(serve(path).url + where, headers={header: value}, content=body)
    assert (answer.status_code, answer.json()) == (200, {"positive": 0.25})


def test_versions_come_and_go_from_python_as_shown():
    page = (ROOT / "docs/how-to/versions-and-reload.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    class Iris(forebay.Model):
        def predict(self, batch: list[int]) -> list[int]:
            return batch

    exec(shown, {"forebay": forebay, "Iris": Iris, "NewIris": Iris})  # by the page, which is ours


@pytest.mark.parametrize("page,name", [("docs/how-to/test-a-model.md", "test_shout.py")])
def test_a_test_shown_passes_as_it_stands(page, name, tmp_path):
    for other, text in blocks(page).items():
        (tmp_path / other).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / name)]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_application_shown_mounts_its_model(tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    (tmp_path / "shop.py").write_text(blocks("docs/how-to/embed.md")["shop.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    shop = importlib.import_module("shop")
    with TestClient(shop.app) as client:
        assert client.post("/ml/models/shout", json="a").json() == "A"
        assert client.get("/").json() == "The shop is open."
        assert client.post("/greet/ann").json() == "HELLO ANN"


def test_the_chat_model_shown_answers_openais_clients(tmp_path, serve):
    path = tmp_path / "parrot.py"
    path.write_text(blocks("docs/how-to/openai.md")["parrot.py"])
    body = {"model": "parrot", "messages": [{"role": "user", "content": "to be or not"}], "stop": "or"}
    answer = httpx.post(f"{serve(path, '--worker-kind', 'thread').url}/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "to be "


def test_the_models_of_audio_shown_hear_what_they_say(tmp_path, serve):
    path = tmp_path / "voice.py"
    path.write_text(blocks("docs/how-to/openai.md")["voice.py"])
    url = f"{serve(path, '--worker-kind', 'thread').url}/v1/audio"
    said = httpx.post(f"{url}/speech", json={"model": "beeper", "voice": "any", "input": "to be", "speed": 2})
    assert (said.status_code, said.headers["content-type"]) == (200, "audio/wav")
    asked = {"model": "listener", "response_format": "srt"}
    heard = httpx.post(f"{url}/transcriptions", data=asked, files={"file": ("beep.wav", said.content, "audio/wav")})
    assert heard.text == "1\n00:00:00,000 --> 00:00:00,500\nbeep\n"
    for lie in (b"beep", said.content[:20], said.content[:24] + bytes(4) + said.content[28:]):  # the last has no rate
        wrong = httpx.post(f"{url}/transcriptions", data=asked, files={"file": ("beep.wav", lie, "audio/wav")})
        assert (wrong.status_code, wrong.json()["error"]["message"][:23]) == (400, "the file is not a WAV: ")


def test_a_wrong_request_to_the_readme_model_names_the_field(tmp_path, serve):
    path = tmp_path / "iris.py"
    path.write_text(blocks("README.md")["iris.py"])
    server = serve(path, "--worker-kind", "thread")
    answer = httpx.post(f"{server.url}/models/iris", json={"measures": "5.1"})
    assert answer.status_code == 422
    assert answer.json()["error"]["detail"]["path"] == "$.measures"


def test_the_readme_says_how_fast_it_is_as_it_was_measured():
    (low, high) = re.findall(r"64 clients it answers ([\d.]+) to ([\d.]+) times", (ROOT / "README.md").read_text())[0]
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    row = r"^\| (?:echo|iris|batchmodel), 64 connections, \w+: rate / mosec \| ([\d.]+) "
    measured = [float(one) for one in re.findall(row, results, re.MULTILINE)]
    assert (float(low), float(high)) == (round(min(measured), 1), round(max(measured), 1))


def test_two_threads_stream_to_two_clients_at_a_time(serve, tmp_path):  # F50: what the pages on streams say
    path = tmp_path / "parts.py"
    path.write_text(
        "import time\nfrom pathlib import Path\nfrom forebay import Model\n\nclass Parts(Model):\n"
        "    def predict(self, batch: list[str]):\n        yield ['first'] * len(batch)\n"
        "        while not Path(batch[0]).exists():\n            time.sleep(0.005)\n"
        "        yield ['last'] * len(batch)\n"
    )
    server = serve(path, "--worker-kind", "thread", "--threads", "2")
    one, two = tmp_path / "one", tmp_path / "two"

    def parts(stream):
        return (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))

    with server.client.stream("POST", "/models/parts", json=str(one)) as first:
        assert next(parts(first)) == '"first"'
        two.touch()
        with server.client.stream("POST", "/models/parts", json=str(two)) as second:
            assert list(parts(second)) == ['"first"', '"last"']
        one.touch()


def test_the_table_of_model_clients_names_the_benchmark_that_measures_it():  # P115
    text = (ROOT / "docs/how-to/pipeline-predictors.md").read_text()
    script = re.search(r"benchmarks[./](pipeline_clients)", text)
    assert script
    assert (ROOT / "benchmarks" / f"{script[1]}.py").is_file()
    rows = re.findall(r"^\| (\w+) \| .* \| ([\d.]+), ([\d.]+) \|", text, re.MULTILINE)
    medians = {name: float(p50) for name, p50, _ in rows}
    assert medians["local_predictor"] < medians["brpc"]


@pytest.mark.parametrize("keys,status", [((), 200), (("@keys.txt",), 401)])
def test_what_is_mounted_has_keys_and_no_dependencies_of_the_application(tmp_path, monkeypatch, keys, status):
    (tmp_path / "keys.txt").write_text("sesame\n")
    monkeypatch.chdir(tmp_path)

    class Shout(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            return [text.upper() for text in batch]

    def refuse():
        raise fastapi.HTTPException(403)

    models = forebay.asgi(Shout, api_keys=list(keys))
    app = fastapi.FastAPI(lifespan=models.lifespan, dependencies=[fastapi.Depends(refuse)])
    app.get("/")(lambda: "home")
    app.mount("/ml", models)
    with TestClient(app) as client:
        assert client.get("/").status_code == 403
        assert client.post("/ml/models/shout", json="a").status_code == status
        assert client.post("/ml/models/shout", json="a", headers={"X-API-Key": "sesame"}).status_code == 200
