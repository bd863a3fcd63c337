# SPDX-License-Identifier: Apache-2.0
"""What the queue costs for each row, without tenants and with some."""

from __future__ import annotations

import gc
import time

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import QueueFull
from forebay.testing import MemoryOrigin
from forebay.types.call import Request
from forebay.types.tenant import Tenant

SIZE = 64
CAPACITY = 4096
FILLS = {"keeps up": 0, "half full": CAPACITY // 2, "full": CAPACITY}
"""Rows that wait when a batch is taken."""


def round_times_us(tenants: int, waiting: int, rounds: int = 120) -> list[float]:
    """Return the time of a row in each of some rounds: offers of a batch (of two where it is full), and the batch."""
    queue = BatchQueue(BatchConfig(max_size=SIZE, capacity=CAPACITY))
    if tenants:
        queue.share()
    names: list[Tenant | None] = [Tenant(str(number)) for number in range(tenants)] or [None]
    origins = [MemoryOrigin() for _ in range(200)]

    def made(number: int) -> Request:
        return Request(b"", print, origin=origins[number % 200], tenant=names[number % len(names)])

    now = 1.0
    for number in range(waiting):
        queue.offer(made(number * 7), now)
    rows = SIZE if waiting < CAPACITY else 2 * SIZE
    times: list[float] = []
    gc.disable()
    try:
        for turn in range(rounds):
            requests = [made((turn * rows + number) * 7) for number in range(rows)]
            began = time.perf_counter()
            for request in requests:
                try:
                    queue.offer(request, now)
                except QueueFull:
                    pass
            batch = queue.take(now)
            if batch is None:  # it waits for clients
                now += 1.0
                batch = queue.take(now)
            now += 0.01
            assert batch is not None
            queue.answered(batch, now)
            times.append((time.perf_counter() - began) / rows * 1e6)
    finally:
        gc.enable()
    return times[rounds // 4 :]


def table(repeats: int, counts: tuple[int, ...] = (0, 1, 2, 10, 1000)) -> list[str]:
    """Return the rows of a table: the quickest fifth of all rounds counts, since the machine may have other work."""
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for fill, waiting in FILLS.items():
            for count in counts:
                found.setdefault((fill, count), []).extend(round_times_us(count, waiting))
    best = {key: sorted(times)[len(times) // 5] for key, times in found.items()}
    lines = ["| queue | " + " | ".join(f"{count} tenants" for count in counts) + " |", "|---|" + "---|" * len(counts)]
    for fill in FILLS:
        cells = [f"{best[fill, count]:.2f} us ({best[fill, count] / best[fill, 0]:.2f}x)" for count in counts]
        lines.append(f"| {fill} | " + " | ".join(cells) + " |")
    return lines
