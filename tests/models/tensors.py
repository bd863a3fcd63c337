# SPDX-License-Identifier: Apache-2.0
"""Models whose samples come as tensors, each with one thing to know about it."""

from typing import Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from forebay import Model

Row = np.ndarray[tuple[Literal[3]], np.dtype[np.float32]]


class Doubled(Model):
    """Takes and gives arrays, and says how many samples ran together."""

    max_batch_size = 4

    def predict(self, batch: list[Row]) -> list[Row]:
        return [row * 2 for row in batch]


class Head(Model):
    """Gives the beginning of what it gets, of any number of axes."""

    def predict(self, batch: list[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        return [row.ravel()[:4] for row in batch]


class Person(msgspec.Struct):
    name: str
    age: int
    scores: list[float] = []
    more: dict[str, int] = {}


class About(TypedDict):
    text: str
    older: int
    mean: float
    all: dict[str, int]


class People(Model):
    """Fields of plain types, one that is optional, and one that no tensor can be."""

    def predict(self, batch: list[Person]) -> list[About]:
        return [
            {
                "text": f"hello {one.name}",
                "older": one.age + 1,
                "mean": sum(one.scores) / max(len(one.scores), 1),
                "all": {**one.more, "n": len(batch)},
            }
            for one in batch
        ]


class Anything(Model):
    """Says nothing of its types."""

    def predict(self, batch):
        return [{"given": one, "kind": type(one).__name__} for one in batch]


class Types(TypedDict, total=False):
    BOOL: npt.NDArray[np.bool_]
    UINT8: npt.NDArray[np.uint8]
    UINT16: npt.NDArray[np.uint16]
    UINT32: npt.NDArray[np.uint32]
    UINT64: npt.NDArray[np.uint64]
    INT8: npt.NDArray[np.int8]
    INT16: npt.NDArray[np.int16]
    INT32: npt.NDArray[np.int32]
    INT64: npt.NDArray[np.int64]
    FP16: npt.NDArray[np.float16]
    FP32: npt.NDArray[np.float32]
    FP64: npt.NDArray[np.float64]
    BYTES: str


class Typed(Model):
    """Echoes each type of data."""

    def predict(self, batch: list[Types]) -> list[Types]:
        return batch


class Wrong(Model):
    """Fails one sample, and gives shapes that cannot be put together."""

    def predict(self, batch: list[int]):
        return [ValueError("secret") if one < 0 else [one] * one for one in batch]


class Sound(Model):
    """Takes and gives bytes."""

    def predict(self, batch: list[bytes]) -> list[bytes]:
        return [one[::-1] for one in batch]


class Words(Model):
    """Streams."""

    def predict(self, batch: list[str]):
        yield [one.upper() for one in batch]
