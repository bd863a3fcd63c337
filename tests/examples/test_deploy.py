# SPDX-License-Identifier: Apache-2.0
"""The recipes of examples/deploy, run or held to their schemas as far as that goes without a container engine. F59"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from tests.conftest import Server
from tests.waiting import PATIENCE_S, eventually

from forebay.server.config import SECTIONS
from forebay.types.settings import declared

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
PAGES = sorted((ROOT / "docs/how-to/deploy").glob("*.md"))
SCHEMAS = ROOT / ".venv/environments/deploy/bin"
SETTINGS = [setting for struct in SECTIONS for setting in declared(struct).values()]
MODEL = """
import time
from pathlib import Path
import forebay

class Shout(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        time.sleep(0.002)
        return [text.upper() for text in batch]

class Parts(forebay.Model):
    def predict(self, batch: list[str]):
        yield ["first"] * len(batch)
        while not Path(batch[0]).exists():
            time.sleep(0.005)
        yield ["second"] * len(batch)
"""


def run(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **more)


def schemas(program):
    if not (SCHEMAS / program).exists():
        pytest.skip("no environment with schemas: make environment NAME=deploy")
    return SCHEMAS / program


def test_a_page_shows_its_recipes_as_they_are():
    pages = "".join(page.read_text() for page in PAGES)
    block = r"\]\(\.\./\.\./\.\./examples/deploy/([\w.]+)\):\n\n```\w+\n(.*?)```"
    shown = dict(re.findall(block, pages, re.DOTALL))
    assert set(shown) >= {"Dockerfile", "compose.yaml", "forebay.service", "kubernetes.yaml", "nginx.conf"}
    assert [name for name, text in shown.items() if text != (DEPLOY / name).read_text()] == []


@pytest.mark.parametrize("path", [*PAGES, *sorted(DEPLOY.iterdir())], ids=lambda path: path.name)
def test_a_recipe_names_only_settings_that_there_are(path):
    text = path.read_text()
    variables = {setting.variable for setting in SETTINGS}
    assert set(re.findall(r"\bFOREBAY_[A-Z_]+", text)) - variables == set()
    flags = {setting.written.flag for setting in SETTINGS}
    assert set(re.findall(r"`(--[a-z-]+)[ `]", text)) - flags <= {"--gpus"}  # Docker's
    for command in re.findall(r"forebay serve (.*)", text):
        assert set(re.findall(r"(?<= )--[a-z-]+", command)) - flags == set()


def test_the_compose_file_fits_its_schema():
    result = run(schemas("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_manifests_fit_their_schemas():
    result = run(schemas("kubernetes-validate"), "--strict", DEPLOY / "kubernetes.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.count("passed for resource") + result.stdout.count("passed for resource") == 4


def test_whoever_stops_the_server_waits_longer_than_its_drain():
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = {one["name"]: one["value"] for one in container["env"]}["FOREBAY_DRAIN_S"]
    # Two seconds after the drain the server ends as it is.
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(drain) + 2
    assert pod["terminationGracePeriodSeconds"] > needed
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["model"]
    assert int(service["stop_grace_period"].rstrip("s")) > int(service["environment"]["FOREBAY_DRAIN_S"]) + 2
    unit = (DEPLOY / "forebay.service").read_text()
    (drain,), (stop,) = re.findall(r"--drain-s (\d+)", unit), re.findall(r"TimeoutStopSec=(\d+)", unit)
    assert int(stop) > int(drain) + 2


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / "forebay.service"
    unit.write_text((DEPLOY / "forebay.service").read_text().replace("/opt/my-model/venv/bin/forebay", "/bin/true"))
    result = run("systemd-analyze", "verify", unit)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    result = run("systemd-analyze", "security", "--offline=true", "--threshold=25", unit)  # tenths of its ten points
    assert result.returncode == 0, result.stdout[-300:] + result.stderr


class Image:
    """What a Dockerfile says, done below a folder instead of in a container, and by uv in the place of pip."""

    def __init__(self, text, context, root):
        self.context, self.root = context, root
        self.workdir, self.env, self.user, self.command, self.health = "/", {}, "root", [], []
        self.stages = 0
        for line in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines():
            if line.strip():
                word, rest = line.split(None, 1)
                getattr(self, word)(rest.strip())

    def place(self, path):
        return self.root / (Path(self.workdir) / path).relative_to("/")

    def FROM(self, rest):
        assert rest.startswith("python:3.11-slim")
        self.stages += 1

    def WORKDIR(self, rest):
        self.workdir = rest
        self.place(".").mkdir(parents=True, exist_ok=True)

    def COPY(self, rest):
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            assert self.place(sources[1]).is_dir()
            return
        for source in sources:
            if (self.context / source).is_dir():
                shutil.copytree(self.context / source, self.place(target))
            else:
                shutil.copy(self.context / source, self.place(target))

    def RUN(self, rest):
        if rest.startswith("useradd"):
            return
        uv = Path(sys.executable).with_name("uv")
        python = self.root / "opt/venv/bin/python"
        for said, done in {
            "python -m venv /opt/venv": f"{uv} venv -q {self.root / 'opt/venv'}",
            "/opt/venv/bin/pip install --no-cache-dir": f"{uv} pip install -q --system-certs --python {python}"
            f" -c {ROOT / 'constraints.txt'}",
        }.items():
            assert said in rest
            rest = rest.replace(said, done)
        result = run("sh", "-c", rest, cwd=self.place("."))
        assert result.returncode == 0, result.stderr

    def ENV(self, rest):
        name, value = rest.split("=", 1)
        self.env[name] = value.replace("/opt/venv/bin", str(self.root / "opt/venv/bin")).replace(
            "$PATH", os.environ["PATH"]
        )

    def USER(self, rest):
        self.user = rest

    def EXPOSE(self, rest):
        assert rest == "8080"

    def HEALTHCHECK(self, rest):
        self.health = json.loads(rest.partition(" CMD ")[2])

    def CMD(self, rest):
        self.command = json.loads(rest)


def test_what_the_dockerfile_says_makes_a_server_that_is_healthy(tmp_path, cli):
    context = tmp_path / "context"
    assert cli("init", context).returncode == 0
    shutil.copy(DEPLOY / "requirements.txt", context)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", context / "wheels"]
    assert run(*command, cwd=ROOT).returncode == 0
    image = Image((DEPLOY / "Dockerfile").read_text(), context, tmp_path / "image")
    assert (image.stages, image.user) == (2, "10001")
    program, *options, target = image.command
    assert target == "."
    forebay = shutil.which(program, path=image.env["PATH"])
    server = Server(image.place(target), command=[forebay, *options], env=image.env)
    try:
        server.wait_ready()
        assert server.host == "0.0.0.0"
        assert image.place("forebay.yaml").is_file()
        url = f"http://127.0.0.1:{server.port}"
        assert httpx.post(f"{url}/models/context", json={"text": "a kind word"}).json()["is_kind"] is True
        health = [part.replace("8080", str(server.port)) for part in image.health]
        environment = {**os.environ, **image.env}
        assert run(*health, env=environment).returncode == 0
        server.signal()
        assert server.wait() == 0
        assert run(*health, env=environment).returncode != 0
    finally:
        server.stop()


@pytest.fixture
def nginx():
    """Starts nginx with the recipe in front of servers; it listens at a socket of its own, so no port can be taken."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no nginx (Debian: apt-get install nginx-light)")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))

        def start(*servers):
            text = (DEPLOY / "nginx.conf").read_text().replace("listen 80;", f"listen unix:{folder}/socket;")
            for said, server in zip(("127.0.0.1:8080", "127.0.0.1:8081"), servers, strict=True):
                assert text.count(said) == 1
                text = text.replace(said, f"{server.host}:{server.port}")
            (folder / "forebay.conf").write_text(text)
            own = "".join(
                f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            )
            user = "user root;" if os.geteuid() == 0 else ""
            http = f"access_log off; {own} include {folder}/forebay.conf;"
            (folder / "nginx.conf").write_text(
                f"{user} daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ {http} }}"
            )
            command = [program, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
            log = stack.enter_context((folder / "log").open("w+"))
            process = subprocess.Popen(command, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            eventually((folder / "socket").exists)
            assert process.poll() is None

            def client():
                transport = httpx.HTTPTransport(uds=str(folder / "socket"))
                return stack.enter_context(
                    httpx.Client(transport=transport, base_url="http://models.example/ml", timeout=PATIENCE_S)
                )

            return client

        yield start


@pytest.fixture
def two(serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = ("--worker-kind", "thread", "--allowed-host", "models.example")
    servers = [serve(path, *options, ready=False) for _ in range(2)]
    return [server.wait_ready() for server in servers]


def test_nginx_hands_on_prefix_pieces_and_large_bodies(two, nginx, tmp_path):
    client = nginx(*two)()
    answer = client.post("/models/shout", json="hello")
    assert answer.json() == "HELLO"
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])  # made by nginx, so that both logs name it
    assert client.get("/openapi.json").json()["servers"] == [{"url": "."}]
    assert 'src="docs/docs-init.js"' in client.get("/docs").text
    assert client.get("/docs/docs-init.js").status_code == 200
    assert len(client.post("/models/shout", json="a" * 2_000_000).json()) == 2_000_000
    go_on = tmp_path / "go-on"
    with client.stream("POST", "/models/parts", json=str(go_on)) as stream:
        parts = (line for line in stream.iter_lines() if line)
        assert next(parts) == 'data: "first"'
        go_on.touch()  # the model waits for it: a proxy that gathered the answer would have handed on nothing yet
        assert next(parts) == 'data: "second"'


def test_a_server_that_drains_behind_nginx_loses_no_request(two, nginx):
    client = nginx(*two)
    answers, stopped = [], threading.Event()

    def ask(mine):
        while not stopped.is_set():
            answers.append(mine.post("/models/shout", json="a").status_code)

    askers = [threading.Thread(target=ask, args=(client(),)) for _ in range(6)]
    for asker in askers:
        asker.start()
    try:
        eventually(lambda: all(server.metric("forebay_requests_total", code="ok") > 20 for server in two))
        two[0].signal()
        assert two[0].wait() == 0
        later = len(answers) + 100
        eventually(lambda: len(answers) > later)
    finally:
        stopped.set()
        for asker in askers:
            asker.join()
    assert set(answers) == {200}
