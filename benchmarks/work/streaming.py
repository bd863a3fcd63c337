# SPDX-License-Identifier: Apache-2.0
"""Models whose streams are as long as their samples say."""

from __future__ import annotations

import time
from collections.abc import Iterator

from forebay import Last, Model

SEATS = 16
STEP_S = 0.005
STREAM_S = 0.0001


class Counting(Model):
    """Counts, for each stream; a step costs nothing."""

    max_batch_size = 32

    def start(self, sample: int) -> list[int]:
        return [0, sample]

    def step(self, states: list[list[int]]) -> list[int | Last[int]]:
        parts: list[int | Last[int]] = []
        for state in states:
            state[0] += 1
            parts.append(state[0] if state[0] < state[1] else Last(state[0]))
        return parts


class Costly(Counting):
    """The same at the price of a small language model, with the processor left to others as by one on a device."""

    max_batch_size = SEATS
    awake_s = 0.0003  # a sleep alone ends late

    def step(self, states: list[list[int]]) -> list[int | Last[int]]:
        until = time.perf_counter() + STEP_S + STREAM_S * len(states)
        time.sleep(max(until - time.perf_counter() - self.awake_s, 0.0))
        while time.perf_counter() < until:
            pass
        return super().step(states)


class Busy(Costly):
    """The same, with a processor of its own for all of the step."""

    awake_s = STEP_S + STREAM_S * SEATS


class Generated(Model):
    """The same as a generator."""

    max_batch_size = 32

    def predict(self, batch: list[int]) -> Iterator[list[int | None]]:
        for number in range(1, max(batch) + 1):
            yield [number if number <= length else None for length in batch]
