# SPDX-License-Identifier: Apache-2.0
"""A model whose streams share their steps, by itself and as the last node of graphs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from forebay import Last, Model, RequestError, compose, node

FOREVER = 1_000_000
WRONG = 7
"""A stream of this length fails after its third number."""


class State:
    alive = 0

    def __init__(self, length: int) -> None:
        State.alive += 1
        self.length = length
        self.told = 0


class Numbers(Model):
    """Counts as far as it is told."""

    name = "numbers"
    max_batch_size = 4

    def start(self, sample: int) -> State:
        if sample < 0:
            raise RequestError("there are no numbers below 0")
        return State(sample)

    def step(self, states: list[State]) -> list[int | Last[int]]:
        if any(state.length >= FOREVER for state in states):
            time.sleep(0.0002)  # else the sockets are full before a test has looked
        parts: list[int | Last[int]] = []
        for state in states:
            state.told += 1
            if state.told > 3 and state.length == WRONG:
                parts.append(RequestError("three are enough"))  # type: ignore[arg-type]
            elif state.told < state.length:
                parts.append(state.told)
            else:
                parts.append(Last(state.told) if state.length else Last())
        return parts

    def finish(self, state: State) -> None:
        State.alive -= 1


class Generated(Model):
    """The same as a generator, for one who asks alone."""

    def predict(self, batch: list[int]) -> Iterator[list[int | None]]:
        State.alive += 1
        try:
            for number in range(1, max(batch) + 1):
                yield [number if number <= length else None for length in batch]
        finally:
            State.alive -= 1


class GeneratedAsync(Model):
    async def predict(self, batch: list[int]) -> AsyncIterator[list[int | None]]:
        for number in range(1, max(batch) + 1):
            yield [number if number <= length else None for length in batch]


@node
def doubled(number: int) -> int:
    return 2 * number


@node
def open_states(_: int) -> int:
    """Of this process."""
    return State.alive


counting = node(Numbers)
generating = node(Generated)
generating_async = node(GeneratedAsync)


@compose(name="numbers")
def numbers(length: int) -> Iterator[int]:
    return counting(length)


@compose
def twice(length: int) -> Iterator[int]:
    return counting(doubled(length))


@compose
def generated(length: int) -> Iterator[int]:
    return generating(doubled(length))


@compose
def generated_async(length: int):
    return generating_async(doubled(length))


@compose
def alive(number: int) -> int:
    return open_states(number)
