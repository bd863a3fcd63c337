# SPDX-License-Identifier: Apache-2.0
"""Parts of streams are written as each client asked for them, also where others with another wish share a step."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.stepping import steps_of

import forebay
from forebay.serving.models.model_runner import runner_for
from forebay.types.call import Failure, Request
from forebay.types.tensor import Tensor, join_elements
from forebay.workers.runner import WorkerContext
from forebay.workers.user_calls.joint_streams import Even


class Generates(forebay.Model):
    def predict(self, batch: list[int]):
        yield batch


class GeneratesAsync(forebay.Model):
    async def predict(self, batch: list[int]):
        yield batch


class Begins(forebay.Model):
    def start(self, sample: int):
        return [sample]

    def step(self, states: list[list[int]]):
        return [state.pop() if state else None for state in states]


class BeginsAsync(forebay.Model):
    def start(self, sample: int):
        return [sample]

    async def step(self, states: list[list[int]]):
        return [state.pop() if state else None for state in states]


@pytest.fixture
def opened():
    """Makes runners as a worker does, and closes them."""
    runners = []

    def make(model):
        runner = runner_for(model)
        runner.open(WorkerContext())
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def of_tensors(runner, value, wanted=()):
    array = np.array([value])
    params, size = runner._tensors.face.ask([Tensor("input", "INT64", (1,), array.tobytes())], wanted)
    return Request(body=[array.tobytes()], reply=print, params=params, size=size)


def of_json(value):
    return Request(body=b"%d" % value, reply=print, params={"in": "json", "out": "json"})


def first_parts(runner, requests):
    """Returns what the first step makes of each request: JSON, or the numbers of a tensor."""
    if runner._settings.steps:
        streams = [runner.run([request]) for request in requests]
        made = streams[0].together(streams)()
        parts = made.parts if type(made) is Even else [part for one in made for part in one.parts or one.outcomes]
    else:
        parts = steps_of(runner, requests)[0]
    return [shown(part) for part in parts]


def shown(part):
    if type(part) is Failure:
        return part.error.message
    return part if type(part) is bytes else [*part[0], *np.frombuffer(part[1], "i8").tolist()]


@pytest.mark.parametrize("model", [Generates, GeneratesAsync, Begins, BeginsAsync])
def test_each_gets_the_format_it_asked_for(model, opened):
    runner = opened(model)
    tensor = ["output", "INT64", [1], False]
    assert first_parts(runner, [of_tensors(runner, 1), of_tensors(runner, 2)]) == [[tensor, 1], [tensor, 2]]
    assert first_parts(runner, [of_json(1), of_tensors(runner, 2)]) == [b"1", [tensor, 2]]
    assert first_parts(runner, [of_tensors(runner, 1), of_json(2)]) == [[tensor, 1], b"2"]
    assert first_parts(runner, [of_json(1), of_json(2)]) == [b"1", b"2"]


@pytest.mark.parametrize("model", [Generates, GeneratesAsync, Begins, BeginsAsync])
def test_an_output_that_is_not_there_fails_its_own_stream(model, opened):
    runner = opened(model)
    first, second = first_parts(runner, [of_tensors(runner, 1, ["nothing"]), of_json(2)])
    assert "no output 'nothing'" in str(first)
    assert second == b"2"


class Waits(forebay.Model):
    def predict(self, batch: list[int]) -> Iterator[list[str | None]]:
        yield [None for _ in batch]
        yield [f'"{number}"' for number in batch]


def test_a_model_that_may_have_nothing_to_send_sends_what_it_declares_besides(opened):
    runner = opened(Waits)
    assert [port.datatype for port in runner._tensors.face.outputs] == ["BYTES"]
    (nothing,), (part,) = runner.run([of_tensors(runner, 1)])
    assert nothing is None
    assert part == [[["output", "BYTES", [1], False]], join_elements("output", [b'"1"'])]


def made(states):
    return [state.pop(0) if len(state) > 1 else forebay.Last(state[0]) for state in states]


class Ends(forebay.Model):
    def start(self, sample: int):
        return [sample, sample + 1]

    def step(self, states: list[list[int]]) -> list[int | forebay.Last[int]]:
        return made(states)


class EndsAsync(forebay.Model):
    def start(self, sample: int):
        return [sample, sample + 1]

    async def step(self, states: list[list[int]]) -> list[int | forebay.Last[int]]:
        return made(states)


@pytest.mark.parametrize("model", [Ends, EndsAsync])
def test_a_stream_of_steps_may_go_alone(model, opened):
    assert [part for (part,) in steps_of(opened(model), [of_json(3)])] == [b"3", b"4"]
