# SPDX-License-Identifier: Apache-2.0
"""A model that keeps some of its samples for good, and tells whether those are still what they were."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from forebay import Model

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Told = np.ndarray[tuple[int], np.dtype[np.int64]]

LETS_GO, KEEPS, KEEPS_A_PART, LEAVES_TO_THE_COLLECTOR, FAILS = range(5)
"""What it does with a sample, as its first byte says."""


class Hoarding(Model):
    def load(self) -> None:
        self.kept = []

    def predict(self, samples: list[Bytes]) -> list[Told]:
        """Whether the sample lies where it landed, how many were kept before, and how many of those are others now."""
        changed = sum(before != digest(one) for one, before in self.kept)
        told = [np.array([has_landed(sample), len(self.kept), changed]) for sample in samples]
        for sample in samples:
            match sample[0]:
                case 1:
                    self.kept.append((sample, digest(sample)))
                case 2:
                    self.kept.append((sample[-1000:], digest(sample[-1000:])))
                case 3:
                    circle: list[Any] = [sample]
                    circle.append(circle)
                case 4:
                    raise ValueError(sample)
        return told


def digest(sample: Any) -> bytes:
    return hashlib.sha1(sample).digest()


def has_landed(sample: Bytes) -> bool:
    address = sample.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(one, 16) for one in span.split("-"))
        if begin <= address < end:
            return "forebay-body" in name
    return False
