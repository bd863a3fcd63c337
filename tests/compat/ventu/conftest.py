# SPDX-License-Identifier: Apache-2.0
"""A raw batching service to put in front of workers, a WSGI client, and processes of both the original and ours."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import httpx
import msgspec
import pytest
from tests.ports import free_port
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
LENGTHS = HERE / "projects" / "lengths.py"
ORIGINAL = HERE.parents[2] / ".venv" / "environments" / "ventu" / "bin" / "python"
OURS = """\
import runpy, sys
from forebay.surfaces.ventu import shim
shim.install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FOREBAY = [sys.executable, "-m", "forebay"]


class Front:
    """The batching service's side of the protocol, written from its description and not from our codec."""

    def __init__(self, address):
        self.listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        if not isinstance(address, str):
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(address)
        self.listener.listen()
        self.listener.settimeout(PATIENCE_S)
        self.connection: Any = None

    def accept(self):
        """Waits for a worker and for its first message."""
        self.hang_up()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(PATIENCE_S)
        assert self.exactly(4) == b"\0\0\0\0"
        return self

    def exactly(self, count):
        data = b""
        while len(data) < count:
            piece = self.connection.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def send(self, payload):
        self.connection.sendall(len(payload).to_bytes(4, "big") + payload)

    def receive(self):
        return self.exactly(int.from_bytes(self.exactly(4), "big"))

    def ask(self, *bodies):
        """Sends a batch; returns the result of each job, None for one left out, and which of them are errors."""
        jobs = {str(uuid.uuid4()): body for body in bodies}
        self.send(msgspec.msgpack.encode(jobs))
        answer = msgspec.msgpack.decode(self.receive())
        ids = answer.pop("error_ids", "")
        errors = [ids[at : at + 36] for at in range(0, len(ids), 36)]
        assert set(answer) <= set(jobs)
        assert errors == [job for job in jobs if job in errors]  # in the order of the batch
        return [answer.get(job) for job in jobs], [job in errors for job in jobs]

    def hang_up(self):
        if self.connection is not None:
            self.connection.close()

    def close(self):
        self.hang_up()
        self.listener.close()


@pytest.fixture
def front_at():
    """Makes services at a path, or at a host and port."""
    with contextlib.ExitStack() as stack:

        def make(address):
            made = Front(address)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def front(front_at, tmp_path):
    """A service at a unix socket."""
    return front_at(str(tmp_path / "batch.socket"))


@pytest.fixture
def work(front):
    """Runs a model as a worker of `front`, in a thread."""
    with contextlib.ExitStack() as stack:

        def start(model):
            worker = model.sock
            thread = threading.Thread(target=model.run_unix, args=(front.listener.getsockname(),), daemon=True)
            thread.start()

            def end():
                worker.stop()
                thread.join(PATIENCE_S)
                assert not thread.is_alive()

            stack.callback(end)
            return front.accept()

        yield start


class Client:
    """Asks a WSGI application."""

    def __init__(self, app, loads=json.loads):
        self.app = app
        self.loads = loads

    def request(self, method, path, content=b"", headers=None, **more):
        environ = {}
        setup_testing_defaults(environ)
        environ |= {"REQUEST_METHOD": method, "PATH_INFO": path, "wsgi.input": io.BytesIO(content)}
        environ["CONTENT_LENGTH"] = str(len(content))
        environ["CONTENT_TYPE"] = (headers or {}).get("content-type", "")
        environ |= more
        began = []
        body = b"".join(self.app(environ, lambda *given: began.append(given)))
        (status, sent), *_ = began
        return httpx.Response(int(status.split()[0]), headers=sent, content=body)

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def post(self, content=b"", path="/inference", **more):
        return self.request("POST", path, content, **more)

    def metric(self, line):
        """The value of one line of the metrics page."""
        page = self.get("/metrics").text.splitlines()
        return next((float(found.rpartition(" ")[2]) for found in page if found.startswith(line + " ")), None)


@pytest.fixture
def ask():
    """Makes a client of a model's WSGI application."""
    return lambda model, **more: Client(model.app, **more)


class Process:
    """A program that runs until the test ends."""

    def __init__(self, command, log, **environment):
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=out, env={**os.environ, **environment}
            )

    def wait(self, within_s=PATIENCE_S):
        return self.process.wait(within_s)

    def end(self, number=signal.SIGTERM, within_s=PATIENCE_S):
        self.process.send_signal(number)
        return self.wait(within_s)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def run(tmp_path):
    """Starts programs: `run(sys.executable, "x.py")`; environment by keyword."""
    with contextlib.ExitStack() as stack:

        def start(*command, **environment):
            made = Process(command, tmp_path / f"log-{uuid.uuid4().hex}", **environment)
            stack.callback(made.kill)
            return made

        yield start


@pytest.fixture
def run_ours(run):
    """Runs a file written for the original, with our names in place of it."""
    return lambda file, *arguments, **environment: run(sys.executable, "-c", OURS, file, *arguments, **environment)


@pytest.fixture
def run_original(run):
    """Runs a file with the original."""
    if not ORIGINAL.exists():
        pytest.skip("the original is not installed; `make setup` does it")
    return lambda file, *arguments, **environment: run(ORIGINAL, file, *arguments, **environment)


@pytest.fixture(scope="session")
def lengths():
    """The project that both sides run."""
    return LENGTHS


@pytest.fixture
def free_ports():
    """Finds ports that were free a moment ago."""
    return lambda count: [free_port() for _ in range(count)]


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    return free_port()


def ready_at(server, eventually):
    """The address that a server of ours says it is ready at."""
    found = eventually(lambda: re.search(r"ready at (http://\S+)", server.log.read_text()), "being ready")
    return found[1]


@pytest.fixture
def batching(run, eventually):
    """Starts `forebay batching`; returns its URL."""
    return lambda *options: ready_at(run(*FOREBAY, "batching", "-port", "0", *options), eventually)


@pytest.fixture
def attaching(run, eventually, tmp_path):
    """A `forebay serve --attach`: its URL, and where workers attach."""
    address = tmp_path / "attach.socket"
    server = run(*FOREBAY, "serve", "--attach", f"unix:{address}", "--http-port", "0")
    return ready_at(server, eventually), address
