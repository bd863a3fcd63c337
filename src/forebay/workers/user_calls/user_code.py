# SPDX-License-Identifier: Apache-2.0
"""The boundary to user code: every call of it goes through here, and whatever comes out can be passed on safely.

User code raises anything (`KeyboardInterrupt`, `GeneratorExit`, a class of its own), and what it raises may be of a
kind that cannot be printed or sent. All of that is caught here and nowhere else. Past this module an error is a
`ForebayError` whose texts and detail every protocol can write.

There are four ways in: `attempt` gives a value or a `Failure`, `user_code` raises a `ForebayError`, `caught` hands out
what was raised as it is, and `answered` runs a whole batch. Two things do not come from the user and pass through all
of them: a Ctrl-C where Python itself raises it, and the cancellation of a task by whoever runs it.
"""

from __future__ import annotations

import inspect
import logging
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, Final, cast

from forebay.errors import BadOutcome, Unavailable
from forebay.types.call import After, Failure, Outcome
from forebay.types.failures import failure_in, failure_of, words_of
from forebay.types.plurals import counted
from forebay.types.user_exceptions import caught, is_ours
from forebay.workers.user_calls.cancel import is_cancelled

log = logging.getLogger("forebay.workers")


_LAZY: Final = frozenset({AsyncGeneratorType, CoroutineType, GeneratorType})
_WRAPPED: Final = (
    " (`list(...)` makes one of a generator that is not a stream; a decorator of `async def` or of a generator needs "
    "functools.wraps)"
)


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's; returns what it returned, or a `Failure` with what it raised."""
    try:
        return function(*arguments)
    except BaseException as error:
        if is_ours(error):
            raise
        return failure_of(error)


async def attempt_async(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that may return an awaitable, as `attempt` does."""
    try:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        if is_ours(error):
            raise
        return failure_of(error)


class _Boundary:
    """What `user_code` returns; it holds nothing of a single use, so one serves all."""

    __slots__ = ("_passes",)

    def __init__(self, *passes: type[BaseException]) -> None:
        self._passes = passes

    def __enter__(self) -> None:
        return

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, self._passes) or is_ours(error):
            return
        trace = error.__traceback__
        told = failure_of(error).error
        if told is not error:
            raise told from error
        error.with_traceback(trace)


_boundary: Final = _Boundary()


def user_code(*passes: type[BaseException]) -> _Boundary:
    """Run the block as user code: whatever it raises leaves it as a `ForebayError`, with the original as its cause.

    Args:
        *passes: What leaves as it is.
    """
    return _Boundary(*passes) if passes else _boundary


def answered(
    run: Callable[[Any], Any], items: Sequence[Any], stream: Callable[[Iterator[Any]], object] | None = None
) -> tuple[Sequence[Outcome], list[Callable[[], object]]]:
    """Run a batch.

    Args:
        run: A runner's.
        stream: Sends the steps of a streamed answer; they are closed once it returns. None where none may come.

    Returns:
        One outcome for each item, whatever happens, and the work to do once they were written.
    """
    count = len(items)
    try:
        result = run(items)
        if stream is None or not hasattr(result, "__next__"):
            return settled(result, count)
        try:
            stream(result)
        finally:
            close(result)
    except BaseException as error:
        if is_ours(error):
            raise
        if isinstance(error, CancelledError) and is_cancelled():  # the worker ended it: the model is not at fault
            return [Failure(Unavailable("the request was cancelled"))] * count, []
        return [failure_of(error)] * count, []
    return [None] * count, []


def settled(outcomes: Any, count: int) -> tuple[Sequence[Outcome], list[Callable[[], object]]]:
    """Return the outcomes of a runner in a form that every pool can hand on, and the work to do once they are written.

    Raises:
        BadOutcome: If there is not exactly one for each item.
    """
    outcomes = checked(outcomes, count)
    kinds = set(map(type, outcomes))
    work: list[Callable[[], object]] = []
    if After in kinds:
        work = [outcome.work for outcome in outcomes if type(outcome) is After]
        outcomes = [outcome.outcome if type(outcome) is After else outcome for outcome in outcomes]
        kinds = set(map(type, outcomes))
    if Failure in kinds:
        outcomes = [failure_in(outcome) if type(outcome) is Failure else outcome for outcome in outcomes]
    return outcomes, work


def checked(outcomes: Any, count: int) -> Sequence[Outcome]:
    """Return the outcomes if there is exactly one for each item.

    Raises:
        BadOutcome: Naming both numbers otherwise.
    """
    try:
        found = len(outcomes)
    except TypeError:
        raise BadOutcome(
            f"the runner returned {type(outcomes).__name__}, expected a list of {counted(count, 'result')}"
        ) from None
    if found != count:
        raise BadOutcome(f"the runner returned {_for(found, count)}")
    return outcomes


def one_each(results: Any, count: int) -> Sequence[Any]:
    """Return what a function of a batch returned if it is one result for each sample.

    Raises:
        BadOutcome: Naming both numbers otherwise.
    """
    name = type(results).__name__
    if results is None:
        raise BadOutcome(f"predict returned None, perhaps because its `return` is missing; {_needed(count)}")
    if type(results) is not list:
        # What has keys or columns would give these instead of its values or rows: mappings of every kind, and tables.
        has_keys = (hasattr(results, "keys") or hasattr(results, "columns")) and getattr(results, "ndim", 2) != 1
        if has_keys or isinstance(results, (str, bytes, bytearray)) or not hasattr(results, "__getitem__"):
            raise BadOutcome(f"predict returned a {name}; {_needed(count)}{_WRAPPED if type(results) in _LAZY else ''}")
        if getattr(results, "ndim", 1) == 0:
            raise BadOutcome(f"predict returned one {name}; {_needed(count)}")
    results = cast("Sequence[Any]", results)
    found, error = caught(len, results)
    if error is not None:  # as of a sparse matrix
        raise BadOutcome(f"predict returned a {name}, which has no length ({words_of(error)}); {_needed(count)}")
    if found != count:
        raise BadOutcome(f"predict returned {_for(found, count)}")
    return results


def close(steps: Any) -> None:
    """End a user's generator at once, so that its `finally` runs here and now."""
    end = getattr(steps, "close", None)
    if end is not None:
        _log("a generator could not be closed", caught(end)[1])


async def aclose(steps: Any) -> None:
    """End an async generator, or a generator, as `close` does."""
    end = getattr(steps, "aclose", None) or getattr(steps, "close", None)
    if end is not None and type(failed := await attempt_async(end)) is Failure:
        _log("a generator could not be closed", failed.error)


def do_after(work: Sequence[Callable[[], object]]) -> None:
    """Do the work that follows an answer; what it raises is logged, as nobody waits for it."""
    for step in work:
        _log("a callback after an answer failed", caught(step)[1])


def close_runner(close: Callable[[], object]) -> None:
    """Close a runner; what that raises is only logged, because the caller has more to stop."""
    _log("a worker could not unload its model", caught(close)[1])


async def close_runner_async(close: Callable[[], Awaitable[object]]) -> None:
    """Close a runner on a loop, in the same way."""
    if type(failed := await attempt_async(close)) is Failure:
        _log("a worker could not unload its model", failed.error)


def _log(what: str, raised: BaseException | None) -> None:
    if raised is not None:
        error = failure_of(raised).error
        log.error("%s: %s", what, error.message, extra={"trace": error.trace})


def _for(found: int, count: int) -> str:
    return f"{counted(found, 'result')} for {counted(count, 'sample')}"


def _needed(count: int) -> str:
    return f"expected a list with one result for each of {counted(count, 'sample')}"
