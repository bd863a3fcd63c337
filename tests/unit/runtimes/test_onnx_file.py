# SPDX-License-Identifier: Apache-2.0
"""What an ONNX file is read for without its library: the files that its weights lie in, and what it is made of."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tests.models import model_files

import forebay.runtimes
from forebay.errors import ConfigError
from forebay.repository.local_source import files_of_model
from forebay.runtimes import onnx_file
from forebay.runtimes.library import OpenVinoOptions, RunOptions
from forebay.runtimes.model_file import load_with
from forebay.runtimes.onnx_file import files_beside, read_onnx

X = np.ones((1, 1), np.float32)


def mapped(folder):
    """Returns the files of a folder that this process has in its memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def by_openvino(path, **options):
    return load_with(path, RunOptions(openvino=OpenVinoOptions(**options)))


def openvino_file(path):
    openvino = pytest.importorskip("openvino")
    outside = openvino.Core().read_model(model_files.outside(path))
    openvino.save_model(outside, path.with_suffix(".xml"), compress_to_fp16=False)
    return path.with_suffix(".xml"), path.with_suffix(".bin")


@pytest.fixture(params=["onnxruntime", "onnx in openvino", "openvino", "openvino with another shape"])
def loaded(request, tmp_path):
    """Returns a loaded model and the file with its weights."""
    if request.param == "onnxruntime":
        return forebay.runtimes.load(model_files.outside(tmp_path / "m.onnx")), tmp_path / "weights.bin"
    pytest.importorskip("openvino")
    if request.param == "onnx in openvino":
        return by_openvino(model_files.outside(tmp_path / "m.onnx")), tmp_path / "weights.bin"
    path, weights = openvino_file(tmp_path / "m.onnx")
    return by_openvino(path, batch="auto" if "shape" in request.param else ""), weights


def test_a_file_that_is_written_over_or_cut_changes_nothing_of_a_model_in_memory(loaded, tmp_path):
    # F91: weights stayed mapped, so that a copy over them changed answers, and a cut ended the process.
    model, weights = loaded
    assert mapped(tmp_path) == []
    before = model({"x": X})["y"]
    assert set(before.ravel()) == {1.0}
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert np.array_equal(model({"x": X})["y"], before)
    with weights.open("r+b") as file:
        file.truncate(0)
    assert np.array_equal(model({"x": X})["y"], before)


@pytest.mark.parametrize("name", ["weights.bin", "parts/one", "m.onnx.data"])
def test_the_files_that_a_file_names_belong_to_it(tmp_path, name):
    # F92: those whose name is not the model's were not looked at, and the old weights went on.
    path = model_files.outside(tmp_path / "m.onnx", name)
    (tmp_path / "other.bin").write_bytes(b"1")
    before = files_of_model(path)
    assert {file.path for file in before} == {"m.onnx", name}
    (tmp_path / name).write_bytes(b"2")
    assert files_of_model(path) != before


def test_weights_in_graphs_within_operators_and_in_attributes_are_files_as_well(tmp_path):
    # F92
    import onnx
    from onnx import helper, numpy_helper
    from onnx.external_data_helper import set_external_data

    def tensor(name):
        made = numpy_helper.from_array(np.ones(4, np.float32), name)
        set_external_data(made, location=f"{name}.bin", offset=0, length=16)
        made.ClearField("raw_data")
        return made

    info = helper.make_tensor_value_info
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=tensor("attribute"))],
        "inner",
        [],
        [info("c", 1, [4])],
        [tensor("inner")],
    )
    sparse = helper.make_sparse_tensor(tensor("values"), numpy_helper.from_array(np.arange(4)), [8])
    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], then_branch=inner, else_branch=inner)],
        "outer",
        [info("flag", 9, [])],
        [info("y", 1, [4])],
        sparse_initializer=[sparse],
    )
    called = helper.make_function(
        "own", "f", [], ["y"], [helper.make_node("Constant", [], ["y"], value=tensor("function"))], []
    )
    model = helper.make_model(graph, functions=[called], opset_imports=[helper.make_opsetid("", 17)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert onnx.load(tmp_path / "m.onnx", load_external_data=False) == model
    expected = {"attribute.bin", "function.bin", "inner.bin", "values.bin"}
    assert set(files_beside(tmp_path / "m.onnx")) == expected


def test_long_lists_of_numbers_and_texts_are_passed_over(tmp_path, monkeypatch):
    # A forest of 90,000 nodes took 48 seconds to read, and one of half a million was refused for its number of fields.
    import onnx
    from onnx import helper

    path = model_files.outside(tmp_path / "m.onnx")
    model = onnx.load(path, load_external_data=False)
    count = 50_000  # more than a chunk
    lists = {
        "floats": [0.5] * count,
        "ints": [1 << at % 60 for at in range(count)],
        "modes": ["BRANCH_LEQ", "LEAF", "l" * 127, "long" * 50] * (count // 4),
        "values": onnx.TensorProto(name="t", data_type=8, dims=[count], string_data=[b"text"] * count),
        "last": [1, -2],
    }
    model.graph.node.insert(0, helper.make_node("Forest", ["x"], ["f"], "forest", domain="own", **lists))
    path.write_bytes(model.SerializeToString())
    monkeypatch.setattr(onnx_file, "MAX_FIELDS", 40_000)
    forest, multiply = read_onnx(path).graph.operators
    assert (forest.outputs, multiply.inputs, files_beside(path)) == (["f"], ["x", "w"], ("weights.bin",))
    assert forest.ints["last"] == [1, -2]
    assert forest.ints["ints"][:4096] == lists["ints"][:4096]


def test_parameters_of_paddle_and_variables_of_tensorflow_belong_to_their_model(tmp_path):
    # F92: parameters may have another name; so have variables where the file of a SavedModel is named.
    for name in ("net.pdmodel", "weights.pdiparams", "a/__model__", "a/fc_0", "b/saved_model.pb", "b/variables/v"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    found = {path: {file.path for file in files_of_model(tmp_path / path)} for path in ("net.pdmodel", "a/__model__")}
    assert found == {"net.pdmodel": {"net.pdmodel", "weights.pdiparams"}, "a/__model__": {"__model__", "fc_0"}}
    assert {file.path for file in files_of_model(tmp_path / "b/saved_model.pb")} == {"saved_model.pb", "variables/v"}


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret", "a/../../secret", ".hidden", "gone.bin", "."])
def test_weights_are_only_read_beside_their_model(tmp_path, name):
    (tmp_path / "secret").write_bytes(bytes(4 << 16))
    folder = tmp_path / "models"
    folder.mkdir()
    path = model_files.outside(folder / "m.onnx", "!" * len(name))
    path.write_bytes(path.read_bytes().replace(b"!" * len(name), name.encode()))
    with pytest.raises(ConfigError) as refused:
        forebay.runtimes.load(path)
    assert f"its weights lie in '{name}'" in refused.value.message


def test_nonsense_is_refused_and_no_file_is_walked_for_ever(tmp_path, monkeypatch):
    path = model_files.elementwise(tmp_path / "m.onnx")
    whole = path.read_bytes()
    started = time.thread_time()
    for at in range(len(whole)):
        for byte in (0x00, 0x7F, 0xFF, whole[at] ^ 0x02):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                read_onnx(path)
            except ConfigError as refused:
                assert "m.onnx cannot be loaded: " in refused.message  # noqa: PT017 - some of them can be read
    assert time.thread_time() - started < 60
    monkeypatch.setattr(onnx_file, "MAX_FIELDS", 10)
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match="it has more than 10 fields"):
        read_onnx(path)
    assert files_beside(path) == ()
    monkeypatch.undo()
    deep = b""
    for _ in range(40):  # a node with an attribute that is a graph
        for field in (6, 5, 1):
            size = len(deep)
            deep = bytes([field << 3 | 2, size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + deep
    path.write_bytes(bytes([7 << 3 | 2, len(deep) & 0x7F | 0x80, len(deep) >> 7]) + deep)
    with pytest.raises(ConfigError, match="more than 32 deep"):
        read_onnx(path)
