# SPDX-License-Identifier: Apache-2.0
"""Models that programs of two versions of forebay serve together."""

from collections.abc import Iterator

import forebay


class Doubler(forebay.Model):
    """Doubles numbers, and refuses negative ones."""

    def predict(self, batch: list[int]) -> list[int | Exception]:
        return [forebay.InvalidRequest("no negative numbers") if one < 0 else 2 * one for one in batch]


class Twice(forebay.Model):
    """Says a text twice, which may be long."""

    def predict(self, batch: list[str]) -> list[str]:
        return [2 * one for one in batch]


class Counter(forebay.Model):
    """Streams the numbers up to another one."""

    def predict(self, batch: list[int]) -> Iterator[list[int | None]]:
        for number in range(max(batch)):
            yield [number if number < one else None for one in batch]
