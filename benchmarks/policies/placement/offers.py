# SPDX-License-Identifier: Apache-2.0
"""B: each front has a queue, and all workers offer themselves to all fronts.

A front that knows of an idle worker sends it a batch. A front that knows of none asks all workers, once, and waits. A
worker that ends a batch calls on the front whose request has waited longest. With nobody left to call on, it tells all
fronts that it is idle, and that it is busy once it has a batch. Two fronts may send to one idle worker at the same
time: the second batch goes back to the head of its queue, and its front counts as waiting.
"""

from __future__ import annotations

from collections import deque

from benchmarks.policies.placement.scenario import Scenario
from benchmarks.policies.placement.simulation import Request, Simulation


class Offers(Simulation):
    """B."""

    name = "B"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        fronts, workers = range(scenario.fronts), range(scenario.workers)
        self.queues = [deque[Request]() for _ in fronts]
        self.is_asking = [False for _ in fronts]
        self.known_idle = [set(workers) for _ in fronts]
        self.is_busy = [False for _ in workers]
        self.waiting: list[dict[int, float]] = [{} for _ in workers]
        """By worker: the fronts that have asked, and since when their first request waits."""

    def arrive(self, request: Request) -> None:
        self.queues[request.front].append(request)
        self._dispatch(request.front)

    def _dispatch(self, front: int) -> None:
        queue, idle = self.queues[front], self.known_idle[front]
        while queue and idle:
            worker = self.choice.choice(sorted(idle))
            idle.discard(worker)
            self.send(self._reach, worker, front, self.take(queue))
        if not queue:
            self.is_asking[front] = False
        elif not self.is_asking[front]:
            self.is_asking[front] = True
            self.send(self._ask, front, queue[0].arrived_s, receivers=self.scenario.workers)

    def _ask(self, front: int, since_s: float) -> None:
        for worker in range(self.scenario.workers):
            self.waiting[worker][front] = since_s
            if not self.is_busy[worker]:
                self._offer(worker)

    def _reach(self, worker: int, front: int, batch: list[Request]) -> None:
        if self.is_busy[worker]:
            self.waiting[worker].setdefault(front, batch[0].arrived_s)
            self.send(self._give_back, front, batch)
        else:
            self._begin(worker, front, batch)
            self.send(self._hear_busy, worker, receivers=self.scenario.fronts - 1)

    def _give_back(self, front: int, batch: list[Request]) -> None:
        self.queues[front].extendleft(reversed(batch))
        self._dispatch(front)

    def _begin(self, worker: int, front: int, batch: list[Request]) -> None:
        self.is_busy[worker] = True
        self.execute(batch, self._end, worker, front, batch)

    def _end(self, worker: int, front: int, batch: list[Request]) -> None:
        self.send(self.answer, batch)
        self.is_busy[worker] = False
        self._offer(worker)

    def _offer(self, worker: int) -> None:
        waiting = self.waiting[worker]
        if waiting:
            front = min(waiting, key=waiting.__getitem__)
            del waiting[front]
            self.is_busy[worker] = True  # it is reserved for that front
            self.send(self._call_on, front, worker)
        else:
            self.send(self._hear_idle, worker, receivers=self.scenario.fronts)

    def _call_on(self, front: int, worker: int) -> None:
        queue = self.queues[front]
        batch = self.take(queue)
        self.is_asking[front] = self.is_asking[front] and bool(queue)
        self.send(self._get, worker, front, batch, queue[0].arrived_s if queue else None)

    def _get(self, worker: int, front: int, batch: list[Request], since_s: float | None) -> None:
        if since_s is not None:
            self.waiting[worker][front] = since_s
        if batch:
            self._begin(worker, front, batch)
        else:
            self.is_busy[worker] = False
            self._offer(worker)

    def _hear_idle(self, worker: int) -> None:
        # All fronts hear it at one moment; that one of them is always the first would be an accident of this loop.
        for front in self.choice.sample(range(self.scenario.fronts), self.scenario.fronts):
            self.known_idle[front].add(worker)
            if self.queues[front]:
                self._dispatch(front)

    def _hear_busy(self, worker: int) -> None:
        for idle in self.known_idle:
            idle.discard(worker)
