# SPDX-License-Identifier: Apache-2.0
"""A model that sleeps, for tenants that share it: each row is `100 * tenant + cost`.

`BENCH_SHAPE` has the largest batch, the seconds of a batch, and those of each unit of cost. Each process appends a line
for each batch to a file of its own in the folder `BENCH_TRUTH`: what the model knows of each tenant's part.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.work import Predict

ROW = 1
SHAPE_ENV, TRUTH_ENV = "BENCH_SHAPE", "BENCH_TRUTH"


class Batch(msgspec.Struct, array_like=True):
    """When a batch ended by the machine's clock, its seconds, its rows, and each tenant's part of the seconds."""

    ended: float
    seconds: float
    rows: int
    parts: dict[int, float]


def shape() -> tuple[int, float, float]:
    """Return the largest batch, the seconds of a batch, and those of a unit of cost."""
    largest, a, b = os.environ.get(SHAPE_ENV, "16,0.022,0.00175").split(",")
    return int(largest), float(a), float(b)


def load() -> Predict:
    _, a, b = shape()
    truth = Path(os.environ[TRUTH_ENV], str(os.getpid()))
    encode = msgspec.json.Encoder().encode

    def predict(batch: list[Any]) -> list[Any]:
        began = time.perf_counter()
        parts: Counter[int] = Counter()
        for row in batch:
            parts[row // 100] += a / len(batch) + b * (row % 100)
        seconds = sum(parts.values())
        time.sleep(seconds)
        ended = time.perf_counter()
        with truth.open("ab") as file:
            file.write(encode(Batch(ended, ended - began, len(batch), dict(parts))) + b"\n")
        return batch

    return predict


def batches(folder: Path) -> list[Batch]:
    """Read what all processes have written."""
    decode = msgspec.json.Decoder(Batch).decode
    return [decode(line) for path in folder.iterdir() for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]


def is_answer(answer: Any) -> bool:
    return answer == ROW
