# SPDX-License-Identifier: Apache-2.0
"""Whether samples share runs of a file: what it declares, held to what it does."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from onnx import helper
from tests.models import model_files

from forebay.runtimes import load
from forebay.runtimes.onnx import OnnxRuntime
from forebay.runtimes.onnx_file import read_onnx
from forebay.runtimes.onnx_operators import over_samples
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


def test_what_answers_one_number_whatever_it_is_asked_shows_nothing_of_padding(tmp_path):
    # F90: a network that made-up values had brought to its limit was padded, and answered otherwise to pictures.
    path = model_files.save(
        tmp_path / "m.onnx",
        [("ReduceMean", ["x"], ["mean"], {"axes": [1], "keepdims": 0}), ("Clip", ["mean", "low", "low"], ["y"])],
        [("x", "FLOAT", ["n", "length"])],
        [("y", "FLOAT", ["n"])],
        [("low", np.float32(7))],
    )
    found = sharing(path)
    assert (found.has_rows, found.is_padded) == (True, False)


@pytest.mark.parametrize(
    "make, why",
    [
        (model_files.one_inside, "cannot be run on 3 samples"),
        (model_files.across, "'y' is another one for a sample that has others beside it"),
        (model_files.trained, "'y' is another one for a sample that has others beside it"),
        (model_files.quantised, "'y' is another one for a sample that has others beside it"),  # F90
    ],
)
def test_a_file_that_declares_what_is_not_so_is_not_believed(tmp_path, monkeypatch, make, why):
    monkeypatch.setattr(OnnxRuntime, "over_samples", lambda _self: "")
    found = sharing(make(tmp_path / "m.onnx"))
    assert not found.has_rows
    assert why in found.why_not


@pytest.mark.parametrize(
    "make, operator",
    [
        (model_files.across, "Softmax"),
        (model_files.trained, "BatchNormalization"),
        (model_files.quantised, "DynamicQuantizeLinear"),
        (partial(model_files.quantised, labels=True), "DynamicQuantizeLinear"),
    ],
)
def test_operators_over_all_samples_are_known_by_name(tmp_path, make, operator):
    # F90: what such a file answers may be so coarse that no values that are made up show it.
    found = sharing(make(tmp_path / "m.onnx"))
    assert not found.has_rows
    assert f"its operator {operator}" in found.why_not


FLOATS = ("FLOAT", ["n", 4])
AXIS = {name: np.array(axes, np.int64) for name, axes in (("first", [0]), ("last", [-1]), ("both", [0, 1]))}


@pytest.mark.parametrize(
    "nodes, is_over",
    [
        ([("ReduceSum", ["x", "first"], ["y"])], True),
        ([("ReduceSum", ["x", "last"], ["y"])], False),
        ([("ReduceSum", ["x", "both"], ["y"])], True),
        ([("ReduceSum", ["x"], ["y"])], True),
        ([("ReduceSum", ["x"], ["y"], {"noop_with_empty_axes": 1})], False),
        ([("ReduceMax", ["x"], ["y"], {"axes": [-2]})], True),
        ([("Transpose", ["x"], ["t"], {"perm": [1, 0]}), ("ReduceMax", ["t"], ["y"], {"axes": [0]})], False),
        ([("Transpose", ["x"], ["t"], {"perm": [1, 0]}), ("ReduceMax", ["t"], ["y"], {"axes": [1]})], True),
        ([("Unsqueeze", ["x", "first"], ["u"]), ("Softmax", ["u"], ["y"], {"axis": 1})], True),
        ([("Unsqueeze", ["x", "first"], ["u"]), ("Softmax", ["u"], ["y"], {"axis": 0})], False),
        ([("Shape", ["x"], ["s"]), ("ReduceProd", ["s"], ["y"], {"axes": [0]})], False),
        ([("NonZero", ["x"], ["y"])], True),
        ([("Shape", ["x"], ["s"]), ("NonZero", ["s"], ["y"])], False),
        ([("TopK", ["x", "first"], ["y", "i"], {"axis": 0})], True),
        ([("TopK", ["x", "first"], ["y", "i"])], False),
        ([("Unique", ["x"], ["y"])], True),
        ([("Unique", ["x"], ["y"], {"axis": 1})], False),
        ([("CumSum", ["x", "zero"], ["y"])], True),
        ([("ArgMax", ["x"], ["y"])], True),
        ([("BatchNormalization", ["x"] + ["w"] * 4, ["y"])], False),
        ([("LSTM", ["u", "w", "w"], ["y"])], True),
        ([("Transpose", ["u"], ["t"], {"perm": [1, 0, 2]}), ("LSTM", ["t", "w", "w"], ["y"])], False),
        ([("MeanVarianceNormalization", ["x"], ["y"])], True),
        ([("MeanVarianceNormalization", ["x"], ["y"], {"axes": [1]})], False),
        ([("Gather", ["w", "x"], ["e"], {"axis": 0}), ("ReduceMax", ["e"], ["y"], {"axes": [0]})], True),
        ([("Gather", ["w", "x"], ["e"], {"axis": 0}), ("ReduceMax", ["e"], ["y"], {"axes": [2]})], False),
    ],
    ids=lambda one: "-".join(node[0] for node in one) if isinstance(one, list) else None,
)
def test_what_is_over_samples_follows_from_the_axis_that_counts_them(tmp_path, nodes, is_over):
    constants = [*AXIS.items(), ("zero", np.int64(0)), ("w", np.ones(4, np.float32))]
    path = model_files.save(
        tmp_path / "m.onnx", nodes, [("x", *FLOATS), ("u", "FLOAT", ["n", 3, 4])], [("y", *FLOATS)], constants
    )
    assert bool(over_samples(read_onnx(path), ["x", "u"])) == is_over


def graph_of(nodes, inputs, outputs):
    info = helper.make_tensor_value_info
    made = [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes]
    return helper.make_graph(
        made, "inner", [info(one, 1, None) for one in inputs], [info(one, 1, None) for one in outputs]
    )


TURN = graph_of([("Identity", ["go"], ["g"]), ("Mul", ["v", "v"], ["o"])], ["i", "go", "v"], ["g", "o"])
SUMMED = graph_of([("Identity", ["go"], ["g"]), ("ReduceSum", ["v", "first"], ["o"])], ["i", "go", "v"], ["g", "o"])
UNTIL = graph_of([("ReduceMax", ["v"], ["g"], {"axes": [1]}), ("Mul", ["v", "v"], ["o"])], ["i", "go", "v"], ["g", "o"])
STEP = graph_of([("Add", ["s", "r"], ["t"]), ("Identity", ["t"], ["o"])], ["s", "r"], ["t", "o"])
SCAN = {"body": STEP, "num_scan_inputs": 1}
YES, NO = graph_of([("Mul", ["x", "x"], ["o"])], [], ["o"]), graph_of([("NonZero", ["x"], ["o"])], [], ["o"])


@pytest.mark.parametrize(
    "nodes, is_over",
    [
        ([("Loop", ["zero", "flag", "x"], ["y"], {"body": TURN})], False),
        ([("Loop", ["zero", "flag", "x"], ["y"], {"body": SUMMED})], True),
        ([("Loop", ["zero", "flag", "x"], ["y"], {"body": UNTIL})], True),
        ([("Loop", ["x", "flag", "x"], ["y"], {"body": TURN})], True),
        ([("Scan", ["w", "x"], ["t", "y"], SCAN)], True),
        ([("Scan", ["w", "x"], ["t", "y"], {**SCAN, "scan_input_axes": [1]})], False),
        ([("If", ["flag"], ["y"], {"then_branch": YES, "else_branch": YES})], False),
        ([("If", ["flag"], ["y"], {"then_branch": YES, "else_branch": NO})], True),
        ([("If", ["x"], ["y"], {"then_branch": YES, "else_branch": YES})], True),
    ],
    ids=lambda one: one[0][0] if isinstance(one, list) else None,
)
def test_graphs_within_operators_are_gone_through(tmp_path, nodes, is_over):
    constants = [*AXIS.items(), ("zero", np.int64(3)), ("flag", np.array(True)), ("w", np.ones(4, np.float32))]
    path = model_files.save(tmp_path / "m.onnx", nodes, [("x", *FLOATS)], [("y", *FLOATS)], constants)
    assert bool(over_samples(read_onnx(path), ["x"])) == is_over


def test_operators_are_known_in_files_of_openvino_as_well(tmp_path):
    openvino = pytest.importorskip("openvino")
    for name, make, operator in (("linear", model_files.linear, ""), ("across", model_files.across, "Softmax")):
        openvino.save_model(openvino.Core().read_model(make(tmp_path / f"{name}.onnx")), tmp_path / f"{name}.xml")
        assert operator in sharing(tmp_path / f"{name}.xml").why_not
        assert sharing(tmp_path / f"{name}.xml").has_rows == (not operator)


def test_a_model_that_answers_otherwise_each_time_may_share_runs(tmp_path):
    path = model_files.save(
        tmp_path / "m.onnx",
        [("RandomNormalLike", ["x"], ["r"], {"scale": 0.01}), ("Add", ["x", "r"], ["y"])],
        [("x", *FLOATS)],
        [("y", *FLOATS)],
    )
    assert sharing(path).has_rows


def test_a_model_that_cannot_be_run_on_what_is_made_up_shares_no_runs(tmp_path):
    # F90: it was believed.
    path = model_files.save(
        tmp_path / "m.onnx",
        [("Add", ["at", "far"], ["there"]), ("Gather", ["rows", "there"], ["row"], {"axis": 0})],
        [("at", "INT64", ["n"])],
        [("row", "FLOAT", ["n", 2])],
        [("far", np.int64(-9)), ("rows", np.ones((4, 2), np.float32))],
    )
    found = sharing(path)
    assert (found.has_rows, found.is_padded) == (True, False)  # a sample is what the file declares
    assert "cannot be run on values that are made up" in found.why_not
