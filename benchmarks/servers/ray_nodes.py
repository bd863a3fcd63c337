# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, with the jobs as deployments of Ray Serve.

Clients ask the proxy on the node `one`; the only replica of each deployment is on the node `two`. The program prints
the address of the cluster once both deployments run, and exits at the end of its input. Ray Serve is tuned by variables
of the environment, which the parent sets.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import ProxyLocation
from starlette.requests import Request

from benchmarks.work import MAX_BATCH, batchmodel, echo

NODES = ("one", "two")
STORE_BYTES = 80 * 1024 * 1024
BATCH_WAIT_S = 0.002
ONGOING = 1024  # by default a replica takes 5 requests at a time, which would also be its largest batch
QUIET = {"enable_access_log": False}
REPLICA: dict[str, Any] = {
    "max_ongoing_requests": ONGOING,
    "ray_actor_options": {"num_cpus": 1, "resources": {NODES[1]: 1}},
    "logging_config": QUIET,
}


@serve.deployment(**REPLICA)
class Echo:
    def __init__(self) -> None:
        self.run = echo.load()

    async def __call__(self, request: Request) -> Any:
        return self.run([await request.json()])[0]


@serve.deployment(**REPLICA)
class BatchModel:
    def __init__(self) -> None:
        self.run = batchmodel.load()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=BATCH_WAIT_S)
    async def predict(self, batch: list[Any]) -> list[Any]:
        return self.run(batch)

    async def __call__(self, request: Request) -> Any:
        return await self.predict(await request.json())


def main() -> None:
    port = int(sys.argv[1])
    cluster = Cluster()
    for name in NODES:
        has = {"num_cpus": 4, "resources": {name: 8}, "object_store_memory": STORE_BYTES}
        cluster.add_node(node_name=name, include_dashboard=False, **has)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options={"port": port}, logging_config=QUIET)
    targets = {"echo": Echo, "batchmodel": BatchModel}
    serve.run_many([serve.RunTarget(each.bind(), name, f"/{name}") for name, each in targets.items()])
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
