# SPDX-License-Identifier: Apache-2.0
"""The iris job as a native model."""

from typing import Any

from benchmarks.work import iris

from forebay import Model


class Iris(Model):
    def load(self) -> None:
        self.run = iris.load()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.run(batch)
