# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's JSON: lists of any depth and shape become tensors that say what they are, or are refused."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forebay.arrays.numpy_tensors import as_raw, from_array, to_array
from forebay.errors import ForebayError
from forebay.protocols.tfserving import examples, json_answers
from forebay.protocols.tfserving.example_bodies import decode_examples
from forebay.protocols.tfserving.predict_bodies import as_tensors, read_predict
from forebay.serving.tensor_face import TensorFace
from forebay.types.element_limits import at_once
from forebay.types.tensor import TensorMetadata

FACES = [
    TensorFace(inputs=[TensorMetadata("x", kind, (-1, -1))], outputs=[TensorMetadata("y", kind, (-1,))])
    for kind in ("FP32", "FP16", "BF16", "INT64", "BYTES", "BOOL")
]
FACES += [TensorFace(is_open=True), TensorFace(inputs=[*FACES[0].inputs, TensorMetadata("z", "BYTES", (-1,))])]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.builds(lambda text: {"b64": text}, st.sampled_from(["QQ==", "/w==", "?", "", 3])),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
)


def tensors_of(body, face):
    return at_once(as_tensors(at_once(read_predict(body, 100)), face))


@given(st.sampled_from(FACES), st.fixed_dictionaries({}, optional={"instances": VALUES, "inputs": VALUES}))
def test_whatever_comes_is_tensors_or_refused(face, body):
    try:
        tensors = tensors_of(json.dumps(body).encode(), face)
        face.ask(tensors)
        for tensor in tensors:
            assert to_array(as_raw(tensor)).shape == tensor.shape
    except ForebayError:
        pass


@given(
    st.sampled_from(FACES),
    st.fixed_dictionaries(
        {"examples": st.lists(st.dictionaries(st.sampled_from("xz"), VALUES, max_size=2), max_size=3)},
        optional={"context": st.dictionaries(st.sampled_from("xz"), VALUES, max_size=2)},
    ),
)
def test_whatever_examples_come(face, body):
    try:
        found, _ = decode_examples(json.dumps(body).encode())
        for tensor in examples.tensors_of(examples.checked(found), face):
            assert to_array(tensor).shape[0] == len(found)
    except ForebayError:
        pass


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=4, max_side=3), elements=st.floats(-9, 9, width=32)))
def test_columns_are_what_they_were(array):
    told = json.dumps({"inputs": {"x": array.tolist()}}).encode()
    (tensor,) = tensors_of(told, FACES[0])
    assert np.array_equal(to_array(as_raw(tensor)), array)
    outputs = [from_array("x", array), from_array("y", array)]
    assert np.array_equal(np.float32(json.loads(json_answers.encode_columns(outputs))["outputs"]["y"]), array)
    rows = json.loads(json_answers.encode_rows(outputs))["predictions"]
    assert np.array_equal(np.array([row["x"] for row in rows], np.float32), array)
