# SPDX-License-Identifier: Apache-2.0
"""What runs of a batch cost is paid by whoever caused it: padding by the longest, runs of halves by what failed."""

from __future__ import annotations

import json
import time

import pytest

from forebay import Model, Pad
from forebay.batching.bill import divide
from forebay.serving.models.model_runner import ModelRunner
from forebay.serving.models.sample_times import SampleTimes
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.workers.runner import WorkerContext
from forebay.workers.user_calls.phases import needed

ROW_S = 0.004
JSON = {"in": "json", "out": "json"}


class Poisoned(Model):
    """Needs a while, and fails as a whole if a sample is negative."""

    isolate_errors = True

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(ROW_S)
        if min(batch) < 0:
            raise ValueError("negative")
        return batch


class Long(Model):
    """Pads its samples."""

    pad = Pad(("length",))

    def predict(self, batch: list[list[int]]) -> list[int]:
        time.sleep(ROW_S)
        return [0 for _ in batch]


def ran(model, samples):
    """Run a batch; returns what each sample paid by itself."""
    runner = ModelRunner(model)
    runner.open(WorkerContext())
    own_s: list[float] = []
    token = needed.set(own_s)
    try:
        items = [Request(json.dumps(sample).encode(), print, JSON) for sample in samples]
        started = time.monotonic()
        runner.run(items)
        batch = EntryBatch(items, None, len(items), model_s=time.monotonic() - started, own_s=own_s)
    finally:
        needed.reset(token)
    return batch, divide(batch, None)


def test_the_first_run_is_paid_by_all_and_those_of_halves_by_what_failed():
    batch, parts = ran(Poisoned, [1, 2, -3, 4])
    assert sum(parts) == pytest.approx(batch.model_s, abs=1e-9)
    assert parts[2] > 4 * ROW_S  # of the runs 1 2 -3 4, 1 2, -3 4, -3, 4 all but three quarters of the first
    assert max(parts[0], parts[1], parts[3]) < parts[2] / 4


def test_the_longest_pays_for_the_padding():
    batch, parts = ran(Long, [[1], [1], [1] * 10])
    assert sum(batch.own_s) <= batch.model_s
    assert batch.own_s == pytest.approx([sum(batch.own_s) * part / 30 for part in (1, 1, 28)])
    assert sum(parts) == pytest.approx(batch.model_s, abs=1e-9)


def test_samples_of_one_bucket_pay_alike():
    pad = Pad(("length",), buckets={"length": [4, 8]})
    assert pad.sizes([pad.measure([0] * size) for size in (1, 4, 3)]) == [4.0, 4.0, 4.0]
    assert pad.sizes([pad.measure([0] * size) for size in (1, 5)]) == [4.0, 12.0]
    assert Pad(("length",)).sizes([Pad(("length",)).measure([])] * 2) == [1.0, 1.0]


def test_runs_of_halves_that_all_succeed_are_paid_by_those_in_them():
    times = SampleTimes(None)
    times.ran([0, 1], 2.0)
    times.ran([0], 1.0)
    times.ran([1], 3.0)
    assert times.seconds(["a", "b"]) == [2.0, 4.0]
    assert times.seconds(["a", Failure(ValueError())]) == [1.0, 5.0]  # pyright: ignore[reportArgumentType]
