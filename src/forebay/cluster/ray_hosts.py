# SPDX-License-Identifier: Apache-2.0
"""The hosts of a deployment, as its controller sees them: one on each node, each asked one question at a time.

A host begins with what is known of the deployment on its machine, then has its node process run, and then reports. One
that fails is replaced while its node is there; until then, its last report stands. A node is lost when its host has
been silent for `SILENT_S` and nothing on it can be reached. Where only Ray has ended, what runs goes on, and nothing is
lost. The same holds for a node that runs something and has no host yet, because Ray does not have it: it is *outside*.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypedDict, cast
from urllib.parse import urlsplit

from forebay.cluster.deployment import ClusterState, newest, read_state
from forebay.cluster.host import Host, NodeReport
from forebay.cluster.node_plan import LOOPBACK
from forebay.cluster.ray_library import ray_library

SILENT_S: Final = 2.0
"""How long a host may take to report before it counts as silent."""
START_S: Final = 60.0
"""How long the others wait for a host that has to start first."""

DIAL_S: Final = 1.0
"""How long one place may take to answer. A machine that is there refuses at once where no process listens."""
NODE_S: Final = 2.0
"""How long all places of a node may take."""
AGAIN_S: Final = 1.0
"""How long an answer holds before the node is dialled again."""
THREADS: Final = 64
"""Nodes that are dialled at a time."""

Place = tuple[str, int]
Step = Literal["kept", "begin", "report"]


class RayNode(TypedDict):
    """A node, as far as it matters what Ray says of it."""

    NodeID: str
    Alive: bool
    NodeName: str
    NodeManagerAddress: str
    Resources: dict[str, float]
    Labels: dict[str, str]


class HostHandle:
    """A host.

    Attributes:
        node_id: What Ray calls its node.
        actor: The actor; None while there is none.
        report: What it told last.
        heard_s: When it was heard last, by the monotonic clock.
        began_s: When its node was seen first.
        has_cpus: Whether Ray may run something there that needs a processor.
        is_begun: Whether its node process runs, as far as it knows.
        applying: The answer to the state that it was told last, while that is outstanding.
    """

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.actor: Any = None
        self.report: NodeReport | None = None
        self.heard_s = self.began_s = time.monotonic()
        self.is_begun = False
        self.is_known = False
        self.has_cpus = True
        self.applying: Any = None
        self.asked: tuple[Step, Any] | None = None

    @property
    def name(self) -> str:
        """What the node is called; empty until its host has said so."""
        return "" if self.report is None else self.report.name

    @property
    def is_silent(self) -> bool:
        """Whether it should have been heard."""
        return time.monotonic() - self.heard_s > SILENT_S

    def forget_actor(self) -> None:
        """Begin anew with another actor."""
        self.actor, self.asked, self.applying, self.is_begun = None, None, None, False


class HostActors:
    """All hosts.

    Attributes:
        lost: Nodes that are lost, by what Ray calls them, with their names.
        outside: Names of nodes that answer and have no host.
        problems: What is wrong with hosts, the last few.
    """

    def __init__(self, deployment: str, *, is_local: bool) -> None:
        self._deployment = deployment
        self._is_local = is_local
        self._handles: dict[str, HostHandle] = {}
        self._kept: list[tuple[int, bytes]] = []
        self._dials = NodeDials()
        self.lost: dict[str, str] = {}
        self.outside: frozenset[str] = frozenset()
        self.problems: list[str] = []
        self.secret = b""

    @property
    def every(self) -> list[HostHandle]:
        """All hosts whose nodes are there, or were."""
        return [*self._handles.values()]

    @property
    def usable(self) -> list[HostHandle]:
        """The hosts whose nodes have reported and are not lost."""
        return [one for one in self._handles.values() if one.name and one.node_id not in self.lost]

    @property
    def are_known(self) -> bool:
        """Whether all have said what runs on their machines, so that nothing will be started twice."""
        handles = self._handles.values()
        late = time.monotonic() - START_S
        return any(one.name for one in handles) and all(one.name or one.began_s < late for one in handles)

    def attend(self, nodes: Iterable[RayNode]) -> None:
        """Have a host on each node that Ray has."""
        alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
        for node_id, handle in list(self._handles.items()):
            others = {one.name for one in self._handles.values() if one is not handle}
            if node_id not in alive and (not handle.name or handle.name in others):  # its successor has the name
                del self._handles[node_id]
                self.lost.pop(node_id, None)
        for node_id, node in alive.items():
            handle = self._handles.setdefault(node_id, HostHandle(node_id))
            handle.has_cpus = node["Resources"].get("CPU", 0.0) > 0
            if handle.actor is None:
                handle.actor = self._made(node_id, node)

    def hear(self, state: ClusterState | None) -> ClusterState | None:
        """Ask all, wait a little for what they say, and return the newest state that is known then."""
        ray = ray_library()

        for handle in self._handles.values():
            if handle.actor is not None and handle.asked is None:
                handle.asked = self._next(handle)
        asked = [one.asked[1] for one in self._handles.values() if one.asked is not None and not one.is_silent]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=SILENT_S)
        states = [] if state is None else [state]
        for handle in self._handles.values():
            if handle.asked is not None and (answer := result(handle.asked[1])) is not None:
                (step, _), handle.asked = handle.asked, None
                states += self._heard(handle, step, answer)
        self._choose_secret()
        return newest(states)

    def find_lost(self, state: ClusterState) -> None:
        """Find the nodes that are lost, and those that are outside; it dials, which takes seconds where many are."""
        named = [one for one in self._handles.values() if one.name]
        silent = [one for one in named if one.is_silent]
        asked = [one for one in silent if one.node_id not in self.lost]
        unheard = state.nodes - {one.name for one in named}
        places = {name: _places(name, state) for name in unheard} | {one.name: _places_of(one, state) for one in asked}
        there = self._dials.answering(places)
        self.outside = frozenset(unheard & there)
        self.lost = {one.node_id: one.name for one in silent if one not in asked or one.name not in there}

    def _made(self, node_id: str, node: RayNode) -> Any:
        ray = ray_library()

        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        kind = ray.remote(Host)
        address = LOOPBACK if self._is_local else node["NodeManagerAddress"]
        return kind.options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=4).remote(
            self._deployment, "local" if self._is_local else node["NodeName"] or address, address
        )

    def _next(self, handle: HostHandle) -> tuple[Step, Any] | None:
        if handle.is_begun:
            return "report", handle.actor.report.remote()
        if not self.secret:
            return None if handle.is_known else ("kept", handle.actor.kept.remote())
        return "begin", handle.actor.begin.remote(self.secret)

    def _heard(self, handle: HostHandle, step: Step, answer: Any) -> list[ClusterState]:
        """Take what a host said; returns the states that came with it."""
        if isinstance(answer, BaseException):
            self._failed(handle, answer)
            return []
        handle.heard_s = time.monotonic()
        if step == "report":
            handle.report = cast("NodeReport", answer)
        elif step == "begin":
            handle.is_begun = True
            return [read_state(answer)] if answer else []
        else:
            handle.is_known = True
            name, secret, state = cast("tuple[str, bytes, bytes]", answer)
            if name:
                self._kept.append((read_state(state).version, secret))
        return []

    def _choose_secret(self) -> None:
        """Take the secret of what runs already, once all hosts that can be heard have said what that is."""
        import secrets

        if self.secret or not any(one.is_known for one in self._handles.values()):
            return
        late = time.monotonic() - START_S
        if all(one.is_known or one.began_s < late for one in self._handles.values()):
            self.secret = max(self._kept)[1] if self._kept else secrets.token_hex(32).encode()

    def _failed(self, handle: HostHandle, error: BaseException) -> None:
        ray = ray_library()

        where = handle.name or handle.node_id[:12]
        said = f"the host on {where} has ended: {words_of(error)}"
        if said not in self.problems:
            self.problems = [*self.problems[-4:], said]
        with contextlib.suppress(Exception):
            ray.kill(handle.actor)
        handle.forget_actor()


def result(reference: Any) -> Any:
    """Return what came of a call: its value, the error that it ended with, or None while it goes on."""
    ray = ray_library()

    ready, _ = ray.wait([reference], timeout=0)
    if not ready:
        return None
    try:
        return ray.get(reference)
    except Exception as error:  # noqa: BLE001 - Ray's errors are of many kinds, and so are those of the other side
        return error


def words_of(error: BaseException) -> str:
    """Return the last line of an error: Ray puts tracebacks before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _places(node: str, state: ClusterState) -> list[Place]:
    return [(one.host, one.port) for one in state.owners if one.node == node]


def _places_of(handle: HostHandle, state: ClusterState) -> list[Place]:
    """Return where something of a node may answer whose host does not."""
    places = _places(handle.name, state)
    if not places and handle.report is not None and handle.report.front:
        front = urlsplit(handle.report.front)
        places = [(front.hostname or "", front.port or 0)]
    return places


class NodeDials:
    """Dials nodes that no host speaks for, and remembers for a moment which of them answered."""

    def __init__(self) -> None:
        self._answered_s: dict[str, float] = {}

    def answering(self, nodes: Mapping[str, Sequence[Place]]) -> set[str]:
        """Return which nodes are there: those that answer at one of their places."""
        since = time.monotonic() - AGAIN_S
        self._answered_s = {name: at for name, at in self._answered_s.items() if at > since and name in nodes}
        unknown = [name for name in nodes if name not in self._answered_s and nodes[name]]
        if unknown:
            with ThreadPoolExecutor(min(THREADS, len(unknown))) as pool:
                found = list(pool.map(_answers, (nodes[name] for name in unknown)))
            now = time.monotonic()
            self._answered_s |= {name: now for name, answers in zip(unknown, found, strict=True) if answers}
        return {*self._answered_s}


def _answers(places: Sequence[Place]) -> bool:
    until = time.monotonic() + NODE_S
    for place in places:
        left = until - time.monotonic()
        if left <= 0:
            break
        try:
            socket.create_connection(place, min(DIAL_S, left)).close()
        except OSError:
            continue
        return True
    return False
