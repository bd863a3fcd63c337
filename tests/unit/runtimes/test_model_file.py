# SPDX-License-Identifier: Apache-2.0
"""Model files that are loaded and asked from Python: `forebay.runtimes.load`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
from tests.models import model_files
from tests.waiting import PATIENCE_S

import forebay.runtimes
from forebay.errors import ConfigError, ForebayError, InvalidRequest, RunnerFailed, ValidationError
from forebay.runtimes import Device
from forebay.runtimes.library import OpenVinoOptions, RunOptions, accelerator
from forebay.runtimes.model_file import ModelFile, load_with, reason_of

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)


@pytest.fixture
def net(tmp_path):
    return forebay.runtimes.load(model_files.linear(tmp_path / "net.onnx"))


def test_a_file_says_what_it_takes_and_gives(net):
    signature = net.signature()
    (feed,), (fetch,) = signature.feeds, signature.fetches
    assert (feed.name, feed.dtype, feed.rows, feed.shape, feed.axes) == ("x", "float32", -1, (3,), ("n", ""))
    assert (fetch.name, fetch.dtype, fetch.rows, fetch.shape) == ("price", "float32", -1, (1,))


def test_it_is_asked_by_name_and_casts_to_its_types(net):
    assert net({"x": X.astype(np.float64)})["price"].tolist() == [[321.0], [654.0]]
    assert list(net({"x": X}, ["price"])) == ["price"]


@pytest.mark.parametrize(
    "arrays, wanted, kind, said",
    [
        ({"y": X}, (), InvalidRequest, "is fed y, and has x"),
        ({"x": X}, ["cost"], InvalidRequest, "is asked for cost, and has price"),
        ({"x": [[1, 2, 3]]}, (), ValidationError, "numpy.array"),
        ({"x": np.array([["a"]])}, (), ValidationError, "cannot be made float32"),
        ({"x": X[:, :2]}, (), RunnerFailed, "the model 'net.onnx' cannot be run on this"),
    ],
)
def test_what_it_cannot_be_asked_is_an_error_of_ours(net, arrays, wanted, kind, said):
    with pytest.raises(kind, match=said) as caught:
        net(arrays, wanted)
    assert caught.value.detail is None  # a pipeline's numbers are a pipeline's


@pytest.mark.parametrize("threads", [1, 2, None])
def test_what_openvino_cannot_compute_is_an_error_with_any_number_of_threads(tmp_path, threads):
    """With one it answered with arrays of no rows, and ended the process later."""
    pytest.importorskip("openvino")
    shapes = {name: ("FLOAT", ["n", f"length of {name}"]) for name in "ab"}
    path = model_files.save(
        tmp_path / "net.onnx",
        [("Add", ["a", "b"], ["sum"]), ("Softmax", ["sum"], ["y"], {"axis": 1})],
        [(name, *shape) for name, shape in shapes.items()],
        [("y", "FLOAT", ["n", "length"])],
    )
    options = RunOptions(threads=threads, openvino=OpenVinoOptions())
    net = load_with(path, options)
    for _ in range(3):
        with pytest.raises(RunnerFailed, match="cannot be run on this"):
            net({"a": np.ones((1, 5)), "b": np.ones((1, 7))})
        assert net({"a": np.ones((1, 4)), "b": np.ones((1, 4))})["y"].tolist() == [[0.25] * 4]


def test_a_file_of_openvino_is_asked_the_same_way(tmp_path):
    openvino = pytest.importorskip("openvino")
    path = model_files.linear(tmp_path / "net.onnx")
    openvino.save_model(openvino.Core().read_model(path), tmp_path / "net.xml", compress_to_fp16=False)
    net = forebay.runtimes.load(tmp_path / "net.xml", threads=1)
    assert net({"x": X})["price"].tolist() == [[321.0], [654.0]]
    (feed,) = net.signature().feeds
    assert (feed.dtype, feed.rows, feed.shape) == ("float32", -1, (3,))


@pytest.mark.filterwarnings("error")
def test_texts_go_through_openvino(tmp_path):
    openvino = pytest.importorskip("openvino")
    from openvino import opset13

    port = opset13.parameter([-1], openvino.Type.string, name="x")
    model: Any = openvino.Model
    openvino.save_model(model([opset13.result(port, name="y")], [port]), tmp_path / "net.xml")
    net = forebay.runtimes.load(tmp_path / "net.xml", threads=1)
    for texts in (["a", "bcd"], ["", "\u00e9\0x"], [""], []):
        (answer,) = net({"x": np.array(texts, object)}).values()
        assert (answer.dtype, answer.tolist()) == (object, texts)
    # F80: bytes that are no text go through as they are.
    (answer,) = net({"x": np.array([b"\x89PNG\0\xff", "\u00e9", b"ab"], object)}).values()
    assert answer.tolist() == [b"\x89PNG\0\xff", "\u00e9", "ab"]
    with pytest.raises(InvalidRequest, match=r"'x' has a text that ends in \\0"):
        net({"x": np.array(["a", "b\0"], object)})


@pytest.mark.parametrize("shape, is_scalar", [(None, False), ([], True)])
def test_a_tensor_of_which_an_onnx_file_says_no_shape_is_no_scalar(tmp_path, shape, is_scalar):  # F89
    axes = [("in", "FLOAT", shape)], [("out", "FLOAT", shape)]
    net = forebay.runtimes.load(model_files.save(tmp_path / "same.onnx", [("Identity", ["in"], ["out"])], *axes))
    (feed,) = net.signature().feeds
    assert (feed.rows, feed.shape, feed.is_scalar) == (None, (), is_scalar)


def test_onnxruntime_reports_nothing_to_its_maker(tmp_path):
    path = model_files.save(
        tmp_path / "same.onnx", [("Identity", ["in"], ["out"])], [("in", "FLOAT", ["n"])], [("out", "FLOAT", ["n"])]
    )
    code = f"import forebay.runtimes; forebay.runtimes.load({str(path)!r})"
    told = {name: value for name, value in os.environ.items() if name not in {"CI", "ORT_DISABLE_TELEMETRY"}}
    subprocess.run([sys.executable, "-c", code], env={**told, "HOME": str(tmp_path)}, check=True, timeout=PATIENCE_S)
    assert [file.name for file in tmp_path.iterdir()] == ["same.onnx"]  # no folder with the number of this machine


def test_what_a_library_says_is_told_to_its_end():  # F89
    said = f"{'a' * 1000} the end"
    assert reason_of(RuntimeError(said)) == f"RuntimeError: {said}" or reason_of(RuntimeError(said)) == said
    assert len(reason_of(RuntimeError("a" * 10_000))) < 2100


def test_bytes_that_are_no_text_reach_onnxruntime(tmp_path):  # F80
    model_files.save(
        tmp_path / "same.onnx",
        [("Equal", ["a", "b"], ["same"])],
        [("a", "STRING", ["n"]), ("b", "STRING", ["n"])],
        [("same", "BOOL", ["n"])],
        opset=19,
    )
    net = forebay.runtimes.load(tmp_path / "same.onnx", threads=1)
    picture = b"\x89PNG\0\xff\0"
    for given, other, same in (
        ([picture], [picture], [True]),
        ([picture], [picture[:-1] + b"\1"], [False]),
        ([picture, picture], [picture[::-1], picture], [False, True]),
        ([b"ab", "c"], ["ab", b"c"], [True, True]),
    ):
        (answer,) = net({"a": np.array(given, object), "b": np.array(other, object)}).values()
        assert answer.tolist() == same
    with pytest.raises(InvalidRequest, match="'a': expected UTF-8, or bytes of one length for onnxruntime"):
        net({"a": np.array([picture, b"a"], object), "b": np.array(["a", "b"], object)})


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("none.onnx", None, "none.onnx', and there is no such file or folder"),
        ("bad.onnx", b"no model", "bad.onnx cannot be loaded: it is not an ONNX file"),
        ("empty.onnx", b"", "empty.onnx cannot be loaded"),
        ("text.bin", b"text", "holds no model; expected an .onnx or .skops file"),
        ("bad.xml", b"<net>", "bad.xml cannot be loaded"),
    ],
)
def test_what_is_no_model_is_said_with_its_name(tmp_path, name, data, said):
    if name.endswith(".xml"):
        pytest.importorskip("openvino")
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        forebay.runtimes.load(tmp_path / name)


def test_a_library_that_is_missing_is_said_with_its_extra(tmp_path, monkeypatch):
    path = model_files.linear(tmp_path / "net.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[onnx\]'$"):
        forebay.runtimes.load(path)


@pytest.mark.parametrize(
    "text, device", [("cpu", None), ("gpu", Device("gpu", 0, "gpu")), ("cuda:1", Device("cuda", 1, "cuda:1"))]
)
def test_devices_are_read(text, device):
    assert accelerator(text) == device


@pytest.mark.parametrize("text", ["", "gpu:", "gpu:x", "0", "cuda 1"])
def test_what_is_no_device_is_told(text):
    with pytest.raises(ConfigError, match=r"expected a device such as cpu, .*, got "):
        accelerator(text)


@pytest.mark.parametrize("is_shared", [True, False])
def test_threads_take_turns_where_the_library_wants_that(is_shared, at_once):
    inside, most = [], []
    meet = threading.Barrier(2)

    def run(_feed, _fetch):
        inside.append(1)
        most.append(len(inside))
        if is_shared:
            meet.wait(PATIENCE_S)
        inside.pop()
        return []

    runtime: Any = types.SimpleNamespace(run=run, is_shared=is_shared)
    model = ModelFile("net", runtime)
    for found in at_once(*[lambda: model.run([], [])] * 2):
        assert not isinstance(found, ForebayError)
    if not is_shared:
        assert max(most) == 1
