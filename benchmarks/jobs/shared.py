# SPDX-License-Identifier: Apache-2.0
"""The shared job as a native model."""

from typing import Any

from benchmarks.work import shared

from forebay import Model


class Shared(Model):
    def load(self) -> None:
        self.run = shared.load()

    def predict(self, batch: list[int]) -> list[Any]:
        return self.run(batch)
