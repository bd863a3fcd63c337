# SPDX-License-Identifier: Apache-2.0
"""Picks the likeliest label."""

import json
from pathlib import Path

import numpy as np
from pyovms import Tensor


class OvmsPythonModel:
    def initialize(self, kwargs):
        self.labels = json.loads((Path(kwargs["base_path"]) / "out/labels.json").read_text())

    def execute(self, inputs):
        scores = np.array(inputs[0])[0]
        best = int(scores.argmax())
        return [Tensor("label", self.labels[best].encode()), Tensor("score", scores[best : best + 1])]
