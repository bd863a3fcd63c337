# SPDX-License-Identifier: Apache-2.0
"""A simulation of tenants in front of the queue that the server has: the queue is real, workers and clock are not."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from forebay.batching.lines import NEVER
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import QueueFull, TooLate
from forebay.types.call import Request
from forebay.types.tenant import Tenant

MAX_SIZE = 64


@dataclass(frozen=True)
class Load:
    """What a tenant sends.

    Attributes:
        tenant: Its name.
        rate: Rows a second that arrive by a Poisson process.
        weight: Its weight.
        cost: What one of its rows costs beside a usual one.
        times_s: How long its requests may take; each draws one of these. Without any they have no deadlines.
        clients: If there are some, so many clients call in its place, each again once it is answered; `rate` is not
            read then. One that is refused tries again when it is told to.
        pause_s: How long a client usually pauses between two calls.
    """

    tenant: str
    rate: float
    weight: float = 1.0
    cost: float = 1.0
    times_s: tuple[float, ...] = ()
    clients: int = 0
    pause_s: float = 0.0


@dataclass
class Outcome:
    """What became of the rows of a tenant, after the first fifth of the time."""

    answered: int = 0
    refused: int = 0
    in_time: int = 0
    late: int = 0
    worker_s: float = 0.0
    tries: int = 0
    times_s: list[float] = field(default_factory=list[float])

    def percentile(self, part: float) -> float:
        """Return the time within which that part of the answers came; 0 if there is none."""
        ordered = sorted(self.times_s)
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


class Simulation:
    """Slots that take batches of a + b n seconds from a queue."""

    def __init__(
        self,
        loads: list[Load],
        *,
        a: float,
        b: float,
        slots: int,
        seconds: float,
        shared: bool,
        seed: int,
        kept: bool = False,
        max_size: int = MAX_SIZE,
        capacity: int = 4096,
        retry_s: float | None = None,
    ):
        self._loads = loads
        self._a, self._b, self._slots, self._seconds = a, b, slots, seconds
        self._random = random.Random(seed)
        self._queue = BatchQueue(BatchConfig(max_size=max_size, capacity=capacity))
        self._retry_s = retry_s
        self._queue.slots = slots
        if shared:
            self._queue.share().eviction.evict = self._evict
        if kept:
            self._queue.keep_deadlines()
        self._kept = kept
        self._tenants = {load.tenant: Tenant(load.tenant, weight=load.weight) for load in loads}
        self._events: list[tuple[float, int, str, Any]] = []
        self._numbers = itertools.count()
        self._busy = 0
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)
        self.tries: list[float] = []

    def run(self) -> dict[str, Outcome]:
        """Simulate all of it."""
        for load in self._loads:
            for _ in range(load.clients):
                self._push(self._random.random() * load.pause_s, "call", load)
            if not load.clients:
                self._push(self._random.expovariate(load.rate), "arrive", load)
        while self._events and self._events[0][0] < self._seconds:
            now, _, kind, what = heapq.heappop(self._events)
            self._now = now
            if kind == "arrive":
                self._push(now + self._random.expovariate(what.rate), "arrive", what)
                self._arrive(what, now)
            elif kind == "call":
                self._arrive(what, now)
            elif kind == "done":
                self._done(what, now)
            elif kind == "expire":
                self._expire(what)
            self._turn(now)
        return self.outcomes

    def _push(self, at: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, what))

    def _arrive(self, load: Load, now: float) -> None:
        if now > self._seconds / 5:
            self.outcomes[load.tenant].tries += 1
            if load.clients:
                self.tries.append(now)
        request = Request(load, print, tenant=self._tenants[load.tenant])
        if load.times_s:
            request.deadline = now + self._random.choice(load.times_s)
            self._push(request.deadline, "expire", request)
            if self._kept:
                request.due = request.deadline
        try:
            self._queue.offer(request, now)
        except (QueueFull, TooLate) as error:
            request.taken = NEVER
            self._refuse(request, error.after_s if isinstance(error, TooLate) else 0.0)

    def _expire(self, request: Request) -> None:
        if not request.taken:
            self._queue.cancel(request)
        if not 0 < request.taken < NEVER and not request.done:
            request.done = True
            self._call_again(request.body)
            if self._now > self._seconds / 5:
                self.outcomes[request.body.tenant].late += 1

    def _evict(self, entry: Any, _why: str) -> None:
        self._queue.cancel(entry)
        self._refuse(entry)

    def _call_again(self, load: Load) -> None:
        """Have a client call again that was answered."""
        if load.clients:
            self._push(self._now + self._random.expovariate(1 / load.pause_s), "call", load)

    def _refuse(self, request: Request, after_s: float = 0.0) -> None:
        request.done = True
        load, now = request.body, self._now
        told = self._queue.next_ticket(request.tenant, 1, now, after_s)
        if load.clients:
            self._push(told if self._retry_s is None else now + self._retry_s, "call", load)
        if self._now > self._seconds / 5:
            self.outcomes[request.body.tenant].refused += 1

    def _turn(self, now: float) -> None:
        while self._busy < self._slots and (batch := self._queue.take(now)) is not None:
            self._busy += 1
            units = sum(entry.body.cost for entry in batch.entries)
            batch.model_s = (self._a + self._b * units) * max(self._random.gauss(1.0, 0.05), 0.3)
            self._push(now + batch.model_s, "done", batch)
        if self._busy < self._slots and (due := self._queue.next_due()) is not None:
            self._push(max(due, now + 1e-9), "look", None)

    def _done(self, batch: Any, now: float) -> None:
        self._busy -= 1
        units = sum(entry.body.cost for entry in batch.entries)
        for entry in batch.entries:
            self._call_again(entry.body)
        if now > self._seconds / 5:
            for entry in batch.entries:
                found = self.outcomes[entry.body.tenant]
                found.answered += 1
                found.in_time += now <= entry.deadline
                found.late += now > entry.deadline
                found.times_s.append(now - entry.arrived)
                part = (self._a / batch.rows + self._b * entry.body.cost) / (self._a + self._b * units)
                found.worker_s += batch.model_s * part
        self._queue.answered(batch, now)
