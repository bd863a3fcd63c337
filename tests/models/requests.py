# SPDX-License-Identifier: Apache-2.0
"""Models that are sent forms, packed bodies and queries."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import pydantic
from numpy.typing import NDArray

import forebay


class Picture(msgspec.Struct, forbid_unknown_fields=True):
    """A picture and what is to become of it."""

    image: forebay.File
    label: str
    size: int = 0
    tags: list[str] = []
    mask: bytes | None = None


class Seen(msgspec.Struct):
    """What came of a picture."""

    filename: str | None
    type: str
    size: int
    sum: int
    is_on_disk: bool
    label: str
    number: int
    tags: list[str]
    mask: list[int] | None = None


class Pictures(forebay.Model):
    """Looks at pictures."""

    def predict(self, batch: list[Picture]) -> list[Seen]:
        return [self.seen(one) for one in batch]

    def seen(self, one: Picture) -> Seen:
        image = one.image
        with image.open() as file:
            content = file.read()
        assert content == image.read()
        assert image.path is None or image.path.is_file()
        mask = None if one.mask is None else list(one.mask)
        told = image.filename, image.type, image.size, sum(content), image.path is not None
        return Seen(*told, one.label, one.size, one.tags, mask)


class Form(pydantic.BaseModel):
    """The same in pydantic."""

    image: forebay.File
    score: float
    is_new: bool = False


class Choice(pydantic.BaseModel):
    """Values of which only a few are allowed."""

    size: Literal[1, 2] = 1
    is_new: Literal[True] | None = None
    named: Literal["1", 2, "two"] = "two"


class Chooses(forebay.Model):
    """Gives back what it was sent, by a form or a query."""

    def predict(self, batch: list[Choice]) -> list[Choice]:
        return batch

    @forebay.endpoint("/asked", methods=["GET"])
    def asked(self, batch: list[Choice]) -> list[Choice]:
        return batch


@dataclass
class Sizes:
    """Arrays of numbers, beside what is none."""

    wide: NDArray[np.float32]
    high: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
    label: str = ""


class Sizer(forebay.Model):
    """Tells what arrays it was sent, by a form or a query."""

    def predict(self, batch: list[Sizes]) -> list[dict]:
        return [self.told(one) for one in batch]

    @forebay.endpoint("/asked", methods=["GET"])
    def asked(self, batch: list[Sizes]) -> list[dict]:
        return self.predict(batch)

    def told(self, one: Sizes) -> dict:
        arrays = {"wide": one.wide, "high": one.high}
        return {name: [str(array.dtype), array.tolist()] for name, array in arrays.items() if array is not None}


class Strict(forebay.Model):
    """Takes a model of pydantic's."""

    def predict(self, batch: list[Form]) -> list[list]:
        return [[one.image.size, one.score, one.is_new] for one in batch]


class Raw(forebay.Model):
    """Takes bytes, and answers how many."""

    def predict(self, batch: list[bytes]) -> list[int]:
        return [len(one) for one in batch]


class Anything(forebay.Model):
    """Takes whatever comes."""

    def predict(self, batch):
        return [{name: str(value) for name, value in one.items()} for one in batch]


class Rows(forebay.Model):
    """Takes arrays of numbers."""

    batchable = True

    def predict(self, batch: list[int]) -> list[int]:
        return batch


class Prompt(msgspec.Struct):
    """What to say, and how often."""

    text: str
    times: int = 2


class Says(forebay.Model):
    """Says it again and again."""

    def predict(self, batch: list[Prompt]) -> Iterator[list[str | None]]:
        for number in range(max(one.times for one in batch)):
            yield [f"{one.text} {number}" if number < one.times else None for one in batch]


class Quotes(forebay.Model):
    """Sends JSON that somebody else wrote, in lines: alone, or in what is declared to hold some."""

    TEXT = msgspec.Raw(b'{\n  "a": [1,\r  2]\r\n\n}')

    def predict(self, batch: list[int]) -> Iterator[list[Any]]:
        for number in range(2):
            yield [self.TEXT if number else "\n" for _ in batch]

    @forebay.endpoint("/inside")
    def inside(self, batch: list[int]) -> Iterator[list[dict[str, msgspec.Raw]]]:
        yield [{"quoted": self.TEXT} for _ in batch]

    @forebay.endpoint("/undeclared")
    def undeclared(self, batch: list[int]) -> Iterator[list[dict]]:
        yield [{"quoted": self.TEXT} for _ in batch]

    @forebay.endpoint("/alone")
    def alone(self, batch: list[int]) -> Iterator[list[msgspec.Raw]]:
        yield [self.TEXT for _ in batch]

    @forebay.endpoint("/beside")
    def beside(self, batch: list[int]) -> list[dict[str, msgspec.Raw | int]]:
        return [{"quoted": self.TEXT, "more": 1} for _ in batch]


class Keyed(forebay.Model):
    """Has a key of a field, and is slow enough for two to meet."""

    max_wait_ms = 1

    @staticmethod
    def batch_key(sample: Picture) -> str:
        return sample.label

    def predict(self, batch: list[Picture]) -> list[str]:
        time.sleep(0.001)
        return [one.label for one in batch]


class Asks(forebay.Model):
    """Answers what it is told of requests, in each of its methods."""

    max_wait_ms = 50

    def preprocess(self, sample: int, context: forebay.Context) -> dict:
        if sample < 0:
            raise forebay.ValidationError("no such number")
        return {"sample": sample, "pre": context.headers.get("x-tag")}

    def predict(self, batch: list[dict], *, context: list[forebay.Context]) -> list[dict]:
        return [{**one, "tag": told.headers.get("x-tag")} for one, told in zip(batch, context, strict=True)]

    def postprocess(self, result: dict, context: forebay.Context) -> dict:
        return {
            **result,
            "post": context.headers.get("x-tag"),
            "id": context.request_id,
            "client": context.client,
            "remaining_s": context.remaining_s,
            "device": context.device,
            "worker": context.worker,
        }


class AsksAsync(forebay.Model):
    """The same, where methods are coroutines."""

    batchable = True

    async def predict(self, batch: list[int], context: list[forebay.Context]) -> list[list]:
        return [[one, told.headers.get("x-tag")] for one, told in zip(batch, context, strict=True)]


class Tells(forebay.Model):
    """Streams what it is told."""

    def predict(self, batch: list[Prompt], context: list[forebay.Context]) -> Iterator[list[str]]:
        yield [told.request_id for told in context]
        yield [one.text for one in batch]

    def postprocess(self, result: str, context: forebay.Context) -> list[str]:
        return [result, context.request_id]
