# SPDX-License-Identifier: Apache-2.0
"""What the dashboard's form is tried with: files, bytes, paths, streams, a chat, tensors, and words of an attacker."""

import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

import forebay
from forebay.openai import ChatRequest

HOSTILE = "<img src=x onerror=\"window.hacked='docstring'\">"


class Picture(msgspec.Struct, kw_only=True):
    """A picture; the fields that must be there stand between others."""

    note: Annotated[str, msgspec.Meta(description=HOSTILE, examples=[HOSTILE])] = HOSTILE
    label: Annotated[str, msgspec.Meta(examples=[HOSTILE])]
    tags: list[str] = []
    image: forebay.File
    mask: bytes | None = None
    number: int = 1
    is_new: bool | None = None


class Pictures(forebay.Model):
    __doc__ = f"""Looks at *pictures* {HOSTILE}.

    More {HOSTILE}
    """

    version = "2.1"

    def predict(self, batch: list[Picture]) -> list[list]:
        return [
            [one.label, one.image.filename, one.image.size, len(one.mask or b""), one.tags, one.number] for one in batch
        ]

    @forebay.endpoint("/classify")
    def classify(self, batch: list[forebay.File]) -> list[str]:
        """Names what is in a picture."""
        return [f"{one.filename} has {one.size} bytes" for one in batch]


class Range(msgspec.Struct):
    """Where to begin and end."""

    first: int
    last: int = 9


class Bytes(forebay.Model):
    def predict(self, batch: list[bytes]) -> list[bytes]:
        return [one[::-1] for one in batch]

    @forebay.endpoint("/range", methods=["GET"])
    def ends(self, batch: list[Range]) -> list[list[int]]:
        """Lists the ends of a range."""
        return [[one.first, one.last] for one in batch]

    @forebay.endpoint("/spell")
    def spell(self, batch: list[str]) -> Iterator[list[str]]:
        for number in range(max(map(len, batch))):
            yield [one[number : number + 1] for one in batch]


class Tensors(forebay.Model):
    def predict(self, batch: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        return [2 * one for one in batch]


class Talk(ChatRequest, frozen=True):
    """A request with a setting of its own."""

    top_k: int = 40


class Parrot(forebay.Model):
    """Says again what it is told, word by word."""

    max_batch_size = 1

    def predict(self, batch: list[Talk]) -> Iterator[list[str]]:
        (request,) = batch
        words = request.messages[-1].text.split()
        if words == ["count"]:
            words = [f"{len(request.messages)} {request.messages[0].role} {request.top_k} {request.temperature}"]
        for word in words * (100_000 if words == ["forever"] else 1):
            if word == "fail":
                raise RuntimeError("no such word")
            time.sleep(0.002)
            yield [f"{word} "]
