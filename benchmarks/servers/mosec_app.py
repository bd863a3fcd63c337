# SPDX-License-Identifier: Apache-2.0
"""A job on mosec, tuned: one worker, batches of 64, 2 ms wait, msgspec instead of the slower default codec.

mosec reads the command line itself, so the job's name comes by the environment.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
from mosec import Server, Worker

from benchmarks.work import MAX_BATCH, load_counted
from benchmarks.work.shared import shape


class JobWorker(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.predict = load_counted(os.environ["BENCH_JOB"])
        self.deserialize = msgspec.json.Decoder().decode
        self.serialize = msgspec.json.Encoder().encode

    def forward(self, data: list[Any]) -> list[Any]:
        return self.predict(data)


if __name__ == "__main__":
    server = Server()
    largest = shape()[0] if os.environ["BENCH_JOB"] == "shared" else MAX_BATCH
    server.append_worker(JobWorker, num=1, max_batch_size=largest, max_wait_time=2, timeout=30)
    server.run()
