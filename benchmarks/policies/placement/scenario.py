# SPDX-License-Identifier: Apache-2.0
"""What is simulated: the cost of a batch, the machines, and the requests that arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

PHASE_S = 0.25
"""Mean length of a burst, and of the pause between two bursts."""


@dataclass(frozen=True)
class BatchCost:
    """A batch of n rows takes `fixed_s` + n x `row_s`."""

    fixed_s: float
    row_s: float
    max_size: int

    def seconds(self, rows: int) -> float:
        return self.fixed_s + self.row_s * rows

    def __str__(self) -> str:
        return f"{self.fixed_s * 1e3:g} ms + {self.row_s * 1e3:g} n"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of a table.

    Attributes:
        load: Offered rate as a share of what the workers serve with full batches.
        burst: How many times as many requests arrive in a burst as between bursts; 1 for a Poisson process.
        way_s: Time that a message takes from one machine to another.
        jitter: Width of the uniform noise on the time of a batch, as a share of it.
        shards: Owners of the model, each with an equal part of the workers. Only design C has them.
        frame_s: CPU time of an owner for a frame that it reads or writes.
        seat_s: CPU time of an owner for a request.
        requests: How many requests arrive.
    """

    cost: BatchCost
    fronts: int
    workers: int
    load: float
    burst: float = 1.0
    way_s: float = 0.1e-3
    jitter: float = 0.1
    shards: int = 1
    frame_s: float = 0.0
    seat_s: float = 0.0
    requests: int = 100_000
    seed: int = 1
    rate: float = field(init=False)

    def __post_init__(self) -> None:
        full = self.cost.max_size
        object.__setattr__(self, "rate", self.load * self.workers * full / self.cost.seconds(full))

    def dice(self, purpose: str) -> random.Random:
        """Return random numbers for one purpose, so that all designs see the same arrivals."""
        return random.Random(f"{self.seed} {purpose}")

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """Yield the front and the moment of each request."""
        dice = self.dice("arrivals")
        is_burst, now, phase_ends = False, 0.0, 0.0
        rate = self.rate
        for _ in range(self.requests):
            moment = now + dice.expovariate(rate)
            while self.burst > 1 and moment > phase_ends:  # a Poisson process has no memory: go on with the new rate
                now, is_burst = phase_ends, not is_burst
                phase_ends += dice.expovariate(1 / PHASE_S)
                rate = 2 * self.rate / (1 + self.burst) * (self.burst if is_burst else 1.0)
                moment = now + dice.expovariate(rate)
            now = moment
            yield dice.randrange(self.fronts), now
