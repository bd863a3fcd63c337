# SPDX-License-Identifier: Apache-2.0
"""Whether nodes are there that no host speaks for: something on each takes a connection, or nothing does."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

DIAL_S: Final = 1.0
"""How long one place may take to answer. A machine that is there refuses at once where no process listens."""
NODE_S: Final = 2.0
"""How long all places of a node may take."""
AGAIN_S: Final = 1.0
"""How long an answer holds before the node is dialled again."""
THREADS: Final = 64
"""Nodes that are dialled at a time."""

Place = tuple[str, int]


class NodeDials:
    """Dials nodes, and remembers for a moment which of them answered."""

    def __init__(self) -> None:
        self._answered_s: dict[str, float] = {}

    def answering(self, nodes: Mapping[str, Sequence[Place]]) -> set[str]:
        """Return which nodes are there: those that answer at one of their places."""
        since = time.monotonic() - AGAIN_S
        self._answered_s = {name: at for name, at in self._answered_s.items() if at > since and name in nodes}
        unknown = [name for name in nodes if name not in self._answered_s and nodes[name]]
        if unknown:
            with ThreadPoolExecutor(min(THREADS, len(unknown))) as pool:
                found = list(pool.map(_answers, (nodes[name] for name in unknown)))
            now = time.monotonic()
            self._answered_s |= {name: now for name, answers in zip(unknown, found, strict=True) if answers}
        return {*self._answered_s}


def _answers(places: Sequence[Place]) -> bool:
    until = time.monotonic() + NODE_S
    for place in places:
        left = until - time.monotonic()
        if left <= 0:
            break
        try:
            socket.create_connection(place, min(DIAL_S, left)).close()
        except OSError:
            continue
        return True
    return False
