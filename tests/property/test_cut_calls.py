# SPDX-License-Identifier: Apache-2.0
"""A call of many rows, which is cut, is answered as one that runs as a whole."""

from __future__ import annotations

import json
import math
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import Model
from forebay.arrays import json_lists
from forebay.arrays.numpy_tensors import as_raw, to_array
from forebay.errors import ValidationError
from forebay.protocols.tfserving import json_answers
from forebay.protocols.tfserving.predict_bodies import as_tensors, read_predict
from forebay.serving.tensor_face import TensorFace
from forebay.testing import client
from forebay.types.element_limits import at_once
from forebay.types.tensor import Tensor

LENGTH = "Inference-Header-Content-Length"
NEVER_TEXT = b"\xff\xfe"


class Sample(TypedDict):
    texts: list[str]
    numbers: npt.NDArray[np.float32]
    flag: bool


class Mirror(Model):
    """Gives what it gets."""

    def predict(self, batch: list[Sample]) -> list[Sample]:
        return batch


class Sorted(Mirror):
    """The same, in batches of one kind."""

    @staticmethod
    def batch_key(sample: Sample) -> bool:
        return sample["flag"]


@pytest.fixture(scope="module")
def whole():
    with client(Mirror, Sorted, max_batch_size=64) as served:
        yield served


@pytest.fixture(scope="module")
def cut():
    with client(Mirror, Sorted, max_batch_size=3, max_queue=7) as served:
        yield served


TEXTS = st.sampled_from(["", "a", '",', '"],["', "\\", '\\"', "é,", "[[", "x" * 40])


@st.composite
def calls(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    rows, width = draw(st.integers(1, 30)), draw(st.integers(0, 3))
    texts = np.array([[draw(TEXTS) for _ in range(width)] for _ in range(rows)], object).reshape(rows, width)
    numbers = np.arange(rows * 2, dtype="f4").reshape(rows, 1, 2)
    flags = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    inputs: list[dict[str, Any]] = []
    behind = b""
    for name, datatype, array in (("texts", "BYTES", texts), ("numbers", "FP32", numbers), ("flag", "BOOL", flags)):
        one: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        form = draw(st.sampled_from(["raw", "flat", "nested"]))
        if form == "raw":
            encoded = [text.encode() for text in texts.ravel()]
            raw = b"".join(len(one).to_bytes(4, "little") + one for one in encoded) if name == "texts" else None
            raw = array.tobytes() if raw is None else raw
            one["parameters"] = {"binary_data_size": len(raw)}
            behind += raw
        else:
            one["data"] = (array.ravel() if form == "flat" else array).tolist()
        inputs.append(one)
    if draw(st.integers(0, 9)) == 0 and behind:  # what is wrong with it is told alike
        behind = NEVER_TEXT + behind[2:]
    asked: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": draw(st.booleans())}}
    if draw(st.booleans()):
        asked["outputs"] = [
            {"name": name, "parameters": {"binary_data": draw(st.booleans())}} for name in ("flag", "texts")
        ]
    head = json.dumps(asked, ensure_ascii=draw(st.booleans())).encode()
    return head + behind, {LENGTH: str(len(head)), "content-type": "application/octet-stream"}


@pytest.mark.parametrize("model", ["mirror", "sorted"])
@given(call=calls())
@settings(max_examples=60, deadline=None)
def test_a_call_that_is_cut_is_answered_as_one_that_is_not(model, whole, cut, call):
    body, headers = call
    expected, found = (one.request("POST", f"/v2/models/{model}/infer", body, headers) for one in (whole, cut))
    assert found.status == expected.status
    if found.status == 200:
        assert found.body == expected.body


@given(st.integers(1, 30), st.integers(0, 2), st.booleans(), st.booleans(), st.sampled_from(["mirror", "sorted"]))
@settings(max_examples=60, deadline=None)
def test_a_call_of_tensorflow_serving_that_is_cut_is_answered_as_one_that_is_not(
    whole, cut, rows, width, in_columns, is_text, model
):
    texts = [["a" if is_text or row % 7 else {"b64": "/w=="}] * width for row in range(rows)]
    flags = [row % 3 == 0 for row in range(rows)]
    numbers = [[[row, 0.5]] for row in range(rows)]
    columns = {"texts": texts, "numbers": numbers, "flag": flags}
    listed = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    body = json.dumps({"inputs": columns} if in_columns else {"instances": listed[:7]}).encode()
    expected, found = (one.request("POST", f"/v1/models/{model}:predict", body) for one in (whole, cut))
    assert (found.status, found.body) == (expected.status, expected.body)


def elements_of(value: Any, axes: tuple[int, ...], kind: type) -> list[Any]:
    """The elements of lists in lists of these lengths."""
    if not axes:
        assert type(value) is kind or (kind is float and type(value) is int)
        return [kind(value)]
    assert isinstance(value, list)
    assert len(value) == axes[0]
    return [leaf for one in value for leaf in elements_of(one, axes[1:], kind)]


def plainly(data: bytes, shape: tuple[int, ...], kind: type) -> list[Any] | None:
    """The elements of a list, flat or of a shape, decoded in one call; None if it is neither."""
    for axes in (shape, (math.prod(shape),), (*shape, 1) if len(shape) == 1 else shape):
        try:
            return elements_of(json.loads(data), axes, kind)
        except (AssertionError, ValueError):
            continue
    return None


@st.composite
def lists(draw: st.DrawFn) -> tuple[bytes, tuple[int, ...], type]:
    """A list, which may be spoiled, and the shape that it is said to have."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    kind = draw(st.sampled_from([str, float]))
    leaves = TEXTS if kind is str else st.sampled_from([1, -2.5, 1e3, math.nan, math.inf])
    count = math.prod(shape)
    array = np.array([*draw(st.lists(leaves, min_size=count, max_size=count)), None], object)[:-1]
    values = (array if draw(st.booleans()) else array.reshape(shape)).tolist()
    data = json.dumps(values, indent=draw(st.sampled_from([None, None, 1]))).encode()
    if draw(st.booleans()):
        place, what = draw(st.integers(0, 400)), draw(st.sampled_from([*b',[]1"', *b",[]"])).to_bytes()
        data = data[:place] + what + data[place + draw(st.integers(0, 1)) :]
    if draw(st.integers(0, 4)) == 0:
        shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    return data, shape, kind


@given(given=lists(), part_bytes=st.integers(1, 30))
@settings(max_examples=500, deadline=None)
def test_a_list_that_is_read_in_parts_is_read_as_one(given, part_bytes):
    data, shape, kind = given
    tensor = Tensor("x", "BYTES" if kind is str else "FP64", shape, data, is_json=True)
    expected = plainly(data, shape, kind)
    if expected is not None and kind is str:
        expected = [one.encode() for one in expected]
    for size in (json_lists.PART_BYTES, part_bytes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_lists, "PART_BYTES", size)
            try:
                found = to_array(as_raw(tensor)).ravel().tolist()
            except ValidationError:
                found = None
        assert str(found) == str(expected)  # not a number is not equal to itself


@pytest.mark.parametrize("shape", [(1, 300_000), (300_000,), (100_000, 3), (1, 2, 150_000), (1, 3)])
def test_a_row_is_read_in_parts_however_long_it_is(shape):
    array = np.zeros(shape if shape != (1, 3) else (1, 300_000))
    data = json.dumps(array.tolist()).encode()
    found = 0
    try:
        for part in json_lists.values_in_parts(Tensor("x", "FP32", shape, data, is_json=True), float):
            assert len(part) <= json_lists.PART_BYTES
            found += len(part)
    except ValidationError:
        assert shape == (1, 3)
    assert found == (array.size if shape != (1, 3) else 0)  # what is too long is known at its beginning


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), indent=st.sampled_from([None, 1]))
@settings(max_examples=100, deadline=None)
def test_columns_have_the_shape_of_their_lists_and_are_written_as_such(shape, indent):
    array = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    body = json.dumps({"inputs": {"x": array.tolist()}}, indent=indent).encode()
    (found,) = at_once(as_tensors(at_once(read_predict(body, 1)), TensorFace(is_open=True)))
    assert found.shape == array.shape
    answered = [Tensor(name, "FP64", array.shape, array.tobytes()) for name in ("x", "y")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_answers, "_ROWS", 2)
        assert json.loads(json_answers.encode_columns(answered)) == {
            "outputs": {"x": array.tolist(), "y": array.tolist()}
        }
        assert json.loads(json_answers.encode_columns(answered[:1])) == {"outputs": array.tolist()}
        assert json.loads(json_answers.encode_rows(answered[:1])) == {"predictions": array.tolist()}
        rows = [{"x": row, "y": row} for row in array.tolist()]
        assert json.loads(json_answers.encode_rows(answered)) == {"predictions": rows}


def test_rows_of_which_nothing_comes_are_limited_in_json_as_well(whole):
    for count in (1024, 1025):
        body = json.dumps({"inputs": {"texts": [[]] * count}}).encode()
        answer = whole.request("POST", "/v1/models/mirror:predict", body)
        assert (b"samples without data" in answer.body) == (count == 1025)
