# SPDX-License-Identifier: Apache-2.0
"""The shared job on Ray Serve: one replica with batches, a bounded queue, no access log.

It exits when it is asked to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.work import shared

LARGEST = shared.shape()[0]
QUIET = {"enable_access_log": False}


@serve.deployment(
    max_ongoing_requests=4 * LARGEST,
    max_queued_requests=int(sys.argv[2]) if len(sys.argv) > 2 else -1,
    ray_actor_options={"num_cpus": 1},
    logging_config=QUIET,
)
class Shared:
    def __init__(self) -> None:
        self.run = shared.load()

    @serve.batch(max_batch_size=LARGEST, batch_wait_timeout_s=0.002)
    async def predict(self, batch: list[Any]) -> list[Any]:
        return await asyncio.to_thread(self.run, batch)

    async def __call__(self, request: Request) -> Any:
        return await self.predict(await request.json())


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 1024 * 1024, log_to_driver=False)
    serve.start(http_options={"port": int(sys.argv[1])}, logging_config=QUIET)
    serve.run(Shared.bind())
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()


if __name__ == "__main__":
    main()
