# SPDX-License-Identifier: Apache-2.0
"""Streams whose parts tell what was asked for, in every place in which they may be made."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from forebay import Last, Model, RequestError, endpoint


class Told:
    """One stream; a sample is the JSON of a name, a length, how it ends and how long a part takes to make."""

    alive: ClassVar[set[Told]] = set()

    def __init__(self, sample: str) -> None:
        self.asked: dict[str, Any] = json.loads(sample)
        if self.asked["how"] == "no start":
            raise RequestError("no start")
        Told.alive.add(self)
        self.made = self.steps = 0

    def part(self) -> str | Last[str] | RequestError | None:
        """The next one; None if there is none in this step."""
        how, length = self.asked["how"], self.asked["length"]
        self.steps += 1
        if how == "pauses" and self.steps % 3 == 0:
            return None
        self.made += 1
        if how == "exit" and self.made == length:
            os._exit(3)
        if how == "error" and self.made == length:
            return RequestError("as it was asked")
        if self.made > length:
            return Last()
        said = f"{self.asked['name']} {self.made} " + "x" * self.asked["wide"]
        return Last(said) if how == "last" and self.made == length else said


def made(streams: list[Told]) -> list[Any]:
    time.sleep(max(one.asked["seconds"] for one in streams))
    return [one.part() for one in streams]


class Stepped(Model):
    """By steps that streams share."""

    max_batch_size = 8

    def start(self, sample: str) -> Told:
        return Told(sample)

    def step(self, states: list[Told]) -> list[str | Last[str] | None]:
        return made(states)

    def finish(self, state: Told) -> None:
        Told.alive.discard(state)

    @endpoint("/alive", methods=["GET"])
    def alive(self, batch: list[dict[str, Any]]) -> list[int]:
        return [len(Told.alive)] * len(batch)


class Threads(Stepped):
    """Another pool."""


class Inline(Stepped):
    """And one more."""


class Ahead(Stepped):
    """A worker with so many seats that streams are sent to it before one is free."""


class Processes(Stepped):
    """A pool beside that of the others."""


class Mortal(Stepped):
    """Whose worker ends now and then."""


class InlineAsync(Model):
    max_batch_size = 8

    async def start(self, sample: str) -> Told:
        return Told(sample)

    async def step(self, states: list[Told]) -> list[str | Last[str] | None]:
        return made(states)

    async def finish(self, state: Told) -> None:
        Told.alive.discard(state)


class Yielded(Model):
    """By generators, each over a batch."""

    max_batch_size = 8

    def predict(self, batch: list[str]) -> Iterator[list[str | None]]:
        streams = [Told(sample) for sample in batch]
        try:
            while any(parts := [plain(one.part()) for one in streams]):
                yield parts
        finally:
            Told.alive.difference_update(streams)

    @endpoint("/alive", methods=["GET"])
    def alive(self, batch: list[dict[str, Any]]) -> list[int]:
        return [len(Told.alive)] * len(batch)


class YieldedAsync(Model):
    max_batch_size = 8

    async def predict(self, batch: list[str]) -> AsyncIterator[list[str | None]]:
        streams = [Told(sample) for sample in batch]
        try:
            while any(parts := [plain(one.part()) for one in streams]):
                yield parts
        finally:
            Told.alive.difference_update(streams)


def plain(part: Any) -> str | None:
    return part.part if isinstance(part, Last) else part
