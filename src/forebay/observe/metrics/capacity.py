# SPDX-License-Identifier: Apache-2.0
"""How many workers a graph needs, and what it will do: plain arithmetic on measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec


class NodeCost(msgspec.Struct, frozen=True):
    """What one request costs a node, in seconds.

    Attributes:
        pre_s: Before the model: decoding, `preprocess`.
        process_s: The model.
        post_s: After it: `postprocess`, encoding.
    """

    pre_s: float
    process_s: float
    post_s: float

    @property
    def total_s(self) -> float:
        """The three together."""
        return self.pre_s + self.process_s + self.post_s


def concurrency(cost_s: float, qps: float) -> float:
    """Return how many requests a node works on at a time if `qps` come a second and each takes it `cost_s`."""
    return cost_s * qps


def workers_needed(cost_s: float, qps: float) -> int:
    """Return the same as a number of workers: whole, and at least one."""
    return max(math.ceil(round(concurrency(cost_s, qps), 9)), 1)


def throughput(nodes: Mapping[str, tuple[float, int]]) -> tuple[str, float]:
    """Return the node that limits all, and how many requests a second it lets through.

    Args:
        nodes: Cost in seconds and number of workers of each node; at least one costs something.

    Raises:
        ValueError: If none does.
    """
    able = {name: workers / cost_s for name, (cost_s, workers) in nodes.items() if cost_s > 0}
    if not able:
        raise ValueError("no node was seen at work")
    slowest = min(able, key=lambda name: able[name])
    return slowest, able[slowest]


def accumulation(in_qps: float, out_qps: float, seconds: float) -> float:
    """Return how many requests gather before a node in some time: none if it keeps up."""
    return max(in_qps - out_qps, 0.0) * seconds
