# SPDX-License-Identifier: Apache-2.0
"""One model that takes large bodies, and a small one that shares the server with it."""

from typing import Any

from forebay import Model


class Large(Model):
    name = "large"

    def predict(self, samples: list[bytes]) -> list[int]:
        return [len(sample) for sample in samples]


class Echo(Model):
    name = "echo"

    def predict(self, samples: list[Any]) -> list[Any]:
        return samples
