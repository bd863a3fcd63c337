# SPDX-License-Identifier: Apache-2.0
"""How much one request of TensorFlow Serving's protocol may have the loop make of it."""

import msgspec
import pytest

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.samples import MAX_SAMPLES
from forebay.protocols.tfserving import example_bodies, examples
from forebay.protocols.tfserving.example_bodies import decode_examples
from forebay.protocols.tfserving.messages import SERVING
from forebay.protocols.tfserving.odd_numbers import MAX_ODD_BYTES
from forebay.protocols.tfserving.predict_bodies import MAX_INPUTS, as_tensors, read_predict
from forebay.serving.tensor_face import TensorFace
from forebay.types.element_limits import at_once
from forebay.types.json_segments import LONG_BYTES
from forebay.types.tensor import TensorMetadata

FACE = TensorFace(inputs=[TensorMetadata("x", "FP32", (-1, -1))], outputs=[TensorMetadata("y", "FP32", (-1,))])
encode = msgspec.json.encode


def predict(body, limit=MAX_SAMPLES):
    return at_once(read_predict(body, limit))


def tensors_of(body):
    return at_once(as_tensors(predict(body), FACE))


def test_a_context_is_said_for_as_many_examples_as_it_is_long():
    short = {"context": {"x": [1, 2]}, "examples": [{}, {"x": [3]}]}
    assert decode_examples(encode(short))[0] == [{"x": [1, 2]}, {"x": [3]}]
    with pytest.raises(TooLarge, match="context is too long"):
        decode_examples(encode({"context": {"x": [1] * 10_000}, "examples": [{}] * 1000}))


@pytest.mark.parametrize("kind, values", [("bytes_list", [b"x" * 20_000]), ("int64_list", [1] * 3000)])
def test_so_is_one_that_comes_over_grpc(kind, values):
    given = SERVING.classes().Input()
    getattr(given.example_list_with_context.context.features.feature["x"], kind).value.extend(values)
    for _ in range(1000):
        given.example_list_with_context.examples.add()
    with pytest.raises(TooLarge, match="context is too long"):
        examples.read_examples(given)


def test_examples_and_their_features_are_counted():
    with pytest.raises(TooLarge, match="more than 16384 examples"):
        decode_examples(encode({"examples": [{}] * (MAX_SAMPLES + 1)}))
    many = {f"f{number}": 1 for number in range(example_bodies.MAX_FEATURES // 2)}
    with pytest.raises(TooLarge, match="more than 200000 features"):
        decode_examples(encode({"examples": [many, many, {"x": 1}]}))


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "BF16", "INT8"])
def test_a_feature_that_its_type_cannot_hold_is_refused(datatype):
    face = TensorFace(inputs=[TensorMetadata("x", datatype, (-1,))], outputs=FACE.outputs)
    given, _ = decode_examples(b'{"examples": [{"x": 1%s}]}' % (b"0" * 39 if datatype == "INT8" else b"e39"))
    with pytest.raises(InvalidRequest, match=f"feature 'x': expected values of {datatype}"):
        examples.tensors_of(examples.checked(given), face)


@pytest.mark.parametrize("limit", [3, 4096, MAX_SAMPLES, 100_000])
def test_rows_are_counted_before_they_are_made(limit):
    """The longest body took 2 s of the loop, and 2 GB, before its rows were held to what may wait."""
    row = [1] * (LONG_BYTES // limit)
    body = encode({"instances": [row] * limit, "signature_name": "x"})
    found = predict(body, limit)
    assert found.signature == "x"
    assert list(map(bytes, found.rows or ())) == [encode(row)] * limit
    with pytest.raises(TooLarge, match=f"instances: expected at most {limit} samples"):
        predict(encode({"instances": [1] * (limit + 1)}), limit)
    with pytest.raises(TooLarge, match=f"instances: expected at most {limit} samples"):
        predict(encode({"instances": [1] * LONG_BYTES}), limit)
    assert predict(encode({"inputs": [1] * LONG_BYTES}), limit).rows is None
    with pytest.raises(InvalidRequest, match=r"Expected `str`, got `int` - at `\$.signature_name`"):
        predict(encode({"instances": [row] * limit, "signature_name": 3}), limit)


def test_inputs_are_counted():
    many = {f"f{number}": [1] for number in range(MAX_INPUTS + 1)}
    with pytest.raises(TooLarge, match="more than 4096 inputs"):
        tensors_of(encode({"inputs": many}))


@pytest.mark.parametrize(
    "text, shape", [("[ ]", (0,)), ("[1]", (1,)), ("[1 , 2]", (2,)), ("[[1,2,3],[4,5,6]]", (2, 3))]
)
def test_lists_of_numbers_have_the_shape_that_they_say(text, shape):
    told = b'{"inputs": {"x": %s}}' % text.encode()
    (tensor,) = tensors_of(told)
    assert tensor.shape == shape


@pytest.mark.parametrize("part", [b'"', b'"\\', b"\\", b"-", b"N", b"I", b"Inf", b'"a"', b"\\\n", b'"\n'])
def test_what_stands_beside_nan_is_read_once(part):  # F83
    """A text without an end was read to the end of the body from each of its quotes: for minutes."""
    body = b'{"instances": [NaN, ' + part * ((MAX_ODD_BYTES - 100) // len(part)) + b"]}"
    with pytest.raises(InvalidRequest):
        predict(body)
    with pytest.raises(TooLarge, match="has NaN or an infinity; ask over gRPC"):
        predict(body + b" " * MAX_ODD_BYTES)
