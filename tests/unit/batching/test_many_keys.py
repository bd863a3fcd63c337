# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false
"""What a step of the queue looks at does not grow with the number of keys that wait."""

from __future__ import annotations

import pytest

from forebay.batching.lines import Line
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.types.call import Request

KEYS = 10_000
FEW = 64 + 40
"""Lines that are told that they wait, and a generous logarithm."""


class CountingLine(Line):
    """Counts how often any line is asked for its first entry: for from when on it is eligible, or how old it is."""

    looks = 0

    def head(self):
        CountingLine.looks += 1
        return super().head()


@pytest.fixture(autouse=True)
def _counting(monkeypatch):
    monkeypatch.setattr("forebay.batching.queue.Line", CountingLine)


def looked(step):
    CountingLine.looks = 0
    result = step()
    return CountingLine.looks, result


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"idle": "go"},
        {"idle": "wait", "max_wait_s": 0.5},
        {"idle": "gather"},
        {"idle": "wait", "max_wait_s": 0.5, "max_running": 1},
        {"idle": "gather", "max_running": 2},
        {"idle": "gather", "objective_s": 2.0},
        {"idle": "go", "objective_s": 2.0},
        {"idle": "go", "objective_s": 2.0, "max_running": 1},
    ],
    ids=str,
)
def test_no_step_looks_at_all_keys(settings, slots):  # F38: a take cost 103 ms at 4,096 keys
    queue = BatchQueue(BatchConfig(capacity=3 * KEYS, **settings))
    queue.slots = slots
    now = 1.0
    for key in range(KEYS):
        most, _ = looked(lambda: queue.offer(Request(body=b"", reply=print, key=key), now))  # noqa: B023
        assert most < FEW
        now += 1e-5
    now += 1.0
    running = []
    total = left = 0
    for _ in range(KEYS // 10):
        looks, batch = looked(lambda: queue.take(now))  # noqa: B023
        total += looks
        if batch is not None:
            left += batch.rows
            running.append(batch)
        total += looked(queue.next_due)[0]
        total += looked(queue.is_full)[0]
        now += 1e-4
        if len(running) >= slots or batch is None:
            done = running.pop(0) if running else None
            if done is not None:
                total += looked(lambda: queue.answered(done, now))[0]  # noqa: B023
            queue.offer(Request(body=b"", reply=print, key=KEYS + left), now)
    assert left > KEYS // 20
    assert total / (KEYS // 10) < FEW


def test_keys_that_left_before_they_were_due_are_forgotten():
    """Each was noted for when it would be due, and once more when it was full."""
    queue = BatchQueue(BatchConfig(max_size=2, idle="wait", max_wait_s=1_000.0))
    queue.offer(Request(body=b"", reply=print, key="waits"), 1.0)
    for key in range(1_000):
        for _ in range(2):
            queue.offer(Request(body=b"", reply=print, key=key), 1.0)
        batch = queue.take(1.0)
        assert batch is not None
        assert batch.rows == 2
    assert len(queue._order._heap) < 100


def test_what_is_noted_about_keys_is_bounded_too():
    """Two lines that never get empty note something with each batch."""
    for settings in ({"idle": "go"}, {"idle": "wait"}, {"objective_s": 0.5}, {"idle": "wait", "max_running": 1}):
        queue = BatchQueue(BatchConfig(max_size=4, **settings))
        now = 1.0
        for _ in range(3_000):
            while queue.waiting < 32:
                for key in "ab":
                    queue.offer(Request(body=b"", reply=print, key=key), now)
            batch = queue.take(now)
            now += 0.001
            if batch is not None:
                queue.answered(batch, now)
        assert len(queue._order._heap) < 200
        assert len(queue._ages._heap) < 200
