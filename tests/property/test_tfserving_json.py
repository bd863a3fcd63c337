# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's JSON: lists of any depth and shape become tensors that say what they are, or are refused."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forebay.arrays.numpy_tensors import as_raw, from_array, to_array
from forebay.errors import ForebayError
from forebay.protocols.tfserving import examples, rest
from forebay.serving.tensor_face import TensorFace
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


@given(st.sampled_from(FACES), st.fixed_dictionaries({}, optional={"instances": VALUES, "inputs": VALUES}))
def test_whatever_comes_is_tensors_or_refused(face, body):
    try:
        asked = rest.decode_predict(json.dumps(body).encode())
        if asked.instances is None:
            tensors = rest.columns_as_tensors(asked.inputs, face)
        else:
            tensors = rest.rows_as_tensors(asked.instances, face)
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
        found, _ = rest.decode_examples(json.dumps(body).encode())
        for tensor in examples.tensors_of(examples.checked(found), face):
            assert to_array(tensor).shape[0] == len(found)
    except ForebayError:
        pass


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=4, max_side=3), elements=st.floats(-9, 9, width=32)))
def test_columns_are_what_they_were(array):
    told = json.dumps({"inputs": {"x": array.tolist()}}).encode()
    (tensor,) = rest.columns_as_tensors(rest.decode_predict(told).inputs, FACES[0])
    assert np.array_equal(to_array(as_raw(tensor)), array)
    outputs = [from_array("x", array), from_array("y", array)]
    assert np.array_equal(np.float32(json.loads(rest.encode_columns(outputs))["outputs"]["y"]), array)
    rows = json.loads(rest.encode_rows(outputs))["predictions"]
    assert np.array_equal(np.array([row["x"] for row in rows], np.float32), array)
