# SPDX-License-Identifier: Apache-2.0
"""The batchmodel job for arrays of rows, with a short queue."""

from typing import Any

from benchmarks.work import batchmodel

from forebay import Model


class Rows(Model):
    batchable = True
    max_queue = 256

    def load(self) -> None:
        self.run = batchmodel.load()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.run(batch)
