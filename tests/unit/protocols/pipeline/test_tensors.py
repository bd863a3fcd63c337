# SPDX-License-Identifier: Apache-2.0
"""Arrays in Tensor messages."""

import io
import pickle
import time

import numpy as np
import pytest

from forebay.errors import InvalidRequest
from forebay.surfaces.pipeline.protocol.messages import Tensor
from forebay.surfaces.pipeline.protocol.tensors import pack, unpack_all

TYPES = {
    "int64": 0, "float32": 1, "int32": 2, "float64": 3, "int16": 4, "float16": 5,
    "uint16": 6, "uint8": 7, "int8": 8, "bool": 9,
}  # fmt: skip
FIELD = {
    "int64": "int64_data", "float32": "float_data", "int32": "int_data", "float64": "float64_data", "int16": "int_data",
    "float16": "float_data", "uint16": "uint32_data", "uint8": "uint32_data", "int8": "int_data", "bool": "bool_data",
}  # fmt: skip


def packed(name, value, **more):
    tensor = Tensor()
    pack(tensor, name, value, **more)
    return tensor


def npy(array, **more):
    file = io.BytesIO()
    np.save(file, array, **more)
    return file.getvalue()


def refused(tensor):
    with pytest.raises(InvalidRequest) as caught:
        unpack_all([tensor])
    assert caught.value.detail == {"err_no": 8000, "product": False}
    return caught.value.message


def extremes(dtype):
    if dtype == "bool":
        return np.array([[True], [False]])
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return np.array([[np.finfo(kind).max, np.nan, -0.0], [np.finfo(kind).tiny, np.inf, 0.1]], kind)
    return np.array([[np.iinfo(kind).min, 0, np.iinfo(kind).max]], kind)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("as_npy", [False, True])
def test_every_dtype_comes_back_as_it_was(dtype, as_npy):  # P14
    array = extremes(dtype)
    tensor = Tensor.FromString(packed("x", array, as_npy=as_npy).SerializeToString())
    assert tensor.elem_type == (13 if as_npy else TYPES[dtype])
    assert bool(getattr(tensor, FIELD[dtype])) is not as_npy
    found = unpack_all([tensor])["x"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    found[:] = 0  # what an op gets is its own


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (2, 3)])
@pytest.mark.parametrize("as_npy", [False, True])
def test_shapes(shape, as_npy):
    assert unpack_all([packed("x", np.ones(shape, "float32"), as_npy=as_npy)])["x"].shape == shape


@pytest.mark.parametrize("given, found", [([-1], (6,)), ([2, -1], (2, 3)), ([-1, 3, 1], (2, 3, 1))])
def test_one_size_may_be_left_to_the_elements(given, found):
    # F43: the original reshapes to it
    tensor = Tensor(name="x", elem_type=1, float_data=range(6), shape=given)
    assert unpack_all([tensor])["x"].shape == found


def test_a_tensor_without_a_shape_is_a_row():
    assert unpack_all([Tensor(name="x", float_data=[1, 2], elem_type=1)])["x"].tolist() == [1.0, 2.0]


def test_texts_and_levels_of_detail():  # P14
    assert unpack_all([packed("t", "äb")]) == {"t": "äb"}
    assert unpack_all([Tensor(name="t", elem_type=12, str_data=["a", "b"])]) == {"t": "ab"}
    found = unpack_all([packed("x", np.zeros((5, 1)), lod=[[0, 2], [2, 5]])])
    assert (found["x.lod"].dtype, found["x.lod"].tolist()) == (np.int32, [[0, 2], [2, 5]])
    assert "3 numbers" in refused(Tensor(name="x", elem_type=1, float_data=[1], shape=[1], lod=[0, 1, 2]))


def test_types_there_are_none_for():  # P14
    assert "complex64" in refused(Tensor(name="x", elem_type=10, complex64_data=[1, 2]))
    assert "complex128" in refused(Tensor(name="x", elem_type=11))
    assert "type 14" in refused(Tensor(name="x", elem_type=14))
    for value in (np.zeros(1, "complex64"), ["a", "b"], np.array([None])):
        with pytest.raises(TypeError, match="can be sent"):
            packed("x", value)


@pytest.mark.parametrize(
    "tensor,says",
    [
        (Tensor(name="x", elem_type=1, float_data=[1], shape=[2**31 - 1, 2**31 - 1]), "needs 4611686014132420609"),
        (Tensor(name="x", elem_type=1, float_data=[1, 2], shape=[-2]), ">= 0"),
        (Tensor(name="x", elem_type=1, float_data=[1, 2], shape=[-1, -1]), "one of which may be -1"),
        (Tensor(name="x", elem_type=1, float_data=[1, 2, 3], shape=[2, -1]), "has 3 elements"),
        (Tensor(name="x", elem_type=1, shape=[0, -1]), "has 0 elements"),
        (Tensor(name="x", elem_type=1, float_data=[1, 2], shape=[3]), "needs 3"),
        (Tensor(name="x", elem_type=1, shape=[1] * 40), "at most 32"),
        (Tensor(name="x", elem_type=8, int_data=[1, 300], shape=[2]), "300, which is out of range for int8"),
        (Tensor(name="x", elem_type=7, uint32_data=[256]), "256, which is out of range for uint8"),
    ],
)
def test_what_does_not_fit_is_refused(tensor, says):  # P157
    assert says in refused(tensor)


class Evil:
    def __reduce__(self):
        return pytest.fail, ("a pickle from the network was loaded",)


def header(text, version=1):
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode()


@pytest.mark.parametrize(
    "data,says",
    [
        (npy(np.array([Evil()]), allow_pickle=True), "pickled objects"),
        (pickle.dumps(Evil()), "not an .npy file"),
        (b"", "not an .npy file"),
        (b"\x93NUMPY", "not an .npy file"),
        (b"\x93NUMPY\x01\x00\xff\xff", "not an .npy file"),
        (b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + b" " * 64, "not an .npy file"),
        (b"\x93NUMPY\x02\x00" + (1 << 20).to_bytes(4, "little") + b" " * (1 << 20), "not an .npy file"),
        (b"\x93NUMPY\x09\x00" + npy(np.zeros(3))[8:], "not an .npy file"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (2147483648, 2147483648)}\n"), "takes"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n"), "not an .npy file"),
        (header("{'descr': '<U0', 'fortran_order': False, 'shape': (4611686018427387904,)}\n"), "numbers, booleans"),
        (header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0,)}\n"), "numbers, booleans"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 500 + "\n"), "not an .npy file"),
        (header("__import__('os').abort()\n"), "not an .npy file"),
        (npy(np.zeros(3)) + b"more", "and 28 bytes"),
        (npy(np.zeros(3))[:-1], "and 23 bytes"),
    ],
)
def test_npy_bytes_are_never_unpickled_nor_trusted(data, says):  # P15, P154, P157
    started = time.process_time()
    assert says in refused(Tensor(name="x", elem_type=13, byte_data=data))
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3).T, np.arange(3, dtype=">f8"), np.array(["ab", "c"])])
def test_npy_bytes_of_other_orders_and_kinds(array):  # P15
    found = unpack_all([Tensor(name="x", elem_type=13, byte_data=npy(array))])["x"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
