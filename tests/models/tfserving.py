# SPDX-License-Identifier: Apache-2.0
"""Models that clients of TensorFlow Serving ask."""

from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

from forebay import Model, endpoint

Four = np.ndarray[tuple[Literal[4]], np.dtype[np.float32]]


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


class Every(Model):
    """Gives what it gets, of every type."""

    def predict(self, batch: list[Types]) -> list[Types]:
        return batch


class Brightness(Model):
    """Takes pictures of any size."""

    def predict(self, batch: list[npt.NDArray[np.float32]]) -> list[float]:
        return [float(picture.mean()) for picture in batch]


class Flower(TypedDict):
    x: Four


class Classes(TypedDict):
    classes: list[str]
    scores: list[float]


class Marks(TypedDict):
    mark_bytes: str
    first: float


class Species(Model):
    """Classifies."""

    def predict(self, batch: list[Flower]) -> list[Classes]:
        return [{"classes": ["small", "large"], "scores": [1.0, float(one["x"].sum())]} for one in batch]

    @endpoint("/weight")
    def weight(self, batch: list[Flower]) -> list[float]:
        return [float(one["x"].sum()) / 2 for one in batch]

    @endpoint("/marks")
    def marks(self, batch: list[Flower]) -> list[Marks]:
        return [{"mark_bytes": "m", "first": float(one["x"][0])} for one in batch]


class House(TypedDict):
    rooms: int
    size: float


class Price(Model):
    """Does a regression."""

    def predict(self, batch: list[House]) -> list[float]:
        return [one["rooms"] * 100 + one["size"] for one in batch]


class Words(Model):
    """Takes and gives texts."""

    def predict(self, batch: list[str]) -> list[str]:
        return [one.upper() for one in batch]


class Broken(Model):
    def predict(self, batch: list[float]) -> list[float]:
        raise ValueError("out of paper")


class Parts(Model):
    """Streams."""

    def predict(self, batch: list[int]):
        for number in range(3):
            yield [number for _ in batch]


class Sounds(Model):
    """Takes and gives bytes."""

    def predict(self, batch: list[bytes]) -> list[bytes]:
        return batch


class Picture(TypedDict):
    thumb_bytes: str
    name: str


class Pictures(Model):
    """Gives what is called bytes."""

    def predict(self, batch: list[str]) -> list[Picture]:
        return [{"thumb_bytes": one.upper(), "name": one} for one in batch]


class Part(TypedDict):
    parts: list[bytes]
    named: dict[str, bytes]


class Nested(Model):
    """Gives bytes within other things."""

    def predict(self, batch: list[int]) -> list[Part]:
        return [{"parts": [b"\xff\0"], "named": {"raw": b""}} for _ in batch]


class Nans(Model):
    def predict(self, batch: list[float]) -> list[float]:
        return [float("nan") for _ in batch]
