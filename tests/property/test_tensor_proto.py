# SPDX-License-Identifier: Apache-2.0
"""Tensors of TensorFlow: what is written is read, and whatever lies is refused without much memory."""

import random
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.errors import ForebayError, ValidationError
from forebay.types.datatypes import BY_NUMPY
from forebay.types.tensor import Tensor, join_elements
from forebay.types.tensor_proto import MAX_FILLED_BYTES, Room, put, tensor_in, tensor_of
from forebay.types.tensorflow_messages import TENSORFLOW, TYPE_NAMES

pytest.importorskip("google.protobuf")

from google.protobuf.message import DecodeError

Proto = TENSORFLOW.classes().TensorProto
FIELDS = [one.name for one in Proto.DESCRIPTOR.fields if one.name.endswith("_val")]
NUMBERS = [name for name in BY_NUMPY if name != "str"]


def written(tensor):
    proto = Proto()
    put(proto, tensor)
    return Proto.FromString(proto.SerializeToString())


@given(data=st.data(), kind=st.sampled_from(NUMBERS))
def test_arrays_come_back(data, kind):
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    array = data.draw(arrays.arrays(kind, shape))
    proto = written(from_array("x", array))
    assert not proto.tensor_content
    found = to_array(tensor_of("x", proto))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    raw = Proto(dtype=proto.dtype, tensor_shape=proto.tensor_shape, tensor_content=array.tobytes())
    if array.size:
        assert bytes(tensor_of("x", raw).data) == array.tobytes()


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_texts_come_back(values):
    tensor = Tensor("x", "BYTES", (len(values),), join_elements("x", values))
    assert tensor_of("x", written(tensor)) is not tensor
    assert bytes(tensor_of("x", written(tensor)).data) == tensor.data


SIZES = [[0], [1], [2], [3], [4], [0, 1], [130], [0, 1, 2, 3, 4, 127, 128, 70_000]]


def test_texts_are_taken_out_as_the_parser_reads_them():  # F74
    chosen = random.Random(5)
    for _ in range(1000):
        sizes = chosen.choice(SIZES)
        proto = Proto(dtype=7)
        proto.string_val.extend([chosen.randbytes(chosen.choice(sizes)) for _ in range(chosen.randrange(30))])
        if chosen.random() < 0.5:
            proto.tensor_shape.dim.add(size=chosen.randrange(40))
        data = proto.SerializeToString()
        others = [data, data + data, data + b"\x48\x05", b"\xc2\x00\x01a" + data, data + b"\x4b\x4c" + data]
        data = chosen.choice(others)
        data = data if chosen.random() < 0.7 else data[: chosen.randrange(len(data) + 1)]
        try:
            expected = tensor_of("x", Proto.FromString(data))
        except (ForebayError, DecodeError) as error:
            said = "expected a TensorProto" if isinstance(error, DecodeError) else str(error)
            with pytest.raises(ForebayError, match=re.escape(said)):
                tensor_in("x", data)
        else:
            found = tensor_in("x", data)
            assert (found.datatype, found.shape) == (expected.datatype, expected.shape)
            assert bytes(found.data) == bytes(expected.data)


@pytest.mark.parametrize("text", [b"", b"a", b"a text of some length"])
def test_a_part_of_the_texts_is_made_at_a_time(text):  # F74
    proto = Proto(dtype=7)
    proto.tensor_shape.dim.add(size=300_000)
    proto.string_val.extend([text] * 300_000)
    data = proto.SerializeToString()
    del proto
    tensor_in("x", data)
    tracemalloc.start()
    try:
        tensor = tensor_in("x", data)
        assert tracemalloc.get_traced_memory()[1] < 4 * (len(data) + len(tensor.data)) + 2**20
    finally:
        tracemalloc.stop()


PROTOS = st.builds(
    lambda dtype, shape, unknown, content, values: (dtype, shape, unknown, content, values),
    st.one_of(st.sampled_from([*TYPE_NAMES]), st.integers(-1, 200)),
    st.lists(st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1])), max_size=6),
    st.booleans(),
    st.binary(max_size=40),
    st.dictionaries(st.sampled_from(FIELDS), st.lists(st.integers(-300, 70_000), max_size=6), max_size=2),
)


@settings(max_examples=400)
@given(PROTOS)
def test_what_lies_is_refused_and_takes_no_memory(told):
    dtype, shape, unknown, content, values = told
    proto = Proto(dtype=dtype, tensor_content=content)
    proto.tensor_shape.unknown_rank = unknown
    for axis in shape:
        proto.tensor_shape.dim.add(size=axis)
    for field, found in values.items():
        is_unsigned = field.startswith("uint")
        cast = {"string_val": lambda one: str(one).encode(), "bool_val": bool}.get(field)
        getattr(proto, field).extend([cast(one) if cast else abs(one) if is_unsigned else one for one in found])
    tracemalloc.start()
    try:
        tensor = tensor_of("x", proto)
    except ForebayError:
        return
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MAX_FILLED_BYTES
    assert tensor.shape == tuple(shape)
    assert to_array(tensor).shape == tensor.shape  # whatever is taken is whole


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data):
    try:
        proto = TENSORFLOW.parsed("TensorProto", data)
        tensor_of("x", proto)
    except ForebayError:
        pass


@pytest.mark.parametrize(
    "told, said",
    [
        ({"dtype": 1, "shape": [2], "float_val": [1, 2, 3]}, "has 2 elements by its shape, and 3 came"),
        (
            {"dtype": 1, "shape": [2**40], "float_val": [1]},
            "has 1099511627776 elements by its shape, and 1 came; up to",
        ),
        ({"dtype": 1, "shape": [2**40]}, "up to 16777216 bytes are filled"),
        ({"dtype": 7, "shape": [2**23], "string_val": [b"long text"]}, "up to 16777216 bytes are filled"),
        ({"dtype": 7, "shape": [2**19]}, "a text counts as 64 at least"),
        ({"dtype": 1, "shape": [2**40, 2**40]}, "every axis must be 0 or more"),
        ({"dtype": 1, "shape": [-1], "float_val": [1]}, "every axis must be 0 or more"),
        ({"dtype": 1, "shape": [1] * 40}, "expected at most 32 axes, got 40"),
        ({"dtype": 1, "shape": [1], "int_val": [1]}, "of DT_FLOAT has its elements in float_val; it came with int_val"),
        ({"dtype": 1, "shape": [2], "tensor_content": b"12345"}, "expected 8 bytes of data, got 5"),
        ({"dtype": 1, "shape": [1], "tensor_content": b"1234", "float_val": [1]}, "in tensor_content; it came with"),
        ({"dtype": 7, "shape": [1], "tensor_content": b"1234"}, "in string_val, not in tensor_content"),
        ({"dtype": 4, "shape": [1], "int_val": [256]}, "elements that do not fit its type"),
        ({"dtype": 6, "shape": [1], "int_val": [-129]}, "elements that do not fit its type"),
        ({"dtype": 19, "shape": [1], "half_val": [65536]}, "elements that do not fit its type"),
        ({"dtype": 8, "shape": [1]}, "is of DT_COMPLEX64, which is not taken here; DT_"),
        ({"dtype": 0, "shape": [1]}, "is of DT_INVALID"),
        ({"dtype": 99, "shape": [1]}, "is of 99"),
    ],
)
def test_each_lie_is_named(told, said):
    shape = told.pop("shape")
    proto = Proto(**told)
    for axis in shape:
        proto.tensor_shape.dim.add(size=axis)
    with pytest.raises(ValidationError) as caught:
        tensor_of("x", proto)
    assert said in caught.value.message


def test_missing_elements_are_the_last_one_and_none_are_zeros():
    proto = Proto(dtype=3, int_val=[1, 2])
    proto.tensor_shape.dim.add(size=4)
    assert to_array(tensor_of("x", proto)).tolist() == [1, 2, 2, 2]
    assert to_array(tensor_of("x", Proto(dtype=3, tensor_shape=proto.tensor_shape))).tolist() == [0] * 4
    texts = Proto(dtype=7, string_val=[b"a"], tensor_shape=proto.tensor_shape)
    assert to_array(tensor_of("x", texts)).tolist() == [b"a"] * 4


def test_what_is_filled_is_counted_for_all_tensors_of_a_request():
    proto = Proto(dtype=1)
    proto.tensor_shape.dim.add(size=MAX_FILLED_BYTES // 8)
    room = Room()
    for _ in range(2):
        tensor_of("x", proto, room)
    with pytest.raises(ValidationError, match="in all tensors of a request"):
        tensor_of("x", proto, room)
