# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster with several nodes on this machine, as a program of its own: Ray ends every program that has joined it.

It says in one line of JSON where the cluster is, and which processes it has; it ends when its input does.
"""

import json
import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 1024 * 1024


def main():
    names = sys.argv[1:]
    cluster = Cluster()
    has = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    nodes = [cluster.add_node(node_name=name, **has) for name in names]
    pids = {name: node.all_processes["raylet"][0].process.pid for name, node in zip(names, nodes, strict=True)}
    head = nodes[0].all_processes["gcs_server"][0].process.pid
    print(json.dumps({"address": cluster.address, "raylets": pids, "head": head}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
