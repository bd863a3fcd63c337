# SPDX-License-Identifier: Apache-2.0
"""Keeps the number of workers of one endpoint as its load asks for; `batching/worker_count.py` decides it.

A look every 100 ms reads counters that are kept anyway, so requests pay nothing for it. While there are no workers and
nothing is asked, nobody looks: the next request does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Final

from forebay.batching.gather import Curve
from forebay.batching.worker_count import BatchTime, Seen, WorkerCount
from forebay.errors import Unavailable
from forebay.types.worker_range import SCALE_DOWN_S, TARGET_QUEUE_MS

if TYPE_CHECKING:
    from forebay.batching.queue import BatchQueue
    from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
    from forebay.workers.pool import Pool

log = logging.getLogger("forebay.workers")

LOOK_S: Final = 0.1
"""Time between two looks."""


class WorkerScaling:
    """Resizes one pool. Lives on one event loop."""

    def __init__(
        self, name: str, pool: Pool, queue: BatchQueue, metrics: EndpointMetrics, *, max_rows: int, streams: bool
    ) -> None:
        """Begin to look, from the next turn of the loop.

        Args:
            pool: Has bounds.
            max_rows: Rows of a batch at most.
            streams: Whether each row has a slot of its own in a worker, for as long as its stream lasts.
        """
        bounds = pool.bounds
        assert bounds is not None
        self._name = name
        self._pool = pool
        self._queue = queue
        self._metrics = metrics
        self._streams = streams
        self._max_rows = 1 if streams else max_rows
        self._curve = Curve()
        self._told: dict[int, tuple[float, float]] = {}
        """How many batches of each size there were at the last look, and how long they ran together."""
        self._rows = 0.0
        """Rows that had arrived by then, but for those that were cancelled while they waited."""
        target_s = (bounds.target_queue_ms or TARGET_QUEUE_MS) / 1000
        quiet_s = bounds.scale_down_s or SCALE_DOWN_S
        self._count = WorkerCount(bounds, pool.slots_each, target_s, quiet_s, bounds.at_first)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def admit(self, deadline: float, now: float) -> None:
        """Let a request wait for a worker, and start one if there is none.

        Raises:
            Unavailable: No worker would be up by the request's deadline.
        """
        start = self._pool.start_up(now)
        if start.up:
            return
        if not start.starting:
            self._count.wake(now)
            self._resize()
            self._arm()
        left_s = max(start.start_s - start.since_s, 0.0)
        if now + left_s + self._curve.a + self._curve.b <= deadline:
            return
        raise Unavailable(
            f"'{self._name}' has no worker; one is being started, which takes about {start.start_s:.2g} s, and the "
            f"request has {max(deadline - now, 0.0):.2g} s",
            detail={"retry_after_s": max(math.ceil(left_s), 1)},
        )

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        before = self._count.wanted
        arrived = self._arrived()
        start = self._pool.start_up(now)
        queue = self._queue
        seen = Seen(
            waiting=queue.waiting,
            busy=queue.running_rows if self._streams else queue.running,
            running=queue.running_rows,
            up=start.up,
            starting=start.starting,
            starting_s=start.since_s,
            start_s=start.start_s,
            arrived=arrived,
            batch=BatchTime(self._curve.a, self._curve.b, self._max_rows),
        )
        wanted = self._count.look(seen, now)
        if wanted != before:
            log.info("scaling '%s' to %d workers from %d", self._name, wanted, before)
        self._resize()
        if wanted:
            self._arm()

    def _resize(self) -> None:
        self._pool.resize(self._count.wanted)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _arrived(self) -> float:
        """Return how many rows have arrived since the last look; learn from the batches that ran since."""
        rows = float(self._queue.waiting + self._queue.running_rows)
        for size, (batches, seconds, _) in self._metrics.sizes.items():
            rows += size * batches
            known = self._told.get(size, (0.0, 0.0))
            if batches > known[0]:
                self._told[size] = batches, seconds
                mean_s = (seconds - known[1]) / (batches - known[0])
                self._curve.learn(1 if self._streams else size, mean_s)
        before, self._rows = self._rows, rows
        return max(rows - before, 0.0)
