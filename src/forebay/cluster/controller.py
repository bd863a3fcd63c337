# SPDX-License-Identifier: Apache-2.0
"""The controller: a detached actor of Ray that keeps a deployment as it should be. No request asks it anything.

Theory of operation. One thread looks at the cluster twice a second: it hears the hosts (`hosts.py`) and follows the
reservations (`reservations.py`), has `decisions.py` say what is to change, and tells the hosts the new state. It is the
only one that makes states. It keeps nothing that is not known elsewhere: what Ray starts in its place hears from the
hosts what runs, and goes on from the newest state that one of them has kept.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any, Final, cast

import msgspec

from forebay.cluster.decisions import NodeView, View, begin, decide, drain, unheard
from forebay.cluster.deployment import ClusterState, Deployment, encode_state
from forebay.cluster.ray_hosts import START_S, HostActors, HostHandle, RayNode, result
from forebay.cluster.ray_library import ray_library
from forebay.cluster.reservations import Reservations
from forebay.errors import ForebayError
from forebay.types.first_use import known

log = logging.getLogger("forebay.cluster")

LOOK_S: Final = 0.5
"""Pause between two looks at the cluster."""
LOG_S: Final = 2.0
"""How long a host may take to say what was logged on its node."""
END_S: Final = 60.0
"""How long the processes of a node may take to end."""


def controller_name(deployment: str) -> str:
    """Return what the actor is called."""
    return f"controller:{deployment}"


class Controller:
    """Keeps one deployment; started by a deployer, and again by Ray."""

    def __init__(self, deployment: str, is_local: bool) -> None:  # noqa: FBT001 - Ray passes it on
        """Begin to look at the cluster; if it `is_local`, all on this machine, nothing need be open to others."""
        self._state: ClusterState | None = None
        self._packed: dict[str, Any] = {}
        self._hosts = HostActors(deployment, is_local=is_local)
        self._reservations = Reservations(deployment)
        self._problem = ""
        self._is_over = threading.Event()
        self._is_known = threading.Event()
        self._lock = threading.RLock()
        threading.Thread(target=self._look, name="forebay-controller", daemon=True).start()

    def deploy(self, deployment: bytes, packed: bytes) -> str:
        """Have a deployment run; returns why it cannot, or nothing.

        Args:
            deployment: A `Deployment`, as msgpack.
            packed: The files of the project.
        """
        ray = ray_library()

        wanted = msgspec.msgpack.decode(deployment, type=known(Deployment))
        if not self._is_known.wait(2 * START_S):
            return "; ".join(self._hosts.problems) or "no node of the cluster has answered"
        with self._lock:
            self._packed = {wanted.code: ray.put(packed)}
            try:
                self._state = begin(self._state, wanted, time.time())
            except ForebayError as error:
                return error.message
        return ""

    def drain(self, node: str, on: bool) -> str:  # noqa: FBT001 - Ray passes it on
        """Leave a node, or use it again; returns why that cannot be, or nothing."""
        with self._lock:
            if self._state is None:
                return "nothing is deployed"
            names = {one.name for one in self._hosts.usable}
            if node not in names:
                return f"there is no node '{node}'; there is {', '.join(sorted(names)) or 'none'}"
            if on and names <= {*self._state.draining, node}:
                return f"'{node}' is the last node in use; forebay cluster down ends the deployment"
            self._state = drain(self._state, node, on=on)
        return ""

    def status(self) -> dict[str, Any]:
        """Return how the deployment is, as plain data."""
        with self._lock:
            state = self._state
            problems = [*self._hosts.problems, *self._reservations.problems(), *filter(None, [self._problem])]
            return {
                "state": b"" if state is None else msgspec.msgpack.encode(state),
                "nodes": [msgspec.to_builtins(one.report) for one in self._hosts.usable],
                "lost": sorted(self._hosts.lost.values()),
                "outside": sorted(self._hosts.outside),
                "problems": problems,
            }

    def logs(self, since: dict[str, int]) -> dict[str, tuple[int, bytes]]:
        """Return what nodes have logged since these bytes, and the numbers of the next ones."""
        ray = ray_library()

        with self._lock:
            hosts = [one for one in self._hosts.usable if one.is_begun and not one.is_silent]
        asked = {one.name: one.actor.log.remote(since.get(one.name, -1)) for one in hosts}
        found: dict[str, tuple[int, bytes]] = {}
        for name, answer in asked.items():
            with contextlib.suppress(Exception):
                found[name] = ray.get(answer, timeout=LOG_S)
        return found

    def down(self) -> list[str]:
        """End everything; returns the nodes whose processes may still run."""
        ray = ray_library()

        self._is_over.set()
        with self._lock:
            self._reservations.end()
            hosts = [one for one in self._hosts.every if one.actor is not None and one.is_begun]
        ending = [(one, one.actor.end.remote(END_S)) for one in hosts]
        left: list[str] = []
        for one, answer in ending:
            try:
                has_ended = ray.get(answer, timeout=END_S + LOG_S)
            except Exception:  # noqa: BLE001 - whatever it is, the node may not have been told
                has_ended = False
            if not has_ended:
                left.append(one.name)
        return sorted({*left, *self._hosts.lost.values(), *self._hosts.outside})

    def _look(self) -> None:
        while not self._is_over.is_set():
            try:
                self._turn()
                self._problem = ""
            except Exception as error:
                log.exception("failed to check the cluster; retrying")
                self._problem = f"failed to check the cluster: {error}"
            self._is_over.wait(LOOK_S)

    def _turn(self) -> None:
        """Look at the cluster once, and change what is to be changed."""
        ray = ray_library()

        nodes = cast("list[RayNode]", ray.nodes())
        with self._lock:
            if self._is_over.is_set():
                return
            hosts, state = self._hosts, self._state
            hosts.attend(nodes)
        heard = hosts.hear(state)  # it waits, and so do those who ask, unless the lock is free
        with self._lock:
            if self._is_over.is_set():
                return
            if self._state is state:
                self._state = heard
            if hosts.are_known:
                self._is_known.set()
            state = self._state
        if state is None or not self._is_known.is_set():  # else a late host's node would be taken for lost
            return
        hosts.find_lost(state)
        with self._lock:
            if not self._is_over.is_set():
                self._change(self._state or state)

    def _change(self, state: ClusterState) -> None:
        """Decide what comes next, and tell the hosts."""
        usable = self._hosts.usable
        names = {one.node_id: one.name for one in usable}
        avoided = [one for one, name in names.items() if name in state.draining]
        children = {child for one in usable if one.report is not None for child in one.report.pids}
        outside = self._hosts.outside
        self._reservations.follow(state, names, [*avoided, *self._hosts.lost], children, outside)
        nodes = {
            one.name: NodeView(
                host=one.report.host,
                applied=one.report.applied,
                owners=one.report.owners,
                wanted=one.report.wanted,
                spare=one.report.spare,
                is_silent=one.is_silent,
                has_cpus=one.has_cpus,
            )
            for one in usable
            if one.report is not None
        }
        nodes |= {name: unheard(name, state) for name in outside}
        self._state = after = decide(state, View(nodes=nodes, placed=self._reservations.placed, now_s=time.time()))
        data = encode_state(after)
        for one in usable:
            self._tell(one, after, data)

    def _tell(self, host: HostHandle, state: ClusterState, data: bytes) -> None:
        """Have a node do what a state says, once it has the files that it needs for that."""
        if host.applying is not None:
            answer = result(host.applying)
            if answer is None:
                return
            host.applying = None
            if isinstance(answer, tuple):
                for digest in cast("tuple[str, ...]", answer):
                    self._hand_over(host, digest)
        if host.is_begun and host.report is not None and host.report.applied < state.version:
            host.applying = host.actor.apply.remote(data)

    def _hand_over(self, host: HostHandle, digest: str) -> None:
        """Give a node the files of the project, which it may get from another one."""
        packed = self._packed.get(digest)
        if packed is not None:
            host.actor.put_code.remote(digest, packed)
            return
        for other in self._hosts.usable:
            if other is not host and other.is_begun and other.report is not None and digest in other.report.code:
                host.actor.put_code.remote(digest, other.actor.code.remote(digest))
                return
