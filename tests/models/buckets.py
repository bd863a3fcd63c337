# SPDX-License-Identifier: Apache-2.0
"""Models whose samples have keys, are padded, or poison their batch; each answers with something of its batch."""

import os

import msgspec

import forebay


class Tokens(msgspec.Struct, forbid_unknown_fields=True):
    """A text as token ids."""

    ids: list[int]
    types: list[int] = []


class Seen(msgspec.Struct):
    """The ids of a sample, doubled, and the shape of the batch it was in."""

    ids: list[int]
    shape: list[int]


class Tagger(forebay.Model):
    """Doubles ids; waits until two samples of a bucket are there."""

    max_batch_size = 2
    max_wait_ms = 5_000
    pad = forebay.Pad({"ids": ("length",)}, buckets={"length": [4, 8]}, outputs={"ids": ("length",)})

    def predict(self, batch: forebay.Padded[Tokens]) -> list[Seen]:
        ids = batch.arrays["ids"]
        assert ids[~batch.mask()].sum() == 0
        return [Seen(ids=list(2 * row), shape=list(ids.shape)) for row in ids]


class Words(forebay.Model):
    """Answers each text with its batch; texts of unlike first letters do not meet. Takes arrays."""

    batchable = True
    max_wait_ms = 50

    @staticmethod
    def batch_key(sample: str) -> object:
        if sample == "fail":
            secret = "attack at dawn"
            raise RuntimeError(secret)
        if sample == "odd":
            return []
        if sample == "not this":
            raise forebay.ValidationError("no such text is taken")
        return sample[:1]

    def predict(self, batch: list[str]) -> list[list[str]]:
        return [sorted(batch)] * len(batch)


class Tokenizer(forebay.Model):
    """Pads what `preprocess` makes of a text; waits until there are four."""

    max_batch_size = 4
    max_wait_ms = 5_000
    pad = forebay.Pad({"ids": ("length",)}, buckets={"length": [2, 8]})

    def preprocess(self, sample: str) -> dict:
        return {"ids": [len(word) for word in sample.split()]}

    def predict(self, batch: forebay.Padded) -> list[list[int]]:
        return [list(batch.arrays["ids"].shape)] * len(batch)


class Poisoned(forebay.Model):
    """Takes four at a time; fails, or ends its worker, as a whole where one of them says so."""

    isolate_errors = True
    max_batch_size = 4
    max_wait_ms = 5_000

    def predict(self, batch: list[str]) -> list[str]:
        if "die" in batch:
            os._exit(9)
        if "raise" in batch:
            secret = "attack at dawn"
            raise RuntimeError(secret)
        return batch
