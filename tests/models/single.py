# SPDX-License-Identifier: Apache-2.0
"""A single model, which also answers at `/`; takes as long as the sample says and tells the process it ran in."""

import os
import time

import forebay


class Sleepy(forebay.Model):
    """Sleeps for seconds, or until a file is there; answers with its sample and its process."""

    def predict(self, batch: list[float | str]) -> list[tuple[float | str, int]]:
        time.sleep(max((sample for sample in batch if not isinstance(sample, str)), default=0.0))
        while not all(os.path.exists(sample) for sample in batch if isinstance(sample, str)):  # noqa: PTH110
            time.sleep(0.005)
        return [(sample, os.getpid()) for sample in batch]
