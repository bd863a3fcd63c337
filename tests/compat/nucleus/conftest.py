# SPDX-License-Identifier: Apache-2.0
"""Nucleus projects in folders of their own, served by the real command."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
import yaml
from tests.forked import COMMAND, Forked
from tests.waiting import PATIENCE_S

from forebay.surfaces.nucleus.runner import NucleusRunner
from forebay.workers.runner import WorkerContext

START_S = 120.0


def write_project(folder, handler, config=None, **files):
    """Writes a project; `files` are further files by name, with `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "handler.py").write_text(textwrap.dedent(handler))
    (folder / "nucleus.yaml").write_text(yaml.safe_dump({"type": "python", "path": "handler.py", **(config or {})}))
    for name, text in files.items():
        file = folder / name.replace("__", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder


@dataclass
class Server:
    """A running `forebay serve`."""

    folder: Path
    state: Path
    process: subprocess.Popen
    out: Path
    err: Path
    url: str = ""

    def client(self, **more):
        # Loading certificates nobody needs here takes longer than most of what is measured.
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False, **more)

    def request(self, method="GET", path="/", **more):
        with self.client() as client:
            return client.request(method, path, **more)

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    @property
    def logged(self):
        """What was logged as JSON on stdout."""
        whole, _, _ = self.out.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def has_logged(self, text, key="message"):
        return any(text in line.get(key, "") for line in self.logged)

    def gauge(self, name):
        """The value of a metric that has one line."""
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", self.request(path="/metrics").text, re.MULTILINE)
        return None if found is None else float(found[1])

    def wait_ready(self, within_s=START_S):
        deadline = time.monotonic() + within_s
        while not (found := re.search(r"ready at ((?:http|grpc)://\S+)", self.err.read_text())):
            assert self.process.poll() is None, self.err.read_text() + self.out.read_text()
            assert time.monotonic() < deadline, self.err.read_text() + self.out.read_text()
            time.sleep(0.02)
        self.url = found.group(1)
        return self

    def stop(self, number=signal.SIGTERM, within_s=PATIENCE_S):
        self.process.send_signal(number)
        return self.process.wait(within_s)


@pytest.fixture(scope="session")
def parallel():
    """Calls a function with each of the values at once; returns the results in order."""

    def run(function, values):
        values = list(values)
        with ThreadPoolExecutor(len(values)) as threads:
            return list(threads.map(function, values))

    return run


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Starts servers and stops them at the end of the module."""
    started = []

    def start(handler, config=None, *options, wait=True, state=None, **files):
        folder = write_project(tmp_path_factory.mktemp("project"), handler, config, **files)
        state = state or tmp_path_factory.mktemp("state")
        out, err = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
        command = [*COMMAND, "serve", str(folder), "--http-port", "0", "--state-dir", str(state), *options]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = Forked(command, stdout=stdout, stderr=stderr, env=dict(os.environ))
        server = Server(folder, state, process, out, err)
        started.append(server)
        return server.wait_ready() if wait else server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
    for server in started:
        try:
            server.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


class Item(msgspec.Struct):
    """A request as a worker sees it."""

    body: bytes
    params: dict
    size: int = 1


def item(verb="post", body=b"", query=b"", content_type=b"application/json"):
    return Item(body, {"verb": verb, "query": query, "headers": [[b"content-type", content_type]]})


@pytest.fixture
def open_runner(tmp_path, monkeypatch):
    """Opens a handler in this process, as a worker does in its own."""

    def run(handler, config=None, *, batched=False):
        folder = write_project(tmp_path / "project", handler)
        monkeypatch.delitem(sys.modules, "cortex_handler", raising=False)
        monkeypatch.chdir(folder)
        runner = NucleusRunner(
            folder / "handler.py", config=yaml.safe_dump(config or {}), batched=batched, requirements="requirements.txt"
        )
        runner.open(WorkerContext())
        return runner

    yield run
    sys.modules.pop("cortex_handler", None)


@pytest.fixture
def ask():
    """Asks a runner and returns status, media type and body."""

    def run(runner, verb="post", body=b"", query=b"", content_type=b"application/json"):
        (outcome,) = runner.run([item(verb, body, query, content_type)])
        status, headers, answer = outcome
        return status, dict(map(tuple, headers)).get(b"content-type", b"").decode(), answer

    return run


@pytest.fixture
def items():
    return item
