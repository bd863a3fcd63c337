# SPDX-License-Identifier: Apache-2.0
"""A model that answers at several paths."""

import asyncio
import os
import time
from collections.abc import Iterator

import msgspec

import forebay


class Prefix(msgspec.Struct):
    """What words begin with."""

    prefix: str = ""
    longest: int = 9


class Words(forebay.Model):
    """Knows three words."""

    max_wait_ms = 20

    def load(self) -> None:
        self.known = ["ax", "axe", "bee"]
        self.made = f"{os.getpid()} {id(self)}"

    def preprocess(self, sample: str) -> str:
        return sample.strip()

    def predict(self, batch: list[str]) -> list[str]:
        return [f"{one}: {self.made}" for one in batch]

    @forebay.endpoint("/embed")
    def embed(self, batch: list[str]) -> list[list[float]]:
        """Counts letters."""
        if "raise" in batch:
            raise ValueError("nothing to count")
        return [[float(len(one)), float(len(batch))] for one in batch]

    @forebay.endpoint("/made")
    async def tell(self, batch: list[int], context: list[forebay.Context]) -> list[list[str]]:
        await asyncio.sleep(0)
        return [[self.made, told.headers.get("x-tag", "")] for told in context]

    @forebay.endpoint("/vocabulary", methods=["GET"])
    def vocabulary(self, batch: list[Prefix]) -> list[list[str]]:
        """Lists words."""
        return [[one for one in self.known if one.startswith(of.prefix) and len(one) <= of.longest] for of in batch]

    @forebay.endpoint("/by/either", methods=["GET", "POST"])
    def either(self, batch: list[Prefix]) -> list[str]:
        return [one.prefix for one in batch]

    @forebay.endpoint("/rows", batchable=True)
    def rows(self, batch: list[int]) -> list[int]:
        return [one + 1 for one in batch]

    @forebay.endpoint("/spell")
    def spell(self, batch: list[Prefix]) -> Iterator[list[str | None]]:
        for number in range(max(len(one.prefix) for one in batch)):
            yield [one.prefix[number : number + 1] or None for one in batch]

    @forebay.endpoint("/bytes")
    def count(self, batch: list[bytes]) -> list[bytes]:
        time.sleep(0.001)
        return [one[::-1] for one in batch]
