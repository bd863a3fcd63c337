# SPDX-License-Identifier: Apache-2.0
"""Several slots behind one queue, in time that nobody waits for: the real queue, stepped as the batcher steps it.

Every arrival is a turn of the loop of its own; the answers of a batch are written one after another. A model is nothing
but the time that a batch of its size takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.testing import MemoryOrigin
from forebay.types.call import Request

MAX_SIZE = 64
WRITE_S = 8e-6
"""Time between the answers of two clients of one batch."""


def flat(rows):
    """The batch model of the comparison with peers: nearly all of the time is the same for every batch."""
    return 2.778e-3 + 2.22e-5 * rows


def even(rows):
    """What `benchmarks.workers` measures."""
    return 10e-3 + 0.2e-3 * rows


def steep(rows):
    return 2e-3 + 0.2e-3 * rows


def linear(rows):
    return 0.5e-3 + 1e-3 * rows


def jumpy(rows):
    """Rows are rounded up to tiles of 8, tiles get cheaper, and from 33 rows on everything takes 1.3 times as long."""
    return (0.002 + 0.0072 * math.ceil(rows / 8) ** 0.8) * (1.3 if rows > 32 else 1.0)


CURVES = {"flat": flat, "even": even, "steep": steep, "linear": linear}
CLIFFS = {"jumpy": jumpy}
"""Not what a + b n can say, so without an objective the rule does not see them: a known limit."""
OBJECTIVE_S = {"flat": 0.05, "even": 0.15, "steep": 0.1, "linear": 0.3, "jumpy": 0.15}


def at_once(draw):
    """A load generator on the same machine."""
    return 50e-6 + draw.random() * 300e-6


def within_1_ms(draw):
    return draw.random() * 1e-3


def thinking(draw):
    """Clients that do something of their own between two calls."""
    return draw.lognormvariate(math.log(5e-3), 1.0)


RETURNS = {"at once": at_once, "within 1 ms": within_1_ms, "thinking": thinking}


class Crowd:
    """Traffic on one queue with several slots. Figures are those after the first quarter, when the rule has learned.

    Attributes:
        throughput: Answers a second.
        latencies: Seconds from arrival to answer, sorted.
        sizes: Rows of the batches.
    """

    def __init__(self, curve, slots, *, clients=0, returns=at_once, rate=0.0, rows=6_000, origins=True, **settings):
        """Run the traffic.

        Args:
            curve: Seconds for a batch of so many rows.
            slots: Batches that can run at a time.
            clients: Those that send again when they are answered.
            returns: How long after it they do.
            rate: Requests a second of others, that come whenever they like.
            rows: Answers to simulate.
            origins: Whether the clients can be told apart.
            **settings: How they are batched.
        """
        self.queue = BatchQueue(BatchConfig(**{"max_size": MAX_SIZE, "capacity": 1_000_000, **settings}))
        self.queue.slots = slots
        self.latencies = []
        self.sizes = []
        self._curve = curve
        self._slots = slots
        self._returns = returns
        self._random = random.Random(5)
        self._count = itertools.count()
        self._running = 0
        self._events = []
        self._origins = origins
        for _ in range(clients):
            self._arrive(self._random.random() * 1e-3, MemoryOrigin() if origins else None, b"returns")
        self._rate = rate
        if rate:
            self._strangers = [MemoryOrigin() if origins else None for _ in range(1_000)]
            self._arrive(self._random.expovariate(rate), self._random.choice(self._strangers), b"stranger")
        self._drive(rows)
        self.latencies.sort()

    @property
    def mean_s(self):
        return sum(self.latencies) / len(self.latencies)

    def quantile_s(self, share):
        return self.latencies[int(share * len(self.latencies))]

    def _arrive(self, moment, origin, body):
        request = Request(body=body, reply=print, origin=origin)
        heapq.heappush(self._events, (moment, next(self._count), request))

    def _drive(self, rows):
        queue, events, slots = self.queue, self._events, self._slots
        settle = rows // 4
        answered = 0
        started = now = 0.0
        timer = math.inf
        while answered < rows:
            if events[0][0] >= timer:
                now, timer = timer, math.inf
            else:
                now, _, what = heapq.heappop(events)
                if type(what) is Request:
                    queue.offer(what, now)
                    if what.body == b"stranger":
                        due = now + self._random.expovariate(self._rate)
                        self._arrive(due, self._random.choice(self._strangers), b"stranger")
                else:
                    self._running -= 1
                    if queue.is_full():
                        self._start(queue.take(now), now)
                    for position, one in enumerate(what.entries):
                        if answered >= settle:
                            self.latencies.append(now - one.arrived)
                        if one.body == b"returns":
                            back = now + WRITE_S * position + self._returns(self._random)
                            self._arrive(back, one.origin, b"returns")
                    queue.answered(what, now)
                    if answered < settle <= answered + what.rows:
                        started = now
                    answered += what.rows
            while self._running < slots and (batch := queue.take(now)) is not None:
                self._start(batch, now)
            if self._running < slots and (due := queue.next_due()) is not None:
                assert due > now, "the driver would be woken again and again"
                timer = due
            else:
                timer = math.inf
        self.throughput = len(self.latencies) / (now - started)

    def _start(self, batch, now):
        if batch is None:
            return
        self._running += 1
        self.sizes.append(batch.rows)
        heapq.heappush(self._events, (now + self._curve(batch.rows), next(self._count), batch))


SIZES = (1, 2, 4, 8, 16, 32, 64)
WAITS_MS = (0, 1, 5, 20)
GRID = [(size, wait_ms) for size in SIZES for wait_ms in WAITS_MS if size > 1 or not wait_ms]


def by_hand(curve, slots, *, grid=GRID, objective_s=None, **traffic):
    """Return the best throughput of all hand-set (size, wait) that hold the objective, and which it is."""
    best, which = 0.0, None
    for size, wait_ms in grid:
        if size > traffic.get("clients", 0) and not traffic.get("rate"):
            continue
        run = Crowd(curve, slots, idle="wait", max_size=size, max_wait_s=wait_ms / 1000, **traffic)
        if objective_s is not None and run.quantile_s(0.95) > objective_s:
            continue
        if run.throughput > best:
            best, which = run.throughput, (size, wait_ms)
    return best, which


def most(curve, slots):
    """Rows a second at the best size there is."""
    return slots * max(rows / curve(rows) for rows in range(1, MAX_SIZE + 1))
