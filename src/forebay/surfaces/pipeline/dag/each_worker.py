# SPDX-License-Identifier: Apache-2.0
"""`build_dag_each_worker`: the whole graph in each of several processes, behind one port of each kind.

    server: Forwarding -> Endpoint -> _GraphProcesses     process: GraphRunner, one thread a request -> ServedGraph

A process takes the next request when it has room for it, so that the load is spread by request and not by connection.
Anything else it has to report travels with its answers. A request whose client went away is called off inside of it;
the process is not ended, for others are inside as well.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import Cancelled, DeadlineExceeded, ForebayError, TooLate, Unavailable
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline import script as scripts
from forebay.surfaces.pipeline.dag.op_workers import built, captured
from forebay.surfaces.pipeline.dag.predictions import Prediction, Predictions, log_call, stopped
from forebay.surfaces.pipeline.dag.served_graph import HANDOVER_S, ServedGraph, endpoint_of
from forebay.surfaces.pipeline.dag.wiring import Dag, inside_of, slots_of
from forebay.surfaces.pipeline.figures.observers import Outlets
from forebay.surfaces.pipeline.figures.reports import Reports
from forebay.types.call import Failure, Item, Outcome, Request
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import Runner, RunnerSpec, WorkerContext
from forebay.workers.user_calls.cancel import is_cancelled
from forebay.workers.user_calls.user_code import attempt_async

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.figures.tracer import Tracer
    from forebay.surfaces.pipeline.prepared_server import PreparedServer
    from forebay.surfaces.pipeline.script import Script
    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.pools.worker_slot import WorkerSlot

log = logging.getLogger("forebay.pipeline")

LATE_S: Final = 1.0
"""Time a process has to answer that a request's time is over, which it does with the request's ids."""
LOOK_S: Final = 0.1
"""So often a request inside of a graph is asked whether anybody still waits for it."""
RUNS: Final = 2
"""Processes a request is given to at most: the second one if the first dies."""


class EachWorker:
    """The processes, and what hands requests to them.

    Attributes:
        nodes: None: those are in the processes.
    """

    nodes: Mapping[str, Endpoint] = {}

    def __init__(self, name: str, dag: Dag, config: PipelineConfig, script: Script) -> None:
        count = config.worker_num
        pool = _GraphProcesses(script, count, inside_of(dag.settings), self._reported)
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
        if isinstance(error, TooLate) or not isinstance(error, (DeadlineExceeded, Unavailable)):
            return error
        told = codes.err_of(error, closing=self.is_closing)
        response = self.error(told.err_no, f"(data_id=- log_id={asked.log_id}) {told.text}")
        log_call(asked, response)
        return response


class _GraphProcesses(ProcessPool):
    """Processes that host a graph each, and report beside their answers.

    Reports are taken here and not where requests are answered, so that a report also counts if nobody waits any more
    for the answer it came with.
    """

    def __init__(self, script: Script, count: int, threads: int, reported: Callable[[Any], object]) -> None:
        # Read by the pool whenever a process says hello; `given` is how many requests those before it were given.
        self._arguments = {"script": msgspec.to_builtins(script), "count": count, "given": 0}
        spec = RunnerSpec(factory=f"{__name__}:dag_runner", kwargs=self._arguments)
        super().__init__(spec, workers=count, threads=threads, stuck_s=None, handover_s=HANDOVER_S, captures=False)
        self._reported = reported
        self._submitted = 0

    def greeted(self, slot: WorkerSlot, about: Mapping[str, Any]) -> None:
        """Tell a new process the first number that no process before it can have given out."""
        self._arguments["given"] = RUNS * self._submitted
        super().greeted(slot, about)

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Give a request to a process, and take the report from its answer."""
        self._submitted += 1
        super().submit(batch, functools.partial(self._answered, done))

    def _answered(self, done: Done, batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        done(batch, [self._without_report(outcome) for outcome in outcomes])

    def _without_report(self, outcome: Any) -> Any:
        if not isinstance(outcome, list):
            return outcome
        answer, report = cast("list[Any]", outcome)
        try:
            self._reported(report)
        except Exception:  # it comes from a process with user code in it, and the answer beside it is good
            log.exception("failed to write the report of a process")
        return answer


def dag_runner(script: Mapping[str, Any], count: int, given: int) -> GraphRunner:
    """Execute a script in this process and host its whole graph; the factory of `build_dag_each_worker`.

    Args:
        script: The fields of the `Script`.
        given: How many requests the processes before this one, in its place, were given at most.
    """
    return GraphRunner(captured(script), count, given)


class GraphRunner(Runner):
    """A whole graph on a loop of its own, in a thread beside those that bring the requests.

    A body is a request as bytes. An outcome is the answer as bytes, or a list of these and of a report for the server
    (see `figures.reports`) where there is something to tell it.
    """

    def __init__(self, server: PreparedServer, count: int, given: int = 0) -> None:
        """Host the graph of a server; see `dag_runner`."""
        self._server = server
        self._count = count
        self._given = given
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forebay-graph", daemon=True)
        self._hosted: ServedGraph | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Bring up the nodes."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(ctx), self._loop).result()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Answer requests."""
        answers = [asyncio.run_coroutine_threadsafe(attempt_async(self._answer, item), self._loop) for item in items]
        return [_outcome(answer) for answer in answers]

    def close(self) -> None:
        """Stop the nodes."""
        if self._hosted is not None:
            asyncio.run_coroutine_threadsafe(self._stop(self._hosted), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, ctx: WorkerContext) -> None:
        dag, config = built(self._server)
        ids = itertools.count(ctx.index + self._given * self._count, self._count)
        self._hosted = ServedGraph(self._server.name, dag, config, scripts.running, ids)
        self._hosted.open()
        await self._hosted.endpoint.start()

    async def _answer(self, item: Item) -> Outcome:
        assert self._hosted is not None
        service, reporter = self._hosted.service, self._hosted.reporter
        assert reporter is not None
        message = service.request_class.FromString(item.body)
        with reporter.answering():
            response = await service.answer(message, **item.params)
            return reporter.beside(response.SerializeToString())

    async def _stop(self, hosted: ServedGraph) -> None:
        await hosted.endpoint.drain(0.0)
        await hosted.close()


def _outcome(answer: Future[Outcome]) -> Outcome:
    """Wait for an answer; once nobody else does, the request is called off and leaves the graph."""
    while True:
        try:
            return answer.result(LOOK_S)
        except TimeoutError:
            if is_cancelled():
                answer.cancel()
        except CancelledError:
            return Failure(Cancelled("the client no longer waits for the request"))
