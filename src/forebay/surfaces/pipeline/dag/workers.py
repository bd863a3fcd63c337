# SPDX-License-Identifier: Apache-2.0
"""What runs in workers: one op, in a thread or in a process that executes the script again, or a whole graph."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import Cancelled, ConfigError, ForebayError
from forebay.graph.values import inputs_of
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline import script as scripts
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.runner import OpInstances, OpRun
from forebay.surfaces.pipeline.predictors.settings import PredictorSettings
from forebay.surfaces.pipeline.predictors.watching import one_version, watch_of
from forebay.surfaces.pipeline.store.store import Store, StoreConfig, open_store
from forebay.types.call import After, Failure
from forebay.types.failures import failure_of
from forebay.workers.cancel import is_cancelled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.dag.adapter import Hosted
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.ops.runner import OpRunner
    from forebay.surfaces.pipeline.server import PipelineServer
    from forebay.types.batch import Phase
    from forebay.types.call import Item, Outcome
    from forebay.workers.runner import WorkerContext

_runs: ContextVar[Sequence[str]] = ContextVar("forebay_pipeline_runs", default=())
"""The requests in the batch that a worker runs, as the store knows them."""


class OpStore:
    """What an op has as `self.store`: the entries of the requests it is working on."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config

    def put(self, value: Any, *, readers: int | None = None) -> str:
        """Keep a value until the request is answered; returns its key. See `Store.put`."""
        return self._now().put(value, readers=readers)

    def get(self, key: str) -> Any:
        """Return a value. See `Store.get`."""
        return self._now().get(key)

    def release(self, key: str) -> None:
        """Free a value now. See `Store.release`."""
        self._now().release(key)

    def _now(self) -> Store:
        runs = _runs.get()
        if not runs:
            msg = "the store keeps values for requests; it can be used in preprocess, process and postprocess only"
            raise ConfigError(msg)
        return open_store(self._config, run=runs)


class Loaded(msgspec.Struct):
    """An item whose inputs are all there."""

    body: Any
    params: Mapping[str, Any]
    size: int


class StoringRunner:
    """Runs an op beside the store; a `Runner`.

    The op's own store is told which requests are worked on. Where the configuration names a store, what is large in the
    results goes there by itself, and comes back for the ops that read it.
    """

    def __init__(self, runner: OpRunner, offloads_to: StoreConfig | None, *, one_by_one: bool = False) -> None:
        """Wrap a runner.

        Args:
            runner: The op's.
            offloads_to: Where large values go; None leaves them in the results.
            one_by_one: Whether the samples of a batch came together only to share the way here.
        """
        self._runner = runner
        self._offloads_to = offloads_to
        self._one_by_one = one_by_one
        self.phases: list[Phase] = []
        """When each sample of the last batch was in which hook."""

    def open(self, ctx: WorkerContext) -> None:
        """Initialise the op."""
        self._runner.open(ctx)

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Run a batch."""
        self.phases = []
        if not self._one_by_one:
            return self._run_together(items)
        return [outcome for item in items for outcome in self._run_together([item])]

    def _run_together(self, items: Sequence[Item]) -> Sequence[Outcome]:
        _runs.set([run_of(item.params) for item in items])
        with one_version():
            outcomes = self._runner.run(items) if self._offloads_to is None else self._run(items, self._offloads_to)
        self.phases += self._runner.phases
        for outcome in outcomes:
            if type(outcome) is Failure:
                _let_go(outcome.error)
        return outcomes

    def close(self) -> None:
        """Let go of what the op has."""
        self._runner.close()

    def _run(self, items: Sequence[Item], config: StoreConfig) -> Sequence[Outcome]:
        loaded: list[Item] = []
        outcomes: list[Outcome] = [None] * len(items)
        places: list[int] = []
        for place, item in enumerate(items):
            store = open_store(config, run=run_of(item.params))
            try:
                body = {name: store.restore(values) for name, values in inputs_of(item).items()}
            except ForebayError as error:
                outcomes[place] = Failure(error)
            else:
                places.append(place)
                loaded.append(Loaded(body, item.params, item.size))
        found = self._runner.run(loaded) if loaded else ()
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = _stored(outcome, open_store(config, run=run_of(items[place].params)))
        return outcomes


def _stored(outcome: Outcome, store: Store) -> Outcome:
    """Put away what is large in a result."""
    if type(outcome) is After:
        return After(_stored(outcome.outcome, store), outcome.work)
    if type(outcome) is Failure:
        return outcome
    try:
        return store.offload(outcome)
    except ForebayError as error:
        return Failure(error)


def _let_go(error: BaseException) -> None:
    """Take the frames off an error that was raised here; their text is in its `trace`.

    They hold the requests of the batch, which hold their answers, which hold the error; and the garbage collector does
    not look at requests.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


def run_of(params: Mapping[str, Any]) -> str:
    """Return what the store calls a request."""
    return str(params["data_id"])


def instances_of(
    dag: Dag, name: str, config: PipelineConfig, store: Mapping[str, Any], *, own_process: bool
) -> OpInstances:
    """Make an op ready to be run.

    Args:
        dag: Its graph.
        name: Which op.
        config: What holds for the graph.
        store: The fields of the store's `StoreConfig`; without any the op has none.
        own_process: Whether its worker is a process of its own.
    """
    op, settings = dag.ops[name], dag.settings[name]
    before = [one.name for one in op.get_input_ops()]
    predictor = PredictorSettings.of_op(name, settings, pack_tensors=op.is_tensor_format)
    watch = watch_of(f"op '{name}'", predictor.local_service_conf)

    def client_for(index: int | None) -> Any:
        from forebay.surfaces.pipeline import predictors

        return predictors.client_for(predictor, concurrency_idx=index, process=own_process, watch=watch)

    return OpInstances(
        op,
        OpRun(
            timeout_ms=settings["timeout"],
            retry=settings["retry"],
            run_process=settings["run_process"],
            batch_style=settings["batch_style"],
            share_instance=settings["share_instance"],
            isolate_failures=settings["isolate_failures"],
            fetch_list=tuple(predictor.wanted),
            # What comes to another process is a copy already.
            shared_inputs=frozenset(one for one in before if dag.is_shared(one) and not own_process),
            debug_errors=config.debug_errors,
        ),
        client_for=None if predictor.kind is None else client_for,
        store=OpStore(msgspec.convert(store, StoreConfig)) if store else None,
        own_process=own_process,
        located=functools.partial(config.located, name),
    )


class ThreadOp:
    """An op whose workers are threads of this process: they share what `init_op` has made."""

    def __init__(self, dag: Dag, name: str, config: PipelineConfig, store: Mapping[str, Any]) -> None:
        """See `instances_of`; `store` may be filled in until the first runner is made."""
        self._make = lambda: instances_of(dag, name, config, store, own_process=False)
        self._offloads_to = lambda: offloads_to(config, store)
        self._instances: OpInstances | None = None
        self._is_alone = dag.settings[name]["batch_size"] == 1

    def runner(self) -> StoringRunner:
        """Return the runner of one thread."""
        if self._instances is None:
            self._instances = self._make()
        return StoringRunner(self._instances.runner(), self._offloads_to(), one_by_one=self._is_alone)


def op_runner(script: Mapping[str, Any], name: str, store: Mapping[str, Any]) -> StoringRunner:
    """Execute a script in this process and take one of its ops; the factory of process workers.

    Args:
        script: The fields of the `Script`.
        name: Which op.
        store: See `instances_of`.
    """
    server = _captured(script)
    dag, config = built(server)
    runner = instances_of(dag, name, config, store, own_process=True).runner()
    return StoringRunner(runner, offloads_to(config, store), one_by_one=dag.settings[name]["batch_size"] == 1)


def offloads_to(config: PipelineConfig, store: Mapping[str, Any]) -> StoreConfig | None:
    """Return the store that large values go to by themselves, if the configuration names one."""
    return None if config.dag.external_store is None else msgspec.convert(store, StoreConfig)


def built(server: PipelineServer) -> tuple[Dag, PipelineConfig]:
    """Return the graph of a prepared server, and what holds for it."""
    config, end = server.config, server.response_op
    if config is None or end is None:
        missing = "set_response_op()" if end is None else "prepare_server()"
        msg = f"the server runs without {missing}; call it before"
        raise ConfigError(msg)
    return wire(server.name or "pipeline", end, config), config


def _captured(script: Mapping[str, Any]) -> PipelineServer:
    server = scripts.capture(msgspec.convert(script, scripts.Script))
    logs.to_stderr("info" if server.config is None else server.config.log_level or "info")
    return server


LOOK_S: Final = 0.1
"""So often a request inside of a graph is asked whether anybody still waits for it."""


def dag_runner(script: Mapping[str, Any], count: int, given: int) -> DagRunner:
    """Execute a script in this process and host its whole graph; the factory of `build_dag_each_worker`.

    Args:
        script: The fields of the `Script`.
        count: How many processes do so.
        given: How many requests the processes before this one, in its place, were given at most.
    """
    return DagRunner(_captured(script), count, given)


class DagRunner:
    """A whole graph on a loop of its own, in a thread beside those that bring the requests; a `Runner`.

    A body is a request as bytes. An outcome is the answer as bytes, or a list of these and of a report for the server
    (see `figures.reports`) where there is something to tell it.
    """

    def __init__(self, server: PipelineServer, count: int, given: int = 0) -> None:
        """See `dag_runner`."""
        self._server = server
        self._count = count
        self._given = given
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forebay-graph", daemon=True)
        self._hosted: Hosted | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Bring up the ops."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(ctx.index), self._loop).result()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Answer requests."""
        futures = [asyncio.run_coroutine_threadsafe(self._answer(item), self._loop) for item in items]
        return [_outcome(future) for future in futures]

    def close(self) -> None:
        """Stop the ops."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, index: int) -> None:
        from forebay.surfaces.pipeline.dag.adapter import Hosted

        dag, config = built(self._server)
        ids = itertools.count(index + self._given * self._count, self._count)
        self._hosted = Hosted(self._server.name, dag, config, scripts.running, ids)
        self._hosted.open()
        await self._hosted.endpoint.start()

    async def _answer(self, item: Item) -> Outcome:
        assert self._hosted is not None
        service, reporter = self._hosted.service, self._hosted.reporter
        assert reporter is not None
        with reporter.answering():
            try:
                request = service.request_class.FromString(item.body)
                response = await service.infer(request, **item.params)
            except ForebayError as error:
                return Failure(error)
            except Exception as error:  # noqa: BLE001 - a defect here must not leave the request without an answer
                return failure_of(error)
            return reporter.beside(response.SerializeToString())

    async def _stop(self) -> None:
        if self._hosted is not None:
            await self._hosted.endpoint.drain(0.0)
            await self._hosted.close()


def _outcome(future: Future[Outcome]) -> Outcome:
    """Wait for an outcome; once nobody else does, the request is called off and leaves the graph."""
    while True:
        try:
            return future.result(LOOK_S)
        except TimeoutError:
            if is_cancelled():
                future.cancel()
        except CancelledError:
            return Failure(Cancelled("nobody waits for the request any more"))
