# SPDX-License-Identifier: Apache-2.0
"""A single model, which also answers at `/`; sleeps as long as the sample says and tells the process it ran in."""

import os
import time

import forebay


class Sleepy(forebay.Model):
    """Answers with its sample and its process."""

    def predict(self, batch: list[float]) -> list[tuple[float, int]]:
        time.sleep(max(batch))
        return [(sample, os.getpid()) for sample in batch]
