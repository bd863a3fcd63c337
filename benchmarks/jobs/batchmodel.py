# SPDX-License-Identifier: Apache-2.0
"""The batchmodel job as a native model."""

from typing import Any

from benchmarks.work import batchmodel

from forebay import Model


class BatchModel(Model):
    def load(self) -> None:
        self.run = batchmodel.load()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.run(batch)
