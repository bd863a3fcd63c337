# SPDX-License-Identifier: Apache-2.0
"""A composition whose nodes share runs of equal numbers."""

import time

import forebay
from forebay import node


class Doubled(forebay.Model):
    """Doubles, in two milliseconds."""

    max_batch_size = 4
    single_flight = "all"

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(0.002)
        return [2 * number for number in batch]


@node
def summed(number: float, doubled: float) -> float:
    """Adds both."""
    time.sleep(0.001)
    return number + doubled


doubled = node(Doubled)


@forebay.compose
def tripled(number: float) -> float:
    """Three times a number."""
    return summed(number, doubled(number))
