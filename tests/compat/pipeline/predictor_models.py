# SPDX-License-Identifier: Apache-2.0
"""Models that are Python callables, and a small ONNX model with a description in the original's form."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

REFERENCE = "tests.compat.pipeline.predictor_models"

DESCRIPTION = """
feed_var {{
  name: "{feed}"
  alias_name: "x"
  is_lod_tensor: false
  feed_type: {type}
  shape: 3
}}
fetch_var {{ name: "{fetch}" alias_name: "price" fetch_type: 1 shape: 1 }}
fetch_var {{ name: "{second}" alias_name: "doubled" fetch_type: 1 shape: 1 }}
"""
WEIGHTS = np.array([[1.0], [10.0], [100.0]], np.float32)
X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
PRICES = X @ WEIGHTS


def twice(feed):
    return {"y": feed["x"] * 2, "pid": np.array([os.getpid()])}


def hangs(feed):
    if feed["x"].min() < 0:
        threading.Event().wait()
    return twice(feed)


_BEGUN = []


def warms_up(feed):
    if not _BEGUN:
        _BEGUN.append(True)
        time.sleep(2)
    return twice(feed)


def broken(feed):
    raise ValueError("it is broken")


def listed(feed):
    return [feed]


class Counter:
    """Made once for each predictor; tells who calls it."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.calls = 0

    def __call__(self, feed):
        self.calls += 1
        return {"calls": np.array([self.calls]), "thread": np.array([threading.get_ident()])}


def describe(folder, *, feed="in", fetch="out", second="twice", type=1, name="serving_server_conf.prototxt"):
    """Writes the description of the model."""
    (Path(folder) / name).write_text(DESCRIPTION.format(feed=feed, fetch=fetch, second=second, type=type))


def onnx_model(folder, *, weights=WEIGHTS, bias=None, names=("in", "out", "twice"), described=True):
    """Writes a model that multiplies three numbers by their weights, and gives the double beside it; its folder."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    feed, fetch, second = names
    bias = np.zeros(1, np.float32) if bias is None else bias
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [feed, "w"], ["m"]),
            helper.make_node("Add", ["m", "b"], [fetch]),
            helper.make_node("Add", [fetch, fetch], [second]),
        ],
        "linear",
        [helper.make_tensor_value_info(feed, TensorProto.FLOAT, ["n", len(weights)])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in (fetch, second)],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(bias, "b")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), folder / "model.onnx"
    )
    if described:
        describe(folder)
    return folder
