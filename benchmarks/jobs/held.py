# SPDX-License-Identifier: Apache-2.0
"""The echo job, but for who asks that its answer be held."""

import time
from typing import Any

from forebay import Model


class Held(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(max(row.get("held_s", 0) for row in batch))
        return batch
