# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false
"""A batch that fails as a whole: its bad sample is found and the others get their answers."""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import Failure, Pad, Padded, QueueFull, ValidationError, is_cancelled
from forebay.errors import BadOutcome, Cancelled, Code, InvalidRequest, RunnerFailed
from forebay.serving.models import isolation
from forebay.serving.models.model import Model
from forebay.serving.models.model_runner import ModelRunner
from forebay.types.call import Request
from forebay.workers.runner import WorkerContext
from forebay.workers.user_calls.cancel import probe

JSON = {"in": "json", "out": "json"}


class Poisoned(Model):
    """Fails as a whole in the way that one of its samples names; keeps the batches it was given."""

    isolate_errors = True

    def load(self):
        self.runs = []

    def predict(self, batch: list[str]) -> list[str]:
        self.runs.append(list(batch))
        if "raise" in batch:
            raise ValueError("not that")
        if "short" in batch:
            return list(batch[1:])
        if "exit" in batch:
            sys.exit(3)
        if "refuse" in batch:
            raise InvalidRequest("not this one")
        if "busy" in batch:
            raise QueueFull("come back later")
        return [sample.upper() for sample in batch]


class PoisonedAsync(Poisoned):
    async def predict(self, batch: list[str]) -> list[str]:
        await asyncio.sleep(0)
        return super().predict(batch)


def opened(model, **options):
    runner = ModelRunner(model, **options)
    runner.open(WorkerContext())
    return runner


@pytest.fixture(params=[Poisoned, PoisonedAsync])
def runner(request):
    made = opened(request.param)
    yield made
    made.close()


def answers(runner, *samples):
    requests = [Request(body=msgspec.json.encode(sample), reply=print, params=JSON) for sample in samples]
    return [outcome.error if type(outcome) is Failure else json.loads(outcome) for outcome in runner.run(requests)]


def told(outcomes):
    return [type(outcome) if isinstance(outcome, Exception) else outcome for outcome in outcomes]


@pytest.mark.parametrize(
    "wish, error", [("raise", RunnerFailed), ("short", BadOutcome), ("exit", RunnerFailed), ("refuse", InvalidRequest)]
)
def test_the_bad_sample_fails_alone(runner, wish, error):
    assert told(answers(runner, "a", "b", wish, "c", "d")) == ["A", "B", error, "C", "D"]


def test_the_batch_is_halved(runner):
    answers(runner, "a", "b", "raise", "c")
    assert runner._model.runs == [["a", "b", "raise", "c"], ["a", "b"], ["raise", "c"], ["raise"], ["c"]]


def test_a_batch_that_runs_is_run_once(runner):
    assert answers(runner, "a", "b") == ["A", "B"]
    assert runner._model.runs == [["a", "b"]]


def test_several_bad_samples_each_get_their_own_error(runner):
    found = answers(runner, "raise", "a", "refuse", "short")
    assert told(found) == [RunnerFailed, "A", InvalidRequest, BadOutcome]
    assert "ValueError: not that" in found[0].trace
    assert found[3].message == "predict returned 0 results for 1 sample"


def test_what_is_nobodys_fault_is_not_run_again(runner):
    found = answers(runner, "a", "busy", "b")
    assert [error.code for error in found] == [Code.RESOURCE_EXHAUSTED] * 3
    assert len(runner._model.runs) == 1


def test_nothing_runs_again_once_nobody_waits(runner):
    probe.set(lambda: True)
    try:
        assert told(answers(runner, "a", "raise", "b", "c")) == [Cancelled] * 4
        assert len(runner._model.runs) == 1
    finally:
        probe.set(None)


@given(st.sets(st.integers(0, 19)), st.integers(1, 20))
@settings(max_examples=80)
def test_every_good_sample_is_answered_within_twice_as_many_runs(bad, count):
    runs = 0

    def predict(samples):
        nonlocal runs
        runs += 1
        if bad & set(samples):
            raise ValueError
        return samples

    results = isolation.run(isolation.plan(range(count), [range(count)], isolate=True), predict)
    assert [type(result) is Failure for result in results] == [place in bad for place in range(count)]
    assert [result for result in results if type(result) is not Failure] == sorted(set(range(count)) - bad)
    assert runs <= 2 * count - 1


def test_without_it_the_batch_fails_as_a_whole():
    class Together(Poisoned):
        isolate_errors = False

    runner = opened(Together)
    assert told(answers(runner, "a")) == ["A"]
    with pytest.raises(ValueError, match="not that"):
        answers(runner, "a", "raise")
    assert told(answers(opened(Together, isolate_errors=True), "a", "raise")) == ["A", RunnerFailed]


# With padding


class Sums(Model):
    """Pads; fails as a whole where a sample has a 13 in it."""

    pad = Pad(("length",), outputs=("length",))

    def predict(self, batch: Padded[list[int]]) -> list[list[int]]:
        if any(13 in row for row in batch):
            raise ValueError("thirteen")
        assert len({len(row) for row in batch}) == 1
        return list(2 * batch.array)


class Untyped(Model):
    """Adds up whatever arrays it is sent; keeps the sizes of its batches."""

    pad = Pad(("length",))

    def load(self):
        self.runs = []

    def predict(self, batch):
        self.runs.append(len(batch))
        return [row.sum() for row in batch.array]


class SumsApart(Sums):
    isolate_errors = True


def test_padded_samples_are_answered_at_their_own_length():
    runner = opened(Sums)
    assert answers(runner, [1], [1, 2, 3], []) == [[2], [2, 4, 6], []]


def test_a_sample_that_cannot_be_padded_fails_alone():
    runner = opened(Untyped)
    assert told(answers(runner, [1], 5, ["a"], [1, 2])) == [1, ValidationError, ValidationError, 3]
    assert runner._model.runs == [2]


def test_samples_that_cannot_be_stacked_run_apart():
    runner = opened(Untyped)
    assert answers(runner, [[1, 2]], [1], [[3, 4], [5, 6]], [[7]]) == [3, 1, 18, 7]
    assert sorted(runner._model.runs) == [1, 1, 2]


def test_padding_and_isolation_go_together():
    assert told(answers(opened(SumsApart), [1], [13, 1], [1, 2])) == [[2], RunnerFailed, [2, 4]]
    assert told(answers(opened(Sums), [1], [13, 1], [1, 2])) == [RunnerFailed] * 3


# The probe of coroutines


def test_a_coroutine_asks_for_its_own_batch():
    class Asks(Model):
        async def predict(self, batch: list[int]) -> list[bool]:
            return [is_cancelled() for _ in batch]

    runner = opened(Asks)
    try:
        found = []
        for gone in (False, True, False):
            probe.set(lambda gone=gone: gone)
            found += answers(runner, 1)
        assert found == [False, True, False]
    finally:
        probe.set(None)
        runner.close()
