# SPDX-License-Identifier: Apache-2.0
"""Models that are nothing but their time, and the arrivals they are measured with.

Each model sleeps for what a batch of its size takes, so that the policy is measured and not the machine. Every curve
serves about a thousand rows a second at its best.
"""

from __future__ import annotations

import math
import random
import time

from forebay.workers.runner import Runner, RunnerSpec

MAX_SIZE = 64


def fixed(rows: int) -> float:
    """Nearly all of the time is the same for every batch."""
    return 0.040 + 0.0004 * rows


def linear(rows: int) -> float:
    return 0.0005 + 0.001 * rows


def jumpy(rows: int) -> float:
    """Rows are rounded up to tiles of 8, tiles get cheaper, and from 33 rows on everything takes 1.3 times as long."""
    return (0.002 + 0.0072 * math.ceil(rows / 8) ** 0.8) * (1.3 if rows > 32 else 1.0)


CURVES = {"fixed": fixed, "linear": linear, "jumpy": jumpy}
OBJECTIVE_MS = {"fixed": 250, "linear": 100, "jumpy": 120}


class Sleeper(Runner):
    """Takes as long as its curve says."""

    def __init__(self, curve: str) -> None:
        self.curve = CURVES[curve]

    def run(self, items):
        time.sleep(self.curve(len(items)))
        return [None] * len(items)


def spec(curve: str) -> RunnerSpec:
    return RunnerSpec("benchmarks.policies.curves:Sleeper", {"curve": curve})


def most(curve: str) -> float:
    """Rows a second at the best size there is."""
    return max(rows / CURVES[curve](rows) for rows in range(1, MAX_SIZE + 1))


def steady(rate: float, until: float) -> list[float]:
    """Moments of a Poisson process at 0.75 of what the model can serve."""
    draw = random.Random(1)
    now, moments = 0.0, []
    while (now := now + draw.expovariate(0.75 * rate)) < until:
        moments.append(now)
    return moments


def bursty(rate: float, until: float) -> list[float]:
    """Bursts of 1 to 31 rows within 5 ms, at 0.5 of what the model can serve."""
    draw = random.Random(2)
    now, moments = 0.0, []
    while (now := now + draw.expovariate(0.5 * rate / 16)) < until:
        moments += [now + draw.random() * 0.005 for _ in range(draw.randint(1, 31))]
    return sorted(moments)


def rising(rate: float, until: float) -> list[float]:
    """From nothing to 0.9 of what the model can serve."""
    draw = random.Random(3)
    return [moment for moment in steady(1.2 * rate, until) if draw.random() < moment / until]


ARRIVALS = {"steady": steady, "bursty": bursty, "rising": rising}
