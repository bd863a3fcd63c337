# SPDX-License-Identifier: Apache-2.0
"""What the tests of servings share."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.waiting import PATIENCE_S
from tests.waiting import eventually as wait_until  # noqa: F401 - for the tests beside

from forebay import Batch, Serving


class Gate:
    """A serving's function that runs when the test says so; upstream's ExecuteSync."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.batches = []

    def init(self, kind, arg, partitions):
        return None

    def handle_batch(self, batch, partition, state):
        def run():
            rows = batch.realize()
            self.batches.append((partition, batch.batch_key, np.asarray(rows).tolist()))
            self.entered.release()
            assert self.go.acquire(timeout=PATIENCE_S)
            if np.any(np.asarray(rows) == 13):
                raise ValueError("thirteen")
            return rows * 2, "metadata"

        return run, state

    def enter(self, count=1):
        """Wait until so many batches have begun."""
        for _ in range(count):
            assert self.entered.acquire(timeout=PATIENCE_S)

    def open(self, count=1):
        """Let so many batches end."""
        for _ in range(count):
            self.go.release()

    @property
    def rows(self):
        return [rows for _, _, rows in self.batches]


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open(1000)


@pytest.fixture
def gated(gate):
    return Serving.new(gate)


@pytest.fixture
def pool():
    """Threads that call."""
    with ThreadPoolExecutor(80) as pool:
        yield pool


@pytest.fixture
def quickly(monkeypatch):
    """What hangs although nobody waits for it is given up at once."""
    monkeypatch.setattr("forebay.serving.nx_serving.partitions.STUCK_S", 0.02, raising=False)


def abandon(process, batch, has_begun):
    """Ask for a batch, and go away once it has begun."""

    async def main():
        task = asyncio.create_task(process.batched_run_async(batch))
        await asyncio.to_thread(has_begun)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def cat(*rows):
    return Batch.concatenate([np.array(rows)])
