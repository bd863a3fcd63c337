# SPDX-License-Identifier: Apache-2.0
"""Compositions that are served in tests: pages of letters, where each pair of letters is a word."""

import asyncio
import os
import signal
import time

import msgspec

import forebay
from forebay import Model, node


class Image(msgspec.Struct):
    """A picture."""

    letters: bytes


class Box(msgspec.Struct):
    """Where a word stands."""

    left: int
    right: int


class Page(msgspec.Struct):
    """What was read."""

    words: list[str]
    boxes: list[Box]
    processes: list[int]


class Word(msgspec.Struct):
    """A word and who read it."""

    text: str
    process: int


@node
def decode(image: bytes) -> Image:
    if not image:
        raise forebay.InvalidRequest("the picture is empty")
    return Image(image)


class Detect(Model):
    """Runs in a process of its own: `Image` and `Box` go there and come back."""

    max_batch_size = 8

    def predict(self, batch: list[Image]) -> list[list[Box]]:
        return [[Box(left, left + 2) for left in range(0, len(image.letters), 2)] for image in batch]


@node
def crop(image: Image, boxes: list[Box]) -> list[Image]:
    return [Image(image.letters[box.left : box.right]) for box in boxes]


class Read(Model):
    """Its elements come from several requests."""

    max_batch_size = 32

    def predict(self, batch: list[Image]) -> list[Word]:
        time.sleep(0.02)
        if any(image.letters == b"!!" for image in batch):
            raise ValueError("cannot read that")
        return [Word(image.letters.decode().upper(), os.getpid()) for image in batch]


@node(worker_kind="inline")
def layout(boxes: list[Box], words: list[Word]) -> Page:
    return Page([word.text for word in words], boxes, sorted({word.process for word in words}))


detect = node(Detect, worker_kind="process", workers=2)
read = node(Read, worker_kind="process")


@forebay.compose
def ocr(image: bytes) -> Page:
    """Read a picture."""
    picture = decode(image)
    boxes = detect(picture)
    return layout(boxes, read.map(crop(picture, boxes)))


@node(outputs=("even", "odd"))
def route(number: int) -> dict[str, int]:
    if number == 0:
        return {}
    return {"odd": number} if number % 2 else {"even": number}


@node
def halve(number: int) -> int:
    return number // 2


@node(batched=True, max_batch_size=4)
def triple(numbers: list[int], plus: list[int | None] | None = None) -> list[int]:
    assert plus is not None
    return [number * 3 + (extra or 0) for number, extra in zip(numbers, plus, strict=True)]


@forebay.compose
def collatz(number: int, plus: int = 1) -> int:
    even, odd = route(number)
    return forebay.either(halve(even), triple(odd, plus))


@forebay.compose
def branches(number: int):
    even, odd = route(number)
    return {"even": halve(even), "odd": odd}


class Lengths(Model):
    """Only samples of equal length share a batch."""

    def predict(self, batch: list[str]) -> list[list[int]]:
        return [[len(text) for text in batch]] * len(batch)


lengths = node(Lengths, batch_key=len, worker_kind="process")


@forebay.compose
def keyed(texts: list[str]) -> list[list[int]]:
    return lengths.map(texts)


def no_key(text: str) -> int:
    """A batch key that fails for some."""
    return {"short": 1}[text]


picky = node(Lengths, name="picky", batch_key=no_key, worker_kind="thread")


@forebay.compose
def picked(text: str) -> list[int]:
    return picky(text)


@node(worker_kind="process")
def risky(text: str) -> str:
    """Quick, so that requests share the way here."""
    if text == "raise":
        raise RuntimeError("as you wished")
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return text.upper()


@forebay.compose
def risked(text: str) -> str:
    return risky(text)


@node(worker_kind="inline", workers=8)
async def wait(seconds: float) -> float:
    """Shares the loop, so that one who waits holds up nobody."""
    await asyncio.sleep(seconds)
    return seconds


@forebay.compose(max_in_flight=1, max_queue=1)
def slow(seconds: float) -> float:
    return wait(seconds)


@node
def same(texts: list[str]) -> list[str]:
    return texts


@forebay.compose
def echo(texts: list[str]) -> list[str]:
    return same(texts)


@node
def swap(data: bytes) -> bytes:
    return data[::-1]


@forebay.compose
def mirror(data: bytes) -> bytes:
    return swap(swap(swap(data)))
