# SPDX-License-Identifier: Apache-2.0
"""What commands have of Ray: they start the program that speaks to it (`ray_program.py`), and listen to that."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from forebay.cluster.ray_program import LOCAL, Job, RayEvent
from forebay.errors import ModelError
from forebay.types.first_use import known

CONNECT_S: Final = 9.0
"""How long a cluster may take to answer."""
START_S: Final = 60.0
"""How long Ray may take to start on this machine."""
END_S: Final = 15.0
"""How long the program may take to end; with Ray, where it has started that."""
_READ_BYTES: Final = 1 << 16


class RayEnded(ModelError):
    """The program has ended, or Ray has."""


class Deployer:
    """The program, from its start to its end: `with Deployer(job) as events`."""

    def __init__(self, job: Job) -> None:
        """Describe what it does."""
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._is_connected = False

    def __enter__(self) -> Iterator[RayEvent]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.cluster.ray_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray's libraries print there
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,  # a Ctrl-C is for the command
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.msgpack.encode(self._job))
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._events()

    def __exit__(self, *_error: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            # It may be waiting for a cluster that does not answer, and hears nothing meanwhile.
            process.send_signal(signal.SIGTERM if self._is_connected else signal.SIGKILL)
        process.stdout.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _events(self) -> Iterator[RayEvent]:
        """Yield what it says.

        Raises:
            RayEnded: The cluster does not answer, or the program has ended without a word.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        is_new = self._job.verb == "deploy" and self._job.address != LOCAL  # else the head is known to be there
        until = time.monotonic() + (CONNECT_S if is_new else START_S)
        rest = b""
        while True:
            if not self._is_connected and not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise RayEnded(f"the Ray cluster '{self._job.address}' does not answer; is its head alive?")
            data = os.read(out, _READ_BYTES)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = msgspec.json.decode(line, type=known(RayEvent))
                if event.kind == "connected":
                    self._is_connected = True
                else:
                    yield event
