# SPDX-License-Identifier: Apache-2.0
"""A model for each way to be asked: one sample, an array of them, and an answer in parts."""

from collections.abc import Iterator

from forebay import Model


class Echo(Model):
    def predict(self, batch: list[str]) -> list[str]:
        return batch


class Doubles(Model):
    batchable = True

    def predict(self, batch: list[int]) -> list[int]:
        return [2 * number for number in batch]


class Words(Model):
    def predict(self, batch: list[str]) -> Iterator[list[str | None]]:
        texts = [text.split() for text in batch]
        for place in range(max(map(len, texts))):
            yield [words[place] if place < len(words) else None for words in texts]
