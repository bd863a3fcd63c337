# SPDX-License-Identifier: Apache-2.0
"""Models with all kinds of containers in their samples, for attacks on the protocols in front of them."""

from typing import Any

import msgspec

import forebay
from forebay.openai import ChatRequest, CompletionRequest, EmbeddingRequest


class Leaf(msgspec.Struct):
    """A part of a sample."""

    weight: float = 0.0
    tags: list[str] = []


class Tree(msgspec.Struct):
    """A sample."""

    name: str = ""
    leaves: list[Leaf] = []
    by_name: dict[str, Leaf] = {}
    numbers: list[float] = []
    more: Any = None


class Typed(forebay.Model):
    """Counts what it gets."""

    def predict(self, batch: list[Tree]) -> list[int]:
        return [len(one.leaves) for one in batch]


class Plain(forebay.Model):
    """Takes anything."""

    def predict(self, batch: list[Any]) -> list[str]:
        return [type(one).__name__ for one in batch]


class Sampled(forebay.Model):
    """Takes arrays of samples."""

    batchable = True

    def predict(self, batch: list[float]) -> list[float]:
        return batch


class Pair(msgspec.Struct):
    """A sample of two tensors."""

    numbers: list[float] = []
    text: str = ""


class Tensors(forebay.Model):
    """Takes tensors."""

    def predict(self, batch: list[Pair]) -> list[float]:
        return [sum(one.numbers) for one in batch]


class Filed(forebay.Model):
    """Takes forms."""

    def predict(self, batch: list[Leaf]) -> list[float]:
        return [one.weight for one in batch]


class Chat(forebay.Model):
    """Answers conversations."""

    def predict(self, batch: list[ChatRequest]) -> list[str]:
        return ["yes" for _ in batch]


class Completion(forebay.Model):
    """Goes on with texts."""

    def predict(self, batch: list[CompletionRequest]) -> list[str]:
        return ["yes" for _ in batch]


class Vectors(forebay.Model):
    """Makes vectors of texts."""

    def predict(self, batch: list[EmbeddingRequest]) -> list[list[float]]:
        return [[0.5] for _ in batch]
