# SPDX-License-Identifier: Apache-2.0
"""Runs the batches of one op in its workers: preprocess each sample, process them together, postprocess each.

A sample that fails leaves its batch-mates alone. An instance of an op works on only one batch at a time, from its first
hook to its last, so anything that hooks keep on `self` in between belongs to that batch. So each thread has its own
instance, a shallow copy of the op that `init_op` was called on.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from forebay.errors import ConfigError, ForebayError, ModelError
from forebay.graph.values import inputs_of
from forebay.remote_servers.servers import PARENT, parent
from forebay.serving.models.sample_times import SampleTimes
from forebay.surfaces.pipeline.codes import CustomExceptionCode, error, is_time_out
from forebay.surfaces.pipeline.ops import merge
from forebay.surfaces.pipeline.ops.hooks import OpHooks, overrides
from forebay.surfaces.pipeline.ops.op_store import OpStore, batch_runs
from forebay.surfaces.pipeline.predictors.client_watching import one_version
from forebay.surfaces.pipeline.script import not_imported
from forebay.surfaces.pipeline.store.store import Store, StoreConfig, open_store
from forebay.types.call import After, Failure, Item, Outcome, nothing
from forebay.types.failures import failure_of, text_of, trace_of, words_of
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.hanging_calls import BoundedCalls, Late
from forebay.workers.user_calls.phases import needed
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.ops.op import Op

ClientFactory = Callable[[int | None], Any]
"""Makes the client of one worker, given the number of its process; None in threads."""


class OpRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is settled about running an op.

    Attributes:
        timeout_ms: Milliseconds a call of `process` may take; 0 or less for any time.
        retry: Calls of `process` in all; again only after a time-out.
        run_process: Whether a `process` that the project wrote runs without a model.
        batch_style: What `process` is given: one dict for all samples, or a list with a dict for each.
        share_instance: Whether threads share one instance of the op.
        isolate_failures: Whether the samples of a batch whose `process` failed are run once more, one by one.
        fetch_list: The model's results that are wanted.
        shared_inputs: Predecessors whose results other ops read as well; this op then works on a copy.
        debug_errors: Whether error texts name classes and kinds of exceptions.
        one_by_one: Whether the samples of a batch came together only to share the way here.
    """

    timeout_ms: float = -1
    retry: int = 1
    run_process: bool = False
    batch_style: Literal["merged", "list"] = "merged"
    share_instance: bool = False
    isolate_failures: bool = False
    fetch_list: tuple[str, ...] = ()
    shared_inputs: frozenset[str] = frozenset()
    debug_errors: bool = False
    one_by_one: bool = False


class OpInstances:
    """The instances of one op that the workers of this process call."""

    def __init__(
        self,
        op: Op,
        settings: OpRun,
        *,
        client_for: ClientFactory | None = None,
        store: OpStore | None = None,
        offloads_to: StoreConfig | None = None,
        own_process: bool = False,
        located: Callable[[str], str] = str,
    ) -> None:
        """Describe them; the first worker that opens initialises the op.

        Args:
            client_for: Makes clients; None without a model, unless the op brings a handler of its own.
            store: For large values; None leaves the op without one.
            offloads_to: Where large values in results go, and come back from for the ops that read them; None leaves
                them in the results.
            own_process: Whether the worker is a process of its own, and its only thread.
            located: Puts in front of a sentence the place in the configuration of the setting that it is about.
        """
        self.op = op
        self._located = located
        self.settings = settings
        self.own_process = own_process
        self._client_for = client_for
        self._store = store
        self._offloads_to = offloads_to
        self._lock = threading.Lock()
        self._is_ready = False
        self._taken = 0

    def runner(self) -> OpRunner:
        """Return the runner of one worker."""
        return OpRunner(self)

    def store_of(self, run: str) -> Store | None:
        """Return where large values of a request go; None if they stay in its results."""
        return None if self._offloads_to is None else open_store(self._offloads_to, run=run)

    def take(self, ctx: WorkerContext) -> Op:
        """Return the instance of one worker.

        Raises:
            ModelError: If the op or its client cannot be made, with op and reason.
            ConfigError: If that is because of what a person wrote, with its place.
        """
        index = ctx.index if self.own_process else None
        instance, raised = caught(self._instance, index)
        if isinstance(raised, ConfigError):
            raise ConfigError(self._located(f"op '{self.op.name}': {raised.message}")) from raised
        if isinstance(raised, ImportError):
            raise ConfigError(f"op '{self.op.name}': {not_imported(raised)}") from raised
        if isinstance(raised, ForebayError):
            failed = failure_of(raised).error
            msg = f"op '{self.op.name}': {failed.message}"
            raise ModelError(msg, detail=failed.detail, trace=failed.trace) from raised
        if raised is not None:
            msg = f"op '{self.op.name}' could not be initialised: {text_of(raised)}"
            raise ModelError(msg, trace=trace_of(raised)) from raised
        with self._lock:
            self._taken += 1
        return instance

    def give_back(self, instance: Op) -> None:
        """Take back the instance of a worker that ends; closes its client, a shared one only after the last worker."""
        with self._lock:
            self._taken -= 1
            is_in_use = self.settings.share_instance and self._taken > 0
        if not is_in_use:
            self.close_client(instance)

    def close_client(self, instance: Op) -> None:
        """Close the client of an instance nobody calls any more, unless it is the project's own."""
        if self._client_for is not None and self.op.local_service_handler is None:
            getattr(instance.client, "close", nothing)()

    def renew(self, instance: Op) -> None:
        """Give an instance a client in place of one that a late call still uses."""
        instance.client = self._client(instance.concurrency_idx)

    def _instance(self, index: int | None) -> Op:
        with self._lock:
            if not self._is_ready:
                self._prepare(index)
                self._is_ready = True
        shared = self.own_process or self.settings.share_instance
        instance = self.op if shared else copy.copy(self.op)
        if not shared:
            instance.client = self._client(index)
        return instance

    def _prepare(self, index: int | None) -> None:
        op = self.op
        op.concurrency_idx = index
        if self._store is not None:
            op.store = self._store
        op.feeds_list = self.settings.batch_style == "list"
        op.fetch_names = list(self.settings.fetch_list) or op.fetch_names
        op.set_dynamic_shape_info()
        op.init_op()
        handler = op.local_service_handler
        if handler is not None:
            for step in ("prepare_server", "start_server"):
                getattr(handler, step, nothing)()
            if not op.fetch_names:
                names: Sequence[str] = getattr(handler, "get_fetch_list", nothing)() or ()
                op.fetch_names = list(names)
        if self.own_process or self.settings.share_instance:
            op.client = self._client(index)

    def _client(self, index: int | None) -> Any:
        """Return the client of a worker; a client that the project has set itself stays if there is no other."""
        handler = self.op.local_service_handler
        if handler is not None:
            return handler.get_client(index) if hasattr(handler, "get_client") else handler
        return self.op.client if self._client_for is None else self._client_for(index)


class _Sample(msgspec.Struct):
    """One request on its way through the hooks.

    Attributes:
        place: Its place in the batch.
        data_id: Its number in this server.
        log_id: The number the client gave it.
        inputs: What the hooks see as `input_dicts`.
        data: What `preprocess` made of it.
        skips: Whether it goes to `postprocess` as it is.
        fetched: What `postprocess` gets.
        outcome: A result or a failure.
    """

    place: int
    data_id: int
    log_id: int
    inputs: Mapping[str, Any] = {}
    data: Any = None
    skips: bool = False
    fetched: Any = None
    outcome: Any = None

    @property
    def typical(self) -> int:
        """What a model is told as log id."""
        return self.log_id or self.data_id


class OpRunner(Runner):
    """Runs an op in one worker.

    Attributes:
        phases: When each sample of the last batch was in which hook: `prep`, `midp` and `postp`.
    """

    def __init__(self, instances: OpInstances) -> None:
        self._instances = instances
        self._settings = instances.settings
        self._calls = BoundedCalls()
        self._is_worn = False
        self._has_left_client = False
        self._times: SampleTimes | None = None
        """The calls of the batch that runs, where they may be several and somebody asks what they cost."""
        self._op: Op | None = None
        self._hooks: OpHooks | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Initialise the op, unless another worker of this process did.

        Raises:
            ModelError: If that fails, with op and reason.
            ConfigError: If a hook cannot be called.
        """
        self._use(self._instances.take(ctx))

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Run a batch."""
        self.phases = []
        groups = [[item] for item in items] if self._settings.one_by_one else [items]
        outcomes = [outcome for group in groups for outcome in self._run_together(group)]
        for outcome in outcomes:
            if type(outcome) is Failure:
                _let_go(outcome.error)
        return outcomes

    def _run_together(self, items: Sequence[Item]) -> Sequence[Outcome]:
        assert self._op is not None
        batch_runs.set([_run_of(item) for item in items])
        parent.set(next((str(item.params[PARENT]) for item in items if PARENT in item.params), ""))
        try:
            self._renew()
        except ForebayError as failed:
            return [Failure(failed)] * len(items)
        own_s = needed.get() if self._settings.isolate_failures else None
        self._times = None if own_s is None else SampleTimes(None)
        with one_version():
            samples = list(map(self._prepared, range(len(items)), items))
            live = [sample for sample in samples if sample.outcome is None]
            if self._op.client is not None or (self._settings.run_process and overrides(self._op, "process")):
                self._process([sample for sample in live if not sample.skips])
            if own_s is not None and self._times is not None:
                own_s += self._times.seconds([sample.outcome for sample in samples])
            for sample in live:
                if sample.outcome is None:
                    self._finish(sample)
        outcomes = [sample.outcome for sample in samples]
        if self._is_worn and self._instances.own_process:
            outcomes[0] = After(outcomes[0], _end_worker)
        return outcomes

    def close(self) -> None:
        """Let go of the client."""
        self._calls.close()
        if self._op is not None:
            if self._has_left_client:
                self._op.client = None
            self._instances.give_back(self._op)

    def _use(self, op: Op) -> None:
        self._op = op
        self._hooks = OpHooks(op, debug=self._settings.debug_errors)

    def _leave(self, op: Op) -> None:
        """Go on with a copy of an instance that a late call still uses."""
        if not _is_shared(op.client) or overrides(op, "process"):  # it may never end
            self._is_worn = True
        if not self._settings.share_instance:
            self._has_left_client = not _is_shared(op.client)
            self._use(copy.copy(op))

    def _renew(self) -> None:
        """Get a client in place of the one that was left to a late call; that may take as long as loading a model.

        Raises:
            ForebayError: With 3003 if there is none.
        """
        if not self._has_left_client:
            return
        assert self._op is not None
        _, raised = caught(self._instances.renew, self._op)
        if raised is not None:
            text = f"[{self._op.name}] the model cannot be opened again after a time-out: {words_of(raised)}"
            raise error(CustomExceptionCode.INIT_ERROR.value, text) from raised
        self._has_left_client = False

    def _prepared(self, place: int, item: Item) -> _Sample:
        assert self._hooks is not None
        sample = _Sample(place, item.params.get("data_id", 0), item.params.get("log_id", 0))
        started = time.monotonic()
        try:
            sample.inputs = self._inputs(item)
            found = self._hooks.preprocess(sample.inputs, sample.data_id, sample.log_id)
            sample.data = sample.fetched = found.data
            sample.skips = found.skips
        except ForebayError as failed:
            sample.outcome = failure_of(failed)
        self._note("prep", started, [sample])
        return sample

    def _inputs(self, item: Item) -> Mapping[str, Any]:
        """Return the inputs, copying what other ops read as well; packed values are copies already."""
        body, given = item.body, inputs_of(item)
        store = self._instances.store_of(_run_of(item))
        if store is not None:
            body = given = {name: store.restore(values) for name, values in given.items()}
        inputs: dict[str, Any] = dict(given)
        for name in self._settings.shared_inputs:
            value = inputs.get(name)
            if value is not None and value is body.get(name):
                inputs[name], raised = caught(copy.deepcopy, value)
                if raised is not None:
                    text = f"[{self._instances.op.name}] the result of '{name}' cannot be copied: {words_of(raised)}"
                    raise error(CustomExceptionCode.TYPE_ERROR.value, text, trace=trace_of(raised)) from raised
        return inputs

    def _process(self, samples: Sequence[_Sample]) -> None:
        """Fill in what `postprocess` gets."""
        whole = [sample for sample in samples if not isinstance(sample.data, list)]
        if self._settings.batch_style == "list":
            if whole:
                self._run_group(
                    whole, [sample.data for sample in whole], lambda found: merge.one_each(found, len(whole))
                )
        else:
            for group in merge.grouped([sample.data for sample in whole]):
                members = [whole[place] for place in group.members]
                self._run_group(members, [group.feed], _splitter(group.rows))
        for sample in samples:
            if isinstance(sample.data, list):
                self._run_parts(sample, cast("list[dict[str, Any]]", sample.data))

    def _run_group(
        self, members: Sequence[_Sample], feed_batch: list[Any], split: Callable[[Any], Sequence[Any]]
    ) -> None:
        """Run samples that share a call."""
        started = time.monotonic()
        try:
            shares = self._shares(members, feed_batch, split)
        except ForebayError as failed:
            if len(members) > 1 and self._settings.isolate_failures and not is_time_out(failed):
                is_list = self._settings.batch_style == "list"
                alone = partial(merge.one_each, count=1) if is_list else _splitter([])
                for sample in members:
                    self._run_group([sample], [sample.data], alone)
                return
            for sample in members:
                sample.outcome = failure_of(failed)
        else:
            for sample, share in zip(members, shares, strict=True):
                sample.fetched = share
        self._note("midp", started, members)

    def _shares(
        self, members: Sequence[_Sample], feed_batch: list[Any], split: Callable[[Any], Sequence[Any]]
    ) -> Sequence[Any]:
        """Call `process` for samples and cut its result apart; note how long that took."""
        started = time.monotonic()
        try:
            return self._split(self._ask(feed_batch, members[0].typical), split)
        finally:
            if self._times is not None:
                self._times.ran([sample.place for sample in members], time.monotonic() - started)

    def _run_parts(self, sample: _Sample, parts: Sequence[dict[str, Any]]) -> None:
        """Run the dicts of one sample one after the other."""
        started = time.monotonic()
        try:
            sample.fetched = [self._ask([part], sample.typical) for part in parts]
        except ForebayError as failed:
            sample.outcome = failure_of(failed)
        self._note("midp", started, [sample])

    def _split(self, found: Any, split: Callable[[Any], Sequence[Any]]) -> Sequence[Any]:
        try:
            return split(found)
        except ValueError as raised:
            text = f"[{self._instances.op.name}] Failed to process: {raised}"
            raise error(CustomExceptionCode.TYPE_ERROR.value, text) from raised

    def _ask(self, feed_batch: list[Any], typical: int) -> Any:
        """Call `process`, again after a time-out; raises what it failed with the last time."""
        for _ in range(self._settings.retry - 1):
            try:
                # A call that is left behind may still change what it was given.
                return self._ask_once([dict(feed) for feed in feed_batch], typical)
            except ForebayError as failed:
                if not is_time_out(failed):
                    raise
        return self._ask_once(feed_batch, typical)

    def _ask_once(self, feed_batch: list[Any], typical: int) -> Any:
        self._renew()
        op, hooks, timeout_ms = self._op, self._hooks, self._settings.timeout_ms
        assert op is not None
        assert hooks is not None
        if timeout_ms <= 0:
            return hooks.process(feed_batch, typical)

        def call() -> Any:
            try:
                return hooks.process(feed_batch, typical)
            finally:
                if op is not self._op and not _is_shared(op.client):  # it was left behind with it
                    self._instances.close_client(op)

        try:
            return self._calls.call(call, timeout_ms / 1000)
        except Late:
            self._leave(op)
            text = f"[{op.name}] Failed to process: timeout after {timeout_ms:g} ms"
            raise error(CustomExceptionCode.TIMEOUT.value, text) from None

    def _finish(self, sample: _Sample) -> None:
        assert self._hooks is not None
        started = time.monotonic()
        try:
            found = self._hooks.postprocess(sample.inputs, sample.fetched, sample.data_id, sample.log_id)
            store = self._instances.store_of(str(sample.data_id))
            sample.outcome = found if store is None else store.offload(found)
        except ForebayError as failed:
            sample.outcome = failure_of(failed)
        self._note("postp", started, [sample])

    def _note(self, phase: str, started: float, samples: Sequence[_Sample]) -> None:
        ended = time.monotonic()
        name = self._instances.op.name
        self.phases = [*self.phases, *((name, phase, started, ended, sample.data_id) for sample in samples)]


def _splitter(rows: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """Return what cuts the result of a group apart; one sample gets it as it is."""
    return (lambda found: merge.split(found, rows)) if rows else (lambda found: [found])


def _is_shared(client: Any) -> bool:
    """Tell whether late calls may go on with a client that others use."""
    return getattr(client, "is_shared", False)


def _run_of(item: Item) -> str:
    """Return what the store calls a request."""
    return str(item.params.get("data_id", 0))


def _let_go(error: BaseException) -> None:
    """Remove the frames from an error that was raised here; their text is in its `trace`.

    They hold the requests of the batch, which hold their answers, which hold the error; and the garbage collector does
    not look at requests.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _end_worker() -> None:
    """End this worker process, which its pool replaces: one of its threads is in a call that nobody can stop.

    Runs after the answer was written. The interpreter's own way out would wait for that thread.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)
