# SPDX-License-Identifier: Apache-2.0
"""The jobs every server does, free of any server's imports so that all of them run the same code.

A job is a module with `ROW` (the request), `load()` (makes the predict function) and `is_answer()`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

Predict = Callable[[list[Any]], list[Any]]

JOBS = ("echo", "batchmodel", "iris")
COUNTER_ENV = "BENCH_COUNTER"
MAX_BATCH = 64


class Job(Protocol):
    """What a job's module offers."""

    ROW: dict[str, Any]

    def load(self) -> Predict: ...

    def is_answer(self, answer: Any) -> bool: ...


def job(name: str) -> Job:
    return cast("Job", import_module(f"benchmarks.work.{name}"))


def request_body(name: str) -> bytes:
    return msgspec.json.encode(job(name).ROW)


def load_counted(name: str) -> Predict:
    """Load a job whose batches are counted in the file that `BENCH_COUNTER` names.

    A shared file mapping costs 0.3 us a batch and can be read from outside while the server runs.
    """
    predict = job(name).load()
    with Path(os.environ[COUNTER_ENV]).open("r+b") as file:
        counter = mmap.mmap(file.fileno(), COUNTER.size)
    batches = rows = 0

    def counted(batch: list[Any]) -> list[Any]:
        nonlocal batches, rows
        batches += 1
        rows += len(batch)
        COUNTER.pack_into(counter, 0, batches, rows)
        return predict(batch)

    return counted


COUNTER = struct.Struct("<QQ")  # batches, rows
