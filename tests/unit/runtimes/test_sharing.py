# SPDX-License-Identifier: Apache-2.0
"""Whether samples share runs of a file: what it declares, held to what it does."""

from __future__ import annotations

import pytest
from tests.models import model_files

from forebay.runtimes import load
from forebay.runtimes.sharing import Sharing, sharing_of


def sharing(path):
    return sharing_of(load(path))


def test_a_free_first_axis_counts_samples(tmp_path):
    found = sharing(model_files.linear(tmp_path / "m.onnx"))
    assert (found.has_rows, found.is_padded) == (True, False)


def test_a_fixed_first_axis_does_not(tmp_path):
    assert sharing(model_files.linear(tmp_path / "m.onnx", rows=2)) == Sharing()


def test_an_axis_is_padded_where_outputs_are_as_long_and_can_be_cut(tmp_path):
    found = sharing(model_files.elementwise(tmp_path / "m.onnx"))
    assert found.feeds == {"ids": ("length",)}
    assert found.fetches == {"labels": ("length",)}


def test_an_axis_is_padded_where_a_mask_hides_it(tmp_path):
    found = sharing(model_files.masked_mean(tmp_path / "m.onnx"))
    assert found.feeds == {"values": ("length",), "mask": ("length",)}
    assert found.fetches == {"mean": ()}


def test_axes_without_a_name_are_tried_as_one(tmp_path):
    found = sharing(model_files.masked_mean(tmp_path / "m.onnx", names=(None, None)))
    assert found.feeds == {"values": ("1",), "mask": ("1",)}


@pytest.mark.parametrize("make", [model_files.mean, model_files.peak])
def test_an_axis_that_zeros_would_change_is_not_padded(tmp_path, make):
    found = sharing(make(tmp_path / "m.onnx"))
    assert (found.has_rows, found.is_padded) == (True, False)


@pytest.mark.parametrize(
    "make, why",
    [
        (model_files.one_inside, "cannot be run on 3 samples"),
        (model_files.across, "'y' is another one for a sample that has others beside it"),
    ],
)
def test_a_file_that_declares_what_is_not_so_is_not_believed(tmp_path, make, why):
    found = sharing(make(tmp_path / "m.onnx"))
    assert not found.has_rows
    assert why in found.why_not
