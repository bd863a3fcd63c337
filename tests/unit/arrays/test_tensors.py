# SPDX-License-Identifier: Apache-2.0
"""Shapes that cannot be are refused before anything is computed of them, and the table of types agrees with NumPy."""

import struct
import sys

import numpy as np
import pytest

from forebay.arrays.numpy_tensors import as_raw, from_array, numbers_of, to_array
from forebay.errors import NotPrepared, ValidationError
from forebay.types.datatypes import DATATYPES
from forebay.types.tensor import Tensor, check_size, elements


@pytest.mark.parametrize("datatype", [row for row in DATATYPES.values() if row.size], ids=lambda row: row.name)
def test_a_row_of_the_table_agrees_with_struct_and_numpy(datatype):
    assert np.dtype(datatype.numpy).itemsize == datatype.size
    if datatype.struct:
        array = np.ones(3, datatype.numpy)
        # NumPy calls whole numbers of 8 bytes "l".
        letter = array.data.format.replace("l", "q").replace("L", "Q")
        assert (letter, struct.calcsize(datatype.struct)) == (datatype.struct, datatype.size)
        assert from_array("x", array).datatype == datatype.name


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize(
    "shape",
    [(10_000_000,) * 4, (2**64 // 5, 5), (0, 2**62, 2**62), (-1,), (1,) * 33, (10**300,), (2**63,)],
    ids=["product", "of-two", "beside-nothing", "negative", "axes", "digits", "axis"],
)
def test_a_shape_that_overflows_is_refused(datatype, shape):  # O33
    with pytest.raises(ValidationError, match=r"tensor 'x'( has|: expected)"):
        to_array(Tensor("x", datatype, shape, b""))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_numbers_of_sixteen_bits_are_read_from_lists(datatype):
    raw = as_raw(Tensor("x", datatype, (1, 2), b"[[1, -2.5]]", is_json=True))
    assert numbers_of(to_array(raw), datatype).tolist() == [[1, -2.5]]
    with pytest.raises(ValidationError, match=f"holds a number that does not fit {datatype}"):
        as_raw(Tensor("x", datatype, (1,), b"[1e300]", is_json=True))


def test_shape_and_data_must_agree():
    assert elements("x", ()) == 1
    check_size("x", "FP32", (2, 3), 24)
    with pytest.raises(ValidationError, match=r"'x' of FP32\[2, 3\]: expected 24 bytes of data, got 23"):
        check_size("x", "FP32", (2, 3), 23)
    with pytest.raises(ValidationError, match=r"all within 2\^63 bytes"):
        check_size("x", "BYTES", (1 << 62,), 0)  # each has its length before it


def test_a_tensor_without_numpy_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(NotPrepared, match="pip install numpy"):
        to_array(Tensor("x", "FP32", (1,), b"\0\0\0\0"))
