# SPDX-License-Identifier: Apache-2.0
"""The records that the configuration asks for: profile lines, the tracer's file, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.observe.metrics.node_totals import NodeListener
from forebay.observe.traces.timeline import Timeline
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.figures.profile import CallTimes, Profile, ProfileWriter
from forebay.surfaces.pipeline.figures.reports import Reporter
from forebay.surfaces.pipeline.figures.tracer import SHORTEST_S, MetricsPort, Tracer, TracerFile
from forebay.types.server_state import here

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag


class Outlets:
    """Where the figures of a graph leave the server: the tracer's file and the port of the metrics.

    Attributes:
        tracer: Takes note of requests and ops; None if the configuration wants no figures.
    """

    def __init__(
        self, dag: Dag, config: PipelineConfig, waiting: Callable[[], Mapping[str, int]], slots: int, processes: int = 1
    ) -> None:
        """Describe them; `open` begins.

        Args:
            waiting: Returns how many requests are before each op.
            slots: Requests that may be inside the graph, of all processes together.
            processes: How many processes host the graph.
        """
        self.tracer: Tracer | None = None
        self._config = config
        if wants_figures(config):
            workers = {name: settings["concurrency"] * processes for name, settings in dag.settings.items()}
            inputs = {name: [one.name for one in op.get_input_ops()] for name, op in dag.ops.items()}
            self.tracer = Tracer(workers, inputs, waiting, config.dag.channel_size * processes or slots)
        self._open = ExitStack()
        self._writing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin; on the loop.

        Raises:
            ConfigError: If the tracer's folder or the port of the metrics cannot be used.
        """
        config = self._config
        if self.tracer is None:
            return
        if config.dag.enable_prometheus:
            port = MetricsPort(self.tracer, config.host, config.dag.prometheus_port)
            self._open.callback(port.close)
        if config.dag.tracer.interval_s >= SHORTEST_S:
            base = logs.base_of(config.log_path) or Path()
            file = TracerFile(self.tracer, base / logs.FOLDER, config.dag.tracer.interval_s)
            self._writing = asyncio.get_running_loop().create_task(file.run())

    async def close(self) -> None:
        """Write what the tracer has not written yet, and end."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
            self._writing = None
        self._open.close()


class Observers:
    """The observers of a graph in this process: its own outlets, or a reporter if several processes host the graph.

    Attributes:
        profile: Makes profile lines, also for clients that ask for theirs.
        reporter: Tells the server that started this process; None where this is the server.
    """

    def __init__(self, dag: Dag, config: PipelineConfig, nodes: Mapping[str, Endpoint], slots: int) -> None:
        """Describe them; `open` begins."""
        self.profile = Profile(dag.spec.name, in_threads=config.dag.is_thread_op or config.build_dag_each_worker)
        self._writer = ProfileWriter(self.profile) if config.dag.use_profile else None
        self._nodes = nodes
        self.reporter: Reporter | None = None
        self._outlets: Outlets | None = None
        if config.build_dag_each_worker:
            level = None if logs.base_of(config.log_path) is None else config.log_level or "info"
            self.reporter = counting = Reporter(nodes, level)
        else:
            self._outlets = Outlets(dag, config, self._waiting, slots)
            counting = self._outlets.tracer
        self._counting = counting if wants_figures(config) else None
        self._listener = None if self._counting is None else NodeListener(dag.spec.name, nodes, self._counting.ran)
        self._open = ExitStack()

    def open(self) -> None:
        """Begin; on the loop.

        Raises:
            ConfigError: If the tracer's folder or the port of the metrics cannot be used.
        """
        self.profile.timeline = here(Timeline)
        for one in (self._writer, self._listener, self.reporter):
            if one is not None:
                self._open.enter_context(one)
        if self._outlets is not None:
            self._outlets.open()

    def answered(self, data_id: int, times: CallTimes, *, ok: bool) -> None:
        """Note a request that was answered."""
        if self._writer is not None:
            self._writer.called(data_id, times)
        if self._counting is not None:
            self._counting.answered(data_id, times.ended - times.started, ok=ok)

    async def close(self) -> None:
        """Write what the tracer has not written yet, and end."""
        if self._outlets is not None:
            await self._outlets.close()
        self._open.close()

    def _waiting(self) -> dict[str, int]:
        return {name: node.waiting for name, node in self._nodes.items()}


def wants_figures(config: PipelineConfig) -> bool:
    """Tell whether the configuration asks for figures about the ops."""
    return config.dag.tracer.interval_s >= SHORTEST_S or config.dag.enable_prometheus
