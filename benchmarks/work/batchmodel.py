# SPDX-License-Identifier: Apache-2.0
"""A model that gains from batching: T(n) = a + b n with a near 2.4 ms and b near 20 us.

It is what a quantised network does: weights kept in four bits are unpacked and scaled for every batch (the fixed
cost), then each row passes the layer (the cost a row). `HIDDEN` was chosen so that both have the size above on
one core of a current server processor; `python -m benchmarks.calibrate` prints the curve.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from benchmarks.work import Predict

FEATURES = 16
HIDDEN = 1344
ZERO_POINT = 8
ROW = {"x": [round(0.1 * i, 1) for i in range(FEATURES)]}


def load() -> Predict:
    draw = np.random.default_rng(0)
    first = draw.standard_normal((FEATURES, HIDDEN), dtype=np.float32)
    packed = draw.integers(0, 256, (HIDDEN, HIDDEN // 2), dtype=np.uint8)
    scale_in = draw.uniform(0.05, 0.15, (HIDDEN, 1)).astype(np.float32)
    scale_out = draw.uniform(0.05, 0.15, HIDDEN).astype(np.float32)
    last = draw.standard_normal(HIDDEN, dtype=np.float32)
    nibbles = np.empty_like(packed)
    weights = np.empty((HIDDEN, HIDDEN), np.float32)
    low, high = weights[:, : HIDDEN // 2], weights[:, HIDDEN // 2 :]

    def predict(batch: list[Any]) -> list[Any]:
        # At least two rows: numpy takes another road for one, which would bend the line T(n).
        x = np.zeros((max(len(batch), 2), FEATURES), np.float32)
        x[: len(batch)] = [row["x"] for row in batch]
        hidden = np.maximum(x @ first, 0)
        low[:] = np.bitwise_and(packed, 15, out=nibbles)
        high[:] = np.right_shift(packed, 4, out=nibbles)
        np.subtract(weights, ZERO_POINT, out=weights)
        np.multiply(weights, scale_in, out=weights)
        np.multiply(weights, scale_out, out=weights)
        scores = np.maximum(hidden @ weights, 0) @ last
        return [{"y": y} for y in scores[: len(batch)].tolist()]

    return predict


@cache
def expected() -> float:
    return load()([ROW])[0]["y"]


def is_answer(answer: Any) -> bool:
    return abs(answer["y"] / expected() - 1) < 1e-3  # sums in another order for other batch sizes
