# SPDX-License-Identifier: Apache-2.0
"""The program that speaks to Ray for a command: `python -m forebay.cluster.ray_program`, a child of the command.

It reads one `Job` from its standard input and writes events to its standard output, one JSON object a line. Only this
program and Ray's own actors import Ray: Ray ends every program that has called `ray.init` some time after its head.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Collection
from typing import Any, Final, Literal, cast

import msgspec

from forebay.cluster.controller import Controller, controller_name
from forebay.cluster.decisions import why_not
from forebay.cluster.deployment import ClusterState, Deployment, read_state
from forebay.cluster.host import AUTH_MODE
from forebay.cluster.node_folder import folders
from forebay.cluster.ray_hosts import START_S, RayNode, words_of
from forebay.cluster.ray_library import ray_library
from forebay.cluster.reservations import NAMESPACE
from forebay.errors import ConfigError, ForebayError
from forebay.types.first_use import known
from forebay.workers.processes.parent_death import end_with

LOCAL: Final = "local"
HEAD: Final = "node:__internal_head__"
"""The resource that only the node of Ray's head has."""
LOOK_S: Final = 0.3
DIAL_S: Final = 3.0
ANSWER_S: Final = 10.0
"""How long the controller may take to answer."""
DOWN_S: Final = 120.0
"""How long all processes of a deployment may take to end."""
CONTROL_THREADS: Final = 16


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done.

    Attributes:
        verb: What to do.
        address: The cluster: `auto`, HOST:PORT, or `local` for one that this program starts.
        auth_mode: How its processes prove to each other that they belong together; empty leaves that to Ray.
        name: The deployment.
        deployment: What to deploy, as msgpack.
        packed: The files of the project.
        node: The node to leave, or to use again.
    """

    verb: Literal["deploy", "drain", "resume", "down"]
    address: str
    auth_mode: str = ""
    name: str
    deployment: bytes = b""
    packed: bytes = b""
    node: str = ""


class RayEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What the command is told.

    Attributes:
        kind: `connected` is the first one and `error` the last; `ready` has an address for each node, `log` what a node
            has logged.
        text: A sentence, or lines of a log.
        node: The node that it is about.
        code: The exit status that an error leads to.
    """

    kind: Literal["connected", "say", "ready", "log", "error", "done"]
    text: str = ""
    node: str = ""
    code: int = 1


class _Program:
    def __init__(self, job: Job, out: int) -> None:
        self._job = job
        self._out = out
        self._ray: Any = None

    def run(self) -> int:
        """Do the job; returns the exit status."""
        try:
            self._connect()
            self._say(kind="connected")
            match self._job.verb:
                case "deploy":
                    self._deploy()
                case "down":
                    self._down()
                case "drain" | "resume":
                    self._drain()
        except ConfigError as error:
            self._say(kind="error", text=error.message, code=2)
            return 2
        except Exception as error:  # noqa: BLE001 - Ray's errors are of many kinds, and the command prints a sentence
            words = error.message if isinstance(error, ForebayError) else words_of(error)
            self._say(kind="error", text=f"Ray: {words}")
            return 1
        return 0

    def _say(self, **event: Any) -> None:
        os.write(self._out, msgspec.json.encode(RayEvent(**event)) + b"\n")

    def _connect(self) -> None:
        """Join the cluster; raises a `ConfigError` if there is none, or this machine is not a node of it."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if self._job.auth_mode:
            os.environ[AUTH_MODE] = self._job.auth_mode
        self._ray = ray_library()
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "CRITICAL"}
        address = self._job.address
        try:
            if address == LOCAL:
                self._ray.init(include_dashboard=False, **options)
            else:
                if address != "auto":  # Ray would try for a long time
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
                self._ray.init(address=address, **options)
        except Exception as error:
            raise ConfigError(
                f"there is no Ray cluster at '{address}' that this machine is a node of: {words_of(error)}; "
                "start one with: ray start --head, or let forebay start Ray here: --cluster local"
            ) from error

    def _controller(self) -> Any:
        """Return the controller of the deployment; raises a `ConfigError` if there is none."""
        name = self._job.name
        try:
            return self._ray.get_actor(controller_name(name), namespace=NAMESPACE)
        except ValueError as error:
            raise ConfigError(f"the cluster has no deployment '{name}'") from error

    def _is_deployed(self) -> bool:
        try:
            self._controller()
        except ConfigError:
            return False
        return True

    def _deploy(self) -> None:
        """Start the deployment, say where it answers, and follow its log.

        Raises:
            ConfigError: It cannot run here.
        """
        nodes = [node for node in cast("list[RayNode]", self._ray.nodes()) if node["Alive"]]
        deployment = msgspec.msgpack.decode(self._job.deployment, type=known(Deployment))
        require_room(deployment, nodes)
        if warning := open_to_readers(deployment, {node["NodeManagerAddress"] for node in nodes}):
            self._say(kind="say", text=f"warning: {warning}")
        if not self._is_deployed():
            require_no_other_host(self._job.name)
        kind = self._ray.remote(Controller)
        controller = kind.options(
            name=controller_name(self._job.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Elsewhere it would die with a node that it has to replace, and Ray takes long to start it again.
            resources={HEAD: 0.001},
            max_concurrency=CONTROL_THREADS,
        ).remote(self._job.name, self._job.address == LOCAL)
        begun = controller.deploy.remote(self._job.deployment, self._job.packed)
        problem = self._ray.get(begun, timeout=3 * START_S)
        if problem:
            raise ConfigError(problem)
        self._follow(controller)

    def _follow(self, controller: Any) -> None:
        said: set[str] = set()
        ready: tuple[str, ...] = ()
        since: dict[str, int] = {}
        while True:
            try:
                status = self._ray.get(controller.status.remote(), timeout=ANSWER_S)
                logs = self._ray.get(controller.logs.remote(since), timeout=ANSWER_S)
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
                if not self._is_deployed():
                    self._say(kind="done", text=f"the deployment '{self._job.name}' has ended")
                    return
                time.sleep(LOOK_S)  # Ray starts it again
                continue
            for name, (at, data) in logs.items():
                since[name] = at
                if data:
                    self._say(kind="log", node=name, text=data.decode(errors="replace"))
            problems = {*status["problems"], *(f"{name} is lost" for name in status["lost"])}
            problems |= {f"{name} is not in this Ray cluster; its processes keep running" for name in status["outside"]}
            problems |= {f"{node['name']}: {one}" for node in status["nodes"] for one in node["problems"]}
            state = read_state(status["state"]) if status["state"] else None
            problems |= {state.problem} if state is not None and state.problem else set()
            for one in sorted(problems - said):
                self._say(kind="say", text=one)
            said = problems
            now_ready = () if state is None else _ready(state, status["nodes"], status["outside"])
            if now_ready and now_ready != ready:
                for address in now_ready:
                    self._say(kind="ready", text=address)
            ready = now_ready or ready
            time.sleep(LOOK_S)

    def _down(self) -> None:
        controller = self._controller()
        left = self._ray.get(controller.down.remote(), timeout=DOWN_S)
        self._ray.kill(controller)
        for name in left:
            self._say(kind="say", text=f"what runs on {name} could not be ended; run forebay cluster down there")
        self._say(kind="done", text=self._job.name)

    def _drain(self) -> None:
        """Leave a node, or use it again; raises a `ConfigError` if that cannot be."""
        job = self._job
        controller = self._controller()
        problem = self._ray.get(controller.drain.remote(job.node, job.verb == "drain"), timeout=ANSWER_S)
        if problem:
            raise ConfigError(problem)
        while job.verb == "drain":
            status = self._ray.get(controller.status.remote(), timeout=ANSWER_S)
            if all(not node["pids"].keys() - {job.node} for node in status["nodes"] if node["name"] == job.node):
                break
            time.sleep(LOOK_S)
        self._say(kind="done", text=job.node)


def require_room(deployment: Deployment, nodes: list[RayNode]) -> None:
    """Check that some node could have each worker, if nothing else ran there; raises a `ConfigError` if none could."""
    for unit in deployment.units:
        why = why_not(unit.needs, [node["Resources"] for node in nodes], [node["Labels"] for node in nodes])
        if unit.workers and why:
            raise ConfigError(f"'{unit.name}' cannot run on this cluster: {why}; change `ray` beside its target")


def open_to_readers(deployment: Deployment, machines: Collection[str]) -> str:
    """Return a warning if machines send each other requests that are not encrypted; empty otherwise."""
    if len(machines) < 2 or deployment.tls:
        return ""
    return (
        f"what the {len(machines)} machines of this cluster send each other is not encrypted, and others may read it "
        "on its way; give --attach-certfile, --attach-keyfile and --attach-cafile"
    )


def require_no_other_host(name: str) -> None:
    """Check that no other cluster keeps this deployment on this machine, or it would run twice.

    Raises:
        ConfigError: One does.
    """
    for folder in folders(name):
        if folder.has_host:
            raise ConfigError(
                f"the deployment '{name}' belongs to another Ray cluster on this machine, which may be about to end; "
                "try again in a minute, end it with forebay cluster down, or take another name: --deployment NAME"
            )


def _ready(state: ClusterState, nodes: list[dict[str, Any]], outside: list[str]) -> tuple[str, ...]:
    """Return where a deployment answers, once all that is wanted is ready, as far as hosts can tell."""
    levels = {one.key: "ready" for one in state.owners if one.node in outside}
    levels |= {key: level for node in nodes for key, level in node["owners"].items()}
    is_whole = set(state.wanted) == set(state.live) and state.previous is None
    if not is_whole or any(levels.get(state.routes.get(key, "")) != "ready" for key in state.live):
        return ()
    if any(node["applied"] != state.version for node in nodes):
        return ()
    serving = [node for node in nodes if node["name"] not in state.draining]
    if not all(node["is_front_ready"] for node in serving):
        return ()
    return tuple(sorted(f"{node['front']} on {node['name']}" for node in serving))


def main() -> int:
    """Read the job and do it."""
    end_with(os.getppid())
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=known(Job))
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # Ray prints
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        return _Program(job, out).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
