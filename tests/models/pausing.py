# SPDX-License-Identifier: Apache-2.0
"""Models that stream and stop speaking: with a file's name as the sample, until there is such a file."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

from forebay import Context, Last, Model, compose, node
from forebay.openai import ChatRequest

FOREVER = "/nowhere/at/all"


async def seen(path: str) -> None:
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240, PTH110 - another process makes it
        await asyncio.sleep(0.005)


class Pausing(Model):
    """Says one word, and a second one later."""

    stream_idle_ms = 300

    async def predict(self, batch: list[str]) -> AsyncIterator[list[str]]:
        yield ["one" for _ in batch]
        await asyncio.gather(*map(seen, batch))
        yield ["two" for _ in batch]


class Patient(Pausing):
    """The same, with little time for the first word and much between two."""

    timeout_ms = 3000
    stream_idle_ms = 600_000


class Raw(Model):
    stream_idle_ms = 300

    async def predict(self, batch: list[str]) -> AsyncIterator[list[bytes]]:
        yield [b"one" for _ in batch]
        await asyncio.gather(*map(seen, batch))


class Chatty(Model):
    stream_idle_ms = 300

    async def predict(self, batch: list[ChatRequest]) -> AsyncIterator[list[str]]:
        yield ["one" for _ in batch]
        await seen(FOREVER)


class Stepping(Model):
    """Streams that share their steps: each says one word, and nothing from then on."""

    stream_idle_ms = 300

    def start(self, sample: str) -> list[str]:
        return ["one"]

    async def step(self, states: list[list[str]]) -> list[str | Last[str] | None]:
        await asyncio.sleep(0.005)
        return [state.pop() if state else None for state in states]


class Hanging(Model):
    """Says one word; for a sample of "hang", its worker is lost with it."""

    stream_idle_ms = 300
    max_batch_size = 1

    def predict(self, batch: list[str]) -> Iterator[list[str]]:
        yield ["one"]
        if batch == ["hang"]:
            threading.Event().wait()


class Left(Model):
    def predict(self, batch: list[int], context: list[Context]) -> Iterator[list[float]]:
        yield [one.remaining_s for one in context]


pausing = node(Pausing)
patient = node(Patient)


@compose(timeout_ms=60_000)
def paused(path: str) -> Iterator[str]:
    return pausing(path)


@compose(timeout_ms=3000)
def waiting(path: str) -> Iterator[str]:
    return patient(path)
