# SPDX-License-Identifier: Apache-2.0
"""SavedModels for tests: written once by TensorFlow, in an environment of its own, and kept beside it.

iris      x FP32[-1,4] -> class_ids INT64[-1], scores FP32[-1,3]
keras     the same, as Keras exports it: also with the signature `serve`
two       no serving_default: the signatures `predict` and `total`
several   signatures `a` and `b` only
texts     texts BYTES[-1] -> length, upper; OpenVINO cannot run it
scalar    x, y FP32[] -> sum: no axis of samples
types     x FP32[-1] -> an output of each of ten types
images    images FP32[-1,-1,-1,1] -> mean: any size
picky     x FP32[-1,2] -> total FP32[]: not by sample
examples  serialized tf.Examples -> classes and scores (`classify`), outputs (`regress`)
plain     as iris, without variables
half_plus_two  the model of TensorFlow Serving's own tests, version 123: y = x / 2 + 2, classify_x_to_y, regress_x_to_y
photos    image_bytes BYTES[-1], encoded images -> scores, classes; the signature `classify` takes tf.Examples of these
"""

import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv/environments/tensorflow"
PYTHON = ENVIRONMENT / "bin/python"
SOURCE = Path(__file__).resolve().parents[2] / "src"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}


def _require_tensorflow():
    if sys.version_info >= (3, 14) and not PYTHON.exists():
        import pytest  # TensorFlow's own environment, which runs this file as well, has none

        pytest.skip("TensorFlow has no wheels for this Python", allow_module_level=True)
    assert PYTHON.exists(), "make setup builds the environments of tests/environments"


@functools.cache
def saved_models():
    """The folder with a folder for each model, and its versions in it."""
    _require_tensorflow()
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    folder = ENVIRONMENT / f"models-{digest}"
    with (ENVIRONMENT / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            coming = folder.with_suffix(".coming")
            shutil.rmtree(coming, ignore_errors=True)
            run_tensorflow(__file__, str(coming))
            coming.rename(folder)
    return folder


def run_tensorflow(*arguments, **more):
    """Runs a script where TensorFlow is installed; returns what it prints."""
    _require_tensorflow()
    env = {**os.environ, **QUIET, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [str(PYTHON), "-P", *arguments],  # beside the script lies a `requests.py`
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        **more,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def write(folder):
    import numpy as np

    tf: Any = importlib.import_module("tensorflow")

    def spec(shape, dtype, name):
        return tf.TensorSpec(shape, dtype, name=name)

    weights = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
    variable = tf.Variable(weights)
    four = spec([None, 4], tf.float32, "x")

    @tf.function(input_signature=[four])
    def iris(x):
        scores = tf.nn.softmax(x @ variable)
        return {"scores": scores, "class_ids": tf.argmax(scores, 1)}

    @tf.function(input_signature=[four])
    def turned(x):
        scores = tf.nn.softmax(-x @ variable)
        return {"scores": scores, "class_ids": tf.argmax(scores, 1)}

    @tf.function(input_signature=[four])
    def total(x):
        return {"total": tf.reduce_sum(x, 1)}

    @tf.function(input_signature=[spec([None], tf.string, "texts")])
    def texts(texts):
        return {"upper": tf.strings.upper(texts), "length": tf.strings.length(texts)}

    @tf.function(input_signature=[spec([], tf.float32, "x"), spec([], tf.float32, "y")])
    def scalar(x, y):
        return {"sum": x + y}

    @tf.function(input_signature=[spec([None], tf.float32, "x")])
    def types(x):
        kinds = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "bool")
        return {**{kind: tf.cast(x, kind) for kind in kinds}, "string": tf.strings.as_string(tf.cast(x, tf.int32))}

    @tf.function(input_signature=[spec([None, None, None, 1], tf.float32, "images")])
    def images(images):
        return {"mean": tf.reduce_mean(images, [1, 2, 3])}

    @tf.function(input_signature=[spec([None, 2], tf.float32, "x")])
    def picky(x):
        return {"total": tf.reduce_sum(x)}

    def parsed(serialized):
        return tf.io.parse_example(serialized, {"x": tf.io.FixedLenFeature([4], tf.float32)})["x"]

    @tf.function(input_signature=[spec([None], tf.string, "inputs")])
    def classify(inputs):
        scores = tf.nn.softmax(parsed(inputs) @ variable)
        names = tf.constant(["setosa", "versicolor", "virginica"])
        return {"scores": scores, "classes": tf.tile(names[tf.newaxis], [tf.shape(inputs)[0], 1])}

    @tf.function(input_signature=[four])
    def plain(x):
        scores = tf.nn.softmax(x @ weights)
        return {"scores": scores, "class_ids": tf.argmax(scores, 1)}

    half, two = tf.Variable(0.5), tf.Variable(2.0)

    def half_plus_two(x):
        return half * x + two

    def first(serialized):
        return tf.io.parse_example(serialized, {"x": tf.io.FixedLenFeature([1], tf.float32)})["x"]

    @tf.function(input_signature=[spec([None, 1], tf.float32, "x")])
    def predict_x_to_y(x):
        return {"y": half_plus_two(x)}

    @tf.function(input_signature=[spec([None], tf.string, "inputs")])
    def classify_x_to_y(inputs):
        return {"scores": half_plus_two(first(inputs))}

    @tf.function(input_signature=[spec([None], tf.string, "inputs")])
    def regress_x_to_y(inputs):
        return {"outputs": half_plus_two(first(inputs))}

    def seen(encoded):
        picture = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return tf.reduce_mean(tf.cast(picture, tf.float32), [0, 1])  # how red, green and blue it is

    def looked(image_bytes):
        scores = tf.nn.softmax(tf.map_fn(seen, image_bytes, fn_output_signature=tf.float32))
        names = tf.constant(["red", "green", "blue"])
        return {"scores": scores, "classes": tf.tile(names[tf.newaxis], [tf.shape(image_bytes)[0], 1])}

    @tf.function(input_signature=[spec([None], tf.string, "image_bytes")])
    def photos(image_bytes):
        return looked(image_bytes)

    @tf.function(input_signature=[spec([None], tf.string, "inputs")])
    def classified_photos(inputs):
        feature = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
        return looked(tf.io.parse_example(inputs, feature)["image/encoded"])

    def keep(name, function, version="1", **more):
        module = tf.Module()
        module.variable, module.function = variable, function
        signatures = more or {"serving_default": function}
        tf.saved_model.save(module, str(folder / name / version), signatures=signatures)

    keep("iris", iris)
    keep("iris", turned, "2")
    keep("keras", iris, serve=iris, serving_default=iris)
    keep("two", iris, predict=iris, total=total)
    keep("several", iris, a=iris, b=total)
    keep("texts", texts)
    keep("scalar", scalar)
    keep("types", types)
    keep("images", images)
    keep("picky", picky)
    keep("examples", classify)
    keep("photos", photos, serving_default=photos, classify=classified_photos)
    module = tf.Module()
    module.variables_of_it = half, two
    tested = {"serving_default": predict_x_to_y, "classify_x_to_y": classify_x_to_y, "regress_x_to_y": regress_x_to_y}
    tf.saved_model.save(module, str(folder / "half_plus_two/123"), signatures=tested)
    tf.saved_model.save(tf.Module(), str(folder / "plain/1"), signatures={"serving_default": plain})
    shutil.rmtree(folder / "plain/1/variables")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
