# SPDX-License-Identifier: Apache-2.0
"""The JSON rules of TensorFlow Serving, as the tests of its converter hold it to them."""

import math

import numpy as np
import pytest
from tests.originals.replay import assert_as_recorded, exchanges, read_json

from forebay.arrays.numpy_tensors import as_raw, from_array, to_array
from forebay.errors import ForebayError
from forebay.protocols.samples import MAX_SAMPLES
from forebay.protocols.tfserving import json_answers
from forebay.protocols.tfserving.predict_bodies import as_tensors, read_predict
from forebay.serving.tensor_face import TensorFace
from forebay.types.datatypes import DATATYPES
from forebay.types.element_limits import at_once
from forebay.types.tensor import TensorMetadata

PAGE = "docs/how-to/tensorflow-serving.md"
KINDS = {f"DT_{row.tensorflow_name}": row for row in DATATYPES.values()}


def numbers(values):
    return [float(one) if one in {"NaN", "Infinity", "-Infinity"} else one for one in values]


def recorded(tensor):
    """A tensor as it stands in a recording; of floats what they are in 32 bits."""
    kind = KINDS[tensor.datatype]
    values = to_array(tensor).ravel().tolist()
    if kind.name == "BYTES":
        values = [one.decode() for one in values]
    elif kind.name.startswith("FP"):
        values = [
            one if math.isfinite(one) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(one, "NaN")
            for one in values
        ]
    return {"dtype": f"DT_{kind.tensorflow_name}", "shape": list(tensor.shape), "values": values}


KINDS |= {row.name: row for row in DATATYPES.values()}


def read(asked):
    inputs = [TensorMetadata(name, KINDS[kind].name, (-1,)) for name, kind in asked["signature"].items()]
    face = TensorFace(inputs=inputs, unranked=frozenset(asked["signature"]))
    try:
        body = at_once(read_predict(asked["text"].encode(), MAX_SAMPLES))
        given = at_once(as_tensors(body, face))
        if body.rows is not None:
            face.ask(given)
        return {"tensors": {one.name: recorded(as_raw(one)) for one in given}}
    except ForebayError as error:
        return {"error": error.message}


@pytest.mark.parametrize("exchange", exchanges("tfserving/json_requests.json"))
def test_requests(exchange):  # F83
    for tensor in exchange.answer.get("tensors", {}).values():
        if tensor["dtype"] == "DT_FLOAT":
            tensor["values"] = recorded(from_array("", np.array(numbers(tensor["values"]), np.float32)))["values"]
    assert_as_recorded(exchange, read(exchange.request), page=PAGE)


def written(asked):
    tensors = []
    for name, one in asked["tensors"].items():
        kind = object if one["dtype"] == "DT_STRING" else KINDS[one["dtype"]].numpy
        array = np.array(numbers(one["values"]), kind).reshape([int(axis) for axis in one["shape"]])
        tensors.append(from_array(name, array))
    try:
        return {
            "json": read_json(
                (json_answers.encode_rows if asked["format"] == "rows" else json_answers.encode_columns)(tensors)
            )
        }
    except ForebayError as error:
        return {"error": error.message}


@pytest.mark.parametrize("exchange", exchanges("tfserving/json_answers.json"))
def test_answers(exchange):  # F82, F83
    assert_as_recorded(exchange, written(exchange.request), page=PAGE)
