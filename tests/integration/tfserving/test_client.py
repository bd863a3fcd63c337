# SPDX-License-Identifier: Apache-2.0
"""The original client of TensorFlow Serving, in an environment of its own."""

import json
from pathlib import Path

import pytest
from tests.models.saved_models import run_tensorflow

SCRIPT = Path(__file__).with_name("clients") / "original.py"


@pytest.fixture(scope="module")
def told(client, server):
    return json.loads(run_tensorflow(str(SCRIPT), client.address, server.url))


def test_it_gets_what_it_asks_for(told):
    assert told["scores"] == [[1, 10], [1, 2]]
    assert told["classes"] == ["small", "large"]
    assert told["version"] == 1
    assert told["texts"] == ["A", "B"]
    assert told["classify"] == [["small", 1], ["large", 10]]
    assert told["regress"] == [301.5]


def test_it_is_told_of_models(told):
    assert told["inputs"] == {"x": [1, [-1, 4]]}
    assert told["method"] == "tensorflow/serving/predict"
    assert told["state"] == [1, 30, 0]


def test_its_messages_read_what_is_told_over_rest(told):  # F85
    assert told["rest_state"] == [1, 30, 0]
    assert told["rest_spec"] == ["species", 1]
    assert told["rest_inputs"] == told["inputs"]


def test_it_is_told_what_is_wrong(told):
    assert told["unknown"][0] == "NOT_FOUND"
    assert told["shape"] == [
        "INVALID_ARGUMENT",
        "input 'x': expected the shape [-1, 4], got [4] (-1 is any length)",
    ]
    assert told["unmanaged"][0] == "PERMISSION_DENIED"


def test_tensors_are_those_of_tensorflow(told):
    assert told["codec"] == []
