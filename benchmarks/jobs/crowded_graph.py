# SPDX-License-Identifier: Apache-2.0
"""The batchmodel job as the second of two nodes."""

from typing import Any

from benchmarks.work import batchmodel

import forebay
from forebay import Model, node


class Score(Model):
    def load(self) -> None:
        self.run = batchmodel.load()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.run(batch)


score = node(Score)


@node
def read(row: dict[str, Any]) -> dict[str, Any]:
    return row


@forebay.compose(max_in_flight=128, max_queue=128)
def graph(row: dict[str, Any]) -> Any:
    return score(read(row))
