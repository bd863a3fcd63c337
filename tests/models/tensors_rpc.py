# SPDX-License-Identifier: Apache-2.0
"""Models that take and give tensors, for clients of the KServe v2 protocol."""

import itertools
import threading
import time
from typing import Any, Literal, TypedDict

import numpy as np

import forebay
from forebay.errors import InvalidRequest

Four = np.ndarray[tuple[Literal[4]], np.dtype[np.float32]]
Any32 = np.ndarray[tuple[int], np.dtype[np.float32]]


class Pair(TypedDict):
    left: Four
    right: Four


class Add(forebay.Model):
    """Adds two tensors."""

    name = "add"
    max_batch_size = 8

    def predict(self, samples: list[Pair]) -> list[Any]:
        return [{"sum": one["left"] + one["right"]} for one in samples]


class Mirror(forebay.Model):
    """Gives back what it was given."""

    name = "mirror"

    def predict(self, samples: list[Any32]) -> list[Any]:
        return [{"output": one} for one in samples]


class Upper(forebay.Model):
    name = "upper"

    def predict(self, samples: list[str]) -> list[str]:
        return [one.upper() for one in samples]


class Picky(forebay.Model):
    """Fails for some samples."""

    name = "picky"

    def predict(self, samples: list[int]) -> list[Any]:
        return [forebay.Failure(InvalidRequest("odd")) if one % 2 else one for one in samples]


class Broken(forebay.Model):
    name = "broken"

    def predict(self, samples: list[int]) -> list[int]:
        msg = "a secret"
        raise RuntimeError(msg)


class Streaming:
    """Says how many of its streams are open."""

    opened = 0
    lock = threading.Lock()

    def numbers(self, samples, stop):
        with self.lock:
            Streaming.opened += 1
        try:
            for number in itertools.count() if stop is None else range(stop):
                yield [number if stop is None or number < one else None for one in samples]
        finally:
            with self.lock:
                Streaming.opened -= 1


class Count(Streaming, forebay.Model):
    """Counts as far as it is told, in parts."""

    name = "count"

    def predict(self, samples: list[int]):
        yield from self.numbers(samples, max(samples))


class Forever(Streaming, forebay.Model):
    """Counts without an end."""

    name = "forever"

    def predict(self, samples: list[int]):
        yield from self.numbers(samples, None)


class Open(forebay.Model):
    """Says how many streams are open."""

    name = "open"

    def predict(self, samples: list[int]) -> list[int]:
        return [Streaming.opened for _ in samples]


class Slow(forebay.Model):
    name = "slow"

    def predict(self, samples: list[float]) -> list[float]:
        time.sleep(max(samples))
        return samples


class Told(forebay.Model):
    """Says what it knows of its request."""

    name = "told"

    def predict(self, samples: list[str], context: list[forebay.Context]) -> list[str]:
        return [about.headers.get(one, "nothing") for one, about in zip(samples, context, strict=True)]
