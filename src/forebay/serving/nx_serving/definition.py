# SPDX-License-Identifier: Apache-2.0
"""`forebay.Serving`: how a function of batches is prepared, run and answered, as one value."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol, TypeVar, cast

from forebay.arrays.array_batch import Batch
from forebay.arrays.tree_rows import concatenate, copy_rows
from forebay.errors import ConfigError, ForebayError, ModelError
from forebay.serving.nx_serving import caller
from forebay.serving.nx_serving.execution import Execution
from forebay.serving.nx_serving.module import TO_JIT, Function, Jitted, Kind, module_of, name_of
from forebay.serving.nx_serving.serving_options import ProcessOptions, ServingSettings, StartOptions, alike
from forebay.serving.nx_serving.started_serving import ServingProcess
from forebay.types.failures import text_of
from forebay.types.settings import checked, keywords_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.serving.nx_serving.execution import Executed, Sink

In = TypeVar("In")
Out = TypeVar("Out")
NewIn = TypeVar("NewIn", bound=Any)  # with a bound, the parameter of a lambda is anything instead of an error
NewOut = TypeVar("NewOut")

_UNSET: Any = object()


class Events(Protocol):
    """What a streaming serving returns: an iterator from `run` and `batched_run`, an async one from coroutines."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...
    def __next__(self) -> tuple[Any, ...]: ...
    def close(self) -> None:
        """Take back what has not run."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[Any, ...]]: ...
    def __anext__(self) -> Awaitable[tuple[Any, ...]]: ...
    def aclose(self) -> Awaitable[None]:
        """Take back what has not run."""
        ...


class Serving(Generic[In, Out]):
    """A function of batches with all that belongs to calling it; a value that never changes, setters return new ones.

    Make one with `Serving.new` or `Serving.jit`. `run` executes at once in the caller, without threads or a server;
    `start` runs it as a process that merges the calls of many threads and tasks into batches.

    Example:
        >>> import numpy as np
        >>> from forebay import Batch, Serving
        >>> serving = Serving.jit(lambda x: x * 2).client_preprocessing(lambda row: (Batch.stack([row]), None))
        >>> serving.run(np.array([1, 2, 3]))
        array([[2, 4, 6]])
    """

    __slots__ = ("__weakref__", "_warmed", "settings")

    settings: ServingSettings
    _warmed: Execution | None

    def __init__(self, settings: ServingSettings) -> None:
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "_warmed", None)

    @staticmethod
    def new(
        module: Any, arg: Any = _UNSET, **compile_options: Any
    ) -> Serving[Batch | Iterable[Batch] | AsyncIterable[Batch], Any]:
        """Make a serving of a function or a module.

        Args:
            module: A function of the compile options, or of a batch key and them, that returns the function to call
                with each `Batch` (which is not joined yet: `batch.realize()` gives its arrays). Or a `ServingModule`:
                a class, made without arguments, or an instance.
            arg: Handed to the module's `init`.
            compile_options: Handed to the function or, for each partition, to `init`.

        Raises:
            ConfigError: It is neither, or a function was given an `arg`.
        """
        made = module_of(module)
        if arg is not _UNSET and made is not module:
            msg = f"arg is handed to the init of a module, and {name_of(made)} is a function; bind it with a closure"
            raise ConfigError(msg)
        return Serving(
            ServingSettings(
                module=made, arg=None if arg is _UNSET else arg, compile_options=MappingProxyType(compile_options)
            )
        )

    @staticmethod
    def jit(
        fn: Callable[..., Any], **compile_options: Any
    ) -> Serving[Batch | Iterable[Batch] | AsyncIterable[Batch], Any]:
        """Make a serving of a function of arrays, compiled with `forebay.jit(fn, **compile_options)`."""
        return Serving.new(Jitted(fn), **compile_options)

    def client_preprocessing(
        self, fn: Callable[[NewIn], tuple[Any, Any] | Awaitable[tuple[Any, Any]]]
    ) -> Serving[NewIn, Out]:
        """Set what turns an input into `(Batch or iterable of Batch, client_info)`; runs in the caller."""
        return cast("Serving[NewIn, Out]", self._with(client_preprocessing=fn))

    def client_postprocessing(self, fn: Callable[[Any, Any], NewOut | Awaitable[NewOut]]) -> Serving[In, NewOut]:
        """Set what turns `(output, metadata)`, or the stream if it is streaming, and the client info into the result.

        Runs in the caller. The metadata of an input that was spread over several batches is that of the last one.
        """
        return cast("Serving[In, NewOut]", self._with(client_postprocessing=fn))

    def distributed_postprocessing(self, fn: Callable[[Any], Any]) -> Serving[In, Out]:
        """Set what runs on the node that executed, before the answer travels."""
        return self._with(distributed_postprocessing=fn)

    def batch_size(self, rows: int) -> Serving[In, Out]:
        """Set how many rows a batch has at most; larger inputs are split.

        Raises:
            ValueError: It is not a whole number of at least 1.
        """
        if type(rows) is not int or rows < 1:
            raise ValueError(f"batch_size: expected a whole number >= 1, got {rows!r}")
        return self._with(batch_size=rows)

    @keywords_of(ProcessOptions)
    def process_options(self, **options: Any) -> Serving[In, Out]:
        """Set options of `start` beforehand, beside those that were set; see `ProcessOptions`.

        Raises:
            ConfigError: One is unknown or has a value that is not possible.
        """
        return self._with(
            process_options=MappingProxyType({**self.settings.process_options, **checked(ProcessOptions, options)})
        )

    def compile_options(self, **options: Any) -> Serving[In, Out]:
        """Set what the function or the module is compiled with, instead of what was set."""
        return self._with(compile_options=MappingProxyType(options))

    defn_options = compile_options

    def streaming(self, hooks: Sequence[str] = ()) -> Serving[In, Events]:
        """Return the outputs one by one instead of joined.

        The result is an iterator of `("batch", output, metadata)`, one for each batch, in the order of the rows. With
        hooks, `(name, value)` comes for each `forebay.hook` of these names that is reached, then one `("batch", ...)`;
        batches are then never broken.

        Raises:
            ConfigError: It is streaming already, or `hooks` is a text.
        """
        if self.settings.streaming is not None:
            raise ConfigError("serving is already marked as streaming")
        if isinstance(hooks, str):  # its letters would be taken for the names
            raise ConfigError(f"hooks: expected a list of names, got the string {hooks!r}; write hooks=[{hooks!r}]")
        return cast("Serving[In, Events]", self._with(streaming=tuple(hooks)))

    def warm(self) -> Serving[In, Out]:
        """Initialise now and keep that for all following calls of `run` on this value; returns the same value.

        Several threads may then `run` it at a time, and call its function at a time.
        """
        if self._warmed is None:
            object.__setattr__(self, "_warmed", self._execution(self.settings.process_options.get("batch_keys")))
        return self

    def run(self, given: In) -> Out:
        """Execute now, in this thread, without batching with others.

        Args:
            given: What the client preprocessing takes; without one, a `Batch` or an iterable of them.

        Raises:
            InvalidRequest: There is nothing to execute, or it is not a batch.
            BadOutcome: The module returned something other than it should.
            Exception: What the function raises.
        """
        settings = self.settings
        prepared, info = caller.prepare(settings, given)
        limit = settings.batch_size
        if isinstance(prepared, Batch):
            batches = caller.cut(caller.whole(settings, prepared, limit), limit)
        else:
            batches = caller.each(settings, prepared, limit)
        if settings.streaming is None:
            return caller.finish(settings, self._joined(batches), info)
        return caller.finish_stream(settings, self.events(batches), info)

    @keywords_of(StartOptions)
    def start(self, name: str | None = None, **options: Any) -> ServingProcess[In, Out]:
        """Start it as a process: threads that execute what any number of callers hand in, in batches.

        Args:
            name: What `forebay.batched_run` finds it under; None if only the returned handle is used.
            options: See `ProcessOptions`; they stand above those of `process_options`.

        Raises:
            ConfigError: The name is taken, or an option is wrong.
            ModelError: The module could not be initialised.
        """
        return ServingProcess(self, name, options)

    def initialise(self, kind: Kind, partitions: Sequence[dict[str, Any]], pad_to: int | None) -> Execution:
        """Initialise the module.

        Raises:
            ConfigError: A function did not return a function.
            ModelError: The module's `init` failed.
        """
        settings = self.settings
        execution, error = caught(
            lambda: Execution(
                settings.module, kind, settings.arg, partitions, hooks=settings.streaming or (), pad_to=pad_to
            )
        )
        if error is None:
            return execution
        if isinstance(error, ForebayError):
            raise error
        # The options are taken for arrays.
        hint = f"; {TO_JIT}" if isinstance(settings.module, Function) and "mappingproxy" in text_of(error) else ""
        raise ModelError(f"{name_of(settings.module)} could not be initialised: {text_of(error)}{hint}") from error

    def _joined(self, batches: Iterator[Batch]) -> tuple[Any, Any]:
        outputs: list[Any] = []
        executed: Executed | None = None
        for batch, executed in self._execute(batches):
            outputs.append(executed.cut(0, batch.size))
        assert executed is not None
        return concatenate(outputs), executed.metadata

    def events(
        self, batches: Iterator[Batch], execution: Execution | None = None, partition: int = 0
    ) -> Iterator[tuple[Any, ...]]:
        """Execute batches here, one after another as they are asked for, and yield the events of a stream.

        The values of hooks come when their batch has run.

        Args:
            batches: Each at most as large as the batch size.
            execution: The initialised module; None takes the warm one, or initialises one.
            partition: Number of the partition.
        """
        reached: list[tuple[str, Any]] = []
        for batch, executed in self._execute(batches, reached, execution, partition):
            yield from reached
            reached.clear()
            yield "batch", executed.cut(0, batch.size), executed.metadata

    def _execute(
        self,
        batches: Iterator[Batch],
        reached: list[tuple[str, Any]] | None = None,
        execution: Execution | None = None,
        partition: int = 0,
    ) -> Iterator[tuple[Batch, Executed]]:
        execution = execution or self._warmed
        sink: Sink | None = None
        for batch in batches:
            if execution is None:
                execution = self._execution([batch.batch_key])
            if reached is not None and self.settings.streaming:
                sink = _into(reached, batch.size)
            yield batch, execution.run(batch, partition, sink).own()

    def _execution(self, batch_keys: Sequence[Hashable] | None) -> Execution:
        keys = list(batch_keys or ["default"])
        partition = {**self.settings.compile_options, "batch_keys": keys}
        return self.initialise("inline", [partition], self.settings.pad_to(self.settings.batch_size))

    def _with(self, **changes: Any) -> Serving[In, Out]:
        return Serving(replace(self.settings, **changes))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Serving cannot be changed; its methods return new ones (setting {name!r})")

    def __eq__(self, other: object) -> bool:
        return alike(self.settings, other.settings) if isinstance(other, Serving) else NotImplemented

    __hash__: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]  # options may be anything

    def __repr__(self) -> str:
        settings = self.settings
        shown = [name_of(settings.module)]
        if settings.arg is not None:
            shown.append(f"arg={settings.arg!r}")
        for name in ("batch_size", "client_preprocessing", "client_postprocessing", "distributed_postprocessing"):
            value = getattr(settings, name)
            if value is not None:
                shown.append(f"{name}={getattr(value, '__qualname__', None) or repr(value)}")
        if settings.streaming is not None:
            shown.append(f"streaming={list(settings.streaming)}")
        for options in (settings.compile_options, settings.process_options):
            shown += [f"{name}={value!r}" for name, value in options.items()]
        return f"Serving({', '.join(shown)})"


def _into(reached: list[tuple[str, Any]], rows: int) -> Sink:
    return lambda name, value: reached.append((name, copy_rows(value, 0, rows)))
