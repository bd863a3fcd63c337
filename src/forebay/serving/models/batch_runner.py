# SPDX-License-Identifier: Apache-2.0
"""Runs a `Model` on batches, wherever its samples come from and its results go to.

Subclasses define what a body and an outcome are: bytes for a model that answers requests (`model_runner.py`), Python
values for one inside a graph. One list of samples at a time is the common case; only a batch in which something fails
is looked at sample by sample.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from forebay.errors import BadOutcome, Unavailable
from forebay.serving.models import isolation
from forebay.serving.models.function_kinds import awaits, may_await
from forebay.serving.models.misspelt_names import STEPS
from forebay.serving.models.model import Model, ModelSettings, set_in_vain, takes_context
from forebay.serving.models.padding import Padded, require_numpy
from forebay.serving.models.sample_times import SampleTimes
from forebay.serving.models.stream_steps import Stream
from forebay.types.call import HEALTH, Failure, Item, Outcome
from forebay.types.context import PARAM, Context, context_of
from forebay.types.failures import failure_in, failure_of
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.coroutines import Coroutines
from forebay.workers.user_calls.joint_streams import JointStreams, SideBySide
from forebay.workers.user_calls.phases import lap, needed
from forebay.workers.user_calls.user_code import aclose, attempt, attempt_async, close, one_each

log = logging.getLogger("forebay.workers")


class BatchRunner(Runner, ABC):
    """A `Runner` for one model class; subclasses read bodies and write outcomes.

    Attributes:
        awaits: Whether the model has functions that return something to wait for.
        silent: Streams that got nothing in the last steps; see `Stepping`.
    """

    def __init__(
        self,
        model_class: type[Model],
        settings: ModelSettings,
        *,
        isolate_errors: bool = False,
        method: str = "predict",
        files: str | None = None,
    ) -> None:
        """Read the class; `open` makes the model.

        Args:
            isolate_errors: Halve batches that fail as a whole, also if the class does not ask for it.
            method: The method that runs; hooks are called around `predict` only.
            files: The folder that `load` is given; None if it takes none.
        """
        self._class = model_class
        self._files = files
        self._method = asked = "start" if settings.steps else method
        self._hooks = ("preprocess", "postprocess") if method == "predict" else ()
        self._settings = settings
        self._has_health = settings.has_health
        self._model: Any = None
        self._predict: Callable[..., Any] = _not_open
        self._preprocess: Callable[[Any], Any] | None = None
        self._postprocess: Callable[[Any], Any] | None = None
        self._pad = settings.pad
        self._isolates = settings.isolate_errors or isolate_errors
        self._in_parts = self._pad is not None or self._isolates
        self._is_alone = False  # whether the method takes one sample and gives its result, without lists
        self._in_buckets = model_class.batch_key is None
        self._has_context = settings.has_context
        self._context_in = {
            name: settings.has_context and takes_context(model_class, asked if name == "predict" else name)
            for name in ("predict", "preprocess", "postprocess")
        }
        self._worker = 0
        self._coroutines = Coroutines()
        self.silent: dict[Stream, tuple[int, float]] = {}
        functions = [
            getattr(model_class, name, None) for name in (*(STEPS if settings.steps else (method,)), *self._hooks)
        ]
        self.awaits = any(map(may_await, functions))
        # A decorator may wait for what it wraps by `asyncio.run`, which is refused where a loop runs.
        self._calls_apart = self.awaits and not settings.streams and not any(map(awaits, functions))
        self._blocks = self.awaits and not self._calls_apart
        self.shares_loop = self._blocks and settings.is_async and not settings.streams

    @abstractmethod
    def _decoded(self, items: Sequence[Item]) -> Samples:
        """Read the bodies; one that cannot be read fails its own item."""

    @abstractmethod
    def _encoded(self, batch: Samples) -> Sequence[Outcome]:
        """Write one outcome for each item."""

    def _parts(self, batch: Samples, given: list[Any]) -> Sequence[Any]:
        """Write one step of a streamed answer; for subclasses whose models may stream."""
        raise NotImplementedError

    def open(self, ctx: WorkerContext) -> None:
        """Make the model and load it."""
        loaded = self._load(ctx)
        if inspect.isawaitable(loaded):
            self._coroutines.run(loaded)
        self._told_of_settings(ctx)
        self._loaded()

    def run_on_loop(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop that has loaded the model."""
        self._coroutines.run(main)

    def share(self, opened: BatchRunner) -> None:
        """Use the model of another runner, which opens and closes it; coroutines stay on the loop that loaded it."""
        self._model, self._worker, self._coroutines = opened._model, opened._worker, opened._coroutines
        self._loaded()

    def close(self) -> None:
        """Drop the model, calling its `unload` if it has one."""
        try:
            unloaded = self._unload()
            if inspect.isawaitable(unloaded):
                self._coroutines.run(unloaded)
        finally:
            self._coroutines.close()
            self.let_go()

    def let_go(self) -> None:
        """Refer to the model no longer: its memory is free with that, and not when the collector comes by."""
        self._model, self._predict = None, _not_open
        self._preprocess = self._postprocess = None

    async def open_async(self, ctx: WorkerContext) -> None:
        """Make the model and load it on a loop that runs already."""
        loaded = self._load(ctx)
        if inspect.isawaitable(loaded):
            await loaded
        self._told_of_settings(ctx)
        self._loaded()

    async def close_async(self) -> None:
        """Drop the model on a loop that runs already."""
        try:
            unloaded = self._unload()
            if inspect.isawaitable(unloaded):
                await unloaded
        finally:
            self.let_go()

    def _load(self, ctx: WorkerContext) -> Any:
        self._worker = ctx.index
        if self._pad is not None:
            require_numpy(f"{self._class.__qualname__}.pad")
        self._model = self._class()
        if ctx.device != "cpu" and self._class.device == "cpu":  # or the class has a `device` of its own
            self._model.device = ctx.device
        return self._model.load() if self._files is None else self._model.load(Path(self._files))

    def _told_of_settings(self, ctx: WorkerContext) -> None:
        if ctx.index:  # the others would say the same
            return
        where = self._class.__qualname__
        for name in set_in_vain(self._model):
            log.warning(
                "%s sets `self.%s`, which has no effect: forebay reads that setting from the class, before it makes a "
                "model; write `%s = ...` in the body of the class. For another purpose choose another name, such as "
                "`_%s`",
                where,
                name,
                name,
                name,
            )

    def _loaded(self) -> None:
        self._predict = self._called(self._method)
        if self._hooks:
            self._preprocess, self._postprocess = map(self._called, self._hooks)

    def _called(self, name: str) -> Any:
        """Return a method as it is called, None if there is none."""
        function = getattr(self._model, name, None)
        return self._coroutines.waiting(function) if self._calls_apart and function is not None else function

    def _unload(self) -> Any:
        unload = getattr(self._model, "unload", None)
        return None if unload is None else unload()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome] | Iterator[Sequence[Any]] | JointStreams:
        """Run a batch; see `Runner.run`."""
        if self._has_health and HEALTH in items[0].params:
            return self._coroutines.run(self._health(self._model.healthy()))
        if self._blocks:
            return self._run_blocking(items)
        ended = lap.get()
        batch = self._read(items)
        if self._preprocess is not None:
            batch.each(self._preprocess, in_context=self._context_in["preprocess"])
        if ended is not None:
            ended("preprocess")
        if self._settings.steps:
            batch.each(self._predict, in_context=self._context_in["predict"])
            return self._begun(batch)
        if self._settings.streams:
            return self._stream(batch, self._predicted(batch))
        if self._in_parts:
            results: Any = isolation.run(self._plan(batch), self._run_part)
            batch.note_seconds(results)
        else:
            results = self._predicted(batch) if batch.samples else []
        if ended is not None:
            ended("predict")
        batch.take_results([results] if self._is_alone else results)
        if self._postprocess is not None:
            batch.each(self._postprocess, in_context=self._context_in["postprocess"])
        outcomes = self._encoded(batch)
        if ended is not None:
            ended("postprocess")
        return outcomes

    def run_async(self, items: Sequence[Item]) -> Any:
        """Run a batch on a loop; only what may await is a coroutine there."""
        if self._has_health and HEALTH in items[0].params:
            return self._health(self._model.healthy())
        return self._run_async(items) if self.awaits else self.run(items)

    async def _health(self, said: Any) -> Sequence[Outcome]:
        """Return what a model says of itself as an outcome: a failure tells why it cannot answer."""
        said = await said if inspect.isawaitable(said) else said
        if said is None:
            return [Failure(BadOutcome("healthy returned None, perhaps because its `return` is missing"))]
        return [b"" if said else Failure(Unavailable(f"healthy returned {said!r:.80}"))]

    async def _run_async(
        self, items: Sequence[Item], wait: Callable[[Any], Any] | None = None
    ) -> Sequence[Outcome] | AsyncIterator[Sequence[Any]] | JointStreams:
        ended = lap.get()
        batch = self._read(items)
        if self._preprocess is not None:
            await batch.each_async(self._preprocess, in_context=self._context_in["preprocess"])
        if ended is not None:
            ended("preprocess")
        if self._settings.steps:
            await batch.each_async(self._predict, in_context=self._context_in["predict"])
            return self._begun(batch, wait)
        if self._settings.streams:
            return self._stream_async(batch, self._predicted(batch))
        if self._in_parts:
            results: Any = await isolation.run_async(self._plan(batch), self._run_part_async)
            batch.note_seconds(results)
        else:
            results = self._predicted(batch) if batch.samples else []
            if inspect.isawaitable(results):
                results = await results
        if ended is not None:
            ended("predict")
        batch.take_results([results] if self._is_alone else results)
        if self._postprocess is not None:
            await batch.each_async(self._postprocess, in_context=self._context_in["postprocess"])
        outcomes = self._encoded(batch)
        if ended is not None:
            ended("postprocess")
        return outcomes

    def _run_blocking(self, items: Sequence[Item]) -> Sequence[Outcome] | Iterator[Sequence[Any]] | JointStreams:
        """Run coroutines in a thread or process of our own, on a loop that this thread keeps."""
        result = self._coroutines.run(self._run_async(items, self._coroutines.run))
        if hasattr(result, "__anext__"):
            return SideBySide(cast("AsyncIterator[Any]", result), len(items), wait=self._coroutines.run)
        return result  # pyright: ignore[reportReturnType]

    def _begun(self, batch: Samples, wait: Callable[[Any], Any] | None = None) -> Sequence[Outcome] | Stream:
        """Return the stream of a request, whose sample has become a state by now."""
        if batch.failures:
            return [batch.failures[0]]
        (state,) = batch.samples  # they leave the queue one by one
        return Stream(self, state, batch.items[0].params, batch.told[0] if batch.told else None, wait)

    def step(self, states: list[Any]) -> Any:
        """Have the model make the next part of each stream."""
        return self._model.step(states)

    def finish(self, state: Any) -> Any:
        """Have the model let go of the state of a stream."""
        finish = getattr(self._model, "finish", None)
        return None if finish is None else finish(state)

    def postprocess(self, part: Any, stream: Stream) -> Any:
        """Return a part after `postprocess`, or the failure it ends in."""
        if self._postprocess is None:
            return part
        attempted = attempt_async if self.awaits else attempt
        if self._context_in["postprocess"]:
            return attempted(_in_context, self._postprocess, part, stream.told)
        return attempted(self._postprocess, part)

    def write(self, part: Any, params: Mapping[str, Any]) -> Any:
        """Return a part as it is sent to who asked with these params; for subclasses whose models may stream."""
        raise NotImplementedError

    def writer(self, asked: Sequence[Mapping[str, Any]]) -> Callable[[Sequence[Any]], Sequence[Any] | None] | None:
        """Return what writes a part for each of these at once; see `Stepping.writer`."""
        return None

    @property
    def model_name(self) -> str:
        """How errors call the model."""
        return self._class.__name__

    def _read(self, items: Sequence[Item]) -> Samples:
        batch = self._decoded(items)
        if self._has_context:
            batch.told = [context_of(item.params, str(self._model.device), self._worker) for item in items]
        return batch

    def _predicted(self, batch: Samples) -> Any:
        given = batch.samples[0] if self._is_alone else batch.samples
        if self._context_in["predict"]:
            return self._predict(given, context=batch.told[0] if self._is_alone else batch.contexts())
        return self._predict(given)

    def _plan(self, batch: Samples) -> isolation.Plan:
        """Measure the samples if they are padded, and say which of them run together."""
        if self._pad is not None:
            batch.each(self._pad.measure)
        if self._pad is None:
            groups: Sequence[Sequence[int]] = [range(len(batch.samples))]
        else:
            groups = self._pad.alike(batch.samples, in_buckets=self._in_buckets)
        samples = (
            list(zip(batch.samples, batch.contexts(), strict=True)) if self._context_in["predict"] else batch.samples
        )
        if batch.needed is not None:
            pad, measured = self._pad, batch.samples
            batch.times = SampleTimes(None if pad is None else lambda group: pad.sizes([measured[at] for at in group]))
        return isolation.plan(samples, groups if batch.samples else [], isolate=self._isolates, times=batch.times)

    def _run_part(self, samples: list[Any]) -> Sequence[Any]:
        given, context = self._asked(samples)
        return self._unpadded(given, self._predict(given, **context))

    async def _run_part_async(self, samples: list[Any]) -> Sequence[Any]:
        given, context = self._asked(samples)
        results = self._predict(given, **context)
        return self._unpadded(given, await results if inspect.isawaitable(results) else results)

    def _asked(self, samples: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what `predict` is called with: samples, and what is known of their requests if it asks."""
        if not self._context_in["predict"]:
            return self._padded(samples), {}
        return self._padded([sample for sample, _ in samples]), {PARAM: [context for _, context in samples]}

    def _padded(self, samples: list[Any]) -> list[Any]:
        return samples if self._pad is None else self._pad.together(samples)

    def _unpadded(self, given: list[Any], results: Any) -> Sequence[Any]:
        results = one_each(results, len(given))
        return self._pad.undo(given, results) if self._pad is not None and isinstance(given, Padded) else results

    def _stream(self, batch: Samples, steps: Iterator[Any]) -> Iterator[Sequence[Any]]:
        try:
            yield from batch.refused()
            if batch.samples:
                self._check_generator(steps, "__next__")
                write = None if batch.failures else self.writer([item.params for item in batch.items])
                for made in steps:
                    step = [made] if self._is_alone else made
                    self._check_step(batch, step)
                    written = None if write is None else write(step)
                    if written is not None:  # as nearly always
                        yield written
                        continue
                    told = batch.contexts() if self._context_in["postprocess"] else None
                    yield self._parts(
                        batch,
                        [
                            None if part is None else self._finished(part, *_context(told, place))
                            for place, part in enumerate(step)
                        ],
                    )
        finally:
            close(steps)

    async def _stream_async(self, batch: Samples, steps: Any) -> AsyncIterator[Sequence[Any]]:
        if hasattr(steps, "__next__"):  # the hooks alone are coroutine functions
            steps = _each(steps)
        try:
            for refused in batch.refused():
                yield refused
            if batch.samples:
                self._check_generator(steps, "__anext__")
                async for made in steps:
                    step = [made] if self._is_alone else made
                    self._check_step(batch, step)
                    told = batch.contexts() if self._context_in["postprocess"] else None
                    yield self._parts(
                        batch,
                        [
                            None if part is None else await self._finished_async(part, *_context(told, place))
                            for place, part in enumerate(step)
                        ],
                    )
        finally:
            await aclose(steps)

    def _check_generator(self, steps: Any, wanted: str) -> None:
        if not hasattr(steps, wanted):
            raise BadOutcome(
                f"{self._class.__name__}.{self._method} returned a {type(steps).__name__} and no generator, though its "
                "decorator says that it wraps one; return what that returns, or leave out functools.wraps"
            )

    def _check_step(self, batch: Samples, step: Any) -> None:
        count = len(step) if type(step) in {list, tuple} else -1
        if count != len(batch.samples):
            found = f"{count} parts" if count >= 0 else f"a {type(step).__name__}"
            raise BadOutcome(
                f"{self._class.__name__}.{self._method} yielded {found} for a batch of {len(batch.samples)}; yield a "
                "list with one part for each sample, None for a sample that has none"
            )

    def _finished(self, part: Any, *context: Context) -> Any:
        """Return a part after `postprocess`, or the failure it ends in."""
        failed = _failed(part)
        if failed is not None or self._postprocess is None:
            return failed or part
        return (
            attempt(_in_context, self._postprocess, part, context[0]) if context else attempt(self._postprocess, part)
        )

    async def _finished_async(self, part: Any, *context: Context) -> Any:
        failed = _failed(part)
        if failed is not None or self._postprocess is None:
            return failed or part
        if context:
            return await attempt_async(_in_context, self._postprocess, part, context[0])
        return await attempt_async(self._postprocess, part)


class Samples:
    """The samples of a batch with the item each belongs to, and the items that have failed."""

    def __init__(
        self,
        items: Sequence[Item],
        samples: list[Any],
        owners: Sequence[int] | None,
        failures: dict[int, Failure],
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.items = items
        self.samples = samples
        self.owners = range(len(items)) if owners is None else owners
        self.failures = failures
        self.params = params
        """Those of all items, if it is known that they have the same."""
        self.told: list[Context] = []
        """What is known of the request of each item, if the model asks."""
        self.needed = needed.get()
        self.times: SampleTimes | None = None

    def contexts(self) -> list[Context]:
        """Return what is known of the request of each sample."""
        return [self.told[owner] for owner in self.owners]

    def each(self, step: Callable[..., Any], *, in_context: bool = False) -> None:
        """Replace each sample by what `step` makes of it; what raises fails its own item."""
        if in_context:
            pairs = zip(self.samples, self.contexts(), strict=True)
            self._settle([attempt(_in_context, step, sample, context) for sample, context in pairs])
        else:
            self._settle([attempt(step, sample) for sample in self.samples])

    async def each_async(self, step: Callable[..., Any], *, in_context: bool = False) -> None:
        """Replace each sample by what `step` makes of it, which may be a coroutine function."""
        if in_context:
            pairs = zip(self.samples, self.contexts(), strict=True)
            self._settle([await attempt_async(_in_context, step, sample, context) for sample, context in pairs])
        else:
            self._settle([await attempt_async(step, sample) for sample in self.samples])

    def take_results(self, results: Any) -> None:
        """Check that there is one result for each sample and set aside those that are errors.

        Raises:
            BadOutcome: Naming both numbers.
        """
        self._settle(list(one_each(results, len(self.samples))))

    def note_seconds(self, results: Sequence[Any]) -> None:
        """Tell the worker what each item needed by itself, if it asks; the results are those of the samples."""
        if self.times is None or self.needed is None:
            return
        self.needed += [0.0] * len(self.items)
        for owner, seconds in zip(self.owners, self.times.seconds(results), strict=True):
            self.needed[owner] += seconds

    def refused(self) -> Iterator[Sequence[Any]]:
        """Yield one step that fails the items whose bodies could not be read, if there are any."""
        if self.failures:
            yield [self.failures.get(owner) for owner in range(len(self.items))]

    def _settle(self, samples: list[Any]) -> None:
        """Go on with these samples; an error among them fails its item, and no sample of a failed item goes on."""
        if any(issubclass(kind, BaseException | Failure) for kind in set(map(type, samples))):
            for owner, sample in zip(self.owners, samples, strict=True):
                failed = _failed(sample)
                if failed is not None:
                    self.failures[owner] = failed
        if not self.failures:
            self.samples = samples
            return
        pairs = [(o, s) for o, s in zip(self.owners, samples, strict=True) if o not in self.failures]
        self.owners = [owner for owner, _ in pairs]
        self.samples = [sample for _, sample in pairs]


async def _each(steps: Iterator[Any]) -> AsyncIterator[Any]:
    try:
        for step in steps:
            yield step
    finally:
        close(steps)


def _in_context(step: Callable[..., Any], sample: Any, context: Context) -> Any:
    return step(sample, context=context)


def _context(told: Sequence[Context] | None, place: int) -> Sequence[Context]:
    return () if told is None else (told[place],)


def _failed(result: Any) -> Failure | None:
    """Return the failure that a result is: an exception, or a `Failure` of the user's."""
    if type(result) is Failure:
        return failure_in(result)
    return failure_of(result) if isinstance(result, BaseException) else None


def _not_open(_samples: list[Any]) -> Any:
    raise RuntimeError("the runner was not opened")
