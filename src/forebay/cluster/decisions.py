# SPDX-License-Identifier: Apache-2.0
"""What the controller decides: which node owns what, when a version takes the place of another, and what may end.

Theory of operation. Everything is a function of the state and of a view of the nodes. One step changes what it can, and
the next one goes on from there, so a controller that starts anew continues where the last one ended. Rules:

- An owner stays where it is. It is replaced if its node is lost, and moved if its node drains.
- A lost owner is replaced at once: fronts hold the requests and send them to its successor.
- A draining node's owner is replaced by one that is up already; fronts change over, and then the old one drains.
- A new version of a unit runs beside the live one. Once all new runs are ready, they become the live ones.
- A node has one door where programs join, as long as it is known: those that have joined elsewhere come back there.
- An owner that fronts do not ask any more is removed once every node knows. Its workers outlive it, since it answers
  what it has accepted with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from forebay.cluster.deployment import MAX_DOORS, ClusterState, Deployment, Owning, PlacedWorker, Run, address_of
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.types.ray_needs import RayNeeds

_OF: Final = ".owner-"
_MAX_ABSENT: Final = 64
"""Doors that are kept of nodes that are not there: they may come back."""
_MAX_NAME: Final = 80
"""Characters of a unit's name that keys have: files are named by them."""

Level = Literal["starting", "up", "ready"]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can be used.

    Attributes:
        host: Where other nodes reach it.
        applied: The version of the state that it runs.
        owners: Its owner processes that have not ended yet, and how far each is.
        wanted: How many workers those of them want that say so.
        spare: Pairs of ports that are free there.
        is_silent: Whether what runs there goes on, but cannot be told anything.
        has_cpus: Whether Ray may run something there that needs a processor.
    """

    host: str
    applied: int = 0
    owners: dict[str, Level] = {}
    wanted: dict[str, int] = {}
    spare: tuple[tuple[int, int], ...] = ()
    is_silent: bool = False
    has_cpus: bool = True


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller sees.

    Attributes:
        nodes: The nodes that can be used, by name.
        placed: Where Ray has reserved what a worker needs, by run and index.
        now_s: Seconds since the epoch.
    """

    nodes: dict[str, NodeView]
    placed: dict[tuple[str, int], PlacedWorker] = {}
    now_s: float = 0.0


def begin(state: ClusterState | None, deployment: Deployment, now_s: float) -> ClusterState:
    """Return the state in which a deployment is wanted; one that is wanted already changes nothing.

    Raises:
        ConfigError: Another deployment runs here, or the same with other TLS files.
    """
    if state is None:
        state = ClusterState(version=0, deployment=deployment)
    elif state.deployment.name != deployment.name:
        raise ConfigError(f"the deployment is called '{state.deployment.name}', not '{deployment.name}'")
    elif state.deployment.tls != deployment.tls:  # fronts and workers that run would not reach the new owners
        raise ConfigError(
            f"TLS between the nodes of '{deployment.name}' cannot change while it runs: end it first with forebay "
            "cluster down, or give the same --attach-certfile, --attach-keyfile and --attach-cafile"
        )
    elif state.deployment == deployment and not state.problem:
        return state
    known = {(run.unit.name, run.code): run for run in state.runs if run.key in state.live}
    coming = {*state.wanted} - {*state.live}
    runs = [run for run in state.runs if run.key not in coming]
    made = state.made
    for unit in deployment.units:
        found = known.get((unit.name, deployment.code))
        if found is None or found.unit != unit:
            made += 1
            runs.append(Run(key=f"{unit.name[:_MAX_NAME].replace('/', '.')}-{made}", unit=unit, code=deployment.code))
    kept = {run.key for run in runs}
    before = state.previous or state.deployment
    begun = msgspec.structs.replace(
        state,
        version=state.version + 1,
        deployment=deployment,
        previous=before if state.live else None,
        runs=tuple(runs),
        routes={run: key for run, key in state.routes.items() if run in kept},
        owners=tuple(one for one in state.owners if one.run in kept),
        workers=tuple(one for one in state.workers if one.run in kept),
        since_s=now_s,
        problem="",
        made=made,
    )
    return begun if state.live else msgspec.structs.replace(begun, live=begun.wanted)


def drain(state: ClusterState, node: str, *, on: bool) -> ClusterState:
    """Return the state in which a node is to be left, or is to be used again."""
    others = tuple(one for one in state.draining if one != node)
    draining = (*others, node) if on else others
    if draining == state.draining:
        return state
    return msgspec.structs.replace(state, version=state.version + 1, draining=draining)


def decide(state: ClusterState, view: View) -> ClusterState:
    """Return the next state; the same one if nothing is to change."""
    draft = _Draft(state, view)
    draft.resize()
    draft.follow_workers()
    draft.replace_lost()
    draft.move_drained()
    draft.change_over()
    draft.open_doors()
    draft.forget()
    return draft.result()


def why_not(needs: RayNeeds, nodes: Iterable[Mapping[str, float]], labels: Iterable[Mapping[str, str]]) -> str:
    """Return why no node could ever have a worker with these needs, as the end of a sentence; empty if one could."""
    totals = [dict(one) for one in nodes]
    if not totals:
        return "the cluster has no node"
    for name, amount in needs.amounts.items():
        most = max(one.get(name, 0.0) for one in totals)
        if most < amount:
            return f"each worker reserves {_shown(name, amount)}, and no node has more than {_shown(name, most)}"
    fitting = [
        one for one, its in zip(totals, labels, strict=True) if all(its.get(k) == v for k, v in needs.labels.items())
    ]
    if needs.labels and not fitting:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(needs.labels.items()))
        return f"no node has the labels {shown}"
    if not any(all(one.get(name, 0.0) >= amount for name, amount in needs.amounts.items()) for one in fitting):
        shown = ", ".join(_shown(name, amount) for name, amount in sorted(needs.amounts.items()))
        return f"each worker reserves {shown}, and no node has all of that"
    return ""


def unheard(node: str, state: ClusterState) -> NodeView:
    """Return what is known of a node that is there and that no host speaks for."""
    owners = [one for one in state.owners if one.node == node]
    host = owners[0].host if owners else ""
    return NodeView(host=host, owners=dict.fromkeys((one.key for one in owners), "up"), is_silent=True)


def run_of(owning: str) -> str:
    """Return the run that an owner with this key is one of."""
    return owning.rpartition(_OF)[0]


def _shown(name: str, amount: float) -> str:
    return f"{amount:g} {name}"


class _Draft:
    """The next state, in the making."""

    def __init__(self, state: ClusterState, view: View) -> None:
        self._before = state
        self._view = view
        self._version = state.version + 1
        self._runs = list(state.runs)
        self._live = state.live
        self._routes = dict(state.routes)
        self._owners = {one.key: one for one in state.owners}
        self._workers = {(one.run, one.index): one for one in state.workers}
        self._made = state.made
        self._kept = {*state.live, *state.wanted}
        self._doors = dict(state.doors)
        self._used = {(one.node, one.port) for one in state.owners}
        self._sizes = state.sizes
        self._used |= {(node, int(door.rpartition(":")[2])) for node, door in state.doors.items()}
        self._more: dict[str, object] = {}

    def result(self) -> ClusterState:
        """Return what came of it."""
        state = msgspec.structs.replace(
            self._before,
            runs=tuple(self._runs),
            live=self._live,
            routes=self._routes,
            owners=tuple(self._owners.values()),
            workers=tuple(self._workers[key] for key in sorted(self._workers)),
            made=self._made,
            sizes=self._sizes,
            doors=self._doors,
            **self._more,
        )
        return self._before if state == self._before else msgspec.structs.replace(state, version=self._version)

    def resize(self) -> None:
        """Have as many workers as their owner wants; while it says nothing, as many as there are."""
        self._sizes = {
            key: size for key, size in self._before.sizes.items() if any(key == one.key for one in self._runs)
        }
        for run in self._runs:
            owning = self._route(run.key)
            node = None if owning is None else self._view.nodes.get(owning.node)
            if run.unit.bounds is not None and owning is not None and node is not None and owning.key in node.wanted:
                self._sizes[run.key] = min(max(node.wanted[owning.key], run.unit.bounds.min), run.unit.bounds.max)

    def follow_workers(self) -> None:
        """Have workers run where Ray has reserved what they need; one without a reservation stays on a usable node."""
        sizes = {run.key: self._sizes.get(run.key, run.unit.workers) for run in self._runs}
        wanted = {(key, index) for key, size in sizes.items() for index in range(size)}
        for key in wanted:
            placed = self._view.placed.get(key)
            if placed is not None and placed.node in self._view.nodes:
                self._workers[key] = placed
        for key, placed in list(self._workers.items()):
            if key not in wanted or placed.node not in self._view.nodes:
                del self._workers[key]

    def replace_lost(self) -> None:
        """Give each run an owner whose node is there."""
        for one in list(self._owners.values()):
            if one.node not in self._view.nodes and self._routes.get(one.run) != one.key:  # nobody asks it
                del self._owners[one.key]
        for run in self._runs:
            if run.key in self._kept and self._route(run.key) is None:
                successor = self._successor(run.key) or self._owned(run.key)
                if successor is not None:
                    self._set_route(run.key, successor)

    def move_drained(self) -> None:
        """Move owners away from nodes that are to be left."""
        for run in self._runs:
            route = self._route(run.key)
            if run.key not in self._kept or route is None:
                continue
            successor = self._successor(run.key) if route.node in self._before.draining else None
            self._retire_others(run.key, {route.key} if successor is None else {route.key, successor.key})
            if route.node not in self._before.draining:
                continue
            if successor is None:
                self._owned(run.key)
            elif self._level(successor) != "starting":
                self._owners[route.key] = msgspec.structs.replace(route, left_at=self._version)
                self._routes[run.key] = successor.key

    def change_over(self) -> None:
        """Let new versions take their place once all of them are ready, or give them up when their time is over."""
        state = self._before
        wanted = state.wanted
        if set(wanted) == set(self._live):
            if state.previous is not None:
                self._more["previous"] = None
            return
        levels = {key: self._route_level(key) for key in wanted if key not in self._live}
        waiting = sorted(key for key, level in levels.items() if level != "ready")
        if not waiting:
            self._retire(key for key in self._live if key not in wanted)
            self._live = wanted
            self._more["previous"] = None
        elif self._view.now_s - state.since_s > state.deployment.load_timeout_s and state.previous is not None:
            names = ", ".join(sorted({run.unit.name for run in self._runs if run.key in waiting}))
            self._more["problem"] = (
                f"rolled back: the new version of {names} was not ready within {state.deployment.load_timeout_s:g} s; "
                "what was served stays served"
            )
            self._more["deployment"], self._more["previous"] = state.previous, None
            self._retire(levels)

    def open_doors(self) -> None:
        """Give each node a door where programs join."""
        for name, node in self._view.nodes.items():
            is_there = self._doors.get(name, "").startswith(address_of(node.host, 0)[:-1])
            if not is_there and not node.is_silent and len(self._doors) < MAX_DOORS and (pairs := self._free(name)):
                self._used.add((name, pairs[0][0]))
                self._doors[name] = address_of(node.host, pairs[0][0])
        absent = [name for name in self._doors if name not in self._view.nodes]
        for name in absent[:-_MAX_ABSENT]:
            del self._doors[name]

    def forget(self) -> None:
        """Remove owners that no front asks any more, and then what belongs to runs without any."""
        oldest = min((node.applied for node in self._view.nodes.values() if not node.is_silent), default=0)
        for one in list(self._owners.values()):
            if one.left_at is not None and oldest >= one.left_at:
                del self._owners[one.key]
        running = {run_of(key) for node in self._view.nodes.values() for key in node.owners}
        owned = {one.run for one in self._before.owners}
        for run in list(self._runs):
            if run.key not in {*self._kept, *self._live, *owned, *running}:
                self._runs.remove(run)
                self._routes.pop(run.key, None)
                for key in [key for key in self._workers if key[0] == run.key]:
                    del self._workers[key]

    def _retire(self, runs: Iterable[str]) -> None:
        leaving = set(runs)
        for one in list(self._owners.values()):
            if one.run in leaving and one.left_at is None:
                self._owners[one.key] = msgspec.structs.replace(one, left_at=self._version)

    def _retire_others(self, run: str, kept: set[str]) -> None:
        """Have owners of a run leave that are not needed any more, as when a node is used again."""
        for one in list(self._owners.values()):
            if one.run == run and one.key not in kept and one.left_at is None:
                self._owners[one.key] = msgspec.structs.replace(one, left_at=self._version)

    def _route(self, run: str) -> Owning | None:
        """Return the owner of a run, if its node is there."""
        found = self._owners.get(self._routes.get(run, ""))
        return found if found is not None and found.node in self._view.nodes else None

    def _successor(self, run: str) -> Owning | None:
        """Return an owner of a run that may take the place of the one that fronts ask."""
        others = (one for one in self._owners.values() if one.run == run and one.key != self._routes.get(run))
        return next((one for one in others if one.left_at is None and self._may_own(one.node)), None)

    def _set_route(self, run: str, owning: Owning) -> None:
        lost = self._owners.get(self._routes.get(run, ""))
        if lost is not None:
            del self._owners[lost.key]
        self._routes[run] = owning.key

    def _level(self, owning: Owning) -> Level:
        node = self._view.nodes.get(owning.node)
        return "starting" if node is None else node.owners.get(owning.key, "starting")

    def _route_level(self, run: str) -> Level:
        route = self._route(run)
        return "starting" if route is None else self._level(route)

    def _may_own(self, node: str) -> bool:
        return node in self._view.nodes and node not in self._before.draining

    def _free(self, node: str) -> list[tuple[int, int]]:
        """Return the pairs of ports of a node that nothing of this state has."""
        return [pair for pair in self._view.nodes[node].spare if (node, pair[0]) not in self._used]

    def _owned(self, run: str) -> Owning | None:
        """Give a run one more owner; None if no node can have it.

        It is on the node that has the fewest, but not on one that Ray keeps free of work while there is another.
        """
        burden = Counter(one.node for one in self._owners.values() if one.left_at is None)
        free = {name: self._free(name) for name, node in self._view.nodes.items() if not node.is_silent}
        usable = [name for name, pairs in free.items() if pairs and self._may_own(name)]
        if not usable:  # better on a node that is to be left than nowhere
            usable = [name for name, pairs in free.items() if pairs and self._route(run) is None]
        if not usable:
            return None
        name = min(usable, key=lambda one: (not self._view.nodes[one].has_cpus, burden[one], one))
        port, http_port = free[name][0]
        self._used.add((name, port))
        self._made += 1
        owning = Owning(
            key=f"{run}{_OF}{self._made}",
            run=run,
            node=name,
            host=self._view.nodes[name].host,
            port=port,
            http_port=http_port,
        )
        self._owners[owning.key] = owning
        return owning
