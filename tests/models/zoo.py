# SPDX-License-Identifier: Apache-2.0
"""One small model for each thing a model can do or get wrong; served by the contract suite and by the fuzzers."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator

import msgspec
import pydantic

import forebay


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """A place in the plane."""

    x: float
    y: float


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A polygon."""

    name: str
    points: list[Point]
    tags: list[str] = []


class Summary(msgspec.Struct):
    """What is known of a shape."""

    name: str
    corners: int


class Echo(forebay.Model):
    """Gives back what it is given."""

    version = "7"

    def predict(self, batch):
        return batch


class Typed(forebay.Model):
    """Counts corners; its sample is a struct with nested lists."""

    def predict(self, batch: list[Shape]) -> list[Summary]:
        return [Summary(shape.name, len(shape.points)) for shape in batch]


class Person(pydantic.BaseModel):
    """A sample with a rule of its own."""

    name: str
    age: int = pydantic.Field(ge=0)


class Pydantic(forebay.Model):
    """Greets; its sample is a pydantic model."""

    def predict(self, batch: list[Person]) -> list[str]:
        return [f"{person.name} is {person.age}" for person in batch]


class Upper(forebay.Model):
    """Bytes in, bytes out."""

    def predict(self, batch: list[bytes]) -> list[bytes]:
        return [sample.upper() for sample in batch]


class Doubles(forebay.Model):
    """Takes arrays of samples."""

    batchable = True
    max_batch_size = 8

    def predict(self, batch: list[int]) -> list[int]:
        return [2 * sample for sample in batch]


class Errand(msgspec.Struct):
    """A sample that takes time."""

    name: str = ""
    s: float = 0.0
    until: str = ""
    """A file; the errand takes until it is there."""

    def run(self):
        time.sleep(self.s)
        while self.until and not os.path.exists(self.until):  # noqa: PTH110 - nothing else is needed of it
            time.sleep(0.005)


class Diary(forebay.Model):
    """Sleeps as long as the sample says and answers with the names of all samples it has run so far."""

    max_batch_size = 1

    def load(self):
        self.names: list[str] = []

    def predict(self, batch: list[Errand]) -> list[list[str]]:
        for errand in batch:
            self.names.append(errand.name)
            errand.run()
        return [list(self.names) for _ in batch]


class Narrow(forebay.Model):
    """Runs one sample at a time and lets two wait."""

    max_batch_size = 1
    max_queue = 2

    def predict(self, batch: list[Errand]) -> list[str]:
        for errand in batch:
            errand.run()
        return [errand.name for errand in batch]


class Pair(forebay.Model):
    """Waits for two samples before it runs, so that they are batch-mates; answers with the size of its batch."""

    max_batch_size = 2
    max_wait_ms = 30_000

    def predict(self, batch: list[Errand]) -> list[object]:
        for errand in batch:
            errand.run()
        return [ValueError(errand.name) if errand.name == "bad" else len(batch) for errand in batch]


class Failing(forebay.Model):
    """Does the wrong thing the sample asks for."""

    max_batch_size = 1

    def predict(self, batch: list[str]) -> list[object]:
        wish = batch[0]
        if wish == "raise":
            secret = "attack at dawn"
            raise RuntimeError(secret)
        if wish == "exit":
            sys.exit(3)
        if wish == "interrupt":
            raise KeyboardInterrupt
        if wish == "die":
            os._exit(9)
        if wish == "too many":
            return [1, 2, 3]
        if wish == "none":
            return None  # type: ignore[return-value]
        if wish == "unsendable":
            return [object()]
        if wish == "refuse":
            return [forebay.Failure(forebay.InvalidRequest("not this one"))]
        if wish == "busy":
            raise forebay.QueueFull("come back later")
        return [wish]


class Count(forebay.Model):
    """Streams the numbers below its sample; -1 ends with an error after two of them, -2 never ends."""

    max_batch_size = 1

    def predict(self, batch: list[int]) -> Iterator[list[object]]:
        top = batch[0]
        number = 0
        while number < top or top < 0:
            if top == -1 and number == 2:
                secret = "attack at dawn"
                raise RuntimeError(secret)
            yield ["x" * 100_000 if top == -2 else number]
            number += 1


class Later(forebay.Model):
    """An `async` model."""

    async def predict(self, batch: list[float]) -> list[float]:
        await asyncio.sleep(max(batch))
        return batch


class Patient(forebay.Model):
    """Works for `s` seconds unless everybody who asked is gone; an errand of no seconds asks how the last one ended."""

    max_batch_size = 1

    def load(self):
        self.ended = "never ran"

    def predict(self, batch: list[Errand]) -> list[str]:
        errand = batch[0]
        if not errand.s:
            return [self.ended]
        self.ended = "running"
        end = time.monotonic() + errand.s
        while time.monotonic() < end:
            if forebay.is_cancelled():
                self.ended = "cancelled"
                return [self.ended]
            time.sleep(0.005)
        self.ended = "finished"
        return [self.ended]


class Large(forebay.Model):
    """Answers with as many bytes as it is asked for."""

    def predict(self, batch: list[int]) -> list[bytes]:
        return [bytes(sample) for sample in batch]
