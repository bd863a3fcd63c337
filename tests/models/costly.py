# SPDX-License-Identifier: Apache-2.0
"""Models whose answers say what they have cost."""

import time
from collections.abc import Iterator

import forebay
from forebay.openai import ChatRequest, Embedding, EmbeddingRequest, TextPart

MS = 4


class Costly(forebay.Model):
    """Needs some milliseconds for each sample."""

    name = "costly"
    max_batch_size = 4

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(MS / 1000 * len(batch))
        if max(batch) > 9:
            message = "too much"
            raise ValueError(message)
        return batch


class CostlyParts(forebay.Model):
    """Streams some parts."""

    name = "parts"

    def predict(self, batch: list[int]) -> Iterator[list[int]]:
        for number in range(3):
            time.sleep(MS / 1000)
            yield [number for _ in batch]


class CostlyBytes(forebay.Model):
    """Streams bytes as they are."""

    name = "bytes"
    raw_output = True

    def predict(self, batch: list[int]) -> Iterator[list[bytes]]:
        for _ in range(3):
            time.sleep(MS / 1000)
            yield [b"part\n" for _ in batch]


class CostlyWords(forebay.Model):
    """Says the words of a message, and counts tokens."""

    name = "words"

    def predict(self, batch: list[ChatRequest]) -> Iterator[list[TextPart | None]]:
        texts = [one.messages[-1].text.split() for one in batch]
        for place in range(max(map(len, texts))):
            time.sleep(MS / 1000)
            yield [TextPart(words[place], 2, 7) if place < len(words) else None for words in texts]


class CostlyVectors(forebay.Model):
    """Makes a vector of a text, and counts its tokens."""

    name = "vectors"

    def predict(self, batch: list[EmbeddingRequest]) -> list[Embedding]:
        time.sleep(MS / 1000)
        return [Embedding([1.0], len(one.input)) for one in batch]
