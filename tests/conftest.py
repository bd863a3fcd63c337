# SPDX-License-Identifier: Apache-2.0
"""Real servers and raw connections for the tests that stand where a user stands: at the socket and at the shell."""

import contextlib
import gc
import inspect
import json
import logging
import mmap
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import hypothesis
import pytest
from tests.browser import Browser
from tests.forked import COMMAND, Forked
from tests.patience import pytest_runtest_makereport, pytest_terminal_summary  # noqa: F401 - pytest calls them
from tests.waiting import PATIENCE_S, eventually

from forebay.observe.logs import model_log

# An example takes as long as the machine is busy, and so does drawing it.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# Hundreds of servers are started, and compiling what each of them imports takes longer than all the rest of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests read what is told as it stands there.
os.environ.pop("FORCE_COLOR", None)

# Who does not say how long an answer may take means that it must come: httpx would give up after five seconds.
_usual = inspect.signature(httpx.Client).parameters["timeout"].default
_usual.connect = _usual.read = _usual.write = _usual.pool = PATIENCE_S

# Tests that make models with OpenVINO import it before forebay does, which keeps it from reporting that to its maker.
sys.modules.setdefault("openvino_telemetry", cast("Any", None))

# Who starts the tests with nohup has them ignore it, and what they start as well; servers are to hear it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

MODELS = Path(__file__).parent / "models"
FOREBAY = COMMAND


def pytest_collection_finish():
    """Keep walks of the collector short, of which tests ask for many: all modules of tests are loaded now, and stay."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Spell what is no text: one such character in a log that pytest keeps ended the whole run under xdist."""  # F110
    return _as_text((yield))


def _as_text(told):
    if isinstance(told, str):
        return told.encode(errors="backslashreplace").decode()
    if isinstance(told, dict):
        return {_as_text(key): _as_text(value) for key, value in told.items()}
    return type(told)(map(_as_text, told)) if type(told) in {list, tuple} else told


@dataclass
class Answer:
    """One HTTP answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    lines: list[str] = field(default_factory=list)

    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json()["error"]


class Wire:
    """A connection that sends what it is told to, however wrong, and reads answers one by one."""

    def __init__(self, server, extra=""):
        self.socket = socket.create_connection((server.host, server.port), timeout=PATIENCE_S)
        if server.trust is not None:
            self.socket = server.trust.wrap_socket(self.socket, server_hostname="localhost")
        self.extra = extra
        self.buffer = b""

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)
        return self

    def request(self, method, target, body=b"", *, headers=(), version="1.1"):
        """The bytes of a request with a body of a known length."""
        lines = [f"{method} {target} HTTP/{version}", "host: localhost", *headers, *self.extra.splitlines()]
        if body or method == "POST":
            lines.append(f"content-length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def head(self, method, target, *headers):
        """The bytes of a head that says nothing of a body but what `headers` say."""
        lines = [f"{method} {target} HTTP/1.1", "host: localhost", *self.extra.splitlines(), *headers, "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def ask(self, method, target, body=b"", **more):
        self.send(self.request(method, target, body, **more))
        return self.read(has_body=method != "HEAD")

    def _more(self):
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(self.buffer[:200])
        self.buffer += data

    def _until(self, mark):
        while mark not in self.buffer:
            self._more()
        found, self.buffer = self.buffer.split(mark, 1)
        return found

    def _exactly(self, count):
        found = bytearray(self.buffer)
        while len(found) < count:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError(bytes(found[:200]))
            found += data
        self.buffer = bytes(found[count:])
        return bytes(found[:count])

    def read_head(self):
        first, *rest = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {}
        for line in rest:
            name, value = line.split(":", 1)
            assert name.lower() not in headers, f"two {name} headers"
            headers[name.lower()] = value.strip()
        assert first.startswith("HTTP/1.1 "), first
        return Answer(int(first.split()[1]), headers, lines=rest)

    def read_chunk(self):
        """One chunk of a chunked answer; empty at its end."""
        data = self._exactly(int(self._until(b"\r\n"), 16))
        assert self._exactly(2) == b"\r\n"
        return data

    def read(self, *, has_body=True):
        answer = self.read_head()
        if not has_body or answer.status in {100, 204, 304}:
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            while chunk := self.read_chunk():
                answer.body += chunk
        elif "content-length" in answer.headers:
            answer.body = self._exactly(int(answer.headers["content-length"]))
        else:
            answer.body, self.buffer = self.buffer + self.read_rest(), b""
        return answer

    def read_rest(self):
        """Everything until the server closes; fails if it does not."""
        found = bytearray()
        while True:
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                return bytes(found)
            if not data:
                return bytes(found)
            found += data

    def is_closed_by_server(self):
        return self.read_rest() == b"" and self.buffer == b""


class Server:
    """A server in a process of its own, with what it wrote to stderr."""

    def __init__(self, target, *options, command=FOREBAY, port=0, ca=None, env=None):
        self.command = [*command, "serve"] if command is FOREBAY else list(command)
        self.command += [*([] if target is None else [str(target)]), "--http-port", str(port), *options]
        self.lines: list[str] = []
        self.trust = None
        self.verify = True
        if ca is not None:
            self.trust = ssl.create_default_context()
            ca.configure_trust(self.trust)
            self.verify = self.trust
        self._ready = threading.Event()
        self.process = (Forked if command is FOREBAY else subprocess.Popen)(
            self.command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line)
                found = re.search(r"ready at (https?)://([^:]+):(\d+)", line)
                if found:
                    self.host, self.port = found[2], int(found[3])
                    self.url = found[0].removeprefix("ready at ")
                    self._ready.set()
        self._ready.set()

    def wait_ready(self):
        assert self._ready.wait(PATIENCE_S), self.log
        assert hasattr(self, "url"), self.log  # it may have closed its errors and not have ended yet
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=self.verify)
        return self

    @property
    def log(self):
        return "".join(self.lines)

    @property
    def records(self):
        """The lines of the log that are JSON."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def connect(self, extra=""):
        return Wire(self, extra)

    def call(self, model, sample, **headers):
        """POSTs a sample as JSON to a model."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"/models/{model}", json=sample, headers=named)

    def metric(self, name, **labels):
        """The value of a metric, summed over what `labels` does not name."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, timeout_s=PATIENCE_S):
        """Waits for the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def stop(self):
        if hasattr(self, "client"):
            self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(PATIENCE_S)


@pytest.fixture(scope="session")
def models():
    """The folder of the models that tests serve."""
    return MODELS


@pytest.fixture(scope="module")
def launch():
    """Starts servers that the tests of a file share: `launch("zoo.py", "--workers", "2")`."""
    with contextlib.ExitStack() as stack:
        running = {}

        def start(target, *options, **more):
            key = (str(target), options, str(more))
            if key not in running:
                server = Server(None if target is None else MODELS / target, *options, **more)
                stack.callback(server.stop)
                running[key] = server.wait_ready()
            return running[key]

        yield start


@pytest.fixture(scope="module")
def browser():
    """A Chromium that the tests of a file share."""
    with Browser() as started:
        yield started


@pytest.fixture
def serve():
    """Starts servers that live as long as the test and may be stopped or broken by it."""
    with contextlib.ExitStack() as stack:

        def start(target, *options, ready=True, **more):
            server = Server(None if target is None else MODELS / target, *options, **more)
            stack.callback(server.stop)
            return server.wait_ready() if ready else server

        yield start


@pytest.fixture
def cli():
    """Runs a `forebay` command to its end."""

    def run(*arguments, input=None, timeout=PATIENCE_S, text=True, **more):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr")[input is None :], subprocess.PIPE)
        with Forked([*FOREBAY, *map(str, arguments)], **pipes, text=text, **more) as process:
            try:
                told = process.communicate(input, timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, *told)

    return run


class Disk:
    """A disk of a quarter of a megabyte."""

    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        for path in self.folder.rglob("*"):
            if path.is_file():  # the rest of its last page would be room
                with path.open("ab") as file:
                    file.write(b"\n" * (-path.stat().st_size % mmap.PAGESIZE))
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            for size in (4096, 512, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def empty(self):
        (self.folder / "ballast").unlink()


@pytest.fixture
def small_disk(tmp_path):
    """A real disk that a test may fill: any user may mount one in namespaces of their own, and look into these."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = 'mount -t tmpfs -o size=256k,mode=700 tmpfs "$0" && echo mounted && read -r _'
    holder = subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("this user may not mount a small disk, not even in a namespace")
        yield Disk(Path(f"/proc/{holder.pid}/root{folder}"))


@pytest.fixture(autouse=True)
def _own_log():
    """What a command that runs in this process makes of its log ends with the test: its stream is closed then."""
    loggers = [logging.getLogger(name) for name in ("", "forebay", "uvicorn")]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    level = model_log.level
    yield
    model_log.level = level
    for one, handlers, lowest, propagates in before:
        if one.handlers != handlers:
            one.handlers[:] = handlers
            one.setLevel(lowest)
            one.propagate = propagates


class Clock:
    """The clock of this process, which goes on as ever and which a test may put forward."""

    def __init__(self):
        self._now = time.monotonic
        self._ahead_s = 0.0

    def __call__(self):
        return self._now() + self._ahead_s

    def forward(self, seconds):
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock to put forward where something is to be late: timers of asyncio go by it, too."""
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture():
    """Waits until a check is true."""
    return eventually


@pytest.fixture
def at_once():
    """Runs functions side by side in threads and returns what they returned, or raised, in order."""

    def run(*functions):
        results: list[Any] = [None] * len(functions)

        def call(index, function):
            try:
                results[index] = function()
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return results

    return run
