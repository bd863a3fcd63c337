# SPDX-License-Identifier: Apache-2.0
"""The echo job, and one that answers with the bytes that it gets: what a server costs, and what it costs by length."""

from typing import Any

from forebay import Model


class Echo(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Large(Model):
    def predict(self, batch: list[bytes]) -> list[bytes]:
        return batch
