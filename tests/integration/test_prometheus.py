# SPDX-License-Identifier: Apache-2.0
"""Debian's Prometheus reads our page, and its linter has nothing to say about it."""

import concurrent.futures
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.waiting import eventually

RECIPE = Path(__file__).parents[2] / "examples/deploy/inference-gateway.yaml"
MODEL = """
import time
from pathlib import Path
import forebay
from prometheus_client import Counter, Gauge

seen = Counter("app_seen", "What was seen")
level = Gauge("app_level", "How full it is")

class Doubles(forebay.Model):
    name = "doubles"
    policy = "auto"
    latency_objective_ms = 1000.0

    def predict(self, batch: list[int]) -> list[int]:
        seen.inc(len(batch))
        level.set(1)
        while 0 in batch and not Path(__file__).with_name("gate").exists():
            time.sleep(0.005)
        return [2 * sample for sample in batch]

node = forebay.node(Doubles)

@forebay.compose
def graph(x: int) -> int:
    return node(node(x))

serving = forebay.Serving.new(lambda options: lambda batch: batch)
"""
PIPELINE = """
from paddle_serving_server.web_service import Op, WebService

class Echo(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        return {"x": 1}, False, None, ""

    def process(self, feed_batch, typical_logid=0):
        return {"y": [1]}, 0, ""

class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Echo(name="echo", input_ops=[read_op])

service = Service(name="echo")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""

need = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="there is no Prometheus (Debian: apt-get install prometheus)",
)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def lint(page):
    found = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@need
@pytest.mark.parametrize("what", ["Doubles", "graph", "serving"])
def test_the_linter_is_silent(serve, model, what):
    server = serve(f"{model}:{what}", "--workers", "1")
    if what == "serving":
        lint(server.client.get("/metrics").text)
        return
    assert server.call(what.lower(), 1).status_code == 200
    eventually(lambda: "app_level{" in server.client.get("/metrics").text)
    lint(server.client.get("/metrics").text)


@need
def test_the_linter_is_silent_about_pipelines(serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yml").write_text(
        "http_port: 18281\nrpc_port: 18282\ndag:\n  is_thread_op: true\nop:\n  echo:\n    concurrency: 1\n"
    )
    (tmp_path / "service.py").write_text(PIPELINE)
    server = serve(tmp_path / "service.py")
    lint(server.client.get("/metrics").text)


def gateway_metrics(model):
    """What an inference gateway asks for by our recipe, as queries: requests that wait, and that run."""
    text = RECIPE.read_text().replace('"chat"', f'"{model}"')
    return [re.findall(rf"{name}RequestsSpec: (.*)", text)[0] for name in ("queued", "running")]


@need
def test_prometheus_scrapes_it(serve, model, tmp_path):
    server = serve(f"{model}:Doubles", "--worker-kind", "thread", "--api-key", "sesame", "--public-metrics")
    server.client.headers["x-api-key"] = "sesame"
    server.call("doubles", 1)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: forebay, static_configs: [{{targets: ['127.0.0.1:{server.port}']}}]}}]\n"
    )
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as prometheus:

        def value(query):
            try:
                found = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}).json()
            except (httpx.TransportError, ValueError):
                return None
            result = found.get("data", {}).get("result")
            return float(result[0]["value"][1]) if result else None

        try:
            eventually(lambda: value('forebay_requests_total{endpoint="doubles",code="ok"}') == 1.0)
            assert value("up") == 1.0
            assert value("app_seen_total") == 1.0
            queued, running = gateway_metrics("doubles")
            with concurrent.futures.ThreadPoolExecutor() as clients:  # issue 48
                clients.submit(server.call, "doubles", 0)
                eventually(lambda: server.metric("forebay_running_requests") == 1)
                for sample in (1, 2):
                    clients.submit(server.call, "doubles", sample)
                eventually(lambda: (value(running), value(queued)) == (1.0, 2.0))
                model.with_name("gate").touch()
            eventually(lambda: (value(running), value(queued)) == (0.0, 0.0))
        finally:
            prometheus.terminate()
