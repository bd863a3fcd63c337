# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false, reportReturnType=false
"""A model in a worker: samples are decoded, predicted and encoded; what fails, fails alone."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import warnings
import weakref
from typing import Any

import msgspec
import pytest
from tests.stepping import steps_of

from forebay.errors import BadOutcome, Code, InvalidRequest, NotFound, RunnerFailed, ValidationError
from forebay.serving.models.further_methods import endpoint
from forebay.serving.models.model import Model
from forebay.serving.models.model_runner import ModelRunner, runner_for
from forebay.types.call import Failure, Request
from forebay.workers.runner import WorkerContext

JSON = {"in": "json", "out": "json"}
PACK = {"in": "msgpack", "out": "msgpack"}


class Doubles(Model):
    def predict(self, batch: list[int]) -> list[int]:
        self.seen = list(batch)
        return [sample * 2 for sample in batch]


class Picky(Model):
    """Hooks and results fail for the samples that say so."""

    def preprocess(self, sample: str) -> str:
        if sample == "pre":
            raise ValueError("in preprocess")
        return sample

    def predict(self, batch: list[str]) -> list[str]:
        if "all" in batch:
            raise RuntimeError("in predict")
        if "short" in batch:
            return list(batch)[1:]
        named = {"result": KeyError("as a result"), "failure": Failure(NotFound("nobody"))}
        return [named.get(sample, sample) for sample in batch]

    def postprocess(self, result):
        if result == "post":
            raise ValueError("in postprocess")
        return object() if result == "odd" else result


class PickyAsync(Picky):
    async def preprocess(self, sample: str) -> str:
        return super().preprocess(sample)

    async def predict(self, batch: list[str]) -> list[str]:
        await asyncio.sleep(0)
        return super().predict(batch)

    async def postprocess(self, result):
        return super().postprocess(result)


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)

    return call


def waited_for(function: Any) -> Any:
    """Makes a plain function of a coroutine function, as people write it who do not know that they need not."""

    @functools.wraps(function)
    def call(*arguments, **named):
        return asyncio.run(function(*arguments, **named))

    return call


class PickyPassedOn(PickyAsync):
    preprocess = passed_on(PickyAsync.preprocess)
    predict = passed_on(PickyAsync.predict)
    postprocess = passed_on(PickyAsync.postprocess)


class PickyWaitedFor(PickyAsync):
    preprocess = waited_for(PickyAsync.preprocess)
    predict = waited_for(PickyAsync.predict)
    postprocess = waited_for(PickyAsync.postprocess)


PICKY = [Picky, PickyAsync, PickyPassedOn, PickyWaitedFor]


class Rows(Model):
    batchable = True

    def predict(self, batch: list[int]) -> list[int]:
        return [10 // sample if sample else ZeroDivisionError("0") for sample in batch]


@pytest.fixture
def opened():
    """Makes runners as a worker does; closes the loops they keep for coroutines."""
    runners = []

    def make(model):
        runner = ModelRunner(model)
        runner.open(WorkerContext())
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner._coroutines.close()


def request(body, params=JSON):
    encode = msgspec.json.encode if params["in"] == "json" else msgspec.msgpack.encode
    return Request(body=body if isinstance(body, bytes | list) else encode(body), reply=print, params=params)


def run(runner, *bodies):
    outcomes = runner.run([body if isinstance(body, Request) else request(body) for body in bodies])
    return [outcome.error if type(outcome) is Failure else json.loads(outcome) for outcome in outcomes]


def told(outcomes):
    return [type(outcome) if isinstance(outcome, Exception) else outcome for outcome in outcomes]


def test_2_plus_2_is_4(opened):
    runner = opened(Doubles)
    assert run(runner, 2) == [4]
    assert run(runner, 1, 2, 3) == [2, 4, 6]


def test_formats_may_be_mixed_in_a_batch(opened):
    outcomes = opened(Doubles).run([request(1), request(2, PACK), request(3, {"in": "json", "out": "msgpack"})])
    assert outcomes == [b"2", msgspec.msgpack.encode(4), msgspec.msgpack.encode(6)]


@pytest.mark.parametrize("bad, error", [(b"nope", InvalidRequest), (b'"x"', ValidationError), (b"", InvalidRequest)])
def test_a_body_that_cannot_be_read_is_refused_and_the_others_run(bad, error, opened):
    """Rule 5: a bad sample never fails its batch-mates."""
    runner = opened(Doubles)
    assert told(run(runner, 1, request(bad), 3)) == [2, error, 6]
    assert runner._model.seen == [1, 3]


def test_a_batch_of_bad_samples_only_is_not_predicted(opened):
    runner = opened(Doubles)
    assert told(run(runner, request(b"nope"), request(b"]"))) == [InvalidRequest] * 2
    assert not hasattr(runner._model, "seen")


@pytest.mark.parametrize("model", PICKY)
@pytest.mark.parametrize(
    "bad, error, message",
    [
        ("pre", RunnerFailed, "in preprocess"),
        ("post", RunnerFailed, "in postprocess"),
        ("result", RunnerFailed, "as a result"),
        ("failure", NotFound, "nobody"),
        ("odd", BadOutcome, "a result of"),
    ],
)
def test_whatever_fails_in_a_sample_fails_alone(model, bad, error, message, opened):
    """Elsewhere: an exception in a batching hook stops the batcher for good (Ray)."""
    outcomes = run(opened(model), "a", bad, "b")
    assert told(outcomes) == ["a", error, "b"]
    assert message in outcomes[1].message


@pytest.mark.parametrize("model", PICKY)
def test_what_predict_raises_fails_the_batch(model, opened):
    with pytest.raises(RuntimeError, match="in predict"):
        run(opened(model), "a", "all")


@pytest.mark.parametrize("model", PICKY)
def test_a_wrong_number_of_results_names_both_numbers(model, opened):
    """G4."""
    with pytest.raises(BadOutcome, match="returned 2 results for 3 samples"):
        run(opened(model), "a", "short", "b")


@pytest.mark.parametrize("returned", [None, "abc", b"abc", {"a": 1, "b": 2, "c": 3}, 3, iter("abc")])
def test_results_that_are_no_list_are_refused(returned, opened):
    """G4."""

    class Odd(Model):
        def predict(self, batch):
            return returned

    with pytest.raises(BadOutcome, match="a list with one result for each of 3 samples"):
        run(opened(Odd), 1, 2, 3)


def test_a_return_that_was_forgotten_is_named(opened):
    class Forgetful(Model):
        def predict(self, batch):
            [sample * 2 for sample in batch]

    with pytest.raises(
        BadOutcome, match=r"predict returned None, perhaps .* `return` is missing; expected a list with"
    ):
        run(opened(Forgetful), 1, 2, 3)


def test_results_without_an_order_are_refused(opened):
    """G4."""

    class Unordered(Model):
        def predict(self, batch):
            return set(batch)

    with pytest.raises(BadOutcome):
        run(opened(Unordered), "b", "a", "c")


def test_each_row_belongs_to_its_request(opened):
    bodies = [[b"1", b"2"], [b"5"], [b"10", b"1", b"2"]]
    outcomes = opened(Rows).run([request(body) for body in bodies])
    assert outcomes == [[b"10", b"5"], [b"2"], [b"1", b"10", b"5"]]


def test_a_bad_row_fails_its_request_and_names_the_row(opened):
    outcomes = opened(Rows).run([request([b"1", b'"x"']), request([b"5"]), request([b"0", b"1"])])
    assert outcomes[1] == [b"2"]
    assert outcomes[0].error.detail == {"path": "$[1]"}
    assert outcomes[2].error.code == Code.INTERNAL


def test_load_is_called_once_and_unload_at_the_end(opened):
    calls = []

    class Loaded(Doubles):
        async def load(self):
            calls.append("load")

        def unload(self):
            calls.append("unload")

    runner = opened(Loaded)
    run(runner, 1)
    runner.close()
    assert calls == ["load", "unload"]


# Streamed answers


class Streams(Model):
    def predict(self, batch: list[str]):
        for step in range(2):
            yield [ValueError("no") if sample == "bad" else f"{sample}{step}" for sample in batch]


class StreamsAsync(Model):
    async def predict(self, batch: list[str]):
        for step in range(2):
            await asyncio.sleep(0)
            yield [ValueError("no") if sample == "bad" else f"{sample}{step}" for sample in batch]


class StreamsPassedOn(Streams):
    predict = passed_on(Streams.predict)


class StreamsAsyncPassedOn(Streams):
    predict = passed_on(StreamsAsync.predict)


class StreamsWithHook(Streams):
    async def postprocess(self, part):
        return part


STREAMS = [Streams, StreamsAsync, StreamsPassedOn, StreamsAsyncPassedOn, StreamsWithHook]


@pytest.mark.parametrize("model", STREAMS)
def test_each_step_has_a_part_for_each(model, opened):
    assert steps_of(opened(model), [request("a"), request("b")]) == [[b'"a0"', b'"b0"'], [b'"a1"', b'"b1"']]


@pytest.mark.parametrize("model", STREAMS)
def test_a_bad_sample_leaves_the_streams_of_the_others_alone(model, opened):
    steps = steps_of(opened(model), [request("a"), request(b"nope"), request("bad")])
    assert type(steps[0][1].error) is InvalidRequest
    assert [step[0] for step in steps[1:]] == [b'"a0"', b'"a1"']
    assert type(steps[1][2].error) is RunnerFailed


@pytest.mark.parametrize("base", [Streams, StreamsAsyncPassedOn])
def test_a_decorator_that_makes_no_generator_of_one_is_told(base, opened):
    class Listed(base):
        @functools.wraps(base.predict)
        def predict(self, batch):
            return [["all"] * len(batch)]

    with pytest.raises(
        BadOutcome, match=r"Listed\.predict returned a list and no generator, though .* functools\.wraps"
    ):
        steps_of(opened(Listed), [request("a")])


def test_a_decorator_that_hides_what_it_wraps_is_told(opened):
    class Hiding(Model):
        predict = lambda self, batch: Streams.predict(self, batch)  # noqa: E731, PLW0108 - it is to hide it

    with pytest.raises(BadOutcome, match=r"predict returned a generator; .* needs functools\.wraps"):
        run(opened(Hiding), "a")


@pytest.mark.parametrize("step", [["one"], "ab", None, [1, 2, 3]])
def test_a_step_needs_one_part_for_each(step, opened):
    """G4."""

    class Odd(Model):
        def predict(self, batch):
            yield step

    with pytest.raises(BadOutcome, match="for a batch of 2"):
        steps_of(opened(Odd), [request("a"), request("b")])


@pytest.mark.parametrize("bad", ["post", "odd"])
def test_whatever_fails_in_a_streamed_sample_fails_alone(bad, opened):
    """Model: what `postprocess` raises fails that sample only."""

    class Both(Streams):
        def postprocess(self, part):
            if part.startswith("post"):
                raise ValueError("in postprocess")
            return object() if part.startswith("odd") else part

    steps = steps_of(opened(Both), [request("a"), request(bad)])
    assert [step[0] for step in steps] == [b'"a0"', b'"a1"']
    assert type(steps[0][1]) is Failure


def test_postprocess_of_a_stream_may_be_async(opened):
    """Model: methods may be `async def`."""

    class Both(StreamsAsync):
        async def postprocess(self, part):
            return part.upper()

    try:
        steps = steps_of(opened(Both), [request("a")])
    except (BadOutcome, TypeError):
        steps = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    assert steps == [[b'"A0"'], [b'"A1"']]


def test_close_closes_the_loop_of_coroutines(opened):
    runner = opened(PickyAsync)
    run(runner, "a")
    loop = runner._coroutines._runner().get_loop()
    runner.close()
    assert loop.is_closed()


class Methods(Doubles):
    @endpoint("/further")
    def further(self, batch: list[int]) -> list[int]:
        return list(batch)


class Unloads(PickyAsync):
    async def unload(self):
        pass


@pytest.mark.parametrize("model", [Doubles, Picky, PickyAsync, Methods, Unloads])
def test_a_closed_runner_has_let_go_of_its_model(model):  # N120: a hundred that had left were still in memory
    runner: Any = runner_for(model)
    asyncio.run(runner.open_async(WorkerContext())) if hasattr(runner, "open_async") else runner.open(WorkerContext())
    gone = weakref.ref(getattr(runner, "_predict", runner)._model if model is Methods else runner._model)
    gc.disable()
    try:
        asyncio.run(runner.close_async()) if hasattr(runner, "close_async") else runner.close()
        assert gone() is None
    finally:
        gc.enable()
