# SPDX-License-Identifier: Apache-2.0
"""D: each worker has a queue. A front sends each request to the shorter of two queues, as far as it knows.

That is what Ray Serve does. A front is told the length of a queue with the answers from there, and adds what it has
sent since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.policies.placement.scenario import Scenario
from benchmarks.policies.placement.simulation import Request, Simulation, by_front


class TwoChoices(Simulation):
    """D."""

    name = "D"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.queues = [deque[Request]() for _ in range(scenario.workers)]
        self.is_busy = [False] * scenario.workers
        self.known = [[0] * scenario.workers for _ in range(scenario.fronts)]

    def arrive(self, request: Request) -> None:
        known = self.known[request.front]
        worker = min(self.choice.sample(range(self.scenario.workers), 2), key=known.__getitem__)
        known[worker] += 1
        self.send(self._enter, worker, request)

    def _enter(self, worker: int, request: Request) -> None:
        self.queues[worker].append(request)
        self._next(worker)

    def _next(self, worker: int) -> None:
        if self.queues[worker] and not self.is_busy[worker]:
            self.is_busy[worker] = True
            batch = self.take(self.queues[worker])
            self.execute(batch, self._end, worker, batch)

    def _end(self, worker: int, batch: list[Request]) -> None:
        self.is_busy[worker] = False
        for front, part in by_front(batch).items():
            self.send(self._hear, front, worker, part, len(self.queues[worker]))
        self._next(worker)

    def _hear(self, front: int, worker: int, part: Sequence[Request], waiting: int) -> None:
        self.known[front][worker] = waiting
        self.answer(part)
