# SPDX-License-Identifier: Apache-2.0
"""Callers of a started serving name a tenant: the partitions and the queue are shared by weights and classes."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
from tests.serving.conftest import PATIENCE_S, cat, wait_until

import forebay
from forebay import Batch, ConfigError, InvalidRequest, QueueFull, ServingCrashed
from forebay.errors import ShareUsed

LONG_MS = 100_000
TWO = {"flood": {}, "light": {}}


class Calls:
    """Hands in calls one after the other."""

    def __init__(self, process, pool):
        self.process = process
        self.pool = pool
        self.count = 0

    def __call__(self, *rows, tenant=None, running=False, batch=None):
        waiting = self.process.statistics().waiting_rows
        batch = cat(*rows) if batch is None else batch
        future = self.pool.submit(self.process.batched_run, batch, tenant=tenant)
        if not running:
            wait_until(lambda: self.process.statistics().waiting_rows >= waiting + batch.size)
        return future


def nothing_is_left(process):
    """Every batch was charged, whatever became of it."""
    queue = process._partitions._dispatch._queue
    assert queue.running == 0
    assert not queue.fair._running


def test_a_light_tenant_does_not_wait_for_what_a_flood_has_before_it(gate, gated, pool):
    with gated.start(tenants=TWO) as process:
        call = Calls(process, pool)
        futures = [call(0, tenant="flood", running=True)]
        gate.enter()
        futures += [call(row, tenant="flood") for row in range(1, 9)]
        futures.append(call(100, tenant="light"))
        gate.open(10)
        assert [future.result(PATIENCE_S).tolist() for future in futures] == [[2 * row] for row in [*range(9), 100]]
        assert gate.rows.index([100]) <= 2
        nothing_is_left(process)


def test_weights_share_partitions_and_a_class_goes_before_those_below_it(gate, gated, pool, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # each batch takes as long
    tenants = {"one": {}, "three": {"weight": 3}, "*": {"class": 0}}
    with gated.start(tenants=tenants) as process:
        call = Calls(process, pool)
        futures = [call(0, running=True)]
        gate.enter()
        for number in range(12):
            futures.append(call(40 + number, tenant="one"))
            futures.append(call(70 + number, tenant="three"))
        futures.append(call(99, tenant="anybody"))
        gate.open(len(futures))
        for future in futures:
            future.result(PATIENCE_S)
        assert gate.rows[1] == [99]
        assert sum(70 <= row < 99 for (row,) in gate.rows[2:14]) == 9


def test_tenants_share_a_batch_and_a_call_that_straddles_two(gate, gated, pool):
    gate.open(100)
    with gated.start(tenants=TWO, batch_size=4, batch_timeout_ms=LONG_MS) as process:
        call = Calls(process, pool)
        first, second = call(1, 2, 3, tenant="flood"), call(4, 5, tenant="light", running=True)
        assert first.result(PATIENCE_S).tolist() == [2, 4, 6]
        third = call(6, 7, 8, running=True)
        assert second.result(PATIENCE_S).tolist() == [8, 10]
        assert third.result(PATIENCE_S).tolist() == [12, 14, 16]
        nothing_is_left(process)


def test_a_full_queue_makes_room_for_a_tenant_that_has_less_in_it(gate, gated, pool):
    with gated.start(tenants=TWO, max_queue_rows=3) as process:
        call = Calls(process, pool)
        running = call(0, tenant="flood", running=True)
        gate.enter()
        waiting = [call(row, tenant="flood") for row in (1, 2, 3)]
        with pytest.raises(QueueFull):
            process.batched_run(cat(4), tenant="flood")
        light = call(5, tenant="light", running=True)
        assert isinstance(waiting[2].exception(PATIENCE_S), ShareUsed)
        gate.open(10)
        assert [one.result(PATIENCE_S).tolist() for one in (running, *waiting[:2], light)] == [[0], [2], [4], [10]]
        nothing_is_left(process)


def test_batches_that_crash_or_do_not_fit_together_or_are_left_are_charged_once(gate, gated, pool):
    with gated.start(tenants=TWO, batch_size=2, batch_timeout_ms=LONG_MS) as process:
        call = Calls(process, pool)
        gate.open(2)
        one = call(1, tenant="flood")
        other = call(tenant="light", running=True, batch=Batch.concatenate([np.array([0.5])]))
        assert (one.result(PATIENCE_S).tolist(), other.result(PATIENCE_S).tolist()) == ([2], [1.0])
        gate.open()
        with pytest.raises(ServingCrashed):
            process.batched_run(cat(13, 14), tenant="light")
        nothing_is_left(process)


def test_tasks_name_tenants_and_so_do_streams(gate, gated):
    gate.open(100)
    with gated.start("shared", tenants=TWO) as process, gated.streaming().start(tenants=TWO) as streams:

        async def main():
            return await forebay.batched_run_async("shared", cat(1), tenant="light")

        assert asyncio.run(main()).tolist() == [2]
        assert forebay.batched_run("shared", cat(2), tenant="flood").tolist() == [4]
        ((_, output, _),) = streams.batched_run(cat(3), tenant="light")
        assert output.tolist() == [6]
        nothing_is_left(process)
        nothing_is_left(streams)


@pytest.mark.parametrize("tenant", ["nobody", 3, ""])
def test_a_tenant_that_is_not_known_is_refused_with_a_sentence(gated, tenant):
    with gated.start(tenants=TWO) as process, pytest.raises(InvalidRequest, match="has 'flood', 'light'"):
        process.batched_run(cat(1), tenant=tenant)
    told = pytest.raises(InvalidRequest, match=r"the serving 'none' has no tenants: start it with tenants=")
    with gated.start("none"), told:
        forebay.batched_run("none", cat(1), tenant=tenant)


@pytest.mark.parametrize(
    "tenants, message",
    [
        ("team-a", "expected tenants by name"),
        ({}, "expected tenants by name"),
        ({"a b": {}}, "expected a tenant name of 1 to 64 letters"),
        ({3: {}}, "expected a tenant name of"),
        ({"a": 3}, "expected weight and class for 'a'"),
        ({"a": {"limits": {}}}, "expected weight and class for 'a'"),
        ({"a": {"weight": 0}}, "expected a weight from 0.001 to 1000"),
        ({"a": {"weight": float("nan")}}, "expected a weight from 0.001 to 1000"),
        ({"a": {"class": 4}}, "a class from 0 to 3 for 'a'"),
    ],
)
def test_tenants_that_are_not_possible(gated, tenants, message):
    with pytest.raises(ConfigError, match=message):
        gated.start(tenants=tenants)
