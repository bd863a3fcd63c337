# SPDX-License-Identifier: Apache-2.0
"""`pyovms.Tensor` as handlers and their unit tests use it."""

import array
import copy
import io
from typing import Any

import numpy as np
import pytest

from forebay.surfaces.ovms import shim

shim.install()
from pyovms import Tensor  # noqa: E402 # pyright: ignore[reportMissingImports]

from forebay.surfaces.ovms.pyovms_tensor import read, renamed, sealed, written  # noqa: E402
from forebay.types.datatypes import DATATYPES  # noqa: E402
from forebay.types.tensor import Tensor as Wire  # noqa: E402

FORMATS = {row.struct: row.name for row in DATATYPES.values() if row.struct}


def test_it_takes_its_data_by_place_and_by_two_names():  # O22
    for made in (
        Tensor("x", b"abc"),
        Tensor("x", data=b"abc"),
        Tensor("x", buffer=b"abc"),
        Tensor(name="x", data=b"abc"),
    ):
        assert bytes(made) == b"abc"
    with pytest.raises(TypeError):
        Tensor("x")


def test_it_tells_what_it_is_and_cannot_be_told_otherwise():  # O23
    made = Tensor("x", np.ones((2, 3), np.float32))
    assert (made.name, made.shape, made.datatype, made.size) == ("x", (2, 3), "FP32", 24)
    assert isinstance(made.data, memoryview)
    assert made.data.readonly
    assert made.size == made.data.nbytes
    for attribute in ("name", "shape", "datatype", "data", "size"):
        with pytest.raises(AttributeError):
            setattr(made, attribute, 1)
    assert repr(made) == "Tensor('x', shape=(2, 3), datatype='FP32', size=24)"


def test_whoever_wants_its_buffer_gets_it():  # O24
    source = np.arange(12, dtype=np.int16).reshape(3, 4)
    made = Tensor("x", source)
    assert bytes(made) == source.tobytes()
    assert io.BytesIO(bytes(made)).read() == source.tobytes()
    assert np.array_equal(np.array(made), source)
    assert type(np.asarray(made)) is np.ndarray
    assert np.shares_memory(np.asarray(made), source)
    assert np.shares_memory(np.array(made, copy=False), source)
    assert np.frombuffer(made, np.int16).tolist() == list(range(12))
    for wanted in (source, source[::2], np.asfortranarray(source)):
        view, expected = memoryview(Tensor("x", wanted)), wanted.data
        assert (view.format, view.itemsize, view.ndim) == (expected.format, expected.itemsize, expected.ndim)
        assert (view.strides, view.shape) == (expected.strides, expected.shape)


def test_it_is_true_and_equal_to_itself_alone():  # F95
    first, second = Tensor("x", b"\0\0"), Tensor("x", b"\0\0")
    assert first
    assert Tensor("x", np.zeros((0, 3)))
    assert first == first  # noqa: PLR0124
    assert first != second
    assert {first: 1, second: 2}[first] == 1
    assert first in [second, first]
    assert (first == np.array([0, 1], np.uint8)).tolist() == [True, False]


def test_numpy_computes_with_it():
    made = Tensor("x", np.ones((2, 3)), shape=(6,))
    assert (made + 1).tolist() == [[2, 2, 2], [2, 2, 2]]
    assert np.expand_dims(made, 0).shape == (1, 2, 3)
    assert np.concatenate([made, made]).shape == (4, 3)
    assert type(np.add(made, made)) is np.ndarray


@pytest.mark.parametrize(
    "source", [b"ab", bytearray(b"ab"), memoryview(b"ab"), array.array("h", [1]), np.float16(1), np.zeros((0, 4))]
)
def test_it_takes_whatever_has_a_buffer(source):  # O25
    assert bytes(Tensor("x", source)) == bytes(memoryview(source))


@pytest.mark.parametrize("source", ["text", 3, None, [1]])
def test_it_takes_nothing_else(source):  # O25
    with pytest.raises(TypeError):
        Tensor("x", source)


def test_shape_and_type_are_only_told_otherwise():  # O26
    for shape in ((1,), [1]):
        made = Tensor("x", np.ones((300, 300, 3), np.uint8), shape=shape, datatype="IMAGE_FRAME")
        assert (made.shape, made.datatype) == ((1,), "IMAGE_FRAME")
        assert (made.data.shape, made.data.format, made.size) == ((300, 300, 3), "B", 270_000)


@pytest.mark.parametrize("form", FORMATS)
def test_types_and_formats_mean_each_other(form):  # O27
    made = Tensor("x", np.ones(3, form))
    assert made.datatype == FORMATS[form]
    found = read(written(made, "y"), "z")
    assert (found.name, found.datatype, found.data.format) == ("z", made.datatype, made.data.format)
    assert bytes(found) == bytes(made)


def test_whole_numbers_of_the_machine_are_named_by_their_size():  # O28
    assert Tensor("x", np.arange(3)).datatype == "INT64"
    assert Tensor("x", array.array("l", [1])).datatype == "INT64"
    assert Tensor("x", array.array("L", [1])).datatype == "UINT64"


def test_a_format_without_a_type_is_the_type():  # O29
    assert Tensor("x", np.array("my string")).datatype == "9w"
    assert Tensor("x", np.ones(2, ">i4")).datatype == ">i"
    for kind in ("V12", [("a", "<i4"), ("b", "<f8")]):
        made: Any = np.zeros(2, kind)
        assert Tensor("x", made).datatype == memoryview(made).format


def test_bytes_are_numbers_of_one_byte():  # O30
    made = Tensor("x", b"some text")
    assert (made.datatype, made.shape, made.data.format) == ("UINT8", (9,), "B")
    empty = Tensor("x", b"")
    assert (empty.shape, empty.size, bytes(written(empty, "x").data)) == ((0,), 0, b"")


@pytest.mark.parametrize(
    "source", [np.arange(10)[::2], np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6)[::-1]]
)
def test_what_does_not_lie_in_one_piece_is_written_row_by_row(source):  # O31
    assert bytes(written(Tensor("x", source), "x").data) == source.tobytes()
    assert bytes(written(sealed(Tensor("x", source)), "x").data) == source.tobytes()


def test_what_is_sealed_stays_as_it_was():  # O21
    source = np.zeros(3)
    made = sealed(Tensor("x", source, shape=(1,), datatype="mine"))
    source += 1
    assert np.asarray(made).tolist() == [0, 0, 0]
    assert (made.name, made.shape, made.datatype) == ("x", (1,), "mine")
    constant = Tensor("x", b"ab")
    assert sealed(constant) is constant


def test_copies_and_other_names_keep_the_rest():
    made = Tensor("x", np.ones(2), shape=(7,), datatype="mine")
    for other in (copy.deepcopy(made), renamed(made, "y")):
        assert (other.shape, other.datatype, other.size) == ((7,), "mine", 16)
    assert renamed(made, "y").name == "y"
    assert renamed(made, "x") is made


# Python reads no elements of `e`, wherever they lie.
@pytest.mark.parametrize("form", [form for form in FORMATS if np.dtype(form).itemsize > 1 and form != "e"])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_request_can_be_read_element_by_element_wherever_it_lies(form, shift):  # O27, O33
    values = np.arange(6, dtype=form).reshape(2, 3)
    room = np.zeros(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64 + shift
    room[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
    found = read(Wire("x", FORMATS[form], (2, 3), room.data[start : start + values.nbytes]), "x")
    given: Any = found
    assert found.data.format == memoryview(given).format == form
    assert found.data.tolist() == memoryview(given).tolist() == values.tolist()


def test_nothing_of_a_request_is_copied():
    body = np.arange(4, dtype=np.float32)
    found = read(Wire("x", "FP32", (2, 2), body.data.cast("B")), "x")
    assert np.shares_memory(np.asarray(found), body)
    assert found.shape == found.data.shape == (2, 2)
