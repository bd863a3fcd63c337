# SPDX-License-Identifier: Apache-2.0
"""Requests with tensors that are alike are read and written as one, and each gets what it would get alone."""

from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
import pytest

import forebay
from forebay.errors import BadOutcome, InvalidRequest
from forebay.serving.models.model_runner import runner_for
from forebay.serving.models.tensor_codec import TensorCodec, TensorPort, TensorSide
from forebay.serving.tensor_face import TensorFace, TensorRequest
from forebay.types.call import Failure, Request
from forebay.types.tensor import Tensor, TensorMetadata
from forebay.workers.runner import WorkerContext

Four = np.ndarray[tuple[Literal[4]], np.dtype[np.float32]]


class Pair(TypedDict):
    left: Four
    right: Four


class Record(msgspec.Struct):
    left: Four
    right: Four


class Mirror(forebay.Model):
    def predict(self, samples: list[Four]) -> list[Any]:
        return [{"y": one, "n": np.int64(one.sum())} if one[0] < 0 else {"y": one * 2} for one in samples]


class Add(forebay.Model):
    def predict(self, samples: list[Pair]) -> list[Any]:
        return [one["left"] + one["right"] for one in samples]


class AddRecords(forebay.Model):
    def predict(self, samples: list[Record]) -> list[Any]:
        return [one.left + one.right for one in samples]


class Odd(forebay.Model):
    """Gives what differs from sample to sample."""

    def predict(self, samples: list[Four]) -> list[Any]:
        kinds = [lambda one: one, lambda one: one.astype("f8"), lambda one: one[:2], lambda one: one.tolist()]
        return [kinds[int(one[0]) % 4](one) for one in samples]


class Forgets(forebay.Model):
    def predict(self, samples: list[Four]) -> list[Four]:
        return [None if one[0] < 0 else one for one in samples]  # type: ignore[misc]


def runner_of(model):
    runner = runner_for(model)
    runner.open(WorkerContext())
    return runner


def request_to(runner, arrays, wanted=()):
    tensors = [Tensor(name, "FP32", array.shape, memoryview(array.tobytes())) for name, array in arrays.items()]
    params, size = runner._tensors.face.ask(tensors, wanted)
    return TensorRequest([one.data for one in tensors], lambda *_: None, params, size=size)


def run(runner, asked) -> Any:
    return runner.run(asked)


def plain(outcome):
    return outcome.error.message if type(outcome) is Failure else [outcome[0], *map(bytes, outcome[1:])]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "model, names", [(Mirror, ["input"]), (Add, ["left", "right"]), (AddRecords, ["left", "right"])]
)
def test_what_comes_together_is_what_comes_alone(model, names, rows, monkeypatch):
    runner = runner_of(model)
    random = np.random.default_rng(3)
    asked = [request_to(runner, {name: random.random((rows, 4), "f4") for name in names}) for _ in range(5)]
    alone = [plain(run(runner, [one])[0]) for one in asked]
    read = []
    decode = TensorCodec.decode
    monkeypatch.setattr(TensorCodec, "decode", lambda *given: read.append(given) or decode(*given))
    assert [plain(one) for one in run(runner, asked)] == alone
    assert len(read) == 1


def test_results_that_are_not_alike_do_not_change_each_other():
    runner = runner_of(Odd)
    asked = [request_to(runner, {"input": np.full((1, 4), value, "f4")}) for value in (0, 1, 2, 3, 0)]
    assert [plain(one) for one in run(runner, asked)] == [plain(run(runner, [one])[0]) for one in asked]
    runner = runner_of(Mirror)
    asked = [request_to(runner, {"input": np.full((1, 4), value, "f4")}) for value in (1, -1, 1)]
    assert [plain(one) for one in run(runner, asked)] == [plain(run(runner, [one])[0]) for one in asked]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_result_that_is_none_is_no_tensor_of_numbers(rows):
    runner = runner_of(Forgets)
    forgotten, found = run(
        runner, [request_to(runner, {"input": np.full((rows, 4), number, "f4")}) for number in (-1, 1)]
    )
    assert type(forgotten) is Failure
    assert "'output': expected a tensor of FP32, got None for a sample" in forgotten.error.message
    assert type(found) is not Failure


def test_requests_that_are_not_alike_are_read_one_by_one():
    runner = runner_of(Mirror)
    asked = [
        request_to(runner, {"input": np.ones((rows, 4), "f4")}, wanted)
        for rows, wanted in ((1, ()), (2, ()), (1, ("y",)))
    ]
    assert [plain(one) for one in run(runner, asked)] == [plain(run(runner, [one])[0]) for one in asked]
    asked.append(request_to(runner, {"input": np.ones((1, 4), "f4")}, ("nothing",)))
    assert "no output 'nothing'" in plain(run(runner, asked)[3])
    assert [plain(one) for one in run(runner, asked)] == [plain(run(runner, [one])[0]) for one in asked]


def test_samples_of_which_nothing_came_are_counted_before_they_are_made():
    face = TensorFace(inputs=[TensorMetadata("x", "FP32", (-1, -1))])
    assert face.ask([Tensor("x", "FP32", (1024, 0), b"")])[1] == 1024
    for shape in ((1025, 0), (2**31, 0), (2**60, 0)):
        with pytest.raises(InvalidRequest, match="'x': expected at most 1024 samples without data"):
            face.ask([Tensor("x", "FP32", shape, b"")])
    with pytest.raises(InvalidRequest, match="'y': expected at most 1024 samples without data"):
        TensorFace(inputs=[TensorMetadata("y", "BYTES", (-1,))]).ask([Tensor("y", "BYTES", (2**31,), b"")])


def test_a_type_that_there_is_not_is_told_with_the_input_and_what_is_expected():
    face = TensorFace(inputs=[TensorMetadata("x", "FP32", (-1,))])
    with pytest.raises(InvalidRequest, match=r"tensor 'x': expected FP32, got 'FLOAT'"):
        face.ask([Tensor("x", "FLOAT", (1,), bytes(4))])
    with pytest.raises(
        InvalidRequest, match=r"tensor 'x': expected a data type \(BOOL.*, got 'FP31'; did you mean 'FP32'\?"
    ):
        TensorFace(is_open=True).ask([Tensor("x", "FP31", (1,), bytes(4))])


def test_requests_that_are_no_rows_are_not_read_as_rows():
    codec = TensorCodec(TensorSide([TensorPort("x", "FP32", None, "array")]), TensorSide(), has_rows=False)
    item = Request(body=[bytes(4)], reply=print, params={"given": [["x", "FP32", [1], False]]})
    assert codec.decode_all([item, item]) is None


def test_an_output_without_rows_is_not_named_by_a_truth():
    codec = TensorCodec(TensorSide(), TensorSide(), has_rows=False)
    with pytest.raises(BadOutcome, match="a key that is `bool`"):
        codec.encode([{True: np.ones(1)}], {"wanted": [], "is_json": False})
