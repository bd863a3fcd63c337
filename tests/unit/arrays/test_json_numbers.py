# SPDX-License-Identifier: Apache-2.0
"""Numbers in JSON are written as TensorFlow Serving writes them, and read back as what they were."""

import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forebay.arrays import json_numbers


def as_the_original(value):
    """`WriteDecimal` of util/json_tensor.cc in tensorflow/serving: %g, and %.9g if that is another float."""
    short = f"{float(value):.6g}"
    return Decimal(short if np.float32(short) == value else f"{float(value):.9g}")


@pytest.mark.filterwarnings("ignore:overflow")
@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=3), elements=st.floats(width=32)))
def test_floats_have_the_digits_of_the_original(array):  # F83
    array = np.resize(array, (200, *array.shape)) if array.size and array.size % 2 else array
    text = json_numbers.written(array)
    found = np.array(json.loads(text, parse_float=Decimal, parse_constant=float), object)
    assert found.shape == array.shape
    for told, value in zip(found.ravel(), array.ravel(), strict=True):
        if np.isfinite(value):
            # The last of nine digits may differ where two spellings are equally near.
            assert told == as_the_original(value) or len(told.as_tuple().digits) >= 8
        assert np.array_equal(np.float32(told), value, equal_nan=True)


@pytest.mark.parametrize(
    "array, text",
    [
        (np.array([0.1, 0.2, 1 / 3, -0.0, 1e-30, 3e38], np.float32), "[0.1,0.2,0.333333343,-0.0,1e-30,3e38]"),
        (np.array([[0.1, np.nan], [np.inf, -np.inf]]), "[[0.1,NaN],[Infinity,-Infinity]]"),
        (np.array([0.1], np.float16), "[0.0999756]"),
        (np.array([1, 2], np.int64), "[1,2]"),
        (np.array(True), "true"),
        (np.float32(np.nan), "NaN"),
        (np.zeros((0, 3), np.float32), "[]"),
    ],
)
def test_how_numbers_are_written(array, text):  # F83
    assert json_numbers.written(np.asarray(array)).decode() == text


def test_many_floats_are_spelled_as_a_few_are():
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint64).astype(np.uint32).view(np.float32)
    bits = bits[np.isfinite(bits)]
    assert json_numbers.rounded(bits).tolist() == json_numbers._few(bits)


@pytest.mark.parametrize("shape", [(200_000,), (3, 70_000), (100_000, 2), (70_000, 0)])
def test_many_are_written_in_parts(shape):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert json.loads(json_numbers.written(array)) == array.tolist()
