# SPDX-License-Identifier: Apache-2.0
"""Models that answer with media of their own, or try to."""

from collections.abc import Iterator
from typing import Any

from forebay import Media, Model


def made(sample) -> Any:
    """What a sample asks for: a picture, one of a size, one inside of an object, or itself."""
    if sample == "inside":
        return {"it": Media(b"", "image/png")}
    if isinstance(sample, int):
        return Media(bytes(sample), "image/x-raw")
    return Media(b"\x89PNG", "image/png") if sample == "picture" else {"text": str(sample)}


class Painter(Model):
    """Declares both: a picture, or words."""

    def predict(self, batch: list[str | int]) -> list[dict[str, str] | Media]:
        return [made(sample) for sample in batch]


class Anything(Model):
    """Declares nothing, and waits."""

    async def predict(self, batch):
        return batch

    async def postprocess(self, sample):
        return made(sample)


class Rows(Model):
    """Takes arrays of samples."""

    batchable = True

    def predict(self, batch):
        return [made(sample) for sample in batch]


class Film(Model):
    """Streams."""

    def predict(self, batch) -> Iterator[list[object]]:
        yield [1 for _ in batch]
        yield [made(sample) for sample in batch]
