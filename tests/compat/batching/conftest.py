# SPDX-License-Identifier: Apache-2.0
"""The batching service as a process, its clients, and workers that say exactly what they are told to."""

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.forked import COMMAND, Forked
from tests.waiting import PATIENCE_S

"""How long a test waits for what should come at once; only a failing test waits so long."""

READY = b"\0\0\0\0"


def framed(payload):
    return len(payload).to_bytes(4, "big") + payload


def packed(value):
    return framed(msgspec.msgpack.encode(value))


class Job:
    """A request that was sent; its answer is read later."""

    def __init__(self, front, body, method="POST", path="/inference", headers=None):
        self.sent = time.monotonic()
        self.connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=PATIENCE_S)
        self.connection.request(method, path, body, headers or {})

    def read(self):
        answer = self.connection.getresponse()
        self.status, self.body, self.type = answer.status, answer.read(), answer.headers["content-type"]
        self.seconds = time.monotonic() - self.sent
        self.connection.close()
        return self

    def leave(self):
        self.connection.close()


class Peer:
    """A worker's end of the socket."""

    def __init__(self, address, *, ready=True):
        if ":" in str(address):
            host, port = address.rsplit(":", 1)
            self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(PATIENCE_S)
            self.socket.connect(str(address))
        if ready:
            self.send(READY)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def _exactly(self, count):
        pieces = []
        while count:
            data = self.socket.recv(min(count, 1 << 20))
            if not data:
                raise EOFError(b"".join(pieces))
            pieces.append(data)
            count -= len(data)
        return b"".join(pieces)

    def take_raw(self):
        header = self._exactly(4)
        return header + self._exactly(int.from_bytes(header, "big"))

    def take(self):
        """The jobs of the next batch, as (id, body) in the order of the frame."""
        return list(msgspec.msgpack.decode(self.take_raw()[4:]).items())

    def answer(self, jobs, errors=(), make=lambda body: b"did " + body):
        """Answers jobs as `take` gave them."""
        results = {job: make(body) for job, body in jobs}
        if errors:
            results["error_ids"] = "".join(errors)
        self.send(packed(results))

    def serve(self):
        """Takes one batch, answers it and returns the bodies."""
        jobs = self.take()
        self.answer(jobs)
        return [body for _, body in jobs]

    def hears(self, within_s):
        """Whether anything comes within a time."""
        return bool(select.select([self.socket], [], [], within_s)[0])

    def is_hung_up_on(self):
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


class Front:
    """A running `forebay batching`."""

    def __init__(self, *flags, cwd):
        self.lines = []
        self.process = Forked(
            [*COMMAND, "batching", "-log-format", "json", "-log-level", "debug", *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line)
                if found := re.search(r"ready at http://127.0.0.1:(\d+)", line):
                    self.port = int(found[1])
                if found := re.search(r"workers join at (?:unix|tcp):(\S+)", line):
                    self.address = found[1]
                    self._ready.set()
        self._ready.set()

    def wait_ready(self):
        assert self._ready.wait(PATIENCE_S), self.log
        assert self.process.poll() is None, self.log
        return self

    @property
    def log(self):
        return "".join(self.lines)

    @property
    def records(self):
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def post(self, body, *arguments, **more):
        """Sends a job and returns once the front has it."""
        before = self.log.count("a job was added")
        job = Job(self, body, *arguments, **more)
        self.wait_for(lambda: self.log.count("a job was added") > before)
        return job

    def send(self, body, *arguments, **more):
        """Sends a request, of which nobody knows when it arrives."""
        return Job(self, body, *arguments, **more)

    def peer(self, **more):
        return Peer(self.address, **more)

    def idle_peer(self):
        """A worker of which the front knows that it is idle."""
        before = self.log.count("has joined")
        peer = self.peer()
        self.wait_for(lambda: self.log.count("has joined") > before)
        return peer

    def wait_for(self, check):
        deadline = time.monotonic() + PATIENCE_S
        while not (found := check()):
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.002)
        return found

    def wait(self):
        """Waits for the exit status."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(PATIENCE_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Starts fronts that live as long as the module, one for each set of flags."""
    with contextlib.ExitStack() as stack:
        running = {}

        def start(*flags):
            if flags not in running:
                front = Front("-port", "0", *flags, cwd=tmp_path_factory.mktemp("front"))
                stack.callback(front.stop)
                running[flags] = front.wait_ready()
            return running[flags]

        yield start


@pytest.fixture
def start(tmp_path):
    """Starts fronts that live as long as the test and may be stopped or broken by it."""
    with contextlib.ExitStack() as stack:

        def start(*flags, ready=True, cwd: Path = tmp_path):
            front = Front("-port", "0", *flags, cwd=cwd)
            stack.callback(front.stop)
            return front.wait_ready() if ready else front

        yield start
