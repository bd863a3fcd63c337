# SPDX-License-Identifier: Apache-2.0
"""A started serving: who shares batches, and what every caller gets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.serving.conftest import PATIENCE_S, Gate, abandon, cat, wait_until
from tests.waiting import timeouts

import forebay
from forebay import (
    Batch,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    Serving,
    ServingCrashed,
    ServingNotFound,
    ServingStopped,
)
from forebay.batching.queue import BatchConfig
from forebay.errors import BadOutcome, InternalError, ModelError
from forebay.serving.nx_serving import registry
from forebay.serving.nx_serving.dispatch import Dispatch, Submission

LONG_MS = 100_000


def identity(options):
    return lambda batch: batch.realize()


plain = Serving.new(identity)


def call(pool, process, *rows, **options):
    return pool.submit(process.batched_run, cat(*rows), **options)


def waits(process, rows):
    wait_until(lambda: process.statistics().waiting_rows == rows)


def outcome(future):
    return future.result(PATIENCE_S).tolist()


def test_defaults():
    # S32
    with plain.start() as process:
        assert process.options == type(process.options)(
            batch_keys=("default",),
            batch_size=1,
            batch_timeout_ms=100,
            partitions=False,
            distribution_weight=1,
            shutdown_ms=30_000,
            max_queue_rows=None,
            pad_to_batch_size=False,
            worker_kind="thread",
        )
        assert process.options.capacity == 64
        assert process.statistics().partitions == 1


@pytest.mark.parametrize(
    "options,message",
    [
        ({"batch_sise": 3}, "unknown setting 'batch_sise'; did you mean 'batch_size'"),
        ({"batch_size": 0}, "batch_size: expected a whole number >= 1, got 0"),
        ({"batch_timeout_ms": -1}, "batch_timeout_ms: expected milliseconds >= 0, got -1"),
        ({"batch_keys": []}, "at least one batch key"),
        ({"batch_keys": ["a", "a"]}, "expected each batch key once, got"),
        ({"partitions": 0}, "partitions: expected True .*, got 0"),
        ({"distribution_weight": 0}, "distribution_weight: expected a whole number >= 1, got 0"),
        ({"worker_kind": "thred"}, "did you mean 'thread'"),
    ],
)
def test_options_that_are_not_possible(options, message):
    # S32
    with pytest.raises(ConfigError, match=message):
        plain.start(**options)
    with pytest.raises(ConfigError, match=message):
        plain.process_options(**options)


def test_options_of_start_stand_above_those_of_the_serving():
    # S33
    serving = plain.process_options(batch_timeout_ms=1, shutdown_ms=5)
    with serving.start(batch_timeout_ms=2) as process:
        assert (process.options.batch_timeout_ms, process.options.shutdown_ms) == (2, 5)
    with pytest.raises(
        ConfigError,
        match=r"set via batch_size \(30\) does not match the batch size given to the serving process \(15\)",
    ):
        plain.batch_size(30).start(batch_size=15)
    with plain.batch_size(30).start(batch_size=30) as process:
        assert process.options.batch_size == 30


def test_a_name_is_taken_by_one_at_a_time():
    # S34, S45
    with plain.start("taken", batch_timeout_ms=1) as process:
        with pytest.raises(ConfigError, match="a serving named 'taken' is running already"):
            plain.start("taken")
        assert forebay.batched_run("taken", cat(1), where="local").tolist() == [1]
        assert process.name == "taken"
    with pytest.raises(ServingNotFound, match=r"could not find a serving named 'taken'. Make sure it is started"):
        forebay.batched_run("taken", cat(1))
    with pytest.raises(ConfigError, match="expected 'any', 'local' or 'distributed'"):
        forebay.batched_run("taken", cat(1), where="here")  # pyright: ignore[reportArgumentType]
    with plain.start("taken"):
        pass


def test_a_serving_that_is_still_starting_is_not_found_yet(pool):
    # S34, S45
    entered, go = threading.Event(), threading.Event()

    def build(options):
        entered.set()
        assert go.wait(PATIENCE_S)
        return lambda batch: batch.realize()

    starting = pool.submit(Serving.new(build).start, "starting", batch_timeout_ms=1)
    try:
        assert entered.wait(PATIENCE_S)
        with pytest.raises(ServingNotFound, match="could not find a serving named 'starting'"):
            forebay.batched_run("starting", cat(1))
        with pytest.raises(ConfigError, match="a serving named 'starting' is running already"):
            plain.start("starting")
        assert "starting" not in [one.name for one in registry.running()]  # all of which pages of a server tell
    finally:
        go.set()
    with starting.result(PATIENCE_S):
        assert forebay.batched_run("starting", cat(1)).tolist() == [1]


def test_a_serving_that_does_not_start_leaves_its_name_free():
    # S34
    class Broken:
        def init(self, kind, arg, partitions):
            raise ValueError("no")

        def handle_batch(self, batch, partition, state): ...

    with pytest.raises(ModelError):
        Serving.new(Broken).start("broken")
    with plain.start("broken"):
        pass


def test_callers_share_a_batch_and_get_their_own_rows(gate, gated, pool):
    # S35, S36: 2 + 2 = 4 leaves at once
    gate.open()
    with gated.start(batch_size=4, batch_timeout_ms=LONG_MS) as process:
        first = call(pool, process, 1, 2)
        waits(process, 2)
        second = call(pool, process, 3, 4)
        assert outcome(first) == [2, 4]
        assert outcome(second) == [6, 8]
    assert gate.rows == [[1, 2, 3, 4]]


def test_the_timeout_sends_what_is_there(gate, gated, pool):
    # S35
    gate.open()
    with gated.start(batch_size=4, batch_timeout_ms=20) as process:
        started = time.monotonic()
        assert process.batched_run(cat(1)).tolist() == [2]
        assert time.monotonic() - started >= 0.019


def test_an_input_of_a_full_batch_sends_what_is_open_and_then_itself(gate, gated, pool):
    # S36
    gate.open(2)
    with gated.start(batch_size=3, batch_timeout_ms=LONG_MS) as process:
        first = call(pool, process, 1)
        waits(process, 1)
        second = call(pool, process, 2, 3, 4)
        assert (outcome(first), outcome(second)) == ([2], [4, 6, 8])
    assert gate.rows == [[1], [2, 3, 4]]


def test_inputs_straddle_batches(gate, pool):
    # S37: 3 + 4 + 5 = 6 + 6, with trees
    def fn(options):
        def run(batch):
            a, b = batch.realize()
            gate.batches.append((0, None, a.tolist()))
            return a * 2, b + 1

        return run

    def rows(*values):
        return Batch.concatenate([(np.array(values), np.array(values) / 2)])

    with Serving.new(fn).start(batch_size=6, batch_timeout_ms=LONG_MS) as process:
        futures = [pool.submit(process.batched_run, rows(1, 2, 3))]
        waits(process, 3)
        futures.append(pool.submit(process.batched_run, rows(4, 5, 6, 7)))
        waits(process, 1)
        futures.append(pool.submit(process.batched_run, rows(8, 9, 10, 11, 12)))
        results = [future.result(PATIENCE_S) for future in futures]
    assert gate.rows == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert [a.tolist() for a, _ in results] == [[2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22, 24]]
    assert results[2][1].tolist() == [5.0, 5.5, 6.0, 6.5, 7.0]


@pytest.mark.parametrize("rows,sizes", [(6, [3, 3]), (7, [3, 3, 1])])
def test_inputs_may_be_larger_than_a_batch(gate, gated, rows, sizes):
    # S37: 6 = 3 + 3
    gate.open(3)
    with gated.start(batch_size=3, batch_timeout_ms=20) as process:
        assert process.batched_run(cat(*range(rows))).tolist() == [2 * row for row in range(rows)]
    assert [len(batch) for batch in gate.rows] == sizes


def test_what_is_due_next_is_seen_to_while_what_was_due_first_runs(pool):
    """The partition that waited for the first timeout runs that batch, so another one waits for the second."""
    may_end = threading.Event()

    def fn(options):
        def run(batch):
            rows = batch.realize()
            assert rows[0] != 1 or may_end.wait(PATIENCE_S)
            return rows * 2

        return run

    with Serving.new(fn).start(batch_size=4, batch_timeout_ms=50, batch_keys=["a", "b"], partitions=2) as process:
        first = pool.submit(process.batched_run, cat(1).key("a"))
        waits(process, 1)
        second = pool.submit(process.batched_run, cat(2).key("b"))
        assert outcome(second) == [4]
        assert not first.done()
        may_end.set()
        assert outcome(first) == [2]


def test_an_open_batch_grows_while_all_partitions_are_busy(gate, gated, pool):
    # S38
    with gated.start(batch_size=4, batch_timeout_ms=1) as process:
        busy = call(pool, process, 1)
        gate.enter()
        late = call(pool, process, 2)
        waits(process, 1)
        time.sleep(0.01)  # its timeout passes
        more = call(pool, process, 3, 4)
        waits(process, 3)
        gate.open(2)
        assert [outcome(one) for one in (busy, late, more)] == [[2], [4], [6, 8]]
    assert gate.rows == [[1], [2, 3, 4]]


def test_keys_are_served_in_the_order_in_which_they_became_ready(gate, gated, pool):
    # S39
    with gated.start(batch_size=2, batch_timeout_ms=LONG_MS, batch_keys=["a", "b"]) as process:
        futures = [pool.submit(process.batched_run, cat(0, 0).key("a"))]
        gate.enter()
        for number, key in enumerate("abab", 1):
            futures.append(pool.submit(process.batched_run, cat(number, number).key(key)))
            waits(process, 2 * number)
        gate.open(5)
        for future in futures:
            outcome(future)
    assert [key for _, key, _ in gate.batches][:3] == ["a", "a", "b"]
    assert sorted(key for _, key, _ in gate.batches) == ["a", "a", "a", "b", "b"]


def test_unknown_keys_are_refused_in_the_caller():
    # S40
    with plain.start(batch_keys=["double", "half"]) as process:
        with pytest.raises(
            InvalidRequest, match=r"unknown batch key: 'default' \(expected one of \['double', 'half'\]\)"
        ):
            process.batched_run(cat(1))
        assert process.statistics().in_flight == 0


def test_keys_execute_independently(pool):
    # S41
    made = []

    def fn(key, options):
        made.append(key)
        return lambda batch: batch.realize() * {"double": 2, "half": 0.5}[key]

    with Serving.new(fn).start(batch_size=2, batch_timeout_ms=LONG_MS, batch_keys=["double", "half"]) as process:
        assert made == ["double", "half"]
        waiting = pool.submit(process.batched_run, cat(1).key("double"))
        waits(process, 1)
        assert process.batched_run(cat(2, 4).key("half")).tolist() == [1.0, 2.0]
        assert not waiting.done()
        assert process.batched_run(cat(5).key("double")).tolist() == [10]
        assert outcome(waiting) == [2]


def test_a_crash_reaches_exactly_the_callers_of_its_batch(gate, gated, pool):
    # S42: 1 => crash, then 2 + 3 => crash with a batch size of 4
    gate.open(10)
    with gated.start(batch_size=4, batch_timeout_ms=20) as process:
        with pytest.raises(ServingCrashed) as caught:
            process.batched_run(cat(13))
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.__cause__.__traceback__ is not None
    with gated.start(batch_size=4, batch_timeout_ms=LONG_MS) as process:
        crashing = call(pool, process, 1, 13)
        waits(process, 2)
        straddling = call(pool, process, 3, 4, 5)
        for future in (crashing, straddling):
            with pytest.raises(ServingCrashed, match="thirteen"):
                future.result(PATIENCE_S)
        assert process.batched_run(cat(1, 2, 3, 4)).tolist() == [2, 4, 6, 8]
        assert process.statistics().waiting_rows == 0


def test_a_crash_while_a_batch_is_handled_fails_that_batch_only():
    # S20; section 9, the second trap
    class Handles:
        def init(self, kind, arg, partitions):
            return 0

        def handle_batch(self, batch, partition, state):
            if state == 0 and batch.size == 1:
                raise KeyError("handling")
            if batch.size == 2:
                return None
            return batch.realize, state  # which returns no (output, metadata)

    with Serving.new(Handles).start(batch_size=4, batch_timeout_ms=1) as process:
        with pytest.raises(ServingCrashed) as caught:
            process.batched_run(cat(1))
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(BadOutcome, match=r"Handles\.handle_batch must return"):
            process.batched_run(cat(1, 2))
        with pytest.raises(BadOutcome, match=r"must return \(output, metadata\)"):
            process.batched_run(cat(1, 2, 3))


def test_rows_that_do_not_fit_together_get_batches_of_their_own(gate, gated, pool):
    gate.open(10)
    with gated.start(batch_size=4, batch_timeout_ms=LONG_MS) as process:
        whole = call(pool, process, 1, 2)
        waits(process, 2)
        other = pool.submit(process.batched_run, Batch.concatenate([np.array([0.5, 1.5])]))
        assert outcome(whole) == [2, 4]
        assert outcome(other) == [1.0, 3.0]


def test_stop_fails_what_waits_and_finishes_what_runs(gate, gated, pool):
    # S44: 2 => shutdown => 2 (queued)
    process = gated.start(batch_size=2, batch_timeout_ms=LONG_MS, name="stopping")
    running = call(pool, process, 1, 2)
    gate.enter()
    queued, stacked = call(pool, process, 3, 4), call(pool, process, 5)
    waits(process, 3)
    stopping = pool.submit(process.stop)
    for future in (queued, stacked):
        with pytest.raises(ServingStopped):
            future.result(PATIENCE_S)
    for run in (process.batched_run, lambda batch: forebay.batched_run("stopping", batch)):
        with pytest.raises(ServingNotFound):
            run(cat(1))
    assert not running.done()
    gate.open()
    assert outcome(running) == [2, 4]
    stopping.result(PATIENCE_S)
    process.stop()  # once more changes nothing


@pytest.mark.parametrize("streams", [False, True])
def test_an_input_that_comes_in_pieces_is_told_that_the_serving_stopped(streams):  # F108, S44
    serving = plain.streaming() if streams else plain
    process = serving.start(batch_timeout_ms=1)

    def batches():
        yield cat(1)
        process.stop()
        yield cat(2)

    with pytest.raises(ServingStopped):
        list(process.batched_run(batches()))


def test_a_task_whose_input_comes_in_pieces_is_told_that_the_serving_stopped():  # F108, S44
    async def main():
        process = plain.start(batch_timeout_ms=1)

        async def batches():
            yield cat(1)
            await asyncio.to_thread(process.stop)
            yield cat(2)

        with pytest.raises(ServingStopped):
            await process.batched_run_async(batches())

    asyncio.run(main())


def test_what_runs_longer_than_the_shutdown_time_is_failed(gate, gated, pool):
    # S44
    process = gated.start(batch_timeout_ms=1, shutdown_ms=10)
    running = call(pool, process, 1)
    gate.enter()
    process.stop()
    with pytest.raises(ServingStopped):
        running.result(PATIENCE_S)
    gate.open()


def test_successive_calls_of_a_caller_stay_in_order():
    # S46
    with plain.start(batch_timeout_ms=0) as process:
        assert [process.batched_run(cat(n)).tolist() for n in range(50)] == [[n] for n in range(50)]


def test_a_deadline_withdraws_rows_that_wait(gate, gated, pool):
    # S47
    with gated.start(batch_size=4, batch_timeout_ms=LONG_MS) as process:
        with pytest.raises(DeadlineExceeded):
            process.batched_run(cat(1), timeout_s=0.01)
        assert process.statistics().waiting_rows == 0
        other = call(pool, process, 2, 3, 4, timeout_s=PATIENCE_S)
        waits(process, 3)
        last = call(pool, process, 5)
        gate.open()
        assert (outcome(other), outcome(last)) == ([4, 6, 8], [10])
    assert gate.rows == [[2, 3, 4, 5]]


def test_a_deadline_ends_the_wait_for_rows_that_run(gate, gated, pool):
    # S47
    with gated.start(batch_size=2, batch_timeout_ms=1) as process:
        late = call(pool, process, 1, timeout_s=0.05)
        gate.enter()
        with pytest.raises(DeadlineExceeded):
            late.result(PATIENCE_S)
        gate.open(2)
        assert process.batched_run(cat(2)).tolist() == [4]


def test_a_cancelled_task_withdraws_its_rows(gate, gated):
    # S47
    async def main():
        async with gated.start(batch_size=2, batch_timeout_ms=LONG_MS) as process:
            task = asyncio.ensure_future(process.batched_run_async(cat(1)))
            await asyncio.sleep(0)
            assert process.statistics().waiting_rows == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert process.statistics().waiting_rows == process.statistics().in_flight == 0
            with pytest.raises(DeadlineExceeded):
                await process.batched_run_async(cat(1), timeout_s=0.01)
            assert process.statistics().in_flight == 0
            gate.open()
            both = [process.batched_run_async(cat(n)) for n in (2, 3)]
            return [out.tolist() for out in await asyncio.gather(*both)]

    assert asyncio.run(main()) == [[4], [6]]
    assert gate.rows == [[2, 3]]


def test_where_no_loop_of_asyncio_runs_it_says_so_and_leaves_nothing_running():  # as under trio
    def begin(coroutine):
        with contextlib.suppress(StopIteration):
            coroutine.send(None)

    process = plain.start(batch_size=2)
    with pytest.raises(ConfigError, match=r"batched_run_async runs on asyncio.*trio.to_thread.run_sync"):
        begin(process.batched_run_async(cat(1)))
    with pytest.raises(ConfigError, match="`async with` of a serving runs on asyncio"):
        begin(process.__aenter__())
    with pytest.raises(ServingNotFound):
        process.batched_run(cat(1))


def test_the_queue_is_bounded(gate, gated, pool):
    # S48
    with gated.start(batch_size=2, batch_timeout_ms=LONG_MS, max_queue_rows=3) as process:
        running = call(pool, process, 1, 2)
        gate.enter()
        waiting = call(pool, process, 3, 4, 5)
        waits(process, 3)
        with pytest.raises(QueueFull, match="3 samples wait already"):
            process.batched_run(cat(6))
        gate.open(3)
        assert outcome(running) == [2, 4]
        process.stop()
        assert waiting.exception(PATIENCE_S) is None or isinstance(waiting.exception(), ServingStopped)


@pytest.mark.stress
def test_many_threads_and_loops_call_one_name():
    # S49
    calls = 100
    failed = []

    def thread(number):
        for turn in range(calls):
            value = number * calls + turn
            if forebay.batched_run("busy", cat(value)).tolist() != [value * 2]:
                failed.append(value)

    def loop(number):
        async def task(value):
            rows = [value] * (1 + value % 3)
            if (await forebay.batched_run_async("busy", cat(*rows))).tolist() != [row * 2 for row in rows]:
                failed.append(value)

        async def main():
            for turn in range(calls // 10):
                await asyncio.gather(*(task(number * calls + turn * 10 + one) for one in range(10)))

        asyncio.run(main())

    serving = Serving.new(lambda options: lambda batch: batch.realize() * 2)
    with serving.start("busy", batch_size=16, batch_timeout_ms=1, partitions=2, max_queue_rows=4096) as process:
        threads = [threading.Thread(target=thread, args=(n,)) for n in range(60)]
        threads += [threading.Thread(target=loop, args=(n,)) for n in range(60, 64)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        statistics = process.statistics()
    assert failed == []
    assert statistics.in_flight == statistics.waiting_rows == 0
    assert statistics.by_key["default"].rows >= 64 * calls


def test_an_async_caller_may_have_async_pre_and_postprocessing():
    # S24
    async def before(rows):
        await asyncio.sleep(0)
        return cat(*rows), threading.get_ident()

    async def after(executed, ident):
        await asyncio.sleep(0)
        return executed[0].tolist(), ident

    serving = plain.client_preprocessing(before).client_postprocessing(after)

    async def main():
        async with serving.start("coroutines", batch_timeout_ms=1):
            return await forebay.batched_run_async("coroutines", [1, 2])

    assert asyncio.run(main()) == ([1, 2], threading.get_ident())
    with serving.start() as process, pytest.raises(ConfigError, match="before is a coroutine function"):
        process.batched_run([1])


def test_pre_and_postprocessing_run_in_the_caller_and_hold_no_batch(gate, gated, pool):
    # S24
    inside, go, idents = threading.Semaphore(0), threading.Event(), []

    def after(executed, info):
        idents.append((info, threading.get_ident()))
        if executed[0][0] == 2:
            inside.release()
            go.wait(PATIENCE_S)
        return executed[0]

    gate.open(10)
    serving = gated.client_preprocessing(lambda n: (cat(n), threading.get_ident())).client_postprocessing(after)
    with serving.start(batch_timeout_ms=1) as process:
        slow = pool.submit(process.batched_run, 1)
        assert inside.acquire(timeout=PATIENCE_S)
        assert outcome(pool.submit(process.batched_run, 2)) == [4]
        go.set()
        assert outcome(slow) == [2]
    assert all(mine == theirs for mine, theirs in idents)


def test_batches_of_an_iterable_are_handed_in_one_after_another(gate, gated, pool):
    # S50
    asked = []

    def batches():
        for number in range(3):
            asked.append(number)
            yield cat(number)

    with gated.start(batch_timeout_ms=1) as process:
        streaming = pool.submit(process.batched_run, batches())
        gate.enter()
        assert asked == [0]
        gate.open()
        gate.enter()
        assert asked == [0, 1]
        gate.open(2)
        assert outcome(streaming) == [0, 2, 4]


def test_many_iterables_with_few_partitions_do_not_block_each_other(pool):
    # S50
    def batches(s):
        return (cat(s * 10 + n) for n in range(5))

    with plain.start(batch_size=2, batch_timeout_ms=1, partitions=2) as process:
        streams = [pool.submit(process.batched_run, batches(s)) for s in range(4)]
        assert [outcome(one) for one in streams] == [[s * 10 + n for n in range(5)] for s in range(4)]


def test_async_iterators_are_taken_by_tasks():
    # S28
    async def batches():
        for number in range(3):
            await asyncio.sleep(0)
            yield cat(number)

    async def main():
        async with plain.start(batch_timeout_ms=1) as process:
            with pytest.raises(InvalidRequest, match="batched_run_async only"):
                process.batched_run(batches())
            return (await process.batched_run_async(batches())).tolist()

    assert asyncio.run(main()) == [0, 1, 2]


def test_what_an_iterable_raises_reaches_its_caller():
    # S51
    def batches():
        yield cat(1)
        raise OSError("disk")

    with plain.start(batch_timeout_ms=1) as process:
        with pytest.raises(OSError, match="disk"):
            process.batched_run(batches())
        assert process.statistics().in_flight == process.statistics().waiting_rows == 0
        with pytest.raises(InvalidRequest, match="must return a stream of Batch of maximum size 1, got: Batch"):
            process.batched_run([cat(1), cat(1, 2)])


def test_partitions_run_at_the_same_time(gate, gated, pool):
    # S52
    with gated.start(batch_timeout_ms=1, partitions=2) as process:
        futures = [call(pool, process, n) for n in (1, 2)]
        gate.enter(2)
        assert {partition for partition, _, _ in gate.batches} == {0, 1}
        gate.open(2)
        assert [outcome(one) for one in futures] == [[2], [4]]


def test_the_compiler_says_how_many_partitions_there_are():
    # S53
    seen = []

    class Module:
        def init(self, kind, arg, partitions):
            seen.append((kind, [dict(one) for one in partitions]))

        def handle_batch(self, batch, partition, state):
            return (lambda: (batch.realize(), partition)), state

    with Serving.new(Module, max_concurrency=3).start(partitions=True, batch_keys=["a"]) as process:
        assert process.statistics().partitions == 3
    kind, partitions = seen[0]
    assert kind == "process"
    assert all(one["batch_keys"] == ["a"] for one in partitions)
    with Serving.new(Module).start(partitions=["gpu:0", "gpu:1"]):
        pass
    assert [one["device"] for one in seen[1][1]] == ["gpu:0", "gpu:1"]

    class Compiler:
        def compile(self, fn, options):
            return fn

    with pytest.raises(ConfigError, match="Compiler has no method"):
        Serving.jit(lambda x: x, compiler=Compiler()).start(partitions=True)


def test_partitions_do_not_poll():
    # G6
    code = (
        "import resource, threading, time, numpy as np\n"
        "from forebay import Batch, Serving, DeadlineExceeded\n"
        "serving = Serving.new(lambda options: lambda batch: batch.realize())\n"
        "with serving.start(partitions=4, batch_size=2, batch_timeout_ms=100_000) as process:\n"
        "    def call():\n"
        "        try: process.batched_run(Batch.concatenate([np.zeros(1)]), timeout_s=1.0)\n"
        "        except DeadlineExceeded: pass\n"
        "    caller = threading.Thread(target=call); caller.start(); time.sleep(0.1)\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw\n"
        "    time.sleep(0.5)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)\n"
        "    caller.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert int(done.stdout) < 10


def test_a_batch_that_nobody_waits_for_can_see_that(gate, pool):
    seen = []

    def fn(options):
        def run(batch):
            gate.entered.release()
            gate.go.acquire(timeout=PATIENCE_S)
            seen.append(forebay.is_cancelled())
            return batch.realize()

        return run

    with Serving.new(fn).start(batch_timeout_ms=1) as process:
        for timeout_s in timeouts():
            with pytest.raises(DeadlineExceeded):
                process.batched_run(cat(1), timeout_s=timeout_s)
            if gate.entered.acquire(blocking=False):
                break
        gate.open()
        gate.open()
        process.batched_run(cat(1))
    assert seen == [True, False]


def test_a_defect_of_ours_is_no_silent_wait(monkeypatch, caplog):
    # G8
    with plain.start(batch_timeout_ms=1) as process:
        monkeypatch.setattr("forebay.observe.metrics.serving_metrics.KeyMetrics.took", lambda *_: 1 / 0)
        with pytest.raises(InternalError, match="division by zero"):
            process.batched_run(cat(1), timeout_s=PATIENCE_S)
        monkeypatch.undo()
        assert process.batched_run(cat(2)).tolist() == [2]
    assert "failed to run a batch" in caplog.text


def test_ctrl_c_while_waiting_withdraws_the_rows(gate, gated):
    # S47
    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with gated.start(batch_size=2, batch_timeout_ms=LONG_MS) as process:

            def interrupt():
                wait_until(lambda: process.statistics().waiting_rows)
                signal.pthread_kill(main, signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                process.batched_run(cat(1))
            thread.join()
            assert process.statistics().in_flight == process.statistics().waiting_rows == 0
            gate.open()
            assert process.batched_run(cat(2, 3)).tolist() == [4, 6]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_refused_call_changes_nothing(gate, gated, pool):
    # S48
    with gated.start(batch_size=1, batch_timeout_ms=1, max_queue_rows=2) as process:
        calls = [pool.submit(process.batched_run, cat(0))]
        gate.enter()
        calls.append(pool.submit(process.batched_run, cat(1)))
        wait_until(lambda: process.statistics().waiting_rows == 1)
        with pytest.raises(QueueFull):
            process.batched_run(cat(1, 2))
        assert (process.statistics().waiting_rows, process.statistics().in_flight) == (1, 2)
        gate.open(2)
        assert [call.result(PATIENCE_S).tolist() for call in calls] == [[0], [2]]


def test_an_input_larger_than_the_queue_is_fed_in(pool):
    # F36
    with plain.start(batch_size=2, batch_timeout_ms=1, max_queue_rows=4) as process:
        rows = np.arange(50)
        assert process.batched_run(Batch.concatenate([rows])).tolist() == rows.tolist()
        assert asyncio.run(process.batched_run_async(Batch.concatenate([rows]))).tolist() == rows.tolist()
        calls = [pool.submit(process.batched_run, Batch.concatenate([rows + n])) for n in range(2)]
        assert [call.result(PATIENCE_S).tolist() for call in calls] == [(rows + n).tolist() for n in range(2)]
    with plain.start(batch_size=4, batch_timeout_ms=1, max_queue_rows=1) as process:  # a batch always finds room
        assert process.batched_run(cat(1, 2, 3, 4)).tolist() == [1, 2, 3, 4]


def test_what_is_fed_in_leaves_room_for_others_and_goes_with_its_caller(gate, gated, pool):
    # F36
    with gated.start(batch_size=2, batch_timeout_ms=1, max_queue_rows=8) as process:
        large = pool.submit(process.batched_run, cat(*range(40)), timeout_s=2.0)
        gate.enter()
        assert process.statistics().waiting_rows == 4
        other = pool.submit(process.batched_run, cat(70))
        wait_until(lambda: process.statistics().waiting_rows == 5)
        with pytest.raises(DeadlineExceeded):
            large.result(PATIENCE_S)
        assert process.statistics().waiting_rows == 1
        gate.open(2)
        assert other.result(PATIENCE_S).tolist() == [140]
        assert process.statistics().in_flight == 0


def test_what_waits_for_room_is_let_in_when_others_leave():
    # F36
    dispatch = Dispatch(BatchConfig(max_size=2, max_wait_s=3.0, capacity=4, idle="wait"))
    others, patient = Submission(cat(1, 2, 3, 4), None), Submission(cat(5), None)
    dispatch.offer(others, 1.0)
    dispatch.offer(patient, 1.0, patient=True)
    assert dispatch.waiting == 4
    assert dispatch.cancel(others)
    dispatch.feed(1.0)
    assert dispatch.waiting == 1
    work = dispatch.take(4.0)
    assert work is not None
    assert work.batch().realize().tolist() == [5]
    assert dispatch.cancel(patient)
    assert (dispatch.waiting, dispatch.open, dispatch.is_feeding) == (0, 0, False)


def test_a_function_that_calls_its_own_serving_is_told():
    # F35
    asked = []

    def build(options):
        def run(batch):
            rows = batch.realize()
            if rows[0] > 0:
                asked.append(rows[0])
                return process.batched_run(Batch.concatenate([rows - 1]))
            return rows + 100

        return run

    with Serving.new(build).start(batch_timeout_ms=1) as process:
        with pytest.raises(ServingCrashed, match="calls that serving itself, and its only partition would wait"):
            process.batched_run(cat(1))
        assert process.batched_run(cat(0)).tolist() == [100]
    with Serving.new(build).start(batch_timeout_ms=1, partitions=3) as process:
        assert process.batched_run(cat(2)).tolist() == [100]
        with pytest.raises(ServingCrashed, match="each of its 3 partitions would wait"):
            process.batched_run(cat(3))
        assert process.batched_run(cat(2)).tolist() == [100]


FORKED = """
import os, sys
import numpy as np
from forebay import Batch, Serving, ServingNotFound, batched_run

rows = Batch.concatenate([np.arange(2)])
plain = Serving.new(lambda options: lambda batch: batch.realize() * 2)
with plain.start("doubles", batch_timeout_ms=1) as process:
    process.batched_run(rows)
    child = os.fork()
    if child == 0:
        for call in (lambda: process.batched_run(rows), lambda: batched_run("doubles", rows)):
            try:
                call()
            except ServingNotFound as error:
                assert "forked" in str(error), error
            else:
                os._exit(1)
        process.stop()
        with plain.start("doubles", batch_timeout_ms=1) as own:
            assert batched_run("doubles", rows).tolist() == [0, 2]
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    assert process.batched_run(rows).tolist() == [0, 2]
print("well")
"""


def test_a_forked_child_is_told_that_the_threads_stayed_behind():
    # F35
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.stdout == "well\n", done.stderr[-2000:]


def test_a_function_may_stop_its_own_serving(gate, gated, pool):
    # F37
    def build(options):
        def run(batch):
            process.stop()
            return batch.realize() * 2

        return run

    process = Serving.new(build).start(batch_timeout_ms=1)
    assert process.batched_run(cat(1)).tolist() == [2]
    with pytest.raises(ServingNotFound):
        process.batched_run(cat(1))
    process.stop()


@pytest.fixture
def held():
    """A function that goes on when the test says so for rows of 13, at once for all others."""
    gate = Gate()

    def fn(options):
        def run(batch):
            rows = batch.realize()
            if np.any(rows == 13):
                gate.entered.release()
                assert gate.go.acquire(timeout=PATIENCE_S)
            return rows

        return run

    yield gate, Serving.new(fn)
    gate.open(1000)


def test_a_thread_that_hangs_on_what_nobody_waits_for_is_left_behind(held, quickly, pool):
    # issue 11: a hang kept its partition for good
    gate, serving = held
    with serving.start(batch_timeout_ms=1, shutdown_ms=1000) as process:
        abandon(process, cat(13), gate.enter)
        assert process.batched_run(cat(1), timeout_s=PATIENCE_S).tolist() == [1]
        assert process.statistics().idle <= 1
        waiting = call(pool, process, 13)  # somebody waits: it is given time
        gate.enter()
        gate.open(2)
        assert outcome(waiting) == [13]
        wait_until(lambda: process._partitions._left == 0)
        assert process.batched_run(cat(2), timeout_s=PATIENCE_S).tolist() == [2]
        assert process._partitions.replaced == 1


def test_rows_that_shared_a_batch_with_what_hangs_but_do_not_fit_it_are_run_all_the_same(held, quickly, pool):
    gate, serving = held
    with serving.start(batch_size=2, batch_timeout_ms=LONG_MS, shutdown_ms=1000) as process:
        mates = []

        def has_begun():
            waits(process, 1)
            mates.append(
                pool.submit(process.batched_run, Batch.concatenate([np.array([[1, 2]])]), timeout_s=PATIENCE_S)
            )
            gate.enter()

        abandon(process, cat(13), has_begun)
        assert outcome(mates[0]) == [[1, 2]]


@pytest.fixture
def opened():
    """A function that goes on with rows of 13, and with those of 14, when the test opens them."""
    opened = {13: threading.Event(), 14: threading.Event()}
    entered = threading.Semaphore(0)

    def fn(options):
        def run(batch):
            rows = batch.realize()
            if (event := opened.get(int(rows[0]))) is not None:
                entered.release()
                event.wait(10 * PATIENCE_S)  # no wait of a test outlasts it, and sees it come back  # F120
            return rows

        return run

    def enter():
        assert entered.acquire(timeout=PATIENCE_S)

    yield opened, enter, Serving.new(fn)
    for event in opened.values():
        event.set()


def is_answered(process):
    try:
        return process.batched_run(cat(1), timeout_s=PATIENCE_S).tolist() == [1]
    except ServingCrashed:
        return False


@pytest.mark.parametrize("first, second", [(13, 14), (14, 13)], ids=["the left first", "the held first"])
def test_no_more_threads_of_a_serving_than_a_bound_are_left_behind(opened, quickly, monkeypatch, first, second):
    monkeypatch.setattr("forebay.serving.nx_serving.partitions.MAX_LEFT", 1)
    opened, enter, serving = opened
    with serving.start(batch_timeout_ms=1, shutdown_ms=1000) as process:
        abandon(process, cat(13), enter)
        wait_until(lambda: process._partitions.replaced == 1)
        abandon(process, cat(14), enter)
        with pytest.raises(ServingCrashed, match=r"1 threads of .* hang in its function"):
            process.batched_run(cat(1), timeout_s=PATIENCE_S)
        opened[first].set()  # whichever comes back, there is one again
        wait_until(lambda: is_answered(process))
        opened[second].set()
        wait_until(lambda: process._partitions._left == 0)
        assert process._partitions._held == {}
        assert is_answered(process)


def test_a_serving_is_refused_only_once_each_of_its_partitions_is_held(opened, quickly, monkeypatch):
    monkeypatch.setattr("forebay.serving.nx_serving.partitions.MAX_LEFT", 0)
    opened, enter, serving = opened
    with serving.start(batch_timeout_ms=1, shutdown_ms=1000, partitions=2) as process:
        abandon(process, cat(13), enter)
        wait_until(lambda: process._partitions._held)
        assert is_answered(process)
        abandon(process, cat(14), enter)
        with pytest.raises(ServingCrashed, match=r"0 threads of .* hang in its function"):
            process.batched_run(cat(1), timeout_s=PATIENCE_S)
        opened[14].set()
        wait_until(lambda: is_answered(process))
        assert process._partitions.replaced == 0
