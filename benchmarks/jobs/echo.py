# SPDX-License-Identifier: Apache-2.0
"""The echo job as a native model."""

from typing import Any

from benchmarks.work import echo

from forebay import Model


class Echo(Model):
    def load(self) -> None:
        self.run = echo.load()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.run(batch)
