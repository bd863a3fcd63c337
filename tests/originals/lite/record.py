# SPDX-License-Identifier: Apache-2.0
"""Writes the `.tflite` files here and `answers.json` with TensorFlow; run in the environment `tensorflow`.

`python tests/originals/lite/record.py` overwrites what is here: chances of three classes by four measures, for any
number of samples (`chances.tflite`) and for one (`one.tflite`), and what TensorFlow Lite's interpreter answers.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

tf: Any = import_module("tensorflow")
HERE = Path(__file__).parent
random = np.random.default_rng(7)


class Chances(tf.Module):
    """A layer and a softmax."""

    def __init__(self):
        super().__init__()
        self.weights = tf.constant(random.normal(size=(4, 3)).astype("f"))
        self.bias = tf.constant(random.normal(size=3).astype("f"))


def main():
    """Writes all files."""
    net = Chances()
    measures = random.normal(size=(9, 4)).astype("f")
    for name, rows in (("chances", None), ("one", 1)):
        given = tf.TensorSpec([rows, 4], tf.float32, name="x")
        chances = tf.function(lambda x: {"chances": tf.nn.softmax(x @ net.weights + net.bias)}, [given])
        made = tf.lite.TFLiteConverter.from_concrete_functions([chances.get_concrete_function()], net).convert()
        (HERE / f"{name}.tflite").write_bytes(made)
    ask = tf.lite.Interpreter(str(HERE / "one.tflite")).get_signature_runner()
    answers = [ask(x=one[None])["chances"][0].tolist() for one in measures]
    (HERE / "answers.json").write_text(json.dumps({"measures": measures.tolist(), "chances": answers}) + "\n")


if __name__ == "__main__":
    main()
