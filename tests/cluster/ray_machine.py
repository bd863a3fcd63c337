# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster with several nodes on this machine, as a program of its own: Ray ends every program that has joined it.

It says in one line of JSON where the cluster is, and which processes it has. When its input ends, as it does however
the test's process ends, so do the cluster, the deployment on it, and this program.
"""

import contextlib
import json
import sys
import time

from ray.cluster_utils import Cluster

from forebay.cluster import local_view
from forebay.cluster.node_folder import folders

STORE_BYTES = 80 * 1024 * 1024


def main():
    deployment, *names = sys.argv[1:]
    cluster = Cluster()
    try:
        with contextlib.suppress(BrokenPipeError):
            live(cluster, names)
    finally:
        cluster.shutdown()
        while list(folders(deployment)):  # a host that has not ended yet may start a node process again
            local_view.end_all(deployment)
            time.sleep(0.2)


def live(cluster, names):
    has = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    nodes = [cluster.add_node(node_name=name, **has) for name in names]
    pids = {name: node.all_processes["raylet"][0].process.pid for name, node in zip(names, nodes, strict=True)}
    head = nodes[0].all_processes["gcs_server"][0].process.pid
    print(json.dumps({"address": cluster.address, "raylets": pids, "head": head}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
