# SPDX-License-Identifier: Apache-2.0
"""A model that takes 10 ms + 0.2 ms for each row, and no processor: what `benchmarks.policies.placement` simulates."""

import time
from typing import Any

from forebay import Model


class Sleeping(Model):
    max_batch_size = 16

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.010 + 0.0002 * len(batch))
        return batch
