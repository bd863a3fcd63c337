# SPDX-License-Identifier: Apache-2.0
"""What a node sees of its inputs, in whichever form they came."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.errors import RunnerFailed
from forebay.graph.values import SKIP, Outputs, inputs_of, loaded
from forebay.types.call import Request
from forebay.workers.wire.objects import Packed, open_outcome, pack


def item(body):
    return Request(body=body, reply=lambda *_: None)


def from_a_process(value):
    """A value as it comes out of a worker process."""
    found = open_outcome(pack({"x": value}))
    assert isinstance(found, Outputs)
    return found.by_port["x"]


def test_plain_inputs_are_handed_on_as_they_are():
    body = {"a": object(), "b": [1, 2]}
    assert inputs_of(item(body)) is body


@pytest.mark.parametrize("form", ["values", "packed", "mixed"])
def test_packed_inputs_are_loaded(form):
    array = np.arange(100_000)
    body = {"a": {"image": array}, "b": "text"}
    if form == "values":
        body = {port: from_a_process(value) for port, value in body.items()}
    elif form == "packed":
        body = pack(body)
    else:
        body["a"] = from_a_process(body["a"])
    found = inputs_of(item(body))
    assert found["b"] == "text"
    assert np.array_equal(found["a"]["image"], array)


@pytest.mark.parametrize("is_packed", [True, False])
def test_samples_of_an_item_that_is_spread_are_a_list(is_packed):
    samples = [{"x": from_a_process([number]), "y": number} for number in range(3)]
    body = [pack(sample) for sample in samples] if is_packed else samples
    assert inputs_of(item(body)) == [{"x": [number], "y": number} for number in range(3)]


def test_readers_of_one_packed_value_do_not_see_what_others_do_to_theirs():  # P65
    value = from_a_process({"scores": np.zeros(100_000), "words": ["a"]})
    first, second = (inputs_of(item({"x": value}))["x"] for _ in range(2))
    first["scores"] += 1
    first["words"].append("b")
    assert second["scores"].max() == 0
    assert second["words"] == ["a"]


def test_a_value_that_cannot_be_loaded_is_the_error_of_its_item():
    broken = Packed([b"no pickle"])
    with pytest.raises(RunnerFailed, match="cannot be loaded here: UnpicklingError"):
        inputs_of(item({"x": broken}))
    with pytest.raises(RunnerFailed):
        loaded({"x": broken})


def test_skip_carries_nothing():
    assert SKIP.by_port == {}
    assert type(SKIP) is Outputs
