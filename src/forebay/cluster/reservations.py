# SPDX-License-Identifier: Apache-2.0
"""What workers need, reserved at Ray: one actor for each worker, which holds that and does nothing.

A worker runs where its actor is. Ray places it, and again on another node when its own is lost. The actors are detached
and have names, so a controller that starts anew finds them. One that is made for a worker which runs already has to be
on that worker's node; if it cannot be had there, the worker moves.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.cluster.deployment import ClusterState, PlacedWorker
from forebay.cluster.node_plan import worker_child
from forebay.cluster.ray_hosts import result, words_of
from forebay.cluster.ray_library import ray_library

if TYPE_CHECKING:
    from forebay.types.ray_needs import RayNeeds

NAMESPACE: Final = "forebay"
PINNED_S: Final = 10.0
"""How long a reservation is waited for on the node where its worker runs already."""
PENDING_S: Final = 5.0
"""A worker that has no place for this long is told of."""
_NODE: Final = "ray.io/node-id"


class Reservation:
    """Holds resources of a node: the actor."""

    def where(self) -> tuple[str, tuple[str, ...] | None]:
        """Return the node, as Ray numbers it, and the GPUs that are reserved there, if any."""
        ray = ray_library()

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return context.get_node_id(), tuple(gpus) or None


class _Held:
    """A reservation."""

    def __init__(self, actor: Any, *, is_pinned: bool = False) -> None:
        self.actor = actor
        self.is_pinned = is_pinned
        self.since_s = time.monotonic()
        self.asked: Any = None
        self.place: tuple[str, tuple[str, ...] | None] | None = None
        self.problem = ""


class Reservations:
    """All reservations of a deployment.

    Attributes:
        placed: Where workers may run, by run and index.
    """

    def __init__(self, deployment: str) -> None:
        self._prefix = f"worker:{deployment}:"
        self._held: dict[tuple[str, int], _Held] = {}
        self._made = 0
        self._is_begun = False
        self.placed: dict[tuple[str, int], PlacedWorker] = {}

    def follow(
        self,
        state: ClusterState,
        names: Mapping[str, str],
        avoided: Collection[str],
        children: Collection[str],
        outside: Collection[str] = (),
    ) -> None:
        """Reserve what the workers of a state need, and give back what is needed no more.

        Args:
            names: The names of the nodes that can be used, by what Ray calls them.
            avoided: Nodes that no worker may be on.
            children: The processes that run, which use what is reserved.
            outside: Nodes that Ray does not have, by name; their workers go on without a reservation.
        """
        if not self._is_begun:
            self._recover()
        needs = {(run.key, index): run.unit.needs for run in state.runs for index in range(state.size(run))}
        for key, held in list(self._held.items()):
            if key not in needs:
                if worker_child(*key) not in children:
                    self._give_back(key)
            elif held.place is not None and held.place[0] in avoided:
                self._give_back(key)
            elif held.is_pinned and held.place is None and time.monotonic() - held.since_s > PINNED_S:
                self._give_back(key)
                self._held[key] = self._reserved(key, needs[key], avoided, None)
        ids = {name: node_id for node_id, name in names.items() if node_id not in avoided}
        nodes = {(one.run, one.index): one.node for one in state.workers}
        for key, wanted in needs.items():
            node = nodes.get(key, "")
            if key not in self._held and node not in outside:
                self._held[key] = self._reserved(key, wanted, avoided, ids.get(node))
        self._ask()
        self.placed = {
            (run, index): PlacedWorker(run=run, index=index, node=names[held.place[0]], gpus=held.place[1])
            for (run, index), held in self._held.items()
            if held.place is not None and held.place[0] in names
        }

    def problems(self) -> list[str]:
        """Return which workers have no place."""
        late = time.monotonic() - PENDING_S
        pending = [key for key, held in self._held.items() if held.place is None and held.since_s < late]
        return [
            f"worker {index} of {run} waits for resources: no node has what it reserves free"
            + (f" ({self._held[run, index].problem})" if self._held[run, index].problem else "")
            for run, index in sorted(pending)
        ]

    def end(self) -> None:
        """Give everything back."""
        if not self._is_begun:
            self._recover()
        for key in list(self._held):
            self._give_back(key)

    def _recover(self) -> None:
        """Find the reservations that another controller has made."""
        ray = ray_library()

        self._is_begun = True
        for one in cast("list[str]", ray.util.list_named_actors()):
            if not one.startswith(self._prefix):
                continue
            run, index, number = one.removeprefix(self._prefix).rsplit(":", 2)
            self._made = max(self._made, int(number))
            key = run, int(index)
            if key in self._held:
                self._give_back(key)
            self._held[key] = _Held(ray.get_actor(one, namespace=NAMESPACE))

    def _reserved(self, key: tuple[str, int], needs: RayNeeds, avoided: Collection[str], node_id: str | None) -> _Held:
        """Reserve what a worker needs.

        Args:
            avoided: Where it may not be.
            node_id: Where it has to be; None leaves that to Ray.
        """
        ray = ray_library()

        self._made += 1
        labels = dict(needs.labels)
        if node_id is not None:
            labels[_NODE] = node_id
        elif avoided:
            labels[_NODE] = f"!in({','.join(sorted(avoided))})"
        kind = ray.remote(Reservation)
        options = {
            "name": f"{self._prefix}{key[0]}:{key[1]}:{self._made}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": -1,
            "num_cpus": needs.num_cpus,
            "num_gpus": needs.num_gpus,
            "memory": needs.memory or None,
            "resources": needs.resources or None,
            "label_selector": labels or None,
            "scheduling_strategy": "SPREAD" if needs.placement == "spread" else "DEFAULT",
        }
        return _Held(kind.options(**options).remote(), is_pinned=node_id is not None)

    def _ask(self) -> None:
        """Ask where all are; what they said before holds until they answer."""
        for held in self._held.values():
            if held.asked is None:
                held.asked = held.actor.where.remote()
            answer = result(held.asked)
            if isinstance(answer, BaseException):
                held.asked, held.problem = None, words_of(answer)
            elif answer is not None:
                held.asked, held.problem, held.place = None, "", answer

    def _give_back(self, key: tuple[str, int]) -> None:
        ray = ray_library()

        ray.kill(self._held.pop(key).actor)
