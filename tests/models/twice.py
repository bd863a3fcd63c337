# SPDX-License-Identifier: Apache-2.0
"""The model that recordings of KServe's servers were made with; see tests/originals/kserve/servers.py."""

from typing import Literal, TypedDict

import numpy as np

import forebay

Row = np.ndarray[tuple[Literal[3]], np.dtype[np.float32]]


class Given(TypedDict):
    x: Row


class Gives(TypedDict):
    y: Row


class Twice(forebay.Model):
    name = "twice"

    def predict(self, batch: list[Given]) -> list[Gives]:
        return [{"y": one["x"] * 2} for one in batch]
