# SPDX-License-Identifier: Apache-2.0
"""Processes that are started for a model: what `client_type` brpc and grpc mean where there are no endpoints.

They are a process pool on a loop of its own, because threads ask them. The pool replaces a process that dies, and one
that hangs in a call for which nobody waits.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, DeadlineExceeded, ForebayError, ModelError
from forebay.repository.cache import Cache, Lease
from forebay.runtimes.signature import LOD, Feed, Value, Var, named
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.pipeline.predictors import prediction_runner
from forebay.surfaces.pipeline.predictors.descriptions import describe
from forebay.surfaces.pipeline.predictors.local_models import is_reference
from forebay.surfaces.pipeline.predictors.model_client import ModelClient
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.processes.loop_thread import LoopThread
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire import objects

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.model_settings import LocalConf, PredictorSettings

FIRST_S: Final = 300.0
"""How long the first call of a process may take: some libraries do much of their work there."""
STUCK_S: Final = 5.0
"""How long a process may hang when nobody waits for its call any more, before it is replaced; as hooks may."""


class ModelHost:
    """Processes for one model, one for each device it is to run on; shared by all who ask for the same."""

    def __init__(self, conf: LocalConf, index: int | None) -> None:
        """Describe them.

        Args:
            index: Number of the worker process that wants one for itself; None for one on each device.
        """
        assert conf.model_config is not None
        if not is_reference(conf.model_config):
            # The process runs in another folder.
            conf = msgspec.structs.replace(conf, model_config=str(Path(conf.model_config).absolute()))
        indices = list(range(max(1, len(conf.device_ids)))) if index is None else [index]
        factory = f"{prediction_runner.__name__}:{prediction_runner.PredictionRunner.__name__}"
        spec = RunnerSpec(factory=factory, kwargs={"conf": msgspec.to_builtins(conf), "indices": indices})
        path = [str(Path(folder or ".").absolute()) for folder in sys.path]
        self._workdir = conf.workdir
        self._pool = ProcessPool(
            objects.packed(spec), workers=len(indices), path=path, cwd=conf.workdir or None, stuck_s=STUCK_S
        )
        self._endpoint = Endpoint(
            EndpointConfig(name=str(conf.model_config)), BatchConfig(max_size=1, idle="go"), self._pool
        )
        self._loop = LoopThread("forebay-model-processes", self._serve)
        self._stopping = asyncio.Event()
        self._answered_since = -1
        """How many processes had died when a call was answered last."""

    @property
    def pids(self) -> list[int]:
        """The processes that are up."""
        return self._pool.pids()

    def start(self) -> None:
        """Start them all and wait until their model is loaded.

        Raises:
            ModelError: If one cannot be started, with the reason; then none is left running.
            ConfigError: If that is because of what a person wrote.
        """
        if self._workdir and not Path(self._workdir).is_dir():
            msg = f"workdir is '{self._workdir}', and no folder is there; leave it out for the server's own"
            raise ConfigError(msg)
        try:
            self._loop.start()
        except ForebayError as problem:
            text = f"the model '{self._endpoint.name}' could not be started: {problem.message}"
            if isinstance(problem, ConfigError):
                raise ConfigError(text) from problem
            raise ModelError(text, trace=problem.trace) from problem

    def stop(self) -> None:
        """End them all."""
        self._loop.call(self._stopping.set)
        self._loop.join()

    def ask(self, feed: Feed, fetch: Sequence[str], log_id: int, timeout_s: float) -> dict[str, Any]:
        """Have one of them make a prediction.

        Args:
            fetch: Names of the results that are wanted; none for all.

        Raises:
            DeadlineExceeded: If it is not made in time.
            Unavailable: If there is no process, with what keeps it from being started.
            RunnerFailed: If the model fails.
        """
        given = named([var for var, _ in feed], [value for _, value in feed])
        body = objects.pack({"feed": given, "fetch": list(fetch)})
        found = objects.open_outcome(self._loop.run(self._ask(body, log_id, timeout_s)))
        assert isinstance(found, objects.Packed)
        return found.load()

    async def _serve(self, is_up: Callable[[], None]) -> None:
        await self._endpoint.start()
        is_up()
        await self._stopping.wait()
        await self._endpoint.drain(0.0)

    async def _ask(self, body: Any, log_id: int, timeout_s: float) -> Any:
        died = self._pool.restarts
        limit_s = timeout_s if self._answered_since == died else FIRST_S
        asking = self._endpoint.call(body, params={"log_id": log_id}, timeout_s=max(timeout_s, limit_s))
        call = asyncio.ensure_future(asking)
        call.add_done_callback(partial(self._ended, died))
        await asyncio.wait([call], timeout=timeout_s)
        if not call.done():
            raise DeadlineExceeded(f"the process of the model did not answer within {timeout_s:g} s")
        return call.result()

    def _ended(self, died: int, call: asyncio.Future[Any]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._answered_since = died


_hosts: Final[Cache[ModelHost]] = Cache("processes of models", ModelHost.stop, max_count=0, may_exceed=True)
"""The hosts that are in use in this process: one that nobody uses any more is stopped."""


def take_host(conf: LocalConf, index: int | None) -> Lease[ModelHost]:
    """Return the use of a model's host in this process, started if nobody had it; the last one to give it back ends it.

    Raises:
        ModelError: If it cannot be started.
    """

    def started() -> ModelHost:
        host = ModelHost(conf, index)
        host.start()
        return host

    return _hosts.take(msgspec.json.encode([conf, index]).decode(), 0, started)


class HostedClient(ModelClient):
    """Asks processes that were started for their model, which give all results where none is named; its own backend."""

    def __init__(self, settings: PredictorSettings, index: int | None) -> None:
        """Start them if nobody has; see `take_host`."""
        conf = settings.local_service_conf
        assert conf.model_config is not None
        self.takes_text = is_reference(conf.model_config)
        signature = None if self.takes_text else describe(Path(conf.model_config))
        self._timeout_s = settings.timeout_s
        self._host = take_host(conf, index)
        super().__init__(self, signature, settings.wanted)

    def signature(self) -> None:
        """Say nothing: the process knows."""

    def run(self, feed: Feed, fetch: Sequence[Var], id: int) -> Sequence[Value]:
        """Have one of the processes make a prediction."""
        found = self._host.value.ask(feed, [var.alias for var in fetch], id, self._timeout_s)
        return [Value(found[var.alias], found.get(var.alias + LOD)) for var in fetch]

    def close(self) -> None:
        """Let go of the processes."""
        self._host.release()

    def _all_of(self, fed: Feed, log_id: int) -> dict[str, Any]:
        return self._host.value.ask(fed, (), log_id, self._timeout_s)
