# SPDX-License-Identifier: Apache-2.0
"""Programs that have joined a cluster, as processes."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import PATIENCE_S, eventually

from forebay import Batch
from forebay.workers.wire import frames

PROGRAM = Path(__file__).parent / "member_program.py"


class Program:
    """A process of `member_program.py`."""

    def __init__(self, address, *servings, env=None):
        command = [sys.executable, str(PROGRAM), address, *servings]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env={**os.environ, **(env or {})})
        self.pid = self.process.pid

    def wait_ready(self):
        self.address = self.read()
        assert self.address
        return self

    def read(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line):
        """Have it do something, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def leave(self):
        """Have it leave the cluster and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self):
        with self.process:
            self.process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.stop()


@contextlib.contextmanager
def programs():
    """Start programs that end with the block."""
    with contextlib.ExitStack() as stack:

        def start(address, *servings, **more):
            program = Program(address, *servings, **more)
            stack.callback(program.stop)
            return program

        yield start


@pytest.fixture
def start_member():
    """Starts members that a test may break."""
    with programs() as start:
        yield lambda *arguments, **more: start(*arguments, **more).wait_ready()


def knows(membership, **counts):
    """Wait until the directory has so many members of each serving."""
    eventually(
        lambda: all(len(membership.directory.members.get(name, ())) == count for name, count in counts.items()),
        f"a directory with {counts}",
    )


def cat(*rows):
    return Batch.concatenate([np.array(rows)])


class Peer:
    """Somebody who speaks the protocol by itself."""

    def __init__(self, address, role, version=frames.VERSION):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(address.removeprefix("unix:"))
        self.reader = frames.FrameReader()
        self.said = []
        self.send(["hello", version, {"role": role, "worker": "hostile" * 3}])

    def send(self, message):
        self.socket.sendall(frames.encode(message))

    def hear(self, kind):
        while True:
            while self.said:
                message = self.said.pop(0)
                if message[0] == kind:
                    return message
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self.said.extend(self.reader.feed(data))

    def is_hung_up_on(self):
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass
        return True
