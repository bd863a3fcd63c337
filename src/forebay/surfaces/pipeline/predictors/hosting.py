# SPDX-License-Identifier: Apache-2.0
"""A process that is started for a model: what `client_type` brpc and grpc mean where there are no endpoints.

The parent binds the port and keeps the socket, so the port is known before the process is up and outlives its crashes.
The process is told what to load on its standard input and ends when that closes: with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from forebay.errors import ModelError
from forebay.surfaces.pipeline.predictors.local import is_reference
from forebay.surfaces.pipeline.predictors.settings import LocalConf

log = logging.getLogger("forebay.pipeline")

HOST: Final = "127.0.0.1"
PROGRAM: Final = "forebay.surfaces.pipeline.predictors.hosted"
"""What the process runs."""
START_S: Final = 300.0
"""How long a model may take to load."""
STOP_S: Final = 5.0
"""How long a process may take to end."""
MAX_PAUSE_S: Final = 10.0
"""Longest pause before a process that keeps dying is started again."""


class ModelProcess:
    """One process that answers for a model; it is started again when it dies."""

    def __init__(self, conf: LocalConf, index: int | None) -> None:
        """Describe it.

        Args:
            conf: The model.
            index: Which of its devices to take; see `LocalConf.device_of`.
        """
        self._conf = conf
        self._index = index
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="forebay-model-process", daemon=True)

    @property
    def port(self) -> int:
        """Where it answers; known once it was started."""
        assert self._socket is not None
        return self._socket.getsockname()[1]

    @property
    def pid(self) -> int:
        """Its process id; known once it was started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until its model is loaded.

        Raises:
            ModelError: If that fails, with the reason.
        """
        self._socket = socket.create_server((HOST, 0), backlog=128)
        try:
            self._process = self._spawn(self._socket)
        except BaseException:
            self._socket.close()
            raise
        self._watcher.start()

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        if self._process is not None:
            _end(self._process)
        if self._watcher.is_alive():
            self._watcher.join()
        if self._socket is not None:
            self._socket.close()

    def _spawn(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            cwd=self._conf.workdir or None,
            start_new_session=True,  # Ctrl+C at the terminal is the server's business
        )
        assert process.stdin is not None
        assert process.stdout is not None
        order = {
            "socket": listener.fileno(),
            "conf": msgspec.to_builtins(self._conf),
            "index": self._index,
            "path": [str(Path(folder or ".").absolute()) for folder in sys.path],
        }
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            is_heard, _, _ = select.select([process.stdout], [], [], START_S)
            said = process.stdout.readline() if is_heard else b""
        except BaseException as problem:
            _end(process)
            if not isinstance(problem, OSError):
                raise
            said = b""
        process.stdout.close()
        if said == b"ready\n":
            return process
        _end(process)
        model = self._conf.model_config
        reason = said.decode(errors="replace").strip() or f"its process ended with status {process.returncode}"
        msg = f"the model '{model}' could not be started: {reason}"
        raise ModelError(msg)

    def _watch(self) -> None:
        assert self._process is not None
        assert self._socket is not None
        pause_s = 0.1
        while True:
            status = self._process.wait()
            _end(self._process)
            if self._stopping.wait(pause_s):
                return
            log.warning("the process of the model '%s' ended with status %d", self._conf.model_config, status)
            try:
                process = self._spawn(self._socket)
            except ModelError as problem:
                log.error("%s", problem.message)  # noqa: TRY400 - the trace is the process's own, on its stderr
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
                continue
            self._process = process
            pause_s = 0.1
            if self._stopping.is_set():
                _end(process)
                return


class ModelHost:
    """Processes for one model, one for each device it shall run on; shared by those who ask for the same."""

    def __init__(self, conf: LocalConf, index: int | None) -> None:
        """Describe them.

        Args:
            conf: The model.
            index: Number of the worker process that wants one for itself; None for one on each device.
        """
        found = conf.model_config
        assert found is not None
        if not is_reference(found):
            # The process runs in another folder.
            conf = msgspec.structs.replace(conf, model_config=str(Path(found).absolute()))
        devices = range(max(1, len(conf.device_ids))) if index is None else [index]
        self.processes = [ModelProcess(conf, device) for device in devices]

    @property
    def endpoints(self) -> list[str]:
        """Where they answer."""
        return [f"http://{HOST}:{process.port}" for process in self.processes]

    def start(self) -> None:
        """Start them all.

        Raises:
            ModelError: If one cannot; none is left then.
        """
        started: list[ModelProcess] = []
        try:
            for process in self.processes:
                process.start()
                started.append(process)
        except BaseException:
            for process in started:
                process.stop()
            raise

    def stop(self) -> None:
        """End them all."""
        for process in self.processes:
            process.stop()


_lock = threading.Lock()
_shared: dict[bytes, tuple[ModelHost, int]] = {}


def take_host(conf: LocalConf, index: int | None) -> ModelHost:
    """Return the host of a model in this process, started if nobody had it; `leave_host` gives it back.

    Raises:
        ModelError: If it cannot be started.
    """
    with _lock:
        host, users = _shared.get(_key(conf, index), (None, 0))
        if host is None:
            host = ModelHost(conf, index)
            host.start()
        _shared[_key(conf, index)] = host, users + 1
        return host


def leave_host(conf: LocalConf, index: int | None) -> None:
    """Give back a host; the last one to do so ends it."""
    with _lock:
        host, users = _shared.pop(_key(conf, index))
        if users > 1:
            _shared[_key(conf, index)] = host, users - 1
            return
    host.stop()


def _key(conf: LocalConf, index: int | None) -> bytes:
    return msgspec.json.encode([conf, index])


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
