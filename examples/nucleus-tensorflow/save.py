# SPDX-License-Identifier: Apache-2.0
"""Writes the networks as SavedModels."""

from pathlib import Path

import numpy as np
import tensorflow as tf

OUT = Path(__file__).resolve().parent / "out"


class Network(tf.Module):
    def __init__(self, weights):
        self.first, self.bias, self.second, self.last = (
            tf.Variable(weights[name].astype(np.float32)) for name in ("first", "bias", "second", "last")
        )

    @tf.function
    def classify(self, numbers):
        hidden = tf.nn.relu(numbers @ self.first + self.bias)
        scores = tf.nn.softmax(hidden @ self.second + self.last)
        return {"scores": scores, "class_ids": tf.argmax(scores, 1)}


for file in sorted((OUT / "weights").glob("*.npz")):
    network = Network(np.load(file))
    given = tf.TensorSpec([None, network.first.shape[0]], tf.float32, name="numbers")
    signatures = {"predict": network.classify.get_concrete_function(given)}
    tf.saved_model.save(network, str(OUT / "models" / file.stem / "1"), signatures=signatures)
