# SPDX-License-Identifier: Apache-2.0
"""Answers that come one by one, batch by batch or hook by hook."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
from tests.serving.conftest import PATIENCE_S, cat, wait_until

from forebay import Batch, ConfigError, DeadlineExceeded, InvalidRequest, Serving, ServingCrashed, hook
from forebay.errors import BadOutcome, BatchResultMismatch
from forebay.serving.nx_serving import stream as streams

LONG_MS = 100_000


def identity(options):
    return lambda batch: batch.realize()


def shown(events):
    return [(kind, np.asarray(out).tolist(), *metadata) for kind, out, *metadata in events]


def round_about(x):
    """Upstream's add-five-round-about: twice and plus ten, by halves."""
    return hook("plus_ten", hook("double", x * 2) + 10) / 2


def test_run_yields_each_batch_before_the_next_is_computed():
    # S56
    seen = []

    def fn(options):
        return lambda batch: (seen.append(batch.size), batch.realize())[1]

    events = Serving.new(fn).streaming().batch_size(2).run(cat(1, 2, 3))
    assert seen == []
    assert shown([next(events)]) == [("batch", [1, 2], "server_info")]
    assert seen == [2]
    assert shown(events) == [("batch", [3], "server_info")]


def test_a_serving_streams_once():
    # S56
    with pytest.raises(ConfigError, match="serving is already marked as streaming"):
        Serving.new(identity).streaming().streaming()


def test_postprocessing_gets_the_stream():
    # S23, S56
    serving = Serving.new(identity).streaming().batch_size(1)
    serving = serving.client_postprocessing(lambda stream, info: [out[0] + 1 for _, out, _ in stream])
    assert serving.run(cat(1, 2)) == [2, 3]
    with serving.start(batch_timeout_ms=1) as process:
        assert process.batched_run(cat(1, 2)) == [2, 3]


def test_a_started_serving_streams_its_batches(gate, gated):
    # S56
    with gated.streaming().start(batch_size=2, batch_timeout_ms=1) as process:
        gate.open()
        events = process.batched_run(cat(1, 2, 3))
        assert gate.batches == []  # nothing is handed in before it is consumed
        assert shown([next(events)]) == [("batch", [2, 4], "metadata")]
        gate.open()
        assert shown(events) == [("batch", [6], "metadata")]


def test_events_hold_the_callers_own_rows_only(gate, gated, pool):
    # S57: 3 + 3 = 4 + 2
    gate.open(2)
    with gated.streaming().start(batch_size=4, batch_timeout_ms=200) as process:
        first = pool.submit(lambda: shown(process.batched_run(cat(1, 2, 3))))
        wait_until(lambda: process.statistics().waiting_rows == 3)
        second = pool.submit(lambda: shown(process.batched_run(cat(4, 5, 6))))
        assert first.result(PATIENCE_S) == [("batch", [2, 4, 6], "metadata")]
        assert second.result(PATIENCE_S) == [("batch", [8], "metadata"), ("batch", [10, 12], "metadata")]


def test_rows_come_with_the_batch_they_were_in_while_others_of_the_same_call_wait(gate, gated, pool):
    # S57
    with gated.streaming().start(batch_size=4, batch_timeout_ms=200) as process:
        first = pool.submit(lambda: shown(process.batched_run(cat(1, 2, 3))))
        wait_until(lambda: process.statistics().waiting_rows == 3)
        events = process.batched_run(cat(4, 5, 6))
        second = pool.submit(lambda: shown([next(events)]))
        gate.open()
        assert second.result(PATIENCE_S) == [("batch", [8], "metadata")]
        assert first.result(PATIENCE_S) == [("batch", [2, 4, 6], "metadata")]
        gate.open()
        assert shown(events) == [("batch", [10, 12], "metadata")]


def test_tasks_get_async_iterators():
    # S56, S64
    serving = Serving.new(identity).streaming()

    async def batches():
        for number in range(3):
            yield cat(number)

    async def main():
        async with serving.start(batch_size=2, batch_timeout_ms=1) as process:
            whole = [event async for event in await process.batched_run_async(cat(1, 2, 3))]
            parts = [event async for event in await process.batched_run_async(batches())]
            return shown(whole), shown(parts)

    whole, parts = asyncio.run(main())
    assert whole == [("batch", [1, 2], "server_info"), ("batch", [3], "server_info")]
    assert parts == [("batch", [n], "server_info") for n in range(3)]


@pytest.mark.parametrize("compiler", ["python", "jax"])
def test_hooks_are_streamed_before_the_batch(compiler):
    # S58
    serving = Serving.jit(round_about, compiler=compiler).streaming(hooks=["double", "plus_ten"])
    expected = [
        ("double", [2.0, 4.0]),
        ("plus_ten", [12.0, 14.0]),
        ("batch", [6.0, 7.0], "server_info"),
    ]

    batch = Batch.concatenate([np.array([1.0, 2.0], dtype=np.float32)])
    assert shown(serving.run(batch)) == expected
    with serving.start(batch_size=2, batch_timeout_ms=1) as process:
        assert shown(process.batched_run(batch)) == expected

        async def main():
            return shown([event async for event in await process.batched_run_async(batch)])

        assert asyncio.run(main()) == expected


def test_hooks_that_are_not_listed_are_ignored():
    # S58
    serving = Serving.jit(round_about).streaming(hooks=["double", "other"])
    assert [kind for kind, *_ in serving.run(cat(1))] == ["double", "batch"]
    assert Serving.jit(round_about).run(cat(1)).tolist() == [6.0]


@pytest.mark.parametrize("compiler", ["python", "jax"])
def test_hook_values_reach_the_callers_whose_rows_they_are(pool, compiler):
    # S58; section 9, the first trap
    serving = Serving.jit(round_about, compiler=compiler).streaming(hooks=["double"])
    with serving.start(batch_size=4, batch_timeout_ms=LONG_MS, partitions=2) as process:
        for _ in range(20):
            futures = [
                pool.submit(lambda n=n: shown(process.batched_run(cat(n, n + 1), timeout_s=PATIENCE_S)))
                for n in range(0, 80, 10)
            ]
            for n, future in zip(range(0, 80, 10), futures, strict=True):
                assert future.result(PATIENCE_S) == [
                    ("double", [2 * n, 2 * n + 2]),
                    ("batch", [n + 5.0, n + 6.0], "server_info"),
                ]


def test_a_value_of_a_hook_without_a_row_for_each_is_an_error_and_no_wrong_rows():
    # S57, S58
    def summing(x):
        return x + hook("sum", x.sum(keepdims=True) if x[0] < 10 else x.sum())

    serving = Serving.jit(summing).streaming(hooks=["sum"])
    with pytest.raises(BatchResultMismatch, match=r"gave the hook 'sum' 1 row for a batch of 2"):
        list(serving.run(cat(1, 2)))
    with serving.start(batch_size=2, batch_timeout_ms=LONG_MS) as process:
        with pytest.raises(BatchResultMismatch, match=r"gave the hook 'sum' 1 row for a batch of 2"):
            list(process.batched_run(cat(1, 2)))
        with pytest.raises(BadOutcome, match=r"gave the hook 'sum' no tree of arrays with the batch as their first"):
            list(process.batched_run(cat(10, 2)))


def test_hooks_and_larger_inputs_do_not_go_together():
    # S59
    serving = Serving.jit(round_about).streaming(hooks=["double"]).batch_size(2)
    too_large = r"batch size \(3\) cannot exceed the serving's batch size of 2 when streaming hooks"
    with serving.start() as process:
        for run in (serving.run, process.batched_run):
            with pytest.raises(InvalidRequest, match=too_large):
                run(cat(1, 2, 3))
            with pytest.raises(
                InvalidRequest, match="streaming hooks do not support input streaming, input must be a Batch"
            ):
                run([cat(1)])  # F108: before anything is taken from what it returns


@pytest.mark.parametrize("pad", [False, True])
def test_with_hooks_a_batch_is_never_broken(gate, gated, pool, pad):
    # S59, S60: 2, 2, 2 with a limit of 3 are three batches
    gate.open(3)
    serving = gated.streaming(hooks=["any"]).process_options(pad_to_batch_size=pad)
    with serving.start(batch_size=3, batch_timeout_ms=200) as process:
        futures = []
        for n in (10, 20, 30):
            futures.append(pool.submit(lambda n=n: shown(process.batched_run(cat(n, n)))))
            wait_until(lambda: len(gate.batches) + process.statistics().waiting_rows // 2 >= len(futures))
        for n, future in zip((10, 20, 30), futures, strict=True):
            assert future.result(PATIENCE_S) == [("batch", [2 * n, 2 * n], "metadata")]
    padding = [0] if pad else []
    assert sorted(gate.rows) == [[10, 10, *padding], [20, 20, *padding], [30, 30, *padding]]


def test_a_crash_ends_the_stream_where_it_happens(gate, gated):
    # S61
    gate.open(10)
    with gated.streaming().start(batch_size=2, batch_timeout_ms=1) as process:
        events = process.batched_run(cat(1, 2, 3, 13, 5))
        assert shown([next(events)]) == [("batch", [2, 4], "metadata")]
        with pytest.raises(ServingCrashed, match="thirteen"):
            next(events)
        wait_until(lambda: process.statistics().in_flight == 0)


def test_a_stream_may_be_consumed_from_any_thread(pool):
    # S62, as documented in stream.py
    with Serving.new(identity).streaming().start(batch_size=1, batch_timeout_ms=1) as process:
        events = process.batched_run(cat(1, 2, 3))
        got = [pool.submit(next, events).result(PATIENCE_S) for _ in range(3)]
        assert shown(got) == [("batch", [n], "server_info") for n in (1, 2, 3)]


@pytest.mark.stress
def test_dropped_streams_leave_nothing_behind():
    # S63
    with Serving.new(identity).streaming().start(batch_size=2, batch_timeout_ms=0) as process:
        for _ in range(1000):
            events = process.batched_run(cat(*range(7)))
            next(events)
            del events

        async def main():
            for _ in range(20):
                events = await process.batched_run_async(cat(*range(7)))
                await anext(events)
                await events.aclose()

        asyncio.run(main())
        wait_until(lambda: process.statistics().in_flight == process.statistics().waiting_rows == 0)

        def left():
            gc.collect()
            return [one for one in gc.get_objects() if type(one) in {streams.Inbox, streams.AsyncInbox}]

        wait_until(lambda: not left())  # the thread that answered last may still hold one


def test_a_slow_consumer_holds_back_its_own_rows_only():
    # S63
    with Serving.new(identity).streaming().start(batch_size=1, batch_timeout_ms=0, max_queue_rows=100) as process:
        slow = process.batched_run(cat(*range(60)))
        next(slow)
        wait_until(lambda: process.statistics().waiting_rows == 0)
        assert process.statistics().by_key["default"].rows <= streams.MAX_EVENTS
        assert len(list(process.batched_run(cat(*range(30))))) == 30
        assert len(list(slow)) == 59


def many(x):
    for _ in range(streams.MAX_EVENTS + 2):
        hook("step", x)
    return x


def test_a_consumer_that_takes_no_hooks_is_let_go(monkeypatch, pool):
    # S63, F8: a batch-mate waits for it
    monkeypatch.setattr(streams, "HURRY_S", 0.05)
    with Serving.jit(many).streaming(hooks=["step"]).start(batch_size=2, batch_timeout_ms=LONG_MS) as process:
        slow = process.batched_run(cat(1))
        mate = pool.submit(lambda: len(list(process.batched_run(cat(2)))))
        wait_until(lambda: process.statistics().waiting_rows == 1)
        next(slow)  # takes one, and then no more
        assert mate.result(PATIENCE_S) == streams.MAX_EVENTS + 3
        with pytest.raises(DeadlineExceeded, match="were taken so slowly"):
            list(slow)


def test_a_partition_does_not_stand_for_a_consumer_that_stops(monkeypatch, pool):
    # F8: others wait for the partition
    monkeypatch.setattr(streams, "HURRY_S", 0.05)
    with Serving.jit(many).streaming(hooks=["step"]).start(batch_timeout_ms=1) as process:
        slow = process.batched_run(cat(1))
        next(slow)
        assert len(list(process.batched_run(cat(2)))) == streams.MAX_EVENTS + 3
        with pytest.raises(DeadlineExceeded, match="were taken so slowly"):
            list(slow)


def test_a_consumer_that_holds_up_nobody_may_take_its_time(monkeypatch):
    # F8
    monkeypatch.setattr(streams, "HURRY_S", 0.01)
    with Serving.jit(many).streaming(hooks=["step"]).start(batch_timeout_ms=1) as process:
        slow = process.batched_run(cat(1))
        next(slow)
        threading.Event().wait(0.1)
        assert len(list(slow)) == streams.MAX_EVENTS + 2


def test_an_async_postprocessing_of_a_stream_is_awaited():
    # F37
    async def collected(events, info):
        return [output.tolist() async for _, output, _ in events]

    serving = Serving.new(identity).streaming().batch_size(1).client_postprocessing(collected)
    with serving.start(batch_timeout_ms=1) as process:
        assert asyncio.run(process.batched_run_async(cat(1, 2))) == [[1], [2]]
        for call in (process.batched_run, serving.run):
            with pytest.raises(ConfigError, match="collected is a coroutine function; await batched_run_async"):
                call(cat(1))


def test_a_stream_waits_for_room_once_it_has_begun(gate, gated, pool):
    # F36
    with gated.streaming().start(batch_size=1, batch_timeout_ms=1, max_queue_rows=2) as process:
        gate.open()
        events = process.batched_run(cat(*range(9)))
        next(events)
        rest = pool.submit(lambda: [output.tolist() for _, output, _ in events])
        gate.open(8)
        assert rest.result(PATIENCE_S) == [[2 * n] for n in range(1, 9)]


def test_a_streams_time_is_limited(gate, gated):
    # S47
    with gated.streaming().start(batch_timeout_ms=1) as process:
        events = process.batched_run(cat(1, 2), timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            next(events)
        gate.open(2)
        wait_until(lambda: process.statistics().in_flight == 0)


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_stream_may_have_more_time_than_a_lock_can_wait(timeout_s):
    with Serving.new(identity).streaming().start(batch_timeout_ms=1) as process:
        assert len(list(process.batched_run(cat(1), timeout_s=timeout_s))) == 1


def test_a_stream_waits_for_room_in_a_small_queue():
    # S48, S63
    with Serving.new(identity).streaming().start(batch_size=1, batch_timeout_ms=0, max_queue_rows=2) as process:
        assert len(list(process.batched_run(cat(*range(40))))) == 40


def test_input_and_output_stream_together(gate, gated):
    # S64
    def batches():
        for number in range(3):
            assert len(gate.batches) == number  # the one before was executed
            yield cat(number)

    gate.open(3)
    with gated.streaming().start(batch_timeout_ms=1) as process:
        events = process.batched_run(batches())
        assert shown(events) == [("batch", [2 * n], "metadata") for n in range(3)]
