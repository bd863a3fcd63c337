# SPDX-License-Identifier: Apache-2.0
"""Models whose methods stand behind decorators that are plain functions and return what they are given."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from forebay import Last, Model, endpoint


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)

    return call


class Coroutine(Model):
    @passed_on
    async def load(self):
        self.mark = "!"

    @passed_on
    async def predict(self, batch: list[str]) -> list[str]:
        await asyncio.sleep(0)
        return [text + self.mark for text in batch]

    @endpoint("/length")
    @passed_on
    async def length(self, batch: list[str]) -> list[int]:
        return [len(text) for text in batch]


class Hooks(Model):
    @passed_on
    async def preprocess(self, sample: str) -> str:
        return sample.upper()

    def predict(self, batch):
        return [f"<{text}>" for text in batch]

    @passed_on
    async def postprocess(self, result: str) -> str:
        return result + "!"


class Isolating(Model):
    isolate_errors = True

    @passed_on
    async def predict(self, batch: list[str]) -> list[str]:
        return [text + "!" for text in batch]


class Generator(Model):
    @passed_on
    def predict(self, batch: list[str]) -> Iterator[list[str]]:
        for step in "01":
            yield [text + step for text in batch]


class AsyncGenerator(Model):
    @passed_on
    async def predict(self, batch: list[str]) -> AsyncIterator[list[str]]:
        for step in "01":
            await asyncio.sleep(0)
            yield [text + step for text in batch]


class GeneratorWithHook(Model):
    """Only what is done with its parts waits."""

    def predict(self, batch: list[str]) -> Iterator[list[str]]:
        for step in "01":
            yield [text + step for text in batch]

    @passed_on
    async def postprocess(self, result: str) -> str:
        return result


class Steps(Model):
    @passed_on
    async def start(self, sample: str) -> list[str]:
        return [sample + step for step in "10"]

    @passed_on
    async def step(self, states: list[list[str]]) -> list[str | Last[str]]:
        parts = [state.pop() for state in states]
        return [part if state else Last(part) for state, part in zip(states, parts, strict=True)]

    @passed_on
    async def finish(self, state: list[str]) -> None:
        assert not state
