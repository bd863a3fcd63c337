# SPDX-License-Identifier: Apache-2.0
"""`build_dag_each_worker`: the whole graph in each of several processes, behind one port of each kind.

Here is both what hands requests to the processes and what answers them there; `graph/graph_processes.py` moves them.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import DeadlineExceeded, ForebayError, Unavailable
from forebay.graph.graph_processes import GraphProcesses, GraphRunner
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline import script as scripts
from forebay.surfaces.pipeline.dag.op_workers import built, captured
from forebay.surfaces.pipeline.dag.predictions import Prediction, Predictions, log_call, stopped
from forebay.surfaces.pipeline.dag.served_graph import HANDOVER_S, ServedGraph, endpoint_of
from forebay.surfaces.pipeline.dag.wiring import inside_of, slots_of
from forebay.surfaces.pipeline.figures.observers import Outlets
from forebay.surfaces.pipeline.figures.reports import Reports
from forebay.types.call import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.figures.tracer import Tracer
    from forebay.surfaces.pipeline.script import Script
    from forebay.surfaces.pipeline.server import PipelineServer
    from forebay.types.call import Item, Outcome, Request
    from forebay.workers.runner import WorkerContext

LATE_S: Final = 1.0
"""Time a process has to answer that a request's time is over, which it does with the request's ids."""


class EachWorker:
    """The processes, and what hands requests to them.

    Attributes:
        endpoint: Their queue.
        nodes: None: those are in the processes.
        service: What answers requests with them.
    """

    nodes: Mapping[str, Endpoint] = {}

    def __init__(self, name: str, dag: Dag, config: PipelineConfig, script: Script) -> None:
        count = config.worker_num
        pool = GraphProcesses(
            f"{__name__}:dag_runner",
            {"script": msgspec.to_builtins(script), "count": count},
            self._reported,
            workers=count,
            threads=inside_of(dag.settings),
            handover_s=HANDOVER_S,
        )
        self.endpoint = endpoint_of(dag, config, pool, more_s=LATE_S)
        self._reports = Reports(dag.ops, pool.pids)
        self._outlets = Outlets(dag, config, self._reports.waiting, slots_of(dag.settings, config) * count, count)
        self.service = Forwarding(name, self.endpoint, config, self._outlets.tracer)

    def open(self) -> None:
        """Begin to observe; each process has a store of its own.

        Raises:
            ConfigError: If the tracer's folder or the port of the metrics cannot be used.
        """
        self._outlets.open()

    async def close(self) -> None:
        """End what observes."""
        await self._outlets.close()

    def _reported(self, told: Any) -> None:
        self._reports.read(told, self._outlets.tracer)


class Forwarding(Predictions):
    """Hands each request to a process, as bytes."""

    def __init__(self, name: str, endpoint: Endpoint, config: PipelineConfig, tracer: Tracer | None) -> None:
        super().__init__(name, endpoint, config)
        self._tracer = tracer

    def _begin(self, asked: Prediction) -> None:
        asked.body = asked.message.SerializeToString()
        more = {"peer": asked.peer, "came": asked.times.started, "parent": asked.parent}
        asked.params = {"deadline": asked.deadline, **more}
        asked.deadline += LATE_S
        self.endpoint.submit(asked)

    def _replied(self, asked: Request, outcome: Outcome) -> None:
        assert isinstance(asked, Prediction)
        is_failed = type(outcome) is Failure
        answer = self._failed(asked, outcome.error) if is_failed else self.response_class.FromString(outcome)
        self._respond(asked, answer)

    def _failed(self, asked: Prediction, error: ForebayError) -> Any:
        """Return the answer to a request that no process has answered, so that it has no number."""
        asked.times.ended = time.monotonic()
        if self._tracer is not None:
            self._tracer.answered(None, asked.times.ended - asked.times.started, ok=False)
        if asked.is_cut:
            error = stopped()
        if not isinstance(error, (DeadlineExceeded, Unavailable)):
            return error
        told = codes.err_of(error, closing=self.is_closing)
        response = self.error(told.err_no, f"(data_id=- log_id={asked.log_id}) {told.text}")
        log_call(asked, response)
        return response


def dag_runner(script: Mapping[str, Any], count: int, given: int) -> GraphRunner:
    """Execute a script in this process and host its whole graph; the factory of `build_dag_each_worker`.

    Args:
        script: The fields of the `Script`.
        count: How many processes do so.
        given: How many requests the processes before this one, in its place, were given at most.
    """
    return runner_of(captured(script), count, given)


def runner_of(server: PipelineServer, count: int, given: int = 0) -> GraphRunner:
    """Host the whole graph of a server; see `dag_runner`.

    A body is a request as bytes. An outcome is the answer as bytes, or a list of these and of a report for the server
    (see `figures.reports`) where there is something to tell it.
    """

    def make(ctx: WorkerContext) -> _InProcess:
        dag, config = built(server)
        ids = itertools.count(ctx.index + given * count, count)
        return _InProcess(ServedGraph(server.name, dag, config, scripts.running, ids))

    return GraphRunner(make)


class _InProcess:
    """The graph of one of the processes."""

    def __init__(self, hosted: ServedGraph) -> None:
        self._hosted = hosted

    async def start(self) -> None:
        self._hosted.open()
        await self._hosted.endpoint.start()

    async def answer(self, item: Item) -> Outcome:
        service, reporter = self._hosted.service, self._hosted.reporter
        assert reporter is not None
        message = service.request_class.FromString(item.body)
        with reporter.answering():
            response = await service.answer(message, **item.params)
            return reporter.beside(response.SerializeToString())

    async def stop(self) -> None:
        await self._hosted.endpoint.drain(0.0)
        await self._hosted.close()
