# SPDX-License-Identifier: Apache-2.0
"""Time the batchmodel job in a tight loop: the limit no server can pass.

Run by `main.py` in a process of its own, pinned as the servers are. Prints JSON: {rows: milliseconds}.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import msgspec

from benchmarks.work import batchmodel

SIZES = (1, 4, 16, 32, 64)
REPEATS = 60


def curve() -> dict[str, float]:
    predict = batchmodel.load()
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(REPEATS):  # sizes interleaved, so that a slow moment touches all of them
        for size in SIZES:
            batch = [batchmodel.ROW] * size
            began = perf_counter()
            predict(batch)
            times[size].append(1e3 * (perf_counter() - began))
    return {str(size): median(values) for size, values in times.items()}


if __name__ == "__main__":
    print(msgspec.json.encode(curve()).decode())
