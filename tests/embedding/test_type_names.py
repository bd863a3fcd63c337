# SPDX-License-Identifier: Apache-2.0
"""Types by the names that statements and generic classes give them, wherever a model or a node has an annotation."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

import forebay.testing
from forebay import Last, Model, compose, node
from forebay.errors import ConfigError
from forebay.types.type_names import expanded

T = TypeVar("T")
K = TypeVar("K")

Vector = TypeAliasType("Vector", list[float])
Batch = TypeAliasType("Batch", list[T], type_params=(T,))
Same = TypeAliasType("Same", T, type_params=(T,))
Swapped = TypeAliasType("Swapped", dict[K, T], type_params=(T, K))
Array = TypeAliasType("Array", NDArray[np.float32])
Few = TypeAliasType("Few", Annotated[list[int], msgspec.Meta(max_length=2)])
Mode = TypeAliasType("Mode", Literal["a", "b"])


class Point(msgspec.Struct):
    x: list[float]
    mode: Literal["a", "b"] = "a"


class Sums(Model):
    def predict(self, batch: Batch[Vector]) -> Batch[float]:
        return [sum(one) for one in batch]


class Modes(Model):
    def predict(self, batch: Batch[Same[Point]]) -> list[Mode]:
        return [one.mode for one in batch]


class Doubles(Model):
    def predict(self, batch: list[Array]) -> list[Array]:
        return [2 * one for one in batch]


class Counts(Model):
    def predict(self, batch: Batch[Few]) -> list[int]:
        return [len(one) for one in batch]


class Steps(Model):
    def start(self, sample: Same[int]) -> list[int]:
        return [sample]

    def step(self, states: list[list[int]]) -> Batch[int | Last[int]]:
        return [Last(state[0]) for state in states]


class Listed(Model, Generic[T, K]):
    def predict(self, batch: list[T]) -> list[tuple[T, K | None]]:
        return [(one, None) for one in batch]


class Alike(Listed[K, K]):
    pass


class Ints(Alike[int]):
    pass


class Open(Listed):
    pass


class Vectors(Listed[Batch[Vector], int]):
    pass


@pytest.mark.parametrize(
    "model, sample, said",
    [
        (Sums, [1, 2.5], 3.5),
        (Modes, {"x": [1.0], "mode": "b"}, "b"),
        (Doubles, [1, 2], [2.0, 4.0]),
        (Counts, [1, 2], 2),
        (Ints, 1, [1, None]),
        (Open, "x", ["x", None]),
        (Vectors, [[1.0]], [[[1.0]], None]),
    ],
)
def test_a_model_names_its_types(model, sample, said):
    with forebay.testing.client(model) as client:
        assert client.call(sample) == said


@pytest.mark.parametrize(
    "model, sample, where",
    [
        (Sums, [1, "two"], "$[1]"),
        (Modes, {"x": [1.0], "mode": "c"}, "$.mode"),
        (Counts, [1, 2, 3], "2"),
        (Ints, "x", "Expected `int`"),
        (Vectors, [["x"]], "$[0][0]"),
    ],
)
def test_what_is_not_of_such_a_type_is_refused(model, sample, where):
    with forebay.testing.client(model) as client:
        answer = client.ask(sample)
    assert answer.status == 422
    assert where in answer.text


def test_streams_do():
    with forebay.testing.client(Steps) as client:
        assert list(client.stream(3)) == [3]


def test_nodes_and_compositions_do():
    @node
    def halves(number: Same[float]) -> Batch[float]:
        return [number / 2] * 2

    @node
    def whole(numbers: Vector) -> Same[float]:
        return sum(numbers)

    @compose
    def there_and_back(number: Same[float]) -> Same[float]:
        return whole(halves(number))

    assert there_and_back.run(3.0) == 3.0

    @node
    def texts(number: float) -> Batch[str]:
        return [str(number)]

    with pytest.raises(ConfigError, match=r"its type is list\[str\], and 'numbers' takes list\[float\]"):
        compose(name="wrong")(lambda number: whole(texts(number))).graph  # noqa: B018 - drawing is what fails


@pytest.mark.parametrize(
    "named, plain",
    [
        (Vector, list[float]),
        (Batch[Vector], list[list[float]]),
        (Batch[Batch[int]], list[list[int]]),
        (Swapped[int, str], dict[str, int]),
        (Same[Vector], list[float]),
        (Vector | None, list[float] | None),
        (tuple[Vector, ...], tuple[list[float], ...]),
        (Annotated[Vector, msgspec.Meta(min_length=1)], Annotated[list[float], msgspec.Meta(min_length=1)]),
        (Mode, Literal["a", "b"]),
        (dict[str, int], dict[str, int]),
        (int, int),
        (Any, Any),
    ],
)
def test_a_name_stands_for_what_it_names(named, plain):
    assert expanded(named) == plain


STATEMENTS = """
import typing
import forebay

type Vector = list[float]
type Batch[T] = list[T]
type Missing = list[Nowhere]
type Tree = dict[str, Tree | int]

class Sums(forebay.Model):
    def predict(self, batch: Batch[Vector]) -> typing.Iterator[Batch[float]]:
        yield [sum(one) for one in batch]

class Lost(forebay.Model):
    def predict(self, batch: Batch[Missing]) -> list[int]:
        return [1 for _ in batch]
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the statement came with Python 3.12")
def test_the_statement_does(tmp_path):
    from forebay.serving.models.model import load_module

    (tmp_path / "model.py").write_text(STATEMENTS)
    module = load_module(tmp_path / "model.py")
    with forebay.testing.client(module.Sums) as client:
        assert list(client.stream([1, 2])) == [3.0]
    lost = "type `Missing` cannot be resolved: NameError: name 'Nowhere'"
    with pytest.raises(ConfigError, match=lost), forebay.testing.client(module.Lost):
        pass
    assert expanded(module.Tree).__args__[0] is str
