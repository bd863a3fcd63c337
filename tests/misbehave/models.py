# SPDX-License-Identifier: Apache-2.0
# pyright: reportGeneralTypeIssues=false
"""Models, compositions and servings that do what their samples say; a sample is a number and a way.

Two samples that are asked at once share a batch, whatever the machine is busy with: a batch waits for its second one.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from tests.misbehave import catalogue

from forebay import Last, Model, Serving, compose, node


def numbers(batch: Any) -> list[Any]:
    return [sample[0] for sample in batch]


def ways(batch: Any) -> list[int]:
    return [sample[1] for sample in batch]


class Plain(Model):
    max_batch_size = 1

    def predict(self, batch):
        return catalogue.perform(batch, ways(batch), numbers(batch))


class Batched(Model):
    max_batch_size = 2
    max_wait_ms = 60_000

    def predict(self, batch):
        return catalogue.perform(batch, ways(batch), numbers(batch))


class Hooked(Model):
    max_batch_size = 2
    max_wait_ms = 60_000

    def preprocess(self, sample):
        (sample,) = catalogue.perform([sample], [sample[1]], [sample], "preprocess")
        return sample

    def predict(self, batch):
        return list(batch)

    def postprocess(self, result):
        (number,) = catalogue.perform([result], [result[1]], [result[0]], "postprocess")
        return number


class Keyed(Hooked):
    max_batch_size = 1
    max_wait_ms = None

    @staticmethod
    def batch_key(sample):
        (key,) = catalogue.perform([sample], [sample[1]], [None], "batch_key")
        return key


class Loaded(Model):
    def load(self):
        self._misbehave("load")

    def predict(self, batch):
        return numbers(batch)

    def unload(self):
        self._misbehave("unload")

    def _misbehave(self, hook):
        catalogue.perform([], [int(os.environ[catalogue.WAY])], [], hook)


class Streamed(Model):
    max_batch_size = 2
    max_wait_ms = 60_000

    def predict(self, batch):
        yield from catalogue.steps(batch, ways(batch), numbers(batch))


class Awaited(Model):
    max_batch_size = 2
    max_wait_ms = 60_000

    async def predict(self, batch):
        return await catalogue.perform_async(batch, ways(batch), numbers(batch))


class Steps(Model):
    """Two parts of each stream; the first step waits for two of them."""

    max_batch_size = 2
    refused = 0

    def start(self, sample):
        self.refused += 1
        catalogue.perform([sample], [sample[1]], [None], "start")
        self.refused -= 1
        return [*sample, 0]

    def step(self, states):
        is_first = not states[0][2]
        if is_first and len(states) + self.refused < 2:
            time.sleep(0.0005)
            return [None]
        self.refused = 0
        for state in states:
            state[2] += 1
        if is_first:
            return catalogue.perform(states, ways(states), numbers(states))
        return [Last(number) for number in numbers(states)]

    def finish(self, state):
        catalogue.perform([state], [state[1]], [None], "finish")


class AwaitedStream(Model):
    max_batch_size = 2
    max_wait_ms = 60_000

    async def predict(self, batch):
        async for step in catalogue.steps_async(batch, ways(batch), numbers(batch)):
            yield step


@node(batched=True, max_batch_size=2, max_wait_ms=60_000)
def misbehaving(sample: list[Any]) -> list[Any]:
    return catalogue.perform(sample, ways(sample), numbers(sample))


@compose
def graph(sample: Any) -> Any:
    return misbehaving(sample)


def function(options):
    def run(batch):
        rows = batch.realize()
        results = catalogue.perform(rows, ways(rows.tolist()), numbers(rows.tolist()))
        is_plain = type(results) is list and all(type(one) is int for one in results)
        return np.array(results) if is_plain else results

    return run


serving = Serving.new(function).process_options(batch_size=2, batch_timeout_ms=60_000)
