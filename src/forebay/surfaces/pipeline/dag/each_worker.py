# SPDX-License-Identifier: Apache-2.0
"""`build_dag_each_worker`: the whole graph in each of several processes, behind one port of each kind.

A process takes the next request when it has room for it, so that the load is spread by request and not by connection.
What it has to say for the log and the figures comes beside its answers. A request whose client went away is called off
inside of it; the process is not ended, for others are inside as well.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import DeadlineExceeded, ForebayError, Unavailable
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline.dag import workers
from forebay.surfaces.pipeline.dag.adapter import HANDOVER_S, NEVER_S, inside_of, messages_of, slots_of
from forebay.surfaces.pipeline.dag.calls import OpenCalls
from forebay.surfaces.pipeline.dag.service import log_call
from forebay.surfaces.pipeline.figures.observers import Outlets
from forebay.surfaces.pipeline.figures.profile import CallTimes
from forebay.surfaces.pipeline.figures.reports import Reports
from forebay.surfaces.pipeline.ops import packing
from forebay.workers.processes import ProcessPool
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.surfaces.pipeline.config import ErrorCodes, PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.figures.tracer import Tracer
    from forebay.surfaces.pipeline.script import Script
    from forebay.types.batch import Batch, Done
    from forebay.workers.slot import Slot

log = logging.getLogger("forebay.pipeline")

LATE_S: Final = 1.0
"""Time a process has to answer that a request's time is over, which it does with the request's ids."""
RUNS: Final = 2
"""Processes a request is given to at most: the second one if the first dies."""


class EachWorker:
    """The processes, and what hands requests to them.

    Attributes:
        endpoint: Their queue.
        nodes: None: those are in the processes.
        service: What answers requests with them.
    """

    nodes: Mapping[str, Endpoint] = {}

    def __init__(self, name: str, dag: Dag, config: PipelineConfig, script: Script) -> None:
        timeout_ms = config.dag.timeout_ms
        timeout_s = NEVER_S if timeout_ms is None else timeout_ms / 1000
        pool = _Processes(script, config.worker_num, inside_of(dag), self._reported)
        self.endpoint = Endpoint(
            EndpointConfig(name=dag.spec.name, timeout_s=timeout_s, max_timeout_s=NEVER_S + LATE_S),
            BatchConfig(max_size=1, idle="go", capacity=config.max_queue),
            pool,
        )
        self._reports = Reports(dag.ops, pool.pids)
        count = config.worker_num
        self._outlets = Outlets(dag, config, self._reports.waiting, slots_of(dag, config) * count, count)
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


class _Processes(ProcessPool):
    """Processes that host a graph each, and report beside their answers.

    Reports are taken here and not where requests are answered, so that also those count that come with the answers of
    requests nobody waits for any more.
    """

    def __init__(self, script: Script, count: int, threads: int, reported: Callable[[Any], object]) -> None:
        # Read by the pool whenever a process says hello.
        self._arguments = {"script": msgspec.to_builtins(script), "count": count, "given": 0}
        spec = RunnerSpec(factory=f"{workers.__name__}:dag_runner", kwargs=self._arguments)
        super().__init__(spec, workers=count, threads=threads, stuck_s=None, handover_s=HANDOVER_S)
        self._reported = reported
        self._submitted = 0

    def greeted(self, slot: Slot, about: Mapping[str, Any]) -> None:
        """Tell a new process from where on the ids are free that one before it cannot have given out."""
        self._arguments["given"] = RUNS * self._submitted
        super().greeted(slot, about)

    def submit(self, batch: Batch, done: Done) -> None:
        """Give a request to a process, and take the report from its answer."""
        self._submitted += 1
        super().submit(batch, functools.partial(self._answered, done))

    def _answered(self, done: Done, batch: Batch, outcomes: Sequence[Any]) -> None:
        done(batch, [self._without_report(outcome) for outcome in outcomes])

    def _without_report(self, outcome: Any) -> Any:
        if not isinstance(outcome, list):
            return outcome
        answer, report = cast("list[Any]", outcome)
        try:
            self._reported(report)
        except Exception:  # it comes from a process with user code in it, and the answer beside it is good
            log.exception("what a process reported could not be written")
        return answer


class Forwarding:
    """Hands each request to a process, as bytes.

    Attributes:
        name: What requests may name the service as; with an empty name any will do.
        request_class: Message of a request.
        response_class: Message of an answer.
        methods: What requests may call; None allows anything.
        error_codes: Which generation's numbers answers carry.
        calls: The requests that wait.
    """

    def __init__(self, name: str, endpoint: Endpoint, config: PipelineConfig, tracer: Tracer | None) -> None:
        self.name = name
        self.request_class, self.response_class = messages_of(config)
        self.methods: Sequence[str] | None = config.methods
        self.error_codes: ErrorCodes = config.error_codes
        self.calls = OpenCalls()
        self._endpoint = endpoint
        self._tracer = tracer

    async def infer(self, request: Any, *, timeout_s: float | None, peer: str) -> Any:
        """Answer one request.

        Raises:
            ForebayError: If too many wait, or the ops are not up yet.
        """
        times = CallTimes(time.monotonic())
        limit_s = self._endpoint.config.timeout_s
        left_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        params = {"timeout_s": left_s, "peer": peer, "came": times.started}
        try:
            with self.calls.waiting():
                body = await self._endpoint.call(request.SerializeToString(), params=params, timeout_s=left_s + LATE_S)
        except ForebayError as error:
            error.__traceback__ = None  # its frames hold the request, which the garbage collector does not look at
            if not self._endpoint.accepting and not self.calls.is_closing:
                raise  # still loading
            times.ended = time.monotonic()
            if self._tracer is not None:
                self._tracer.answered(None, times.ended - times.started, ok=False)
            if not isinstance(error, (DeadlineExceeded, Unavailable)):
                raise
            response = self._refusal(error, request.logid)
            log_call(request, peer, response, "-", request.logid, times)
            return response
        return self.response_class.FromString(body)

    def _refusal(self, error: ForebayError, log_id: int) -> Any:
        """Return the answer to a request that no process has answered, so that it has no data id."""
        told = codes.err_of(error, closing=self.calls.is_closing)
        text = f"(data_id=- log_id={log_id}) {told.text}"
        return packing.pack_error(codes.numbered(told.err_no, self.error_codes), text, self.response_class)
