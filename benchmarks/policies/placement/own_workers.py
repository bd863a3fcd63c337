# SPDX-License-Identifier: Apache-2.0
"""A: each front has a queue and an equal part of the workers for itself."""

from __future__ import annotations

from collections import deque

from benchmarks.policies.placement.scenario import Scenario
from benchmarks.policies.placement.simulation import Request, Simulation


class OwnWorkers(Simulation):
    """A."""

    name = "A"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.queues = [deque[Request]() for _ in range(scenario.fronts)]
        self.idle = [len(range(front, scenario.workers, scenario.fronts)) for front in range(scenario.fronts)]

    def arrive(self, request: Request) -> None:
        self.queues[request.front].append(request)
        self._dispatch(request.front)

    def _dispatch(self, front: int) -> None:
        queue = self.queues[front]
        while queue and self.idle[front]:
            self.idle[front] -= 1
            self.send(self._begin, front, self.take(queue))

    def _begin(self, front: int, batch: list[Request]) -> None:
        self.execute(batch, self._end, front, batch)

    def _end(self, front: int, batch: list[Request]) -> None:
        self.send(self._return, front, batch)

    def _return(self, front: int, batch: list[Request]) -> None:
        self.idle[front] += 1
        self.answer(batch)
        self._dispatch(front)
