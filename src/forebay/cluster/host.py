# SPDX-License-Identifier: Apache-2.0
"""The host: the actor of Ray on a node, which starts the node process there, or adopts the one that it finds.

It never serves anything and never has children: what it starts detaches itself. When it ends, with its controller or
with all of Ray, the node process goes on, and the next host finds it by the folder of the node.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.cluster import control, project_files
from forebay.cluster.deployment import ClusterState, read_state
from forebay.cluster.node_folder import CODE, LOG, RAY, NodeFolder, claim, folders
from forebay.cluster.node_life import NodeStatus
from forebay.cluster.node_plan import FRONT, LOOPBACK, code_folder, owner_in, tls_files
from forebay.cluster.node_ports import free_port
from forebay.cluster.ray_library import ray_library
from forebay.errors import ForebayError
from forebay.types.first_use import known
from forebay.workers.wire.tls_files import server_tls

if TYPE_CHECKING:
    from forebay.cluster.decisions import Level

ASK_S: Final = 1.0
"""How long an owner may take to say whether it is ready."""
START_S: Final = 10.0
"""How long a node process may take to answer once it was started."""
SPARE: Final = 4
"""Pairs of ports that are kept for new owners."""
AUTH_MODE: Final = "RAY_AUTH_MODE"
"""The variable that says whether processes of Ray show each other a token; a driver has to be told the same."""
MAX_FACTS_BYTES: Final = 1 << 20
"""The longest page about a model that is read."""
MAX_LOG_BYTES: Final = 1 << 16
"""What is read of a log at a time."""
_NOT_OURS: Final = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "FOREBAY_")
"""How variables begin that Ray sets for its own processes, or that settings of a server are told by."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a host tells of its node.

    Attributes:
        name: What the node is called.
        host: Where other nodes reach it.
        applied: The version of the state that its node process does; -1 if it has none, or there is none.
        front: Where its front answers.
        is_front_ready: Whether it does.
        owners: Its owners that have not ended, and how far each is.
        wanted: How many workers those of them want that say so.
        problems: What does not run, and why.
        spare: Pairs of ports that are free.
        pids: Its processes, by their names.
        code: The digests of the files that it has.
    """

    name: str
    host: str
    applied: int = -1
    front: str = ""
    is_front_ready: bool = False
    owners: dict[str, Level] = {}
    wanted: dict[str, int] = {}
    problems: tuple[str, ...] = ()
    spare: tuple[tuple[int, int], ...] = ()
    pids: dict[str, int] = {}
    code: tuple[str, ...] = ()


class _Workers(msgspec.Struct):
    wanted: int | None = None


class _Facts(msgspec.Struct):
    """What of the facts of a model matters here."""

    workers: _Workers


class Host:
    """The host of a node; all of its methods are called by the controller."""

    def __init__(self, deployment: str, node: str, host: str) -> None:
        """Find the node's folder.

        Args:
            node: What Ray calls the node.
            host: Where other nodes reach it.
        """
        self._deployment = deployment
        self._node = node
        self._host = host
        self._folder: NodeFolder | None = None
        self._secret = b""
        self._has_begun = False
        self._spare: list[tuple[int, int]] = []
        self._ready: dict[str, int] = {}
        self._lock = threading.Lock()
        self._problem = ""

    def kept(self) -> tuple[str, bytes, bytes]:
        """Return what is known of the deployment on this machine: a name, its secret and the newest state, if any."""
        for folder in folders(self._deployment):
            state = folder.state
            if folder.identity is not None and state is not None:
                return folder.name, folder.secret, msgspec.msgpack.encode(state)
        return "", b"", b""

    def begin(self, secret: bytes) -> bytes:
        """Have a node process run; returns the state that it does, if there is one."""
        with self._lock:
            if self._folder is None:
                self._folder = claim(self._deployment, self._node, secret)
            folder, self._secret = self._folder, secret
            self._revive(folder)
            head = ray_library().get_runtime_context().gcs_address
            folder.write(RAY, f"{head} {os.environ.get(AUTH_MODE, '')}".encode())
            state = folder.state
            return b"" if state is None else msgspec.msgpack.encode(state)

    def report(self) -> NodeReport:
        """Return how the node is."""
        with self._lock:
            folder = self._folder
            if folder is None:
                return NodeReport(name="", host=self._host)
            try:
                self._revive(folder)
                told = control.ask(folder.control, self._secret, "status", patience_s=ASK_S)
            except (ForebayError, OSError) as error:
                why = error.message if isinstance(error, ForebayError) else str(error)
                return NodeReport(name=folder.name, host=self._host, problems=(why,))
            status = msgspec.convert(told, known(NodeStatus))
            return self._report(folder, status, folder.state)

    def apply(self, state: bytes) -> int | tuple[str, ...]:
        """Have the node process do what a state says; returns the version that it does then.

        If the node has no copy of files that are needed, nothing is done, and their digests are returned. If it cannot
        use its TLS files, or the node process refuses, the next report says why.
        """
        with self._lock:
            folder = self._folder
            assert folder is not None
            wanted = read_state(state)
            needed = dict.fromkeys(run.code for run in wanted.runs)
            if missing := tuple(one for one in needed if not code_folder(folder.path, one).is_dir()):
                return missing
            try:
                server_tls(**tls_files(wanted, folder.path, wanted.deployment.code), flag="--attach-")
                told = control.ask(folder.control, self._secret, "apply", state)
            except ForebayError as error:
                self._problem = error.message
                return -1
            self._problem = ""
            return msgspec.convert(told, known(NodeStatus)).version

    def put_code(self, digest: str, packed: bytes) -> None:
        """Keep a copy of the project."""
        assert self._folder is not None
        project_files.unpack(packed, digest, self._folder.path / CODE)

    def code(self, digest: str) -> bytes:
        """Return the files with this digest, for another node."""
        assert self._folder is not None
        found, packed = project_files.pack(code_folder(self._folder.path, digest))
        return packed if found == digest else b""

    def log(self, since: int) -> tuple[int, bytes]:
        """Return what was logged since this byte, and the number of the next one; -1 asks for the end."""
        assert self._folder is not None
        try:
            with (self._folder.path / LOG).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if since < 0:
                    return size, b""
                file.seek(since if since <= size else 0)
                data = file.read(MAX_LOG_BYTES)
                return file.tell(), data
        except OSError:
            return 0, b""

    def end(self, wait_s: float) -> bool:
        """End the node process; returns whether it has ended."""
        with self._lock:
            folder = self._folder
            if folder is None or not folder.end(wait_s):
                return folder is None
            self._folder = None
            folder.remove()
            return True

    def _revive(self, folder: NodeFolder) -> None:
        """Start a node process if there is none; raises an `OSError` if it cannot be started."""
        if folder.identity is not None:
            if folder.secret == self._secret:
                return
            folder.end(START_S)
        elif self._has_begun and not folder.path.exists():
            raise OSError(f"{folder.path} was removed: forebay cluster down has ended what ran here")
        folder.prepare(self._secret)
        self._has_begun = True
        subprocess.run(
            [sys.executable, "-m", "forebay.cluster.node_life", str(folder.path)],
            env=own_environment(os.environ),
            check=True,
            timeout=START_S,
            close_fds=True,
        )
        until = time.monotonic() + START_S
        while not folder.control.exists() and time.monotonic() < until:
            time.sleep(0.05)

    def _report(self, folder: NodeFolder, status: NodeStatus, state: ClusterState | None) -> NodeReport:
        owners: dict[str, Level] = {}
        problems = [self._problem] if self._problem else []
        for child in status.children:
            key = owner_in(child.name)
            if key is not None:
                owners[key] = self._level(key, child.starts, state)
            if child.problem and not child.is_ready:
                problems.append(f"{child.name}: {child.problem}")
        self._ready = {key: starts for key, starts in self._ready.items() if key in owners}
        return NodeReport(
            name=folder.name,
            host=self._host,
            applied=status.version,
            front=status.front,
            is_front_ready=any(child.name == FRONT and child.is_ready for child in status.children),
            owners=owners,
            wanted={} if state is None else self._wanted([one for one in owners if owners[one] == "ready"], state),
            problems=tuple(problems),
            spare=self._spare_ports(state),
            code=tuple(path.name for path in (folder.path / CODE).iterdir() if not path.name.startswith(".")),
            pids={folder.name: status.pid, **{one.name: one.pid for one in status.children if one.pid is not None}},
        )

    def _level(self, key: str, starts: int, state: ClusterState | None) -> Level:
        """Return how far an owner is; one that was ready once is asked again when it was started anew."""
        if self._ready.get(key) == starts:
            return "ready"
        known = () if state is None else state.owners
        port = next((one.http_port for one in known if one.key == key), None)
        if port is None:
            return "up"  # it is leaving
        connection = http.client.HTTPConnection(LOOPBACK, port, timeout=ASK_S)
        try:
            connection.request("GET", "/readyz")
            is_ready = connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return "starting"
        finally:
            connection.close()
        if not is_ready:
            return "up"
        self._ready[key] = starts
        return "ready"

    def _wanted(self, keys: Iterable[str], state: ClusterState) -> dict[str, int]:
        """Return how many workers owners want, as far as their number follows the load and they say so."""
        found: dict[str, int] = {}
        for one in state.owners:
            run = state.run(one.run)
            if one.key not in keys or run is None or run.unit.bounds is None:
                continue
            connection = http.client.HTTPConnection(LOOPBACK, one.http_port, timeout=ASK_S)
            try:
                connection.request("GET", f"/models/{run.unit.models[0]}")
                told = msgspec.json.decode(connection.getresponse().read(MAX_FACTS_BYTES), type=known(_Facts))
            except (OSError, http.client.HTTPException, msgspec.MsgspecError):
                continue
            finally:
                connection.close()
            if told.workers.wanted is not None:
                found[one.key] = told.workers.wanted
        return found

    def _spare_ports(self, state: ClusterState | None) -> tuple[tuple[int, int], ...]:
        used = set[int]()
        if state is not None:
            used = {one.port for one in state.owners} | {int(one.rpartition(":")[2]) for one in state.doors.values()}
        self._spare = [pair for pair in self._spare if pair[0] not in used]
        while len(self._spare) < SPARE:
            self._spare.append((free_port(self._host), free_port(LOOPBACK)))
        return tuple(self._spare)


def own_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what Ray sets for its own processes, and without settings of other servers."""
    return {name: value for name, value in variables.items() if not name.startswith(_NOT_OURS)}
