# SPDX-License-Identifier: Apache-2.0
"""Models of tensors: 600 KB that become 4 KB, and four floats that are doubled. `work/tensors.py` says what they do."""

from typing import Literal

import numpy as np
from benchmarks.work import tensors

from forebay import Model

Image = np.ndarray[tuple[Literal[150_528]], np.dtype[np.float32]]
Scores = np.ndarray[tuple[Literal[1024]], np.dtype[np.float32]]
Four = np.ndarray[tuple[Literal[4]], np.dtype[np.float32]]


class Large(Model):
    name = "large"
    max_batch_size = 64

    def predict(self, samples: list[Image]) -> list[Scores]:
        return [tensors.scores(sample) for sample in samples]


class Small(Model):
    name = "small"
    max_batch_size = 64

    def predict(self, samples: list[Four]) -> list[Four]:
        return [tensors.doubled(sample) for sample in samples]
