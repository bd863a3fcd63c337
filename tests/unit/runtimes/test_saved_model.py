# SPDX-License-Identifier: Apache-2.0
"""SavedModels from Python: what their file says, by OpenVINO in this process and by TensorFlow in another one."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tests.models.saved_models import run_tensorflow, saved_models

import forebay.runtimes
from forebay.errors import ConfigError, InvalidRequest
from forebay.runtimes.model_file import ModelFile
from forebay.runtimes.saved_model import chosen, folder_of, signatures_of
from forebay.runtimes.signature import Value

ROWS = [[1.0, 2.0, 3.0, 4.0], [0.0, -1.0, 0.5, 2.0]]

IN_TENSORFLOW = """
import json, sys
from pathlib import Path
import numpy as np
import forebay.runtimes
from forebay.errors import ForebayError
from forebay.runtimes.sharing import sharing_of
from forebay.runtimes.signature import Value
from forebay.server.config import Overrides
from forebay.surfaces.native.model_files import read_model_file
from forebay.workers.runner import RunnerSpec, WorkerContext
import msgspec

folder, rows = Path(sys.argv[1]), np.array(json.loads(sys.argv[2]), np.float32)


def load(name, **more):
    return forebay.runtimes.load(folder / name / "1", **more)


def told(found):
    return {name: [str(array.dtype), array.tolist()] for name, array in found.items()}


def refused(work):
    try:
        work()
    except ForebayError as error:
        return error.message


class Item(msgspec.Struct):
    body: bytes
    params: dict
    size: int = 1


def asked(spec):
    # Both signatures, as a worker process builds its runner.
    runner = RunnerSpec(spec.factory, msgspec.msgpack.decode(msgspec.msgpack.encode(spec.kwargs))).build()
    runner.open(WorkerContext())
    plain = {"in": "json", "out": "json"}
    given = [Item(b'{"x": [1, 2, 3, 4]}', params) for params in (plain, {**plain, "call": "total"})]
    found = [json.loads(runner.run([item])[0]) for item in given]
    together = [Item(body, {**plain, "call": "total"}) for body in (b'{"x": [1e99, 0, 0, 0]}', b'{"x": [1, 2, 3, 4]}')]
    return [*found, *[getattr(one, "error", one) is one and json.loads(one) for one in runner.run(together)]]


scalar = load("scalar")
numbers = np.array([-1, 0, 2.5], np.float32)
print(json.dumps({
    "iris": told(load("iris")({"x": rows})),
    "keras": told(load("keras")({"x": rows})),
    "total": told(load("two", signature="total")({"x": rows})),
    "two": told(load("two")({"x": rows})),
    "texts": told(load("texts")({"texts": np.array(["a", "b\u00fc"], object)})),
    "types": told(load("types")({"x": numbers})),
    "sum": scalar.run(
        [(var, Value(np.array(2, np.float32))) for var in scalar.signature().feeds], scalar.signature().fetches
    )[0].array.tolist(),
    "has_rows": {name: sharing_of(load(name)).has_rows for name in ("iris", "picky", "scalar", "texts")},
    "shape": refused(lambda: load("iris")({"x": rows[:, :2]})),
    "several": refused(lambda: load("several")),
    "unknown": refused(lambda: load("two", signature="totals")),
    "runner": asked(read_model_file(folder / "two/1", Overrides()).spec),
}))
"""


@pytest.fixture(scope="module")
def in_tensorflow(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "ask.py"
    script.write_text(IN_TENSORFLOW)
    return json.loads(run_tensorflow(str(script), str(saved_models()), json.dumps(ROWS)))


def load(name, version="1", **more):
    return forebay.runtimes.load(saved_models() / name / version, **more)


def softmax(rows):
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


SCORES = softmax(np.array(ROWS, np.float32) @ (np.arange(12, dtype=np.float32).reshape(4, 3) / 10))


@pytest.mark.parametrize("name", ["iris", "keras", "plain"])
def test_openvino_runs_a_saved_model(name):  # N104: `plain` has no variables
    found = load(name)({"x": np.array(ROWS)})
    assert found["class_ids"].tolist() == SCORES.argmax(1).tolist()
    np.testing.assert_allclose(found["scores"], SCORES, rtol=1e-5)  # not in bf16, as OpenVINO likes to


def test_openvino_reports_to_nobody_that_it_is_used():
    code = """
import os, sys
os.register_at_fork(before=lambda: print("forked"))
import forebay.runtimes
forebay.runtimes.load(sys.argv[1])
print(sys.modules.get("openvino_telemetry"))
"""
    command = [sys.executable, "-c", code, str(saved_models() / "iris/1")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "None\n"


def test_no_library_of_openvino_leaves_the_process_with_the_last_model():
    """One did that, beside a thread that was loading a model, and the process crashed."""
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
import forebay.runtimes

def libraries():
    with open("/proc/self/maps") as file:
        return {line.split()[-1] for line in file if "openvino" in line and ".so" in line}

with ThreadPoolExecutor(4) as threads:
    models = list(threads.map(forebay.runtimes.load, sys.argv[1:] * 4))
    assert len({id(model.runtime) for model in models}) == 4
loaded = libraries()
assert any("plugin" in path for path in loaded)
models.clear()
print(sorted(loaded - libraries()))
"""
    command = [sys.executable, "-c", code, str(saved_models() / "plain/1")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_file_says_what_it_takes_and_gives():
    signature = load("iris").signature()
    told = [(var.name, var.dtype, var.rows, var.shape) for var in (*signature.feeds, *signature.fetches)]
    assert told == [("x", "float32", -1, (4,)), ("class_ids", "int64", -1, ()), ("scores", "float32", -1, (3,))]
    several = signatures_of(saved_models() / "two/1")
    assert list(several) == ["predict", "total"]  # and not the one that TensorFlow writes for itself
    assert [var.name for var in several["total"].fetches] == ["total"]
    assert signatures_of(saved_models() / "texts/1")["serving_default"].feeds[0].datatype == "BYTES"
    assert signatures_of(saved_models() / "scalar/1")["serving_default"].feeds[0].rows is None


@pytest.mark.parametrize(
    "names, wanted, found",
    [
        (["a"], None, "a"),
        (["a", "serving_default"], None, "serving_default"),
        (["a", "predict"], None, "predict"),
        (["a", "b"], None, None),
        (["a", "b"], "b", "b"),
        (["a", "b"], "c", None),
    ],
)
def test_which_signature_is_meant(names, wanted, found):
    assert chosen(names, wanted) == found


@pytest.mark.parametrize(
    "name, signature, said",
    [
        ("two", "totals", "no signature 'totals' that would be meant, but 'predict', 'total'"),
        ("several", None, "no signature that would be meant, but 'a', 'b'; name one of them"),
        ("two", None, "several signatures and no 'serving_default', which TensorFlow runs; pip install"),
        ("keras", "serve", "'serve' beside 'serving_default' is run by TensorFlow only; pip install"),
        ("texts", None, r"OpenVINO cannot run it \(No conversion rule .*StringUpper\); TensorFlow can: pip install"),
    ],
)
def test_what_openvino_cannot_run_is_told(name, signature, said):
    with pytest.raises(ConfigError, match=said):
        load(name, signature=signature)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\xff\xff no model", "saved_model.pb cannot be read: expected a SavedModel"),
        (b"", "no graph with the tag 'serve', only none"),
        (b"\x12\x02\x0a\x00", "no graph with the tag 'serve', only none"),
        (b"\x12\x0c\x0a\x0a\x22\x08training", "no graph with the tag 'serve', only training"),
        (b"\x12\x09\x0a\x07\x22\x05serve", "holds no signature"),
    ],
)
def test_a_file_that_is_no_saved_model(tmp_path, content, said):
    (tmp_path / "saved_model.pb").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        forebay.runtimes.load(tmp_path)


def test_weights_that_are_missing(tmp_path):
    folder = tmp_path / "iris"
    shutil.copytree(saved_models() / "iris/1", folder)
    shutil.rmtree(folder / "variables")
    with pytest.raises(ConfigError, match="cannot"):
        forebay.runtimes.load(folder)


def test_folder_and_file_mean_the_same(tmp_path):
    iris = saved_models() / "iris/1"
    assert folder_of(iris) == folder_of(iris / "saved_model.pb") == iris
    assert folder_of(tmp_path) is None
    assert folder_of(tmp_path / "saved_model.pb") is None


def test_a_shape_that_does_not_fit():
    with pytest.raises(InvalidRequest, match=r"'x' has the shape \[2, 2\], and the model takes"):
        load("iris")({"x": np.array(ROWS)[:, :2]})


def test_without_an_axis_of_samples():
    scalar = load("scalar")
    assert isinstance(scalar, ModelFile)
    feeds = [(var, Value(np.array(2, np.float32))) for var in scalar.signature().feeds]
    assert scalar.run(feeds, scalar.signature().fetches)[0].array == 4


def test_tensorflow_answers_the_same(in_tensorflow):
    for name in ("iris", "keras", "two"):
        kind, ids = in_tensorflow[name]["class_ids"]
        assert (kind, ids) == ("int64", SCORES.argmax(1).tolist())
        np.testing.assert_allclose(in_tensorflow[name]["scores"][1], SCORES, rtol=1e-5)


def test_tensorflow_runs_what_openvino_cannot(in_tensorflow):
    assert in_tensorflow["total"] == {"total": ["float32", [10.0, 1.5]]}
    assert in_tensorflow["texts"] == {"length": ["int32", [1, 3]], "upper": ["object", ["A", "B\u00fc"]]}
    assert in_tensorflow["sum"] == 4


def test_types_of_tensorflow(in_tensorflow):
    types = {name: told for name, (told, _) in in_tensorflow["types"].items()}
    assert types.pop("string") == "object"
    assert types == {name: name for name in types}
    assert len(types) == 9
    assert in_tensorflow["types"]["int16"][1] == [-1, 0, 2]
    assert in_tensorflow["types"]["string"][1] == ["-1", "0", "2"]


def test_what_tensorflow_is_not_asked_is_told(in_tensorflow):
    assert "cannot be run on this" in in_tensorflow["shape"]
    assert "but 'a', 'b'; name one of them" in in_tensorflow["several"]
    assert "no signature 'totals' that would be meant, but 'predict', 'total'" in in_tensorflow["unknown"]


def test_how_samples_share_a_run_of_tensorflow(in_tensorflow):
    assert in_tensorflow["has_rows"] == {"iris": True, "picky": False, "scalar": False, "texts": True}


def test_a_worker_process_runs_every_signature(in_tensorflow):
    main, total, failed, beside = in_tensorflow["runner"]
    assert main["class_ids"] == 2
    assert total == beside == {"total": 10}
    assert failed is False  # a number that is no FP32, alone
