# SPDX-License-Identifier: Apache-2.0
"""A job on LitServe, tuned: one worker, one API process, its fast queue, batches of 64, 2 ms wait."""

from __future__ import annotations

import sys
from typing import Any

import litserve

from benchmarks.work import MAX_BATCH, load_counted


class JobAPI(litserve.LitAPI):
    def __init__(self, job: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=0.002)
        self.job = job

    def setup(self, device: str) -> None:
        self.predict_rows = load_counted(self.job)

    # LitServe looks `request` and `output` up by name, and takes an annotation of `request` for a query parameter.
    def decode_request(self, request):
        return request

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: list[Any]) -> list[Any]:
        return self.predict_rows(x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    job, port = sys.argv[1], int(sys.argv[2])
    server = litserve.LitServer(JobAPI(job), accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=30)
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
        loop="uvloop",
        http="httptools",
    )
