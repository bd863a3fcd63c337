# SPDX-License-Identifier: Apache-2.0
"""Ops and the store: what an op has as `self.store`, and how large values in its results go there automatically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, ForebayError
from forebay.graph.values import inputs_of
from forebay.surfaces.pipeline.predictors.client_watching import one_version
from forebay.surfaces.pipeline.store.store import Store, StoreConfig, open_store
from forebay.types.call import After, Failure
from forebay.workers.runner import Runner
from forebay.workers.wire.objects import UnpackedItem

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.ops.runner import OpRunner
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


class StoringRunner(Runner):
    """Runs an op that uses the store.

    The op's own store is told which requests are worked on. If the configuration names a store, large values in the
    results go there automatically, and come back for the ops that read them.
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
        self.phases = [*self.phases, *self._runner.phases]
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
                loaded.append(UnpackedItem(body, item.params, item.size))
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
    """Remove the frames from an error that was raised here; their text is in its `trace`.

    They hold the requests of the batch, which hold their answers, which hold the error; and the garbage collector does
    not look at requests.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


def run_of(params: Mapping[str, Any]) -> str:
    """Return what the store calls a request."""
    return str(params["data_id"])
