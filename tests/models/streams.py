# SPDX-License-Identifier: Apache-2.0
"""Models that stream: by steps that their streams share, and by generators; what happened is noted in a folder."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from forebay import Last, Model, RequestError, endpoint
from forebay.serving.models.stream_steps import IDLE_STEP_S, MAX_SILENT
from forebay.workers.user_calls.joint_streams import SideBySide


class State:
    alive = 0

    def __init__(self, sample: dict[str, Any]) -> None:
        State.alive += 1
        self.sample = sample
        self.made = 0


TIDIES_S = 0.3
"""Longer than a worker takes to ask whether anybody still waits, and than others wait for a generator's end."""


async def tidy(note: str | None) -> None:
    """Take some time, and note what became of that."""
    if note is None:
        return
    _add(note, "begun ")
    try:
        await asyncio.sleep(TIDIES_S)
    except BaseException:
        _add(note, "interrupted ")
        raise
    _add(note, "ended ")


def _add(note: str, word: str) -> None:
    with Path(note).open("a") as file:
        file.write(word)


def made(states: list[State]) -> Any:
    """Numbers up to the length; what a sample asks for at its third part."""
    parts: list[Any] = []
    for state in states:
        state.made += 1
        how = state.sample.get("how", "")
        if state.made == 3 and how == "raise":
            raise ValueError("a step")
        if state.made == 3 and how == "short":
            return []
        if state.made == 3 and how == "exit":
            os._exit(3)
        if state.made == 3 and how == "none":
            return None
        if state.made >= 3 and how.startswith("nothing"):
            if state.made == 5 and how == "nothing, late":
                time.sleep(MAX_SILENT * IDLE_STEP_S)
            parts.append(None)
            continue
        if state.made == 3 and how == "error":
            parts.append(RequestError("this one"))
        elif state.made >= state.sample["length"]:
            parts.append(Last([state.made, len(states)]))
        else:
            parts.append([state.made, len(states)])
    time.sleep(max(state.sample.get("seconds", 0.0) for state in states))
    return parts


class Shared(Model):
    """Parts are the number of the part and how many streams made that step."""

    max_batch_size = 4

    def start(self, sample: dict[str, Any]) -> State:
        if sample.get("how") == "no start":
            raise RequestError("no start")
        if sample.get("how") == "exit at first" and not Path(sample["note"]).exists():
            Path(sample["note"]).touch()
            os._exit(3)
        return State(sample)

    def step(self, states: list[State]) -> list[list[int] | Last[list[int]] | None]:
        return made(states)

    def finish(self, state: State) -> None:
        State.alive -= 1

    @endpoint("/alive", methods=["GET"])
    def alive(self, batch: list[dict[str, Any]]) -> list[dict[str, int]]:
        counts = {"states": State.alive, "threads": threading.active_count(), "pid": os.getpid()}
        return [counts | {"descriptors": len(list(Path("/proc/self/fd").iterdir()))}] * len(batch)


class SharedAsync(Model):
    max_batch_size = 4

    async def start(self, sample: dict[str, Any]) -> State:
        return State(sample)

    async def step(self, states: list[State]) -> list[list[int] | Last[list[int]] | None]:
        return made(states)

    async def finish(self, state: State) -> None:
        State.alive -= 1
        await tidy(state.sample.get("tidies"))

    async def postprocess(self, part: list[int]) -> list[int]:
        return part


def seen(part: list[int]) -> list[int] | None:
    """Odd numbers alone, so that the end of a stream may have no part."""
    return part if part[0] % 2 else None


class SharedSome(Shared):
    def postprocess(self, part: list[int]) -> list[int] | None:
        return seen(part)


class SharedSomeAsync(Shared):
    async def postprocess(self, part: list[int]) -> list[int] | None:
        return seen(part)


class Generated(Model):
    """A generator for those who come at a time; parts are the number and how many of them there are."""

    open = 0

    def predict(self, batch: list[dict[str, Any]]) -> Iterator[list[list[int] | None]]:
        Generated.open += 1
        try:
            for number in range(1, max(sample["length"] for sample in batch) + 1):
                time.sleep(max(sample.get("seconds", 0.0) for sample in batch))
                yield [[number, len(batch)] if number <= sample["length"] else None for sample in batch]
        finally:
            Generated.open -= 1

    @endpoint("/alive", methods=["GET"])
    def alive(self, batch: list[dict[str, Any]]) -> list[int]:
        return [Generated.open] * len(batch)


class GeneratedSome(Generated):
    def postprocess(self, part: list[int]) -> list[int] | None:
        return seen(part)


class GeneratedAsync(Model):
    async def predict(self, batch: list[dict[str, Any]]) -> AsyncIterator[list[list[int] | None]]:
        try:
            for number in range(1, max(sample["length"] for sample in batch) + 1):
                yield [[number, len(batch)] if number <= sample["length"] else None for sample in batch]
                await asyncio.sleep(max(sample.get("seconds", 0.0) for sample in batch))
        finally:
            await tidy(batch[0].get("tidies"))


class Awaiting(Model):
    """Says how often its worker looked at it while it waited."""

    looks = 0

    async def predict(self, batch: list[dict[str, Any]]) -> AsyncIterator[list[int]]:
        before = Awaiting.looks
        await asyncio.sleep(0.2)
        yield [Awaiting.looks - before] * len(batch)


def _counted(first: Any) -> Any:
    def look(self: Any, streams: Any) -> Any:
        Awaiting.looks += 1
        return first(self, streams)

    return look


SideBySide._first = _counted(SideBySide._first)  # pyright: ignore[reportPrivateUsage]
