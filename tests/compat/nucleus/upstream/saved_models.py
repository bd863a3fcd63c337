# SPDX-License-Identifier: Apache-2.0
"""Writes small SavedModels with the inputs and outputs that the original's examples ask for. Run by TensorFlow."""

import importlib
import sys
from pathlib import Path
from typing import Any

MEASURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


def write(folder):
    tf: Any = importlib.import_module("tensorflow")

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32, name=name) for name in MEASURES])
    def iris(sepal_length, sepal_width, petal_length, petal_width):
        del sepal_length, sepal_width, petal_width
        return {"class_ids": tf.reshape(tf.cast(petal_length > 2.5, tf.int64), [1])}

    def images(given, wanted, classes):
        @tf.function(input_signature=[tf.TensorSpec([None, 224, 224, 3], tf.float32, name=given)])
        def run(pictures):
            bright = tf.reduce_mean(pictures, [1, 2, 3])
            return {wanted: tf.one_hot(tf.cast(bright * 0, tf.int32) + 7, classes)}

        return run

    @tf.function(input_signature=[tf.TensorSpec([None, 128], tf.int32, name="input_ids")])
    def bert(input_ids):
        return {"labels": tf.cast(tf.reduce_sum(input_ids, 1) > 0, tf.int32)}

    for path, function in {
        "tensorflow/iris-classifier/nn/1": iris,
        "tensorflow/image-classifier/inception/1": images("images", "classes", 1001),
        "tensorflow/resnet50/1": images("input", "output", 1000),
        "tensorflow/sentiment-analyzer/bert/1": bert,
    }.items():
        module = tf.Module()
        module.function = function
        tf.saved_model.save(module, str(folder / path), signatures={"serving_default": function})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
