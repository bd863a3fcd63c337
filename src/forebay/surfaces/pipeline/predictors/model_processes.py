# SPDX-License-Identifier: Apache-2.0
"""A process that is started for a model: what `client_type` brpc and grpc mean where there are no endpoints.

The parent binds the port and keeps the socket, so the port is known before the process is up and outlives its crashes.
The process is told what to load on its standard input, is replaced by a supervisor (`workers/supervisor.py`) when it
dies, and ends with its parent, however that ends. One that hangs is replaced as well, once nobody can wait for it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ConfigError, ModelError, Unavailable
from forebay.remotes.http_calls import HttpCalls
from forebay.remotes.servers import ServerAddress, Unreachable
from forebay.surfaces.pipeline.predictors.local import is_reference
from forebay.surfaces.pipeline.predictors.settings import LocalConf
from forebay.types.first_use import known
from forebay.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from forebay.errors import ForebayError
    from forebay.workers.supervisor import End

log = logging.getLogger("forebay.pipeline")

HOST: Final = "127.0.0.1"
PROGRAM: Final = "forebay.surfaces.pipeline.predictors.model_process_main"
"""What the process runs."""
START_S: Final = 300.0
"""How long a model may take to load, and for its first call: some libraries do much of their work there."""
STOP_S: Final = 5.0
"""How long a process may take to end."""
STUCK_S: Final = 5.0
"""How long a process may hang when nobody can wait for its call any more, before it is replaced; as hooks may."""
LOOK_S: Final = 1.0
"""How long a process may take to tell what it does, and the pause before it is asked again."""
WRONG: Final = "wrong: "
"""Before the reason of a process that cannot load its model because of what a person wrote."""


class AtWork(msgspec.Struct, frozen=True):
    """What a process does.

    Attributes:
        call: Number of the call that its model is in; 0 if it is in none.
        took_s: How long it is in there.
    """

    call: int = 0
    took_s: float = 0.0


class ModelProcess:
    """One process that answers for a model; it is started again when it dies."""

    def __init__(self, conf: LocalConf, index: int | None) -> None:
        """Describe it.

        Args:
            index: Which of its devices to take; see `LocalConf.device_of`.
        """
        self._conf = conf
        self._index = index
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._doubted = threading.Lock()
        self._answered_in = 0
        """Number of the last process that has answered."""
        self._supervisor = Supervisor(
            f"the process of the model '{conf.model_config}'", self._start, load=self._load, on_end=self._ended
        )

    @property
    def port(self) -> int:
        """Where it answers; known once it was started."""
        assert self._socket is not None
        return self._socket.getsockname()[1]

    @property
    def pid(self) -> int:
        """Its process id; known once it was started."""
        assert self._supervisor.pid is not None
        return self._supervisor.pid

    @property
    def problem(self) -> ForebayError | None:
        """Why it cannot be replaced since it died, though that was tried several times, and still is."""
        return self._supervisor.problem if self._supervisor.has_given_up else None

    def start(self) -> None:
        """Start it and wait until its model is loaded.

        Raises:
            ModelError: If that fails, with the reason.
            ConfigError: If that is because of what a person wrote.
        """
        if self._conf.workdir and not Path(self._conf.workdir).is_dir():
            msg = f"workdir is '{self._conf.workdir}', and no folder is there; leave it out for the server's own"
            raise ConfigError(msg)
        self._socket = socket.create_server((HOST, 0), backlog=128)
        try:
            self._supervisor.begin()
            self._supervisor.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it."""
        self._supervisor.stop()
        if self._process is not None:
            self._process.terminate()
        self._supervisor.join(STOP_S)
        if self._socket is not None:
            self._socket.close()

    def doubt(self, patience_s: float) -> None:
        """Replace it if it hangs, which is looked at in a thread: a call to it was not answered in time.

        Args:
            patience_s: How long a call is waited for.
        """
        if self._doubted.acquire(blocking=False):
            looking = threading.Thread(target=self._look, args=(patience_s,), daemon=True, name="forebay-model-look")
            try:
                looking.start()
            except RuntimeError:  # there can be no further thread; the next call that is late doubts again
                self._doubted.release()

    def answered(self) -> None:
        """Note that a call was answered."""
        self._answered_in = self._supervisor.lives

    def _look(self, patience_s: float) -> None:
        """Look at it until it is in no call that may hang, or is replaced."""
        calls = HttpCalls(ServerAddress("http", HOST, self.port))
        supervisor = self._supervisor
        life, call, heard = supervisor.lives, None, time.monotonic()
        try:
            while supervisor.lives == life and not supervisor.is_stopping:
                now = time.monotonic()
                found = _at_work(calls)
                if not supervisor.is_ready:  # it loads its model, which has a time of its own
                    heard = now
                if found is None:
                    hangs_s, what = now - heard, "says nothing"
                else:
                    heard, call, before = now, found.call, call
                    if not call or call != (before or call):
                        return
                    hangs_s, what = found.took_s, "is in the same call"
                if hangs_s >= (patience_s + STUCK_S if self._answered_in == life else START_S):
                    text = "the process of the model '%s' %s for %.0f s, and is replaced"
                    log.error(text, self._conf.model_config, what, hangs_s)
                    supervisor.kill(life)
                    return
                time.sleep(min(LOOK_S, STUCK_S))
        finally:
            self._doubted.release()

    def _start(self) -> subprocess.Popen[bytes]:
        assert self._socket is not None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._socket.fileno()],
            cwd=self._conf.workdir or None,
            start_new_session=True,  # Ctrl+C at the terminal is the server's business
        )
        return self._process

    def _load(self, process: subprocess.Popen[bytes]) -> None:
        """Say what to load and wait until it is."""
        assert self._socket is not None
        assert process.stdin is not None
        assert process.stdout is not None
        order = {
            "socket": self._socket.fileno(),
            "conf": msgspec.to_builtins(self._conf),
            "index": self._index,
            "path": [str(Path(folder or ".").absolute()) for folder in sys.path],
            "server": os.getpid(),
        }
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        heard = select.poll()  # `select` knows no descriptors from 1,024 on
        heard.register(process.stdout, select.POLLIN)
        if not heard.poll(START_S * 1000):
            raise ModelError(f"the model '{self._conf.model_config}' was not loaded in {START_S:g} s")
        said = process.stdout.readline()
        if not said:
            raise EOFError
        if said != b"ready\n":
            reason = said.decode(errors="replace").strip()
            msg = f"the model '{self._conf.model_config}' could not be started: {reason.removeprefix(WRONG)}"
            raise ConfigError(msg) if reason.startswith(WRONG) else ModelError(msg)

    def _ended(self, end: End) -> None:
        if self._supervisor.is_stopping:
            return
        how = "could not be started" if end.status is None else f"ended with status {end.status}"
        why = "" if self._supervisor.problem is None else f": {self._supervisor.problem.message}"
        log.warning("the process of the model '%s' %s%s", self._conf.model_config, how, why)


def _at_work(calls: HttpCalls) -> AtWork | None:
    """Ask a process what it does; None if it does not say."""
    try:
        return msgspec.json.decode(calls.call("GET", "/", time.monotonic() + LOOK_S).body, type=known(AtWork))
    except (TimeoutError, Unreachable, msgspec.DecodeError):
        return None
    finally:
        calls.close()


class ModelHost:
    """Processes for one model, one for each device it is to run on; shared by all who ask for the same.

    Attributes:
        patience_s: How long the most patient of them waits for a call.
    """

    def __init__(self, conf: LocalConf, index: int | None) -> None:
        """Describe them.

        Args:
            index: Number of the worker process that wants one for itself; None for one on each device.
        """
        found = conf.model_config
        assert found is not None
        if not is_reference(found):
            # The process runs in another folder.
            conf = msgspec.structs.replace(conf, model_config=str(Path(found).absolute()))
        devices = range(max(1, len(conf.device_ids))) if index is None else [index]
        self.processes = [ModelProcess(conf, device) for device in devices]
        self.patience_s = 0.0

    @property
    def endpoints(self) -> list[str]:
        """Where they answer."""
        return [f"http://{HOST}:{process.port}" for process in self.processes]

    def require_one(self) -> None:
        """Refuse at once where nobody can answer: the ports are there all the same, and a call would wait in vain.

        Raises:
            Unavailable: With what keeps the processes from being started.
        """
        problems = [process.problem for process in self.processes]
        if all(problems) and problems[0] is not None:
            raise Unavailable(f"{problems[0].message}; it is tried again")

    def answered(self) -> None:
        """Note that a call was answered: what hangs from now on is not in its first one."""
        for process in self.processes:
            process.answered()

    def doubt(self) -> None:
        """Replace those that hang: one did not answer in time."""
        for process in self.processes:
            process.doubt(self.patience_s)

    def start(self) -> None:
        """Start them all.

        Raises:
            ModelError: If one cannot be started; then none is left running.
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
