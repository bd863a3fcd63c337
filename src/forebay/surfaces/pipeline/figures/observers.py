# SPDX-License-Identifier: Apache-2.0
"""What the configuration wants to be known of each request: profile lines, the tracer's file, metrics."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.figures.profile import Profile, ProfileWriter
from forebay.surfaces.pipeline.figures.tracer import SHORTEST_S, Channel, MetricsPort, Tracer, TracerFile

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.figures.profile import CallTimes


class Observers:
    """Those of one graph.

    Attributes:
        profile: Makes profile lines, also for clients that ask for theirs.
    """

    def __init__(self, dag: Dag, config: PipelineConfig, nodes: dict[str, Endpoint], slots: int) -> None:
        """Describe them; `open` begins.

        Args:
            dag: The ops.
            config: What holds for them.
            nodes: The endpoint of each op.
            slots: Requests that may be inside the graph.
        """
        self.profile = Profile(dag.spec.name, in_threads=config.dag.is_thread_op or config.build_dag_each_worker)
        self._dag = dag
        self._config = config
        self._nodes = nodes
        self._slots = slots
        self._writer = ProfileWriter(self.profile) if config.dag.use_profile else None
        self._tracer: Tracer | None = None
        # Each of several processes would open the same file and the same port.
        self._has_file = config.dag.tracer_interval_s >= SHORTEST_S and not config.build_dag_each_worker
        self._has_port = config.dag.enable_prometheus and not config.build_dag_each_worker
        if self._has_file or self._has_port:
            workers = {name: settings["concurrency"] for name, settings in dag.settings.items()}
            self._tracer = Tracer(dag.spec.name, workers, self._channels)
        self._open = ExitStack()
        self._writing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin; on the loop.

        Raises:
            ConfigError: If the tracer's folder or the port of the metrics cannot be used.
        """
        config = self._config
        if self._writer is not None:
            self._open.enter_context(self._writer)
        if self._tracer is None:
            return
        self._open.enter_context(self._tracer)
        if self._has_port:
            port = MetricsPort(self._tracer.counters, config.host, config.dag.prometheus_port)
            self._open.callback(port.close)
        if self._has_file:
            base = config.log_path or os.environ.get(logs.VARIABLE) or "."
            file = TracerFile(self._tracer, Path(base) / logs.FOLDER, config.dag.tracer_interval_s)
            self._writing = asyncio.get_running_loop().create_task(file.run())

    def answered(self, data_id: int, times: CallTimes, *, ok: bool) -> None:
        """Note a request that was answered."""
        if self._writer is not None:
            self._writer.called(data_id, times)
        if self._tracer is not None:
            self._tracer.answered(data_id, times.ended - times.started, ok=ok)

    async def close(self) -> None:
        """End; what the tracer has not written yet is written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
            self._writing = None
        self._open.close()

    def _channels(self) -> list[Channel]:
        """Return what waits before each op: the channel that its predecessors write."""
        limit = self._config.dag.channel_size or self._slots
        return [
            Channel(
                name=f"chl{number}",
                producers=[one.name for one in self._dag.ops[name].get_input_ops()],
                consumers=[name],
                size=node.waiting,
                limit=limit,
            )
            for number, (name, node) in enumerate(self._nodes.items())
        ]
