# SPDX-License-Identifier: Apache-2.0
"""300 models in one server: one that is called, and others that are only there."""

from typing import Any

from forebay import Model

MODELS = 300


class Called(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


def another(number: int) -> type[Model]:
    return type(f"Model{number}", (Called,), {"name": f"model{number}"})


for _number in range(1, MODELS):
    globals()[f"Model{_number}"] = another(_number)
