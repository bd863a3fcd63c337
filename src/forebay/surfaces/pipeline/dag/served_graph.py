# SPDX-License-Identifier: Apache-2.0
"""Turns a checked graph of ops into an endpoint: a queue and workers for each op, and places for requests inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.batching.queue import BUNDLE_S, BatchConfig
from forebay.graph.pool import GraphPool, Node
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.pipeline.dag import op_workers
from forebay.surfaces.pipeline.dag.service import PipelineService
from forebay.surfaces.pipeline.dag.wiring import NEVER_S, Dag, slots_of
from forebay.surfaces.pipeline.figures.observers import Observers
from forebay.surfaces.pipeline.store.store import Storage, StoreConfig, open_store
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire.objects import packed

if TYPE_CHECKING:
    import itertools

    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.figures.profile import CallTimes
    from forebay.surfaces.pipeline.figures.reports import Reporter
    from forebay.surfaces.pipeline.script import Script
    from forebay.workers.pool import Pool

STUCK_S: Final = 5.0
"""A worker that goes on so long with a batch nobody waits for is replaced."""
HANDOVER_S: Final = 0.8
"""What a worker was running when it died waits so long for another one."""


class ServedGraph:
    """A graph on workers of this process, or of processes it starts, with its store.

    Attributes:
        endpoint: The graph; to be started after `open` and drained before `close`.
        reporter: Tells the server that started this process; None where this is the server.
    """

    def __init__(
        self,
        name: str,
        dag: Dag,
        config: PipelineConfig,
        script: Callable[[], Script],
        ids: itertools.count[int],
    ) -> None:
        """Describe it.

        Args:
            script: Gives the script that worker processes execute to find their op; asked only where there are any.
        """
        self._store_config = StoreConfig(**(config.dag.external_store or {}))
        self._storage: Storage | None = None
        self._offloads = config.dag.external_store is not None
        self._store: dict[str, Any] = {}  # filled in by `open`, before a worker looks at it
        slots = slots_of(dag.settings, config)
        nodes = {one: self._node(one, dag, config, slots, script) for one in dag.ops}
        self.endpoint = endpoint_of(dag, config, GraphPool(dag.spec, nodes, slots=slots, hears_all=True))
        self.nodes = {one: node.endpoint for one, node in nodes.items()}
        self._observers = Observers(dag, config, self.nodes, slots)
        self.reporter: Reporter | None = self._observers.reporter
        self.service = PipelineService(
            name,
            dag,
            self.endpoint,
            config,
            ids=ids,
            profile=self._observers.profile,
            restored=self._restored,
            ended=self._ended,
        )

    def open(self) -> None:
        """Make the store and begin to observe; on the loop.

        Raises:
            ConfigError: If that is not possible.
        """
        import_module("numpy")  # every answer looks for arrays, and the first request need not wait for this
        self._storage = Storage(self._store_config)
        self._store.update(msgspec.to_builtins(self._storage.config))
        self._observers.open()

    async def close(self) -> None:
        """Free what the store, the observers and the threads hold."""
        self.service.close()
        await self._observers.close()
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def _restored(self, values: Mapping[str, Any], data_id: int) -> Mapping[str, Any]:
        if not self._offloads or self._storage is None:
            return values
        return open_store(self._storage.config, run=str(data_id)).restore(values)

    def _ended(self, data_id: int, times: CallTimes, ok: bool) -> None:
        self._observers.answered(data_id, times, ok=ok)
        if self._storage is not None:
            self._storage.forget(str(data_id))

    def _node(self, name: str, dag: Dag, config: PipelineConfig, slots: int, script: Callable[[], Script]) -> Node:
        in_threads = config.dag.is_thread_op or config.build_dag_each_worker
        count = dag.settings[name]["concurrency"]
        factory = f"{op_workers.__name__}:op_runner"
        if in_threads:
            local = op_workers.thread_runners(dag, name, config, self._store)
            pool: Pool = ThreadPool(RunnerSpec(factory=factory, local=local), workers=count, stuck_s=STUCK_S)
        else:
            kwargs = {"script": msgspec.to_builtins(script()), "name": name, "store": self._store}
            pool = ProcessPool(
                packed(RunnerSpec(factory=factory, kwargs=kwargs)),
                workers=count,
                stuck_s=STUCK_S,
                isolates=True,
                handover_s=HANDOVER_S,
            )
        endpoint = Endpoint(
            EndpointConfig(name=f"{dag.spec.name}/{name}", timeout_s=NEVER_S, max_timeout_s=NEVER_S),
            _batching(dag.settings[name], slots),
            pool,
        )
        return Node(endpoint=endpoint, packs=not in_threads)


def endpoint_of(dag: Dag, config: PipelineConfig, pool: Pool, more_s: float = 0.0) -> Endpoint:
    """Return the endpoint of a whole graph; a request may ask for `more_s` beyond the longest time."""
    timeout_ms = config.dag.timeout_ms
    timeout_s = NEVER_S if timeout_ms is None else timeout_ms / 1000
    return Endpoint(
        EndpointConfig(name=dag.spec.name, timeout_s=timeout_s, max_timeout_s=NEVER_S + more_s),
        BatchConfig(max_size=1, idle="go", capacity=config.max_queue),
        pool,
    )


def _batching(settings: Mapping[str, Any], slots: int) -> BatchConfig:
    size, wait_ms = settings["batch_size"], settings["auto_batching_timeout"]
    if size == 1:
        # With several workers, no other worker could take what one has in its bundle.
        bundle_s = BUNDLE_S if settings["concurrency"] == 1 else 0.0
        return BatchConfig(max_size=1, idle="go", capacity=slots, bundle_s=bundle_s, ranked=True)
    wait_s = wait_ms / 1000 if wait_ms and wait_ms > 0 else NEVER_S
    return BatchConfig(max_size=size, max_wait_s=wait_s, idle="wait", capacity=slots, ranked=True)
