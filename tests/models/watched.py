# SPDX-License-Identifier: Apache-2.0
"""What the dashboard is looked at with: a model, one that streams, one that fails, and a graph."""

import time
from collections.abc import Iterator
from typing import Literal

import msgspec

import forebay


class Flower(msgspec.Struct):
    """An iris."""

    measures: list[float]
    kind: Literal["wild", "garden"] = "wild"
    note: str = ""


class Iris(forebay.Model):
    """Names the kind of an iris."""

    version = "3"

    def predict(self, batch: list[Flower]) -> list[str]:
        time.sleep(0.002)
        return [f"setosa, {flower.kind}" for flower in batch]


class Story(forebay.Model):
    """Tells a story word by word, as soon as each is called for."""

    def predict(self, batch: list[int]) -> Iterator[list[str]]:
        for number in range(max(batch)):
            time.sleep(0.02)
            yield [f"word{number} " for _ in batch]


class Failing(forebay.Model):
    """Fails, and says so in words that a careless page would run."""

    def predict(self, batch: list[str]) -> list[str]:
        msg = f"<img src=x onerror=\"window.hacked='error'\">{batch[0]}"
        raise RuntimeError(msg)


@forebay.node(worker_kind="thread", workers=2)
def detect(x: float) -> list[float]:
    time.sleep(0.002)
    return [x, x + 1]


@forebay.node(worker_kind="thread")
def read(x: float) -> str:
    time.sleep(0.004)
    return str(x)


@forebay.node(worker_kind="thread")
def join(texts: list[str]) -> str:
    return " ".join(texts)


@forebay.compose
def ocr(x: float) -> str:
    """Reads."""
    return join(read.map(detect(x)))
