# SPDX-License-Identifier: Apache-2.0
"""The life of a node process of a cluster: `python -m forebay.cluster.node_life FOLDER`.

Theory of operation. It is nobody's child: it forks, the parent ends, and the child begins a session of its own. So it
outlives the host that has started it, and Ray. It does what the newest state says that it was told, and writes that
down, so that its successor begins with it. Only SIGTERM, and a host that says so, end it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.cluster.control import ControlQuestion, ControlSocket
from forebay.cluster.deployment import ClusterState, read_state
from forebay.cluster.node_folder import CODE, LOG, STATE, NodeFolder
from forebay.cluster.node_plan import FRONT, LOOPBACK, plan_of
from forebay.cluster.node_ports import take_port
from forebay.errors import ForebayError, InvalidRequest
from forebay.machine.children import ChildState
from forebay.machine.node_process import NodeProcess
from forebay.observe.logs.log import tell
from forebay.server.config import HttpConfig

LOOK_S: Final = 2.0
"""How often a node process looks whether its folder is still there."""
MAX_LOG_BYTES: Final = 64 * 1024 * 1024
"""A longer log begins anew."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a node process tells.

    Attributes:
        pid: Its process.
        version: The version of the state that it does.
        children: Its children.
        front: Where its front answers; empty if it has none.
    """

    pid: int
    version: int
    children: tuple[ChildState, ...]
    front: str


class NodeLife:
    """Does what a state says, and the next one that it is told."""

    def __init__(self, folder: NodeFolder) -> None:
        """Begin with nothing; `run` begins with what the folder has."""
        self._folder = folder
        self._process = NodeProcess()
        self._state: ClusterState | None = None
        self._files: dict[str, bytes] = {}
        self._port: int | None = None
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run until the node process is stopped; returns the exit status."""
        control: list[ControlSocket] = []

        def ready(_states: object) -> None:
            before = self._folder.state
            if before is not None:
                self._follow(before)
            control.append(ControlSocket(self._folder.control, self._folder.secret, self._answer))

        threading.Thread(target=self._stay_known, name="forebay-folder", daemon=True).start()
        status = self._process.run((), ready=ready, reload=lambda: None)
        for one in control:
            one.close()
        self._folder.control.unlink(missing_ok=True)
        return status

    def _stay_known(self) -> None:
        """End when the folder is gone, by which alone others find this process."""
        while self._folder.path.exists():
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def _answer(self, question: ControlQuestion) -> Any:
        """Do what a host asks; raises a `ForebayError` if it cannot be done."""
        match question.verb:
            case "status":
                self._bound_log()
            case "apply":
                state = read_state(question.data)
                if state.deployment.name != self._folder.deployment:
                    raise InvalidRequest(f"the state is that of a deployment '{state.deployment.name}'")
                self._follow(state)
            case "end":
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                raise InvalidRequest(f"a node process cannot {question.verb!r}")
        return msgspec.to_builtins(self._status())

    def _status(self) -> NodeStatus:
        version, front = -1, ""
        if self._state is not None:
            version, http = self._state.version, self._state.deployment.front.get("http", {})
            host = http.get("host", LOOPBACK)
            scheme = "https" if http.get("certfile") else "http"
            front = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"
        return NodeStatus(pid=os.getpid(), version=version, children=tuple(self._process.states()), front=front)

    def _follow(self, state: ClusterState) -> None:
        """Do what a state says, if it is newer than the last one; raises an `OSError` if a file cannot be written."""
        with self._lock:
            if self._state is not None and state.version <= self._state.version:
                return
            if self._port is None:
                http = state.deployment.front.get("http", {})
                self._port = take_port(self._folder, http.get("host", LOOPBACK), http.get("port", HttpConfig().port))
            plan = plan_of(state, self._folder.name, self._folder.path, sys.executable, self._port)
            changed = [name for name, data in plan.files.items() if self._files.get(name) != data]
            for name in changed:
                self._folder.write(name, plan.files[name])
            for name in self._files.keys() - plan.files.keys():
                (self._folder.path / name).unlink(missing_ok=True)
            was_running = {one.name for one in self._process.states()}
            self._process.adjust(plan.children)
            if f"{FRONT}.yaml" in changed and FRONT in was_running:
                self._process.signal(FRONT, signal.SIGHUP)
            self._folder.write(STATE, msgspec.msgpack.encode(state))
            self._state, self._files = state, plan.files
            self._forget_code({run.code for run in state.runs} | {state.deployment.code})

    def _forget_code(self, used: set[str]) -> None:
        for path in (self._folder.path / CODE).iterdir():
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)

    def _bound_log(self) -> None:
        """Begin the log anew where it has become too long; all who write append to it."""
        log = self._folder.path / LOG
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(log, 0)


def main() -> int:
    """Become a node process; returns its exit status."""
    folder = NodeFolder(Path(sys.argv[1]))
    if os.fork():
        os._exit(0)
    os.setsid()
    log = os.open(folder.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder.path)
    try:
        if folder.identity is not None:
            tell("there is a node process already")
            return 1
        folder.enlist()
        return NodeLife(folder).run()
    except ForebayError as error:
        tell(error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
