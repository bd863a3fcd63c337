# SPDX-License-Identifier: Apache-2.0
"""Padding: samples of unlike length get one shape, nothing of them is lost, and their answers come back as long."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import Failure, NotFound, Pad, Padded
from forebay.errors import BadOutcome, ConfigError, ValidationError
from forebay.serving.models.model import Model
from forebay.serving.models.model_runner import ModelRunner
from forebay.workers.runner import WorkerContext

TOKENS = Pad({"ids": ("length",), "types": ("length",)}, buckets={"length": [64, 16, 32]}, outputs=("length",))
rows = st.lists(st.lists(st.integers(-1000, 1000), max_size=20), min_size=1, max_size=8)


def sample(*ids):
    return {"ids": list(ids), "types": [7] * len(ids), "more": "kept"}


# Nothing is lost


@given(rows)
@settings(max_examples=60)
def test_pad_then_undo_is_the_identity(found):
    pad = Pad(("length",), outputs=("length",), value=-1)
    batch = pad(found)
    assert {len(row) for row in batch} == {max(map(len, found))}
    assert [list(row) for row in pad.undo(batch, list(batch))] == found
    assert pad.undo(batch, [row.tolist() for row in batch]) == found


@given(rows)
@settings(max_examples=60)
def test_masks_sum_to_the_lengths(found):
    batch = TOKENS([sample(*row) for row in found])
    mask = batch.mask()
    assert mask.dtype == bool
    assert mask.shape == batch.arrays["ids"].shape
    assert mask.sum(axis=1).tolist() == batch.lengths["length"].tolist() == [len(row) for row in found]
    assert batch.arrays["types"].sum() == 7 * mask.sum()
    assert not batch.arrays["ids"][~mask].any()


shapes = st.tuples(st.integers(0, 4), st.integers(0, 4))


@given(st.lists(shapes, min_size=1, max_size=5), st.integers(1, 3), st.sampled_from(["<f4", "<i2", "<u1", "?"]))
@settings(max_examples=60)
def test_two_axes_are_padded_and_cut_and_a_third_is_left(sizes, channels, dtype):
    pad = Pad((None, "height", "width"), outputs={"map": ("height", "width")})
    images = [np.ones((channels, *size), dtype) for size in sizes]
    batch = pad(images)
    assert batch.array.dtype == np.dtype(dtype)
    assert batch.array.sum() == sum(image.sum() for image in images)
    undone = pad.undo(batch, [{"map": image[0]} for image in batch])
    assert [one["map"].shape for one in undone] == sizes
    assert all(one["map"].all() for one in undone)


@given(st.lists(st.integers(0, 64), min_size=1, max_size=6))
@settings(max_examples=60)
def test_the_bucket_is_the_smallest_that_holds_the_longest(lengths):
    batch = TOKENS([sample(*range(length)) for length in lengths])
    size = batch.sizes["length"]
    assert size in {16, 32, 64}
    assert size >= max(lengths)
    assert size == 16 or size // 2 < max(lengths)
    keys = {TOKENS.key_of(sample(*range(length))) for length in lengths}
    assert max(keys) == (size,)


# What predict is given


class Struct(msgspec.Struct):
    ids: Any
    types: Any
    more: str = "kept"


@dataclasses.dataclass(frozen=True)
class Data:
    ids: Any
    types: Any
    more: str = "kept"


class Named(NamedTuple):
    ids: Any
    types: Any
    more: str = "kept"


class Typed(TypedDict):
    ids: list[int]
    types: list[int]


class Pydantic(pydantic.BaseModel):
    ids: list[int]
    types: list[int]
    more: str = "kept"


@pytest.mark.parametrize("kind", [Struct, Data, Named, Pydantic])
def test_a_sample_stays_what_it_is(kind):
    given = [kind(ids=[1, 2], types=[3, 4]), kind(ids=[5], types=[6])]
    batch = TOKENS(given)
    assert isinstance(batch, Padded)
    assert [type(one) for one in batch] == [kind, kind]
    assert [one.more for one in batch] == ["kept", "kept"]
    assert np.stack([one.ids for one in batch])[:, :3].tolist() == [[1, 2, 0], [5, 0, 0]]
    assert given[1].ids == [5]  # what the client sent is not touched
    assert np.shares_memory(batch[0].ids, batch.arrays["ids"])


def test_mappings_stay_mappings():
    assert TOKENS([sample(1)])[0].keys() == {"ids", "types", "more"}


def test_each_field_may_have_a_value_of_its_own():
    pad = Pad({"ids": ("length",), "labels": ("length",)}, value={"labels": -100})
    batch = pad([{"ids": [1], "labels": [1]}, {"ids": [1, 2], "labels": [1, 2]}])
    assert (batch.arrays["ids"][0, 1], batch.arrays["labels"][0, 1]) == (0, -100)


def test_an_empty_list_does_not_make_the_batch_floats():
    pad = Pad(("length",))
    assert pad([[], [1, 2]]).array.dtype == np.int64
    assert pad([[]]).array.dtype == np.int64
    assert pad([[], [0.5]]).array.dtype == np.float64
    assert pad([[1], [0.5]]).array.tolist() == [[1.0], [0.5]]


def test_a_mask_needs_a_name_where_there_are_several():
    batch = Pad(("height", "width"))([[[1, 2]], [[3], [4]]])
    assert batch.mask("height").tolist() == [[True, False], [True, True]]
    assert batch.mask("width").tolist() == [[True, True], [True, False]]
    with pytest.raises(KeyError, match="no name was given; the padded axes are 'height', 'width'"):
        batch.mask()
    with pytest.raises(KeyError, match="there is no axis 'depth'"):
        batch.mask("depth")


def test_samples_that_differ_where_nothing_is_padded_are_told_apart():
    pad = Pad(("length",))
    frames = [np.ones((2, 3)), np.ones((1, 4)), np.ones((5, 3))]
    assert pad.alike([pad.measure(frame) for frame in frames]) == [[0, 2], [1]]
    with pytest.raises(ValidationError, match="an axis that has no name"):
        pad(frames)


# What is refused


@pytest.mark.parametrize(
    "bad, why, path",
    [
        (sample(*range(65)), "expected length <= 64, got 65", "$.ids"),
        ({"ids": [1], "types": [1, 2]}, "its length is 2, that of 'ids' is 1; they must be equal", "$.types"),
        ({"ids": [1]}, "has no field 'types'", "$.types"),
        ([1, 2], "a list was found that has no field 'ids'", "$.ids"),
        ({"ids": ["a"], "types": [1]}, "expected an array of numbers", "$.ids"),
        ({"ids": [1, None], "types": [1, 2]}, "expected an array of numbers, got a NoneType", "$.ids"),
        ({"ids": [[1], [1, 2]], "types": [1, 2]}, "expected an array", "$.ids"),
        ({"ids": 5, "types": [1]}, "expected 1 axis, got 0", "$.ids"),
        ({"ids": [2**70], "types": [1]}, "a number beyond 64 bits", "$.ids"),
    ],
)
def test_a_sample_that_cannot_be_padded_is_refused_by_name(bad, why, path):
    with pytest.raises(ValidationError, match=why) as caught:
        TOKENS([bad])
    assert caught.value.detail == {"path": path}


@pytest.mark.parametrize("bad", [sample(*range(65)), {"ids": 5, "types": [1]}, {"ids": "text", "types": []}, {}, 7])
def test_the_front_refuses_it_too(bad):
    with pytest.raises(ValidationError):
        TOKENS.key_of(bad)


def test_the_front_needs_only_the_axes_that_have_buckets():
    pad = Pad((None, "height", "width"), buckets={"width": [4, 8]})
    assert pad.key_of([[[1, 2, 3, 4, 5]]]) == (8,)
    assert pad.key_of([]) == (4,)


@pytest.mark.parametrize(
    "result, why",
    [
        ([1], "its length is 1, that of the batch is 16"),
        (5, "has no len"),
        (np.zeros(()), "it has 0 axes, `outputs` names 1"),
    ],
)
def test_a_result_of_another_size_is_the_error_of_its_sample(result, why):
    batch = TOKENS([sample(1), sample(1, 2)])
    failed, fine = TOKENS.undo(batch, [result, list(range(16))])
    assert isinstance(failed, BadOutcome)
    assert why in failed.message
    assert fine == [0, 1]


def test_results_that_are_errors_stay_so():
    failure, error = Failure(NotFound("nobody")), ValueError("no")
    batch = TOKENS([sample(1), sample(1, 2)])
    assert TOKENS.undo(batch, [failure, error]) == [failure, error]


def test_a_field_that_is_missing_in_a_result_is_named():
    pad = Pad({"ids": ("length",)}, outputs={"tags": ("length",)})
    (failed,) = pad.undo(pad([{"ids": [1]}]), [{"tag": [1]}])
    assert "has no field 'tags'" in failed.message


def test_nothing_is_cut_without_outputs():
    pad = Pad(("length",))
    assert pad.undo(pad([[1], [1, 2]]), ["a", "b"]) == ["a", "b"]


def test_a_worker_without_numpy_says_so_when_it_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    model = type("Tagger", (Model,), {"pad": TOKENS, "predict": lambda self, batch: batch})
    with pytest.raises(
        ConfigError, match=r"Tagger\.pad needs numpy where the model runs; install it there: pip install"
    ):
        ModelRunner(model).open(WorkerContext())


# What the author of a model gets wrong


@pytest.mark.parametrize(
    "arguments, options, told",
    [
        ([{}], {}, "axes names no axis"),
        ([("length")], {}, r"axes: expected a tuple of names such as \('length',\), got 'length'"),
        ([{"ids": "length"}], {}, "axes of 'ids': expected a tuple of names"),
        ([{"ids": (1,)}], {}, "axes of 'ids': expected the name of an axis, or None to leave it, got 1"),
        ([("",)], {}, "axes: expected the name of an axis, or None to leave it, got ''"),
        ([{3: ("length",)}], {}, "axes: expected the name of a field, got 3"),
        ([5], {}, "axes: expected a tuple of names .*, got 5"),
        ([("length",)], {"value": "0"}, "value: expected a number, or a number for each field, got '0'"),
        ([{"ids": ("length",)}], {"value": {"idz": 0}}, "the field 'idz', there is 'ids'; did you mean 'ids'"),
        ([("length",)], {"buckets": {"lenght": [1]}}, "the axis 'lenght', there is 'length'; did you mean 'length'"),
        (
            [("length",)],
            {"buckets": {"length": []}},
            r"buckets of 'length': expected a list of whole numbers >= 1, got \[\]",
        ),
        ([("length",)], {"buckets": {"length": [0]}}, r"expected a list of whole numbers >= 1, got \[0\]"),
        ([("length",)], {"buckets": {"length": 16}}, "buckets of 'length': expected .* got 16"),
        ([("length",)], {"buckets": [16]}, r"buckets: expected sizes for each axis .*, got \[16\]"),
        ([("length",)], {"outputs": {"tags": ("size",)}}, "outputs names the axis 'size', there is 'length'"),
    ],
)
def test_a_wrong_pad_is_told_what_is_allowed(arguments, options, told):
    with pytest.raises(ConfigError, match=told):
        Pad(*arguments, **options)


@pytest.mark.parametrize("kind", [Struct, Data, Named, Typed, Pydantic])
def test_a_field_that_samples_do_not_have_is_told(kind):
    with pytest.raises(
        ConfigError, match=rf"My\.pad pads the field 'idz', samples of the type `{kind.__name__}`.*'ids'\?"
    ):
        Pad({"idz": ("length",)}).require_fields("My.pad", kind)
    TOKENS.require_fields("My.pad", kind)


def test_fields_of_arrays_and_arrays_of_fields_are_told():
    with pytest.raises(ConfigError, match="samples of the type `list` have no fields"):
        TOKENS.require_fields("My.pad", list[int])
    with pytest.raises(ConfigError, match="pads samples that are arrays"):
        Pad(("length",)).require_fields("My.pad", Struct)
    for free in (Any, dict[str, Any], object):
        TOKENS.require_fields("My.pad", free)
    Pad(("length",)).require_fields("My.pad", list[int])
