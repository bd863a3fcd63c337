# SPDX-License-Identifier: Apache-2.0
"""Discrete events: a clock that jumps, messages that take their time, and requests that are answered exactly once."""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from benchmarks.policies.placement.scenario import Scenario

WARM_UP = 0.2
"""Share of the requests, at the beginning, that no figure counts."""
TAIL = 0.05
"""The same at the end, when nothing new arrives."""


class Request(NamedTuple):
    number: int
    front: int
    arrived_s: float


@dataclass(frozen=True)
class Result:
    """Figures of one run.

    Attributes:
        messages: Messages between machines, for each request.
        cpu: Cores that the owner of the model keeps busy, the busiest of several.
    """

    mean_ms: float
    p50_ms: float
    p99_ms: float
    batch: float
    messages: float
    cpu: float


class Simulation(ABC):
    """One run of one design; subclasses say where a request goes."""

    name: ClassVar[str]

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.choice = scenario.dice("choices")
        self.latencies_s = [math.nan] * scenario.requests
        self.batch_sizes: list[int] = []
        self.messages = 0
        self.cpu_s = [0.0]
        self._noise = scenario.dice("noise")
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    @abstractmethod
    def arrive(self, request: Request) -> None:
        """A client's request has reached its front."""

    def run(self) -> Result:
        """Run until every request is answered."""
        for number, (front, moment) in enumerate(self.scenario.arrivals()):
            self._run_until(moment)
            self.now = moment
            self.arrive(Request(number, front, moment))
        arriving_s = self.now
        self._run_until(math.inf)
        if any(map(math.isnan, self.latencies_s)):
            raise AssertionError(f"{self.name}: {sum(map(math.isnan, self.latencies_s))} requests were not answered")
        return self._result(arriving_s)

    def at(self, moment: float, action: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (moment, next(self._order), action, args))

    def send(self, action: Callable[..., None], *args: object, receivers: int = 1) -> None:
        """Have another machine do something when a message has reached it."""
        self.messages += receivers
        self.at(self.now + self.scenario.way_s, action, *args)

    def execute(self, batch: Sequence[Request], action: Callable[..., None], *args: object) -> None:
        """Run a batch on a worker, and then do something there."""
        self.batch_sizes.append(len(batch))
        noise = 1 + self.scenario.jitter * (self._noise.random() - 0.5)
        self.at(self.now + self.scenario.cost.seconds(len(batch)) * noise, action, *args)

    def take(self, queue: deque[Request]) -> list[Request]:
        """Form a batch: all that waits, up to the largest size."""
        return [queue.popleft() for _ in range(min(self.scenario.cost.max_size, len(queue)))]

    def answer(self, batch: Sequence[Request]) -> None:
        """The answers have reached the front."""
        for request in batch:
            if not math.isnan(self.latencies_s[request.number]):
                raise AssertionError(f"{self.name}: request {request.number} was answered twice")
            self.latencies_s[request.number] = self.now - request.arrived_s

    def _run_until(self, moment: float) -> None:
        events = self._events
        while events and events[0][0] <= moment:
            self.now, _, action, args = heapq.heappop(events)
            action(*args)

    def _result(self, arriving_s: float) -> Result:
        count = self.scenario.requests
        counted = sorted(self.latencies_s[int(count * WARM_UP) : int(count * (1 - TAIL))])
        return Result(
            mean_ms=sum(counted) / len(counted) * 1e3,
            p50_ms=counted[len(counted) // 2] * 1e3,
            p99_ms=counted[len(counted) * 99 // 100] * 1e3,
            batch=count / len(self.batch_sizes),
            messages=self.messages / count,
            cpu=max(self.cpu_s) / arriving_s,
        )


def by_front(batch: Sequence[Request]) -> dict[int, list[Request]]:
    """Group a batch by the fronts that wait for it: each gets one message."""
    groups: dict[int, list[Request]] = {}
    for request in batch:
        groups.setdefault(request.front, []).append(request)
    return groups
