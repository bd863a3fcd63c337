# SPDX-License-Identifier: Apache-2.0
"""What happens in the caller, before its rows are handed in and after they came back."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from forebay.arrays.array_batch import Batch
from forebay.errors import ConfigError, InvalidRequest
from forebay.observe.spans import span

if TYPE_CHECKING:
    from forebay.serving.nx_serving.serving_options import ServingSettings

Prepared = Batch | Iterable[Batch] | AsyncIterable[Batch]
"""What a caller hands in: one batch, or several one after another."""


def require_blocking(settings: ServingSettings, where: str) -> None:
    """Look at what runs in the caller before there is one.

    Raises:
        ConfigError: The pre- or postprocessing is made of coroutines, which a worker has no loop for.
    """
    for name in ("client_preprocessing", "client_postprocessing"):
        fn = getattr(settings, name)
        if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise ConfigError(f"{where}: its {name}, {_name(fn)}, is a coroutine function; write it with `def`")


def prepare(settings: ServingSettings, given: Any) -> tuple[Batch | Iterable[Batch], Any]:
    """Run the client preprocessing.

    Returns:
        What is to be executed, and the info for the postprocessing.

    Raises:
        InvalidRequest: Without a preprocessing, `given` is not a batch.
        ConfigError: The preprocessing returned something else, or is a coroutine function.
    """
    with span("serving.preprocessing", input=given) as attributes:
        fn = settings.client_preprocessing
        prepared, info = _default(given) if fn is None else _checked(fn, _here(fn, fn(given)))
        if isinstance(prepared, AsyncIterable):
            raise InvalidRequest("an async iterator can be given to batched_run_async only")
        attributes["info"] = info
        return prepared, info


async def prepare_async(settings: ServingSettings, given: Any) -> tuple[Prepared, Any]:
    """Run the client preprocessing, which may be a coroutine function; see `prepare`."""
    with span("serving.preprocessing", input=given) as attributes:
        fn = settings.client_preprocessing
        if fn is None:
            prepared, info = _default(given)
        else:
            returned = fn(given)
            prepared, info = _checked(fn, await returned if inspect.isawaitable(returned) else returned)
        attributes["info"] = info
        return prepared, info


def finish(settings: ServingSettings, executed: tuple[Any, Any], info: Any) -> Any:
    """Run the client postprocessing on `(output, metadata)`; without one, return the output.

    Raises:
        ConfigError: The postprocessing is a coroutine function.
    """
    with span("serving.postprocessing", info=info, metadata=executed[1]):
        fn = settings.client_postprocessing
        return executed[0] if fn is None else _here(fn, fn(executed, info))


async def finish_async(settings: ServingSettings, executed: tuple[Any, Any], info: Any) -> Any:
    """Run the client postprocessing, which may be a coroutine function; see `finish`."""
    with span("serving.postprocessing", info=info, metadata=executed[1]):
        fn = settings.client_postprocessing
        if fn is None:
            return executed[0]
        returned = fn(executed, info)
        return await returned if inspect.isawaitable(returned) else returned


def finish_stream(settings: ServingSettings, stream: Any, info: Any) -> Any:
    """Run the client postprocessing on a stream; without one, return the stream.

    Raises:
        ConfigError: The postprocessing is a coroutine function, or an async generator function.
    """
    fn = settings.client_postprocessing
    if inspect.isasyncgenfunction(fn):
        msg = f"{_name(fn)} is an async generator function; await batched_run_async, or write it with `def`"
        raise ConfigError(msg)
    return stream if fn is None else _here(fn, fn(stream, info))


async def finish_stream_async(settings: ServingSettings, stream: Any, info: Any) -> Any:
    """Run the client postprocessing on a stream, which may be a coroutine function; see `finish_stream`.

    Raises:
        ConfigError: The postprocessing is a generator function, which cannot read what is asynchronous.
    """
    fn = settings.client_postprocessing
    if fn is None:
        return stream
    if inspect.isgeneratorfunction(fn):
        raise ConfigError(
            f"{_name(fn)} is a generator function; batched_run_async gives it an async iterator: write it with "
            "`async def` and `async for`, or call batched_run"
        )
    returned = fn(stream, info)
    return await returned if inspect.isawaitable(returned) else returned


def whole(settings: ServingSettings, batch: Batch, limit: int | None) -> Batch:
    """Check a batch that was handed in by itself.

    Raises:
        InvalidRequest: It is empty, or too large for a serving that streams hooks.
    """
    if batch.size == 0:
        raise InvalidRequest("cannot run with empty Batch")
    if settings.streaming and limit is not None and batch.size > limit:
        raise InvalidRequest(
            f"batch size ({batch.size}) cannot exceed the serving's batch size of {limit} when streaming hooks, "
            "because their values belong to whole batches"
        )
    return batch


def each(settings: ServingSettings, batches: Iterable[Batch], limit: int | None) -> Iterator[Batch]:
    """Return the batches of an iterable, checked as they are taken.

    Raises:
        InvalidRequest: The serving streams hooks; later, an item is not a batch, empty or too large, or there is none.
    """
    _refuse_hooks(settings)
    return _each(settings, batches, limit)


def _each(settings: ServingSettings, batches: Iterable[Batch], limit: int | None) -> Iterator[Batch]:
    item: Batch | None = None
    for item in batches:
        yield _one(settings, item, limit)
    if item is None:
        raise InvalidRequest(_NOTHING)


def each_async(settings: ServingSettings, batches: Any, limit: int | None) -> AsyncIterator[Batch]:
    """Return the batches of an iterable or an async iterable, checked; see `each`."""
    _refuse_hooks(settings)
    return _each_async(settings, batches, limit)


async def _each_async(settings: ServingSettings, batches: Any, limit: int | None) -> AsyncIterator[Batch]:
    if not isinstance(batches, AsyncIterable):
        for item in _each(settings, batches, limit):
            yield item
        return
    item: Batch | None = None
    async for item in cast("AsyncIterable[Batch]", batches):
        yield _one(settings, item, limit)
    if item is None:
        raise InvalidRequest(_NOTHING)


def cut(batch: Batch, limit: int | None) -> Iterator[Batch]:
    """Yield the rows of a batch in pieces that fit."""
    while limit is not None and batch.size > limit:
        piece, batch = batch.split(limit)
        yield piece
    yield batch


_NOTHING = "cannot run with empty Batch: the iterable gave none at all"


def _refuse_hooks(settings: ServingSettings) -> None:
    if settings.streaming:
        raise InvalidRequest("streaming hooks do not support input streaming, input must be a Batch")


def _one(settings: ServingSettings, item: Any, limit: int | None) -> Batch:
    if not isinstance(item, Batch) and settings.client_preprocessing is None:
        raise InvalidRequest(_needs_batches(f"an iterable with {_shown(item)}"))
    if not isinstance(item, Batch) or (limit is not None and item.size > limit):
        size = "" if limit is None else f" of maximum size {limit}"
        raise InvalidRequest(f"client_preprocessing must return a stream of Batch{size}, got: {item!r}")
    if item.size == 0:
        raise InvalidRequest("cannot run with empty Batch")
    return item


def _default(given: Any) -> tuple[Prepared, Any]:
    if not _can_run(given):
        raise InvalidRequest(_needs_batches(_shown(given)))
    return given, "client_info"


def _needs_batches(got: str) -> str:
    return (
        f"without a client_preprocessing a serving takes a Batch or an iterable of Batch, got {got}; "
        "give Batch.stack([row, ...]) or Batch.concatenate([rows, ...]), or set a client_preprocessing"
    )


def _checked(fn: Callable[..., Any], returned: Any) -> tuple[Prepared, Any]:
    if type(returned) is not tuple or len(cast("tuple[Any, ...]", returned)) != 2 or not _can_run(returned[0]):
        raise ConfigError(
            f"client_preprocessing function {_name(fn)} must return a two-element tuple: a Batch or an iterable of "
            f"Batch, and the client info. Got: {_shown(returned)}"
        )
    return cast("tuple[Prepared, Any]", returned)


def _can_run(given: Any) -> bool:
    if isinstance(given, Batch | AsyncIterable):
        return True
    # Arrays, texts and mappings are iterable as well, and never meant as an iterable of batches.
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping) and not hasattr(given, "shape")  # pyright: ignore[reportUnknownArgumentType]


def _here(fn: Callable[..., Any], returned: Any) -> Any:
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise ConfigError(f"{_name(fn)} is a coroutine function; await batched_run_async, or write it with `def`")
    return returned


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
