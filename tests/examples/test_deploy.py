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
from importlib.metadata import distribution, version
from pathlib import Path

import httpx
import pytest
from tests.conftest import FOREBAY, Server
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

from forebay.server.config import SECTIONS, WorkerConfig
from forebay.types.settings import declared

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
PAGES = sorted((ROOT / "docs/how-to/deploy").glob("*.md"))
SCHEMAS = ROOT / ".venv/environments/deploy/bin"
SETTINGS = [setting for struct in SECTIONS for setting in declared(struct).values()]
GENERATES = {"--force", "--output", "--image", "--python-version", "--replicas", "--wire-tls", "--ray", "--split"}
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
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False, **more)


def schemas(program):
    if not (SCHEMAS / program).exists():
        pytest.skip("no environment with schemas: make environment NAME=deploy")
    return SCHEMAS / program


def test_a_page_shows_its_recipes_as_they_are():
    pages = "".join(page.read_text() for page in PAGES)
    block = r"\]\(\.\./\.\./\.\./examples/deploy/([\w./-]+)\):\n\n```\w+\n(.*?)```"
    shown = dict(re.findall(block, pages, re.DOTALL))
    kubernetes = {"kubernetes/deployment.yaml", "kubernetes/autoscaling.yaml", "prometheus-adapter.yaml", "kserve.yaml"}
    assert set(shown) >= {"Dockerfile", "compose.yaml", "forebay.service", "nginx.conf"} | kubernetes
    assert [name for name, text in shown.items() if text != (DEPLOY / name).read_text()] == []


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted(path for path in DEPLOY.rglob("*") if path.is_file())], ids=lambda path: path.name
)
def test_a_recipe_names_only_settings_that_there_are(path):
    text = path.read_text()
    variables = {setting.variable for setting in SETTINGS}
    assert set(re.findall(r"\bFOREBAY_[A-Z_]+", text)) - variables == set()
    written = {setting.written.flag: setting.kind for setting in [*SETTINGS, *declared(WorkerConfig).values()]}
    flags = written.keys() | {flag.replace("--", "--no-", 1) for flag, kind in written.items() if flag and kind is bool}
    assert set(re.findall(r"`(--[a-z-]+)[ `]", text)) - flags <= {"--gpus", "--build-context", *GENERATES}  # Docker's
    for command in re.findall(r"forebay (?:serve|worker)((?:.*\\\n)*.*)", text):
        assert set(re.findall(r"(?<= )--[a-z-]+", command)) - flags == set()


def test_the_compose_file_of_nginx_fits_its_schema():
    file = DEPLOY / "compose.nginx.yaml"
    result = run(schemas("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_systemd_waits_longer_than_the_drain():
    unit = (DEPLOY / "forebay.service").read_text()
    (drain,), (stop,) = re.findall(r"--drain-s (\d+)", unit), re.findall(r"TimeoutStopSec=(\d+)", unit)
    assert int(stop) > int(drain) + 2  # two seconds after the drain the server ends as it is


@pytest.mark.parametrize("role", ["owner", "front", "worker"])
def test_systemd_finds_nothing_wrong_with_the_unit_of_each_machine(tmp_path, role):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / "forebay.service"
    (tmp_path / "forebay.service.d").mkdir()
    for place, file in ((unit, "forebay.service"), (tmp_path / "forebay.service.d/role.conf", f"machines/{role}.conf")):
        place.write_text((DEPLOY / file).read_text().replace("/opt/my-model/venv/bin/forebay", "/bin/true"))
    result = run("systemd-analyze", "verify", unit)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_units_of_several_machines_answer_together(tmp_path):
    openssl = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "chain.pem"]
    assert run("openssl", *openssl.split(), *files).returncode == 0
    shutil.copy(tmp_path / "chain.pem", tmp_path / "ca.pem")
    (tmp_path / "secret").write_text("a secret of these three machines\n")
    (tmp_path / "model.py").write_text(MODEL.partition("class Parts")[0])
    port = free_port()
    here = {
        "/etc/forebay": str(tmp_path),
        "tcp:0.0.0.0:9100": f"tcp:localhost:{port}",
        "iris:9100": f"localhost:{port}",
    }

    def command(role):
        text = (DEPLOY / f"machines/{role}.conf").read_text()
        (line,) = re.findall(r"^ExecStart=\S+/forebay ((?:.*\\\n)*.*)", text, re.MULTILINE)
        for there, it in {**here, "0.0.0.0": "127.0.0.1"}.items():
            line = line.replace(there, it)
        return ["env", "-C", str(tmp_path), *FOREBAY, *line.replace("\\\n", "").split()]

    with contextlib.ExitStack() as stack:
        servers = [Server(None, command=command(role)) for role in ("owner", "front")]
        for server in servers:
            stack.callback(server.stop)
        worker = subprocess.Popen(command("worker"), stderr=subprocess.DEVNULL)
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        front = servers[1].wait_ready()
        eventually(lambda: front.call("shout", "hello").status_code == 200)


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / "forebay.service"
    unit.write_text((DEPLOY / "forebay.service").read_text().replace("/opt/my-model/venv/bin/forebay", "/bin/true"))
    result = run("systemd-analyze", "verify", unit)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    result = run("systemd-analyze", "security", "--offline=true", "--threshold=25", unit)  # tenths of its ten points
    assert result.returncode == 0, result.stdout[-300:] + result.stderr


@pytest.fixture
def from_an_index(tmp_path):
    """The environment of a forebay that is installed from an index: nothing says that it came from elsewhere."""
    about = Path(str(distribution("forebay").locate_file(f"forebay-{version('forebay')}.dist-info")))
    shutil.copytree(about, tmp_path / "site" / about.name, ignore=shutil.ignore_patterns("direct_url.json"))
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


@pytest.fixture
def project(tmp_path, cli, from_an_index):
    """The project that the recipes are for, with the files that were generated for it."""
    folder = tmp_path / "my-model"
    assert cli("init", folder).returncode == 0
    shutil.copy(DEPLOY / "requirements.txt", folder)
    (folder / "keys.txt").write_text("a-key\n")
    options = "--workers 2 --api-key @keys.txt --image registry.example/my-model:1 --python-version 3.11"
    command = (sys.executable, "-m", "forebay", "generate", ".", *options.split())
    done = run(*command, cwd=folder, env=from_an_index)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_recipes_are_what_generate_writes(project):
    files = [file for file in (project / "deploy").rglob("*") if file.is_file()]
    assert len(files) == 9
    changed = {
        file.name for file in files if file.read_text() != (DEPLOY / file.relative_to(project / "deploy")).read_text()
    }
    assert changed == set()


@pytest.fixture
def builder(tmp_path):
    """Runs buildah, which needs no engine; the image that others begin with has the programs of this machine."""
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("no buildah, or not root (Debian: apt-get install buildah)")
    if run("/usr/bin/python3", "-c", "import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))").returncode:
        pytest.skip("no Python 3.11 of Debian's here, with python3-venv")
    store = ("--root", tmp_path / "store", "--runroot", tmp_path / "run", "--storage-driver", "vfs")

    def buildah(command, *arguments, **more):
        isolated = ("--isolation", "chroot", "-v", "/usr:/usr:ro") if command in {"bud", "run"} else ()
        return ["buildah", *store, command, *isolated, *arguments]

    root = tmp_path / "base/root"
    for folder in ("etc", "usr", "tmp", "root", "proc", "dev", "sys", "var", "run"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        shutil.copy(f"/{link}", root / link, follow_symlinks=False)
    for file in ("login.defs", "nsswitch.conf", "ld.so.cache"):
        shutil.copy(f"/etc/{file}", root / "etc")
    for file in ("passwd", "group", "shadow"):  # this machine may have a user of the name that the recipe makes
        lines = Path(f"/etc/{file}").read_text().splitlines(keepends=True)
        (root / "etc" / file).write_text("".join(line for line in lines if not line.startswith("forebay:")))
    shutil.copytree("/etc/ssl", root / "etc/ssl")
    (tmp_path / "base/Dockerfile").write_text(
        "FROM scratch\nCOPY root/ /\nENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
    )
    result = run(*buildah("bud", "-t", "python:3.11-slim", tmp_path / "base"))
    assert result.returncode == 0, result.stderr
    return buildah


@pytest.mark.slow
def test_what_the_dockerfile_says_makes_a_server_that_is_healthy(project, builder, tmp_path):
    (project / "deploy/Dockerfile").unlink()
    done = run(sys.executable, "-m", "forebay", "generate", ".", "--force", "--python-version", "3.11", cwd=project)
    assert done.returncode == 0, done.stderr
    (tmp_path / "pip.conf").write_text("[global]\nretries = 3\n")
    secret = f"id=pip.conf,src={tmp_path / 'pip.conf'}"
    ignored = project / "deploy/Dockerfile.dockerignore"
    options = ("--pull-never", "--ignorefile", ignored, "--secret", secret, "-f", project / "deploy/Dockerfile")
    options += ("--build-context", f"wheels={project / 'deploy/wheels'}")
    result = run(*builder("bud", *options, "-t", "my-model:1", project))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    container = run(*builder("from", "--pull-never", "my-model:1")).stdout.strip()
    told = json.loads(run(*builder("inspect", container)).stdout)["OCIv1"]["config"]
    inside = builder("run", "--user", told["User"], "--env", "FOREBAY_HOST=127.0.0.1", container, "--")
    assert (told["User"], told["WorkingDir"], [*told["ExposedPorts"]]) == ("10001", "/app", ["8080/tcp"])
    kept = run(*inside, "/bin/sh", "-c", "ls -a; whoami; touch model.py a /opt/a || stat -c %U:%a . model.py").stdout
    assert {"model.py", "forebay", "root:755", "root:644"} <= {*kept.split()}
    assert {"deploy", "keys.txt", "a"} & {*kept.split()} == set()
    server = Server(None, command=[*map(str, inside), *told["Cmd"]])
    try:
        server.wait_ready()
        assert httpx.post(f"{server.url}/models/my-model", json={"text": "a kind word"}).json()["is_kind"] is True
        text = (project / "deploy/Dockerfile").read_text().partition("HEALTHCHECK")[2].partition(" CMD ")[2]
        health = [part.replace("8080", str(server.port)) for part in json.loads(text.splitlines()[0])]
        assert run(*inside, *health).returncode == 0
    finally:
        server.stop()
    assert run(*inside, *health).returncode != 0


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
