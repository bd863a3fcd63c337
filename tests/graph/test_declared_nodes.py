# SPDX-License-Identifier: Apache-2.0
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Nodes and compositions are held to the types they declare, as models are: F29."""

from typing import Any

import numpy as np
import pytest

from forebay import SKIP, ConfigError, Media, Model, compose, node
from forebay.errors import BadOutcome
from forebay.graph.composition.border import Wire
from forebay.types.call import Failure, Request
from forebay.workers.runner import WorkerContext

JSON = {"in": "json", "out": "json"}


class Odd(Model):
    def predict(self, batch: list[str]) -> list[int]:
        return [sample if sample == "wrong" else len(sample) for sample in batch]


class Unchecked(Odd):
    check_outputs = False


@node
def odd(text: str) -> int:
    return text if text == "wrong" else len(text)


@node(check_outputs=False)
def unchecked(text: str) -> int:
    return text


@node(outputs=("left", "right"))
def split(text: str) -> dict[str, int]:
    return {"left": 1, "right": text} if text == "wrong" else {"left": 1}


def outcomes(made, *texts, port="text") -> Any:
    runner = made.runner()
    runner.open(WorkerContext())
    return runner.run([Request(body={port: text}, reply=print) for text in texts])


@pytest.mark.parametrize("made, port", [(odd, "text"), (node(Odd), "batch")])
def test_a_result_of_a_node_is_of_its_declared_type(made, port):  # F29
    fine, wrong, last = outcomes(made, "ab", "wrong", "abc", port=port)
    assert (fine, last) == (2, 3)
    assert type(wrong.error) is BadOutcome
    assert f"node '{made.name}'" in wrong.error.message
    assert "Expected `int`, got `str`" in wrong.error.message


@pytest.mark.parametrize("made, port", [(unchecked, "text"), (node(Unchecked), "batch")])
def test_the_check_can_be_left_away(made, port):  # F29
    assert outcomes(made, "wrong", port=port) == ["wrong"]


def test_each_of_several_results_is_held_to_its_type():  # F29
    fine, wrong = outcomes(split, "a", "wrong")
    assert fine.by_port == {"left": 1}
    assert "node 'split'" in wrong.error.message


def test_a_mapped_list_fails_with_the_element_that_is_wrong():  # F29
    runner: Any = odd.runner()
    runner.open(WorkerContext())
    fine, wrong = runner.run(
        [Request(body=[{"text": text} for text in texts], reply=print) for texts in (["a"], ["a", "wrong"])]
    )
    assert fine == [1]
    assert type(wrong) is Failure


def values(annotation, value):
    def made(text: str):
        return value

    made.__annotations__["return"] = annotation
    return outcomes(node(made), "a")[0]


@pytest.mark.parametrize("annotation, value", [
    (np.ndarray, np.zeros(2)), (list[float], np.zeros(2)), (object, object()), (float, 1), (bytes, b"a"),
    (set[int], {1}), (tuple[int, str], (1, "a")), (dict[int, str], {1: "a"}), (Media, Media(b"", "image/png")),
    (int | Media, Media(b"", "image/png")), (int, SKIP), (None, None),
])  # fmt: skip
def test_what_is_of_its_type_goes_on_as_it_is(annotation, value):  # F29
    assert values(annotation, value) is value


@pytest.mark.parametrize("annotation", [int, list[int], int | Media, bytes])
def test_what_is_not_goes_nowhere(annotation):  # F29
    assert type(values(annotation, "a" * 3).error) is BadOutcome


def test_the_answer_of_a_composition_is_of_the_type_it_declares():  # F29
    @node
    def anything(text: str):
        return text if text == "wrong" else len(text)

    def count(text: str) -> int:
        return anything(text)

    wire = Wire(compose(count))
    item = Request(body=b"", reply=print, params=JSON)
    assert wire.write(item, {"out": 3}) == b"3"
    with pytest.raises(BadOutcome, match="'count' is not what it declares: Expected `int`, got `str`"):
        wire.write(item, {"out": "wrong"})
    assert wire.write(item, {}) == b"null"  # a branch that was not taken
    free = Wire(compose(name="count", check_outputs=False)(count))
    assert free.write(item, {"out": "wrong"}) == b'"wrong"'


def test_the_settings_are_true_or_false():
    with pytest.raises(ConfigError, match="check_outputs"):
        node(check_outputs="no")(lambda text: text)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="check_outputs"):
        compose(check_outputs=1)(odd.target)  # pyright: ignore[reportArgumentType]
