# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false
"""A result that is not of the declared type is an error of its sample, and what can be sent as that type is sent."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, ClassVar, Literal, TypedDict

import msgspec
import numpy as np
import pytest

from forebay import Model
from forebay.errors import BadOutcome, ConfigError
from forebay.serving.models.model import settings_of
from forebay.serving.models.model_runner import ModelRunner
from forebay.types.call import Failure, Request
from forebay.workers.runner import WorkerContext

JSON = {"in": "json", "out": "json"}
PACK = {"in": "json", "out": "msgpack"}


class Point(msgspec.Struct):
    x: float
    name: str = ""
    others: list[Point] = []


@dataclasses.dataclass
class Pair:
    left: int
    right: int | None = None


@dataclasses.dataclass
class Labelled:
    label: str
    kind: ClassVar = 3
    _: dataclasses.KW_ONLY
    score: float = 0.0


class Row(TypedDict):
    a: int


class Colour(enum.Enum):
    RED = "red"


def answers(annotation, results, params=JSON, **members) -> Any:
    def predict(self, batch):
        return results

    predict.__annotations__ = {"return": list[annotation]}
    model = type("Made", (Model,), {"predict": predict, **members})
    runner = ModelRunner(model)
    runner.open(WorkerContext())
    return runner.run([Request(body=b"0", reply=print, params=params) for _ in results])


RIGHT = [
    (int, [1, np.int64(2)], [1, 2]),
    (float, [1, 2.5, np.float32(0.5), float("nan")], [1, 2.5, 0.5, None]),
    (str, ["a", np.str_("b")], ["a", "b"]),
    (bool, [True, np.bool_(False)], [True, False]),
    (list[float], [[1.5], np.array([2.5, 3.5]), (1, 2)], [[1.5], [2.5, 3.5], [1, 2]]),
    (list[list[int]], [np.array([[1, 2]]), [[3]]], [[[1, 2]], [[3]]]),
    (dict[str, float], [{"a": 1.5}, {1: 2}], [{"a": 1.5}, {"1": 2}]),
    (dict[str, list[Point]], [{"a": [Point(1)]}], [{"a": [{"x": 1, "name": "", "others": []}]}]),
    (Point, [Point(1.5, "a", [Point(2)]), {"x": 3}], None),
    (Pair, [Pair(1), Pair(1, 2)], [{"left": 1, "right": None}, {"left": 1, "right": 2}]),
    (Labelled, [Labelled("a", score=1.5)], [{"label": "a", "score": 1.5}]),
    (Row, [{"a": 1}], [{"a": 1}]),
    (Colour, [Colour.RED, "red"], ["red", "red"]),
    (Literal["a", "b"], ["a"], ["a"]),
    (int | None, [1, None], [1, None]),
    (int | str, [1, "a"], [1, "a"]),
    (Any, [1, "a", None], [1, "a", None]),
    (np.ndarray, [np.array([1])], [[1]]),
    (Point | Pair, [Point(1.0), Pair(1)], None),
]
WRONG = [
    (int, "a", "Expected `int`, got `str`"),
    (int, True, "Expected `int`, got `bool`"),
    (str, 1, "Expected `str`, got `int`"),
    (list[int], ["a"], "Expected `int`, got `str` - at `$[0]`"),
    (list[int], np.array(["a"]), "at `$[0]`"),
    (list[float], {"a": 1.0}, "Expected `array`, got `object`"),
    (dict[str, float], {"a": "b"}, "at `$[...]`"),
    (Point, Point("a"), "at `$.x`"),
    (Point, Point(1.0, others=[Point(1.0, name=3)]), "at `$.others[0].name`"),
    (Pair, Pair("a"), "at `$.left`"),
    (list[Pair], [Pair(1), Pair(2, "b")], "at `$[1].right`"),
    (Labelled, Labelled("a", score="b"), "at `$.score`"),
    (Row, {"b": 1}, "missing required field `a`"),
    (Literal["a", "b"], "c", "Invalid enum value 'c'"),
    (int | None, "a", "Expected `int | null`, got `str`"),
]


@pytest.mark.parametrize("annotation, results, sent", RIGHT, ids=lambda value: str(value)[:30])
def test_what_can_be_sent_as_the_declared_type_is_sent(annotation, results, sent):
    found = answers(annotation, results)
    assert not [one for one in found if type(one) is Failure]
    assert sent is None or [json.loads(one) for one in found] == sent
    assert not [one for one in answers(annotation, results, PACK) if type(one) is Failure]


@pytest.mark.parametrize("params", [JSON, PACK], ids=["json", "msgpack"])
@pytest.mark.parametrize("annotation, result, words", WRONG, ids=lambda value: str(value)[:30])
def test_a_result_of_another_type_fails_its_sample_with_path_and_types(annotation, result, words, params):  # F29
    (alone,) = answers(annotation, [result], params)
    assert type(alone.error) is BadOutcome
    assert words in alone.error.message
    assert "Made" in alone.error.message
    assert type(answers(annotation, [result], params, check_outputs=False)[0]) is bytes


def test_its_batch_mates_are_sent():  # F29
    first, wrong, last = answers(int, [1, "a", 3])
    assert (first, last) == (b"1", b"3")
    assert "got `str`" in wrong.error.message


def test_rows_of_an_array_of_samples_and_parts_of_streams_are_held_to_their_type_too():  # F29
    class Streams(Model):
        def predict(self, batch):
            yield [1, 2]
            yield ["a", 3]

    Streams.predict.__annotations__ = {"return": "Iterator[list[int]]"}
    Streams.predict.__globals__["Iterator"] = __import__("typing").Iterator
    runner: Any = ModelRunner(Streams)
    runner.open(WorkerContext())
    first, (wrong, fine) = runner.run([Request(body=b"0", reply=print, params=JSON) for _ in range(2)])
    assert (first, fine) == ([b"1", b"2"], b"3")
    assert type(wrong.error) is BadOutcome

    class Rows(Model):
        batchable = True

        def predict(self, batch) -> list[int]:
            return ["a" if sample else 0 for sample in batch]

    runner = ModelRunner(Rows)
    runner.open(WorkerContext())
    fine, wrong = runner.run([Request(body=rows, reply=print, params=JSON) for rows in ([b"0"], [b"0", b"1"])])
    assert fine == [b"0"]
    assert type(wrong.error) is BadOutcome


def test_the_setting_is_true_or_false():
    with pytest.raises(ConfigError, match="check_outputs"):
        settings_of(type("Odd", (Model,), {"predict": lambda self, batch: batch, "check_outputs": 1}))
