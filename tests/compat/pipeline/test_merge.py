# SPDX-License-Identifier: Apache-2.0
"""Samples that share a call of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.surfaces.pipeline.ops.merge import grouped, one_each, split


def array(rows: int, columns: int = 2, start: int = 0, dtype: Any = "float32") -> Any:
    return np.arange(start, start + rows * columns, dtype=dtype).reshape(rows, columns)


def test_rows_are_stacked_and_cut_apart_again() -> None:  # P81
    samples = [{"x": array(1)}, {"x": array(3, start=10)}, {"x": array(2, start=20)}]
    (group,) = grouped(samples)
    assert group.members == [0, 1, 2]
    assert group.feed["x"].shape == (6, 2)
    shares = split({"y": group.feed["x"] * 2, "n": [1, 2, 3, 4, 5, 6]}, group.rows)
    for sample, share in zip(samples, shares, strict=True):
        np.testing.assert_array_equal(share["y"], sample["x"] * 2)
    assert [share["n"] for share in shares] == [[1], [2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    "other",
    [
        {"x": array(1, columns=3)},  # P82
        {"x": array(1, dtype="float64")},
        {"z": array(1)},
        {"x": array(1), "mode": "fast"},
        {"x": array(1), "extra": array(1)},
        {"x": np.float32(1)},
        {"x": np.ma.masked_array(array(1), mask=True)},
    ],
)
def test_what_does_not_fit_has_a_call_of_its_own(other: dict[str, Any]) -> None:  # P82
    samples = [{"x": array(1)}, other, {"x": array(2)}]
    groups = grouped(samples)
    assert [group.members for group in groups] == [[0, 2], [1]]
    assert groups[1].feed is other
    assert groups[1].rows == []


@pytest.mark.parametrize("one, other", [("fast", "exact"), (1, 1.0), ([1], [2]), (float("nan"), float("nan"))])
def test_options_that_differ_are_never_lost(one: Any, other: Any) -> None:  # P83
    assert len(grouped([{"x": array(1), "mode": one}, {"x": array(1), "mode": other}])) == 2


@pytest.mark.parametrize("option", ["fast", 3, None, [1, 2], {"a": "b"}])
def test_equal_options_share_a_call(option: Any) -> None:  # P83
    (group,) = grouped([{"x": array(1), "mode": option}, {"x": array(1), "mode": option}])
    assert group.feed["mode"] == option


@pytest.mark.parametrize("words", [["a", "b"], ("a", "b"), [[1, 2], [3, 4]]])
def test_lists_with_an_element_for_each_row_are_not_taken_for_options(words: Any) -> None:  # P83
    one, other = ({"x": array(2), "words": words} for _ in range(2))
    assert [group.members for group in grouped([one, other])] == [[0], [1]]
    assert len(grouped([{"x": array(1), "words": words}, {"x": array(1), "words": words}])) == 1


def test_names_that_are_no_texts_are_not_merged_and_cut_apart_as_others() -> None:  # P82
    assert len(grouped([{0: array(1), "x": array(1)}, {0: array(1), "x": array(1)}])) == 2  # pyright: ignore[reportArgumentType]
    shares: Any = split({0: array(3), 1: "v1"}, [1, 2])
    assert [(len(share[0]), share[1]) for share in shares] == [(1, "v1"), (2, "v1")]


def test_options_that_cannot_be_compared_are_not_merged() -> None:  # P83
    first, second = ({"x": array(1), "more": {"mask": array(1)}} for _ in range(2))
    assert len(grouped([first, second])) == 2
    assert len(grouped([first, {"x": array(1), "more": first["more"]}])) == 1


def test_values_without_rows_are_not_merged() -> None:  # P83: nothing would say which result is whose
    assert len(grouped([{"image": "a"}, {"image": "a"}])) == 2
    assert len(grouped([{"x": array(2), "y": array(3)}, {"x": array(2), "y": array(3)}])) == 2


def test_texts_of_different_lengths_are_stacked() -> None:  # P81
    (group,) = grouped([{"t": np.array(["a"])}, {"t": np.array(["long", "er"])}])
    assert list(group.feed["t"]) == ["a", "long", "er"]


@pytest.mark.parametrize("form", [list, np.array])
def test_offsets_are_shifted_when_sequences_are_joined(form: Any) -> None:  # P84
    one = {"words": np.arange(5), "words.lod": form([0, 2, 5])}
    other = {"words": np.arange(10, 14), "words.lod": form([0, 4])}
    (group,) = grouped([one, other])
    assert list(group.feed["words"]) == [0, 1, 2, 3, 4, 10, 11, 12, 13]
    assert list(group.feed["words.lod"]) == [0, 2, 5, 9]
    assert group.rows == [2, 1]

    # A model with one row for each sequence, and one that answers with sequences.
    shares = split({"score": np.array([[1.0], [2.0], [3.0]])}, group.rows)
    assert [share["score"].tolist() for share in shares] == [[[1.0], [2.0]], [[3.0]]]
    shares = split({"tag": group.feed["words"], "tag.lod": group.feed["words.lod"]}, group.rows)
    for sample, share in zip((one, other), shares, strict=True):
        assert list(share["tag"]) == list(sample["words"])
        assert list(share["tag.lod"]) == list(sample["words.lod"])


def test_offsets_of_several_levels_are_not_joined() -> None:  # P84
    deep = {"x": array(4), "x.lod": np.array([[0, 2], [0, 4]])}
    assert len(grouped([deep, deep])) == 2


@pytest.mark.parametrize(
    "result",
    [
        {"y": array(5)},
        {"y": [1, 2, 3, 4]},
        {"y": array(6), "y.lod": [0, 3, 6]},
        [1, 2, 3],
        "text",
    ],
)
def test_a_result_with_another_number_of_rows_is_refused(result: Any) -> None:  # P81
    with pytest.raises(ValueError, match="process returned"):
        split(result, [1, 3, 2])


def test_what_has_no_rows_goes_to_every_sample() -> None:  # P81
    shares = split({"y": array(2), "model": "v1", "scale": np.float32(2)}, [1, 1])
    assert [(share["model"], float(share["scale"])) for share in shares] == [("v1", 2.0)] * 2


def test_a_list_of_samples_gets_one_element_each() -> None:  # P44
    shares = one_each({"y": np.array([[1, 2], [3, 4]]), "model": "v1"}, 2)
    assert [share["y"].tolist() for share in shares] == [[1, 2], [3, 4]]
    assert one_each([{"y": 1}, {"y": 2}], 2) == [{"y": 1}, {"y": 2}]
    assert one_each({"t": np.arange(3), "t.lod": [0, 1, 3]}, 2)[1]["t"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="returned 1 row as 'y', the batch needs 2"):
        one_each({"y": [1]}, 2)


_arrays = st.tuples(st.integers(0, 4), st.integers(1, 3), st.sampled_from(["float32", "int64"]))
_samples = st.lists(st.tuples(_arrays, st.sampled_from(["fast", "exact"])), min_size=1, max_size=8)


@given(_samples)
@settings(max_examples=100, deadline=None)
def test_grouped_or_alone_every_sample_gets_the_result_of_its_own(plan: Any) -> None:  # P81, P82, P83
    def model(feed: Any) -> Any:
        return {"y": feed["x"] * (2 if feed["mode"] == "fast" else 3)}

    samples = [
        {"x": array(rows, columns, start=100 * place, dtype=dtype), "mode": mode}
        for place, ((rows, columns, dtype), mode) in enumerate(plan)
    ]
    answered: dict[int, Any] = {}
    for group in grouped(samples):
        result = model(group.feed)
        shares = split(result, group.rows) if group.rows else [result]
        answered |= dict(zip(group.members, shares, strict=True))
    assert sorted(answered) == list(range(len(samples)))
    for place, sample in enumerate(samples):
        np.testing.assert_array_equal(answered[place]["y"], model(sample)["y"])
        assert answered[place]["y"].dtype == model(sample)["y"].dtype
