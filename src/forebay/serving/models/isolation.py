# SPDX-License-Identifier: Apache-2.0
"""Run a batch in parts: samples of different shapes apart, and a failing part in halves until the bad sample is alone.

The plan is a generator that knows nothing of models: it yields which samples to run and is sent what became of them,
so that one plan serves plain functions and coroutines.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.errors import Cancelled, CapacityError
from forebay.types.call import Failure
from forebay.workers.user_calls.cancel import is_cancelled
from forebay.workers.user_calls.user_code import attempt, attempt_async

if TYPE_CHECKING:
    from forebay.serving.models.sample_times import SampleTimes

Plan: TypeAlias = Generator[list[Any], Sequence[Any] | Failure, list[Any]]
"""Yields samples that run together, is sent their results or the failure of all of them, returns a result for each."""


def plan(
    samples: Sequence[Any], groups: Sequence[Sequence[int]], *, isolate: bool, times: SampleTimes | None = None
) -> Plan:
    """Plan the runs of a batch.

    Args:
        groups: Which of them, by their places, can run together; each place once.
        times: Is told how long each run took; None where nobody asks.
        isolate: Whether a group that fails is halved and run again: 2 n - 1 runs for n samples at most, and none once
            nobody waits. A failure that says nothing of the samples, such as a queue that is full, ends its group.

    Returns:
        By the generator, one result for each sample: what was sent for it, or a `Failure`.
    """
    results: list[Any] = [None] * len(samples)
    todo = list(reversed(groups))
    halved = False
    while todo and not (halved and is_cancelled()):
        group = todo.pop()
        began = time.monotonic()
        outcome = yield [samples[place] for place in group]
        if times is not None:
            times.ran(group, time.monotonic() - began)
        if not isinstance(outcome, Failure):
            for place, result in zip(group, outcome, strict=True):
                results[place] = result
        elif isolate and len(group) > 1 and not isinstance(outcome.error, CapacityError):
            halved = True
            middle = (len(group) + 1) // 2
            todo += [group[middle:], group[:middle]]
        else:
            for place in group:
                results[place] = outcome
    for group in todo:
        for place in group:
            results[place] = Failure(Cancelled("no client waits for the batch any more"))
    return results


def run(runs: Plan, predict: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Follow a plan."""
    try:
        samples = next(runs)
        while True:
            samples = runs.send(attempt(predict, samples))
    except StopIteration as end:
        return end.value


async def run_async(runs: Plan, predict: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> list[Any]:
    """Follow a plan with a coroutine function."""
    try:
        samples = next(runs)
        while True:
            samples = runs.send(await attempt_async(predict, samples))
    except StopIteration as end:
        return end.value
