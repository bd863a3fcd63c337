# SPDX-License-Identifier: Apache-2.0
"""What tensors the fields of a sample become."""

import msgspec
import numpy as np
import pytest

from forebay.errors import InvalidRequest
from forebay.serving.models.schema import WireType
from forebay.serving.models.tensor_codec import TensorCodec, TensorPort, TensorSide, codec_of, face_of, side_of
from forebay.serving.tensor_face import TensorFace
from forebay.types.tensor import TensorMetadata


class Sample(msgspec.Struct):
    needed: float | None
    number: float | None = None
    words: list[str] | None = None
    either: int | str | None = None
    plain: int = 3


def test_a_field_that_may_be_none_is_what_it_is_otherwise():  # F88
    ports = {port.name: (port.datatype, port.shape, port.is_optional) for port in side_of(WireType(Sample)).ports}
    assert ports == {
        "needed": ("BYTES", (), False),  # its None has to be said, as JSON
        "number": ("FP64", (), True),
        "words": ("BYTES", (-1,), True),
        "either": ("BYTES", (), True),
        "plain": ("INT64", (), True),
    }
    results = {port.name: port.datatype for port in side_of(WireType(Sample, "output")).ports}
    assert results["number"] == "BYTES"  # a result may be None, which no number is


@pytest.mark.parametrize("numbers", [[1.5, 2.5], None])
def test_such_a_field_is_read_or_left_out(numbers):  # F88
    codec = codec_of(WireType(Sample), WireType(float, "output"))
    given, data = [["needed", "BYTES", [2], False]], [b"\4\0\0\0null\3\0\0\0" + b"2.5"]
    if numbers is not None:
        given.append(["number", "FP64", [2], False])
        data.append(np.array(numbers).tobytes())
    found = codec.decode(data, {"given": given}, 2)
    assert [one.needed for one in found] == [None, 2.5]
    assert [one.number for one in found] == (numbers or [None, None])


def test_a_sample_with_one_field_is_a_record_all_the_same():
    port = TensorPort("x", "INT64")
    data, params = [np.array([1, 2]).tobytes()], {"given": [["x", "INT64", [2], False]]}
    assert TensorCodec(TensorSide([port], is_record=True), TensorSide()).decode(data, params, 2) == [{"x": 1}, {"x": 2}]
    assert TensorCodec(TensorSide([port]), TensorSide()).decode(data, params, 2) == [1, 2]


class Blob(msgspec.Struct):
    name: str
    content: bytes


def test_a_field_of_bytes_is_said_in_json_for_that_alone_says_how_it_is_encoded():
    ports = {port.name: (port.datatype, port.kind) for port in side_of(WireType(Blob)).ports}
    assert ports == {"name": ("BYTES", "plain"), "content": ("BYTES", "json")}


@pytest.mark.parametrize(
    "shape, has_rows, told", [(None, False, (-1,)), (None, True, (-1,)), ((), False, ()), ((), True, (-1,))]
)
def test_a_tensor_of_any_number_of_axes_is_not_told_as_a_scalar(shape, has_rows, told):  # F89
    side = TensorSide([TensorPort("x", "FP32", shape, "array")], is_record=True)
    face = face_of(side, side, has_rows=has_rows)
    assert face.inputs[0].shape == face.outputs[0].shape == told
    assert face.unranked == ({"x"} if shape is None else set())


def test_a_call_without_inputs_is_told_what_the_model_takes():
    with pytest.raises(InvalidRequest, match="no inputs; the model takes at least one"):
        TensorFace(is_open=True).ask([])
    with pytest.raises(InvalidRequest, match="no inputs; the model takes 'x'"):
        TensorFace(inputs=[TensorMetadata("x", "INT64", (-1,))]).ask([])
