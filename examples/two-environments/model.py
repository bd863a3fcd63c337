# SPDX-License-Identifier: Apache-2.0
"""Summarises measurements, and says which numpy did it."""

import numpy as np

import forebay


class Summary(forebay.Model):
    """Median and spread of a series."""

    def predict(self, batch: list[list[float]]) -> list[dict[str, float | str]]:
        return [
            {
                "median": float(np.median(series)),
                "spread": float(np.ptp(series)),
                "numpy": np.__version__,
            }
            for series in batch
        ]
