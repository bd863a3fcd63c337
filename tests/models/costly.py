# SPDX-License-Identifier: Apache-2.0
"""Models whose answers say what they have cost."""

import time
from collections.abc import Iterator

import forebay

MS = 4


class Costly(forebay.Model):
    """Needs some milliseconds for each sample."""

    name = "costly"
    max_batch_size = 4

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(MS / 1000 * len(batch))
        if max(batch) > 9:
            message = "too much"
            raise ValueError(message)
        return batch


class CostlyParts(forebay.Model):
    """Streams some parts."""

    name = "parts"

    def predict(self, batch: list[int]) -> Iterator[list[int]]:
        for number in range(3):
            time.sleep(MS / 1000)
            yield [number for _ in batch]
