# SPDX-License-Identifier: Apache-2.0
"""Everything one server answers with, and its one lifecycle: start, ready, drain."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import ConfigError, NotFound, nearest
from forebay.protocols.native import Contract

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.batching.auto import AutoState
    from forebay.protocols.openapi import Described
    from forebay.serving.endpoint import Endpoint
    from forebay.workers.worker_listener import Door

log = logging.getLogger("forebay")


class Served(msgspec.Struct, eq=False):
    """An endpoint with what protocols must know of it.

    Attributes:
        endpoint: What answers.
        contract: How its bytes are moved.
        described: How it is documented; None where its requests are opaque.
        nodes: The endpoints of its nodes by name, if it is a graph. They start and stop with it.
    """

    endpoint: Endpoint
    contract: Contract
    described: Described | None = None
    nodes: Mapping[str, Endpoint] = {}


class App:
    """The endpoints of a server by name."""

    def __init__(self, served: Sequence[Served]) -> None:
        """Register endpoints.

        Raises:
            ConfigError: If two have the same name.
        """
        self._served: dict[str, Served] = {}
        self._on_change: list[Callable[[], None]] = []
        self.door: Door | None = None
        """Where workers attach, and with them endpoints; opened and closed with the app."""
        for one in served:
            if one.endpoint.name in self._served:
                msg = f"two models are named '{one.endpoint.name}'; give one of them another `name`"
                raise ConfigError(msg)
            self._served[one.endpoint.name] = one
        self.is_live = True
        self.is_draining = False
        self.started_s = 0.0

    @property
    def served(self) -> Mapping[str, Served]:
        """All endpoints by name."""
        return self._served

    @property
    def only(self) -> Served | None:
        """The endpoint, if there is just one: it also answers without its name."""
        return next(iter(self._served.values())) if len(self._served) == 1 else None

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this whenever an endpoint joins or is replaced while the app runs."""
        self._on_change.append(on_change)

    def put(self, served: Served) -> Served | None:
        """Let an endpoint join while the app runs; returns the one whose place it takes, if there was one."""
        replaced = self._served.get(served.endpoint.name)
        self._served[served.endpoint.name] = served
        for on_change in self._on_change:
            on_change()
        return replaced

    def find(self, name: str) -> Served:
        """Return an endpoint.

        Raises:
            NotFound: Naming the nearest name there is.
        """
        found = self._served.get(name)
        if found is not None:
            return found
        hint = nearest(name, self._served)
        known = ", ".join(f"'{known}'" for known in list(self._served)[:10])
        did_you_mean = f"; did you mean '{hint}'?" if hint else f"; there is {known or 'none yet'}"
        msg = f"there is no model '{name[:100]}'{did_you_mean}"
        raise NotFound(msg)

    async def start(self) -> None:
        """Bring up every endpoint.

        Raises:
            ModelError: If a model could not be loaded; what was started is stopped again.
            ConfigError: If the door for workers cannot be opened.
        """
        started = time.monotonic()
        if self.door is not None:
            await self.door.start()
        endpoints = [one.endpoint for one in self._served.values()]
        try:
            async with asyncio.TaskGroup() as group:
                for endpoint in endpoints:
                    group.create_task(endpoint.start())
        except BaseExceptionGroup as errors:
            await self.drain(0.0)
            raise errors.exceptions[0] from None
        self.started_s = time.monotonic() - started

    def begin_drain(self) -> None:
        """Say that no more is to come: the server is not ready any more, and no batch waits for company."""
        self.is_draining = True
        for one in self._served.values():
            for endpoint in (one.endpoint, *one.nodes.values()):
                endpoint.hasten()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let open ones end within `grace_s`, stop the workers."""
        self.begin_drain()
        if self.door is not None:
            self.door.close()
        drains = [one.endpoint.drain(grace_s) for one in self._served.values()]
        for name, problem in zip(
            list(self._served), await asyncio.gather(*drains, return_exceptions=True), strict=True
        ):
            if isinstance(problem, Exception):  # the others are to end all the same
                log.error("model '%s' did not stop as it should", name, exc_info=problem)
        if self.door is not None:
            self.door.stop()

    def problems(self) -> list[str]:
        """Return why the server is not ready; empty if it is."""
        if self.is_draining:
            return ["the server is draining"]
        found: list[str] = [] if self._served else ["no model is served yet: none of its workers has attached"]
        for name, one in self._served.items():
            if not one.endpoint.accepting:
                found.append(f"model '{name}' is loading")
            elif dead := [node for node, endpoint in one.nodes.items() if endpoint.pool.statistics().alive == 0]:
                found += [f"model '{name}': its node '{node}' has no worker{_why(one.nodes[node])}" for node in dead]
            elif one.endpoint.pool.statistics().alive == 0:
                found.append(f"model '{name}' has no worker{_why(one.endpoint)}")
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Return what `/models/{name}` tells: settings and the batch sizes that happen."""
        one = self.find(name)
        endpoint = one.endpoint
        facts = {
            "name": name,
            "version": endpoint.config.version,
            "ready": endpoint.accepting and endpoint.pool.statistics().alive > 0,
            "description": one.described.description if one.described else "",
            "streams": one.contract.streams,
            "batchable": one.contract.batchable,
            "timeout_ms": round(endpoint.config.timeout_s * 1000),
            **_facts(endpoint),
        }
        if one.nodes:
            facts["nodes"] = {node: _facts(endpoint) for node, endpoint in one.nodes.items()}
        return facts


def _why(endpoint: Endpoint) -> str:
    problem = endpoint.pool.statistics().problem
    return f": {problem}" if problem else ""


def _facts(endpoint: Endpoint) -> dict[str, Any]:
    """Return how an endpoint batches and what its workers do."""
    batching = endpoint.batching
    sizes = endpoint.metrics.batch_size
    pool = endpoint.pool.statistics()
    return {
        "batching": {
            "max_batch_size": batching.max_size,
            "idle": batching.idle,
            "max_wait_ms": batching.max_wait_s * 1000 if batching.idle == "wait" else None,
            "max_queue": batching.capacity,
            "batches": sizes.count,
            "mean_batch_size": round(sizes.total / sizes.count, 2) if sizes.count else None,
            "auto": None if endpoint.auto is None else _told(endpoint.auto),
        },
        "workers": {
            "slots": pool.slots,
            "idle": pool.idle,
            "alive": pool.alive,
            "restarts": pool.restarts,
            "joined": pool.joined,
            "left": pool.left,
        },
        "in_flight": endpoint.in_flight,
        "waiting": endpoint.waiting,
    }


def _told(auto: AutoState) -> dict[str, Any]:
    """Return what a latency objective has led to, in the units of the page."""
    return {
        "latency_objective_ms": auto.objective_s * 1000,
        "objective_held": auto.objective_held,
        "because": auto.because or None,
        "late": round(auto.late, 4),
        "batch_size": auto.size,
        "waits_for": auto.goal,
        "wait_ms": round(auto.wait_s * 1000, 3),
        "fixed_ms": round(auto.fixed_s * 1000, 4),
        "per_sample_ms": round(auto.per_row_s * 1000, 4),
        "samples_per_s": round(auto.rows_per_s, 1),
    }
