# SPDX-License-Identifier: Apache-2.0
"""The engine beside a naive implementation of MediaPipe's rules; `make fuzz` goes on with other seeds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.graph.random_graphs import compare, to_the_end

GRAPHS = 300


def test_random_graphs_go_the_way_of_mediapipe():  # F93
    count: Counter[str] = Counter()
    for number in range(GRAPHS):
        count += compare(f"make test.{number}")
    for kind in ("sync_set nodes", "immediate nodes", "default nodes", "barrier nodes", "loops", "refusals", "close"):
        assert count[kind] >= 20, count
    assert count["invocations"] >= 1000


@pytest.mark.parametrize("number", range(30))
def test_what_default_nodes_read_does_not_depend_on_how_early_bounds_are_told(number: int):
    """So it is no matter that Python nodes of the original say nothing of what they will not write."""
    ours, theirs = to_the_end(random.Random(number))
    assert ours == theirs
    assert sum(map(len, ours.values())) > 0
