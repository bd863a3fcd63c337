# SPDX-License-Identifier: Apache-2.0
"""`build_dag_each_worker`: the whole graph in each of several processes, behind one port of each kind.

A process takes the next request when it has room for it, so that the load is spread by request and not by connection.
One that works for a client who went away is not ended: others are inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import DeadlineExceeded, Unavailable
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline.dag import workers
from forebay.surfaces.pipeline.dag.adapter import NEVER_S, inside_of, messages_of
from forebay.surfaces.pipeline.dag.calls import OpenCalls
from forebay.surfaces.pipeline.ops import packing
from forebay.workers.processes import ProcessPool
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.script import Script


class EachWorker:
    """The processes, and what hands requests to them.

    Attributes:
        endpoint: Their queue.
        nodes: None: those are in the processes.
        service: What answers requests with them.
    """

    nodes: Mapping[str, Endpoint] = {}

    def __init__(self, name: str, dag: Dag, config: PipelineConfig, script: Script) -> None:
        spec = RunnerSpec(
            factory=f"{workers.__name__}:dag_runner",
            kwargs={"script": msgspec.to_builtins(script), "count": config.worker_num},
        )
        timeout_ms = config.dag.timeout_ms
        timeout_s = NEVER_S if timeout_ms is None else timeout_ms / 1000
        self.endpoint = Endpoint(
            EndpointConfig(name=dag.spec.name, timeout_s=timeout_s, max_timeout_s=NEVER_S),
            BatchConfig(max_size=1, idle="go", capacity=config.max_queue),
            ProcessPool(spec, workers=config.worker_num, threads=inside_of(dag), stuck_s=None),
        )
        self.service = Forwarding(name, self.endpoint, messages_of(config))

    def open(self) -> None:
        """Do nothing: each process has a store of its own."""

    async def close(self) -> None:
        """Do nothing: see `open`."""


class Forwarding:
    """Hands each request to a process, as bytes.

    Attributes:
        name: What requests may name the service as; with an empty name any will do.
        request_class: Message of a request.
        response_class: Message of an answer.
        calls: The requests that wait.
    """

    def __init__(self, name: str, endpoint: Endpoint, messages: tuple[Any, Any]) -> None:
        self.name = name
        self.request_class, self.response_class = messages
        self.calls = OpenCalls()
        self._endpoint = endpoint

    async def infer(self, request: Any, *, timeout_s: float | None, peer: str) -> Any:
        """Answer one request.

        Raises:
            ForebayError: If too many wait, or the ops are not up yet.
        """
        limit_s = self._endpoint.config.timeout_s
        left_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        try:
            with self.calls.waiting():
                body = await self._endpoint.call(
                    request.SerializeToString(), params={"timeout_s": left_s, "peer": peer}, timeout_s=left_s
                )
        except (DeadlineExceeded, Unavailable) as error:
            error.__traceback__ = None  # its frames hold the request, which the garbage collector does not look at
            if not self._endpoint.accepting and not self.calls.is_closing:
                raise  # still loading
            told = codes.err_of(error, closing=self.calls.is_closing)
            return packing.pack_error(told.err_no, told.text, self.response_class)
        return self.response_class.FromString(body)
