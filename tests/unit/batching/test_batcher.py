# SPDX-License-Identifier: Apache-2.0
"""Queue and pool are brought together at the right moments and at no others."""

from __future__ import annotations

import asyncio
import logging

import pytest

from forebay.batching.batcher import Batcher
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.testing import FakeClock, ManualPool, MemoryOrigin
from forebay.types.call import ALONE, Request


class AudiblePool(ManualPool):
    """Hears its workers; a test says what is heard in each rest."""

    can_rest = True

    def __init__(self, slots, clock):
        super().__init__(slots)
        self.clock = clock
        self.rests = []
        self.heard = {}

    def rest(self, seconds):
        self.rests.append(seconds)
        self.clock.advance(seconds)
        self.heard.get(len(self.rests), lambda: None)()


class ApartPool(ManualPool):
    answers_apart = True


class Bench:
    def __init__(self, clock, slots=1, cores=2, pool=None, **settings):
        self.clock = clock
        self.pool = pool or ManualPool(slots)
        self.pool.idle = slots
        self.answered = []
        self.queue = BatchQueue(BatchConfig(**{"idle": "go", "max_size": 4, **settings}))
        self.batcher = Batcher(self.queue, self.pool, self.answer, asyncio.get_running_loop(), cores=cores)

    def answer(self, batch, outcomes, now):
        self.answered += outcomes

    def submit(self, *names, origin=None):
        for name in names:
            self.batcher.submit(Request(body=name, reply=print, origin=origin), self.clock.now)

    @property
    def batches(self):
        return ["".join(entry.body for entry in batch.entries) for batch in self.pool.seen]


def bench(story, **settings):
    clock = FakeClock()

    async def main():
        await story(Bench(clock, **settings))

    clock.run(main())


def test_nothing_leaves_before_the_turn_ends():
    async def story(bench):
        bench.submit("a")
        assert bench.batches == []
        bench.submit("b")
        await asyncio.sleep(0)
        assert bench.batches == ["ab"]

    bench(story)


def test_what_arrives_in_a_turn_is_brought_before_a_batch_leaves_at_its_end():
    async def story(bench):
        def bring(*names):
            bench.batcher.expect(lambda now: (moments.append(now), bench.submit(*names)))

        moments, before = [], bench.clock.now
        bring("a")
        bench.clock.advance(0.001)
        bring("b")
        assert bench.queue.waiting == 0
        await asyncio.sleep(0)
        assert bench.batches == ["ab"]
        assert moments == [before, before], "as long as the first has waited"
        bring("c")
        await asyncio.sleep(0)
        assert bench.queue.waiting == 1, "also while every slot is busy"
        bring("d")
        bench.pool.complete()
        assert bench.queue.waiting == 2, "before it is asked what runs next"
        await asyncio.sleep(0)
        assert bench.batches == ["ab", "cd"]
        bring("e")
        bench.pool.complete()
        bench.batcher.admit()
        await asyncio.sleep(0)
        assert bench.batches == ["ab", "cd", "e"]

    bench(story)


def test_who_fails_to_bring_something_keeps_nobody_else_from_it(caplog):
    async def story(bench):
        bench.batcher.expect(lambda _: bench.no_such_thing)
        bench.batcher.expect(lambda _: bench.submit("a"))
        await asyncio.sleep(0)
        assert bench.batches == ["a"]

    bench(story)
    assert "failed to queue requests" in caplog.text


def test_every_idle_slot_is_used():
    async def story(bench):
        bench.submit(*"abcdef")
        await asyncio.sleep(0)
        assert bench.batches == ["ab", "cd"]
        bench.pool.complete()
        await asyncio.sleep(0)
        assert bench.batches == ["ab", "cd", "ef"]
        assert bench.answered == ["a", "b"]

    bench(story, slots=2, max_size=2)


def test_no_slot_no_turn():
    """G6: with every slot busy an arrival only queues."""

    async def story(bench):
        bench.submit("a")
        await asyncio.sleep(0)
        before = bench.clock.turns
        for _ in range(100):
            bench.submit("b")
        await asyncio.sleep(10.0)
        assert bench.clock.turns - before < 5
        assert bench.batches == ["a"]

    bench(story)


def test_answers_are_written_before_who_comes_back_is_counted():
    async def story(bench):
        origin = MemoryOrigin()
        bench.submit("a", origin=origin)
        await asyncio.sleep(0)
        bench.clock.advance(0.010)
        seen = []
        bench.batcher._answer = lambda *_: seen.append(origin.release)
        bench.pool.complete(model_s=0.010)
        assert seen == [0]
        assert origin.release > 0

    bench(story, idle="gather")


@pytest.mark.parametrize("idle, batches", [("go", ["ab", "c", "d"]), ("gather", ["ab", "cd"])])
def test_gather_keeps_a_crowd_together(idle, batches):
    """Two clients in a closed loop: `go` splits them, `gather` waits for the second."""

    async def story(bench):
        first, second = MemoryOrigin(), MemoryOrigin()
        bench.submit("a", origin=first)
        bench.submit("b", origin=second)
        await asyncio.sleep(0)
        bench.clock.advance(0.010)
        bench.pool.complete(model_s=0.010)
        bench.submit("c", origin=first)
        await asyncio.sleep(0.001)
        bench.submit("d", origin=second)
        await asyncio.sleep(0.001)
        if idle == "go":
            bench.pool.complete()
            await asyncio.sleep(0)
        assert bench.batches == batches

    bench(story, idle=idle)


def test_idle_slots_share_what_came():  # F70
    async def story(bench):
        bench.submit(*"abcd")
        await asyncio.sleep(0)
        assert bench.batches == ["ab", "cd"]

    bench(story, idle="gather", slots=2)


def test_a_slot_that_went_away_leaves_its_share_to_the_others():  # F70
    async def story(bench):
        bench.pool.idle = 1
        bench.submit(*"abcd")
        await asyncio.sleep(0)
        assert bench.batches == ["abcd"]

    bench(story, idle="gather", slots=2)


@pytest.mark.parametrize("cores, batches", [(1, ["abc"]), (2, ["a"])])
def test_on_one_core_a_batch_grows_while_the_loop_finds_more_to_read(cores, batches):
    async def story(bench):
        for name in "abc":
            bench.submit(name)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.batches == batches

    bench(story, idle="gather", cores=cores)


def test_on_one_core_a_lone_request_waits_for_one_turn_only():
    async def story(bench):
        bench.submit("a")
        await asyncio.sleep(0)
        assert bench.batches == []
        await asyncio.sleep(0)
        assert bench.batches == ["a"]

    bench(story, idle="gather", cores=1)


def test_on_one_core_no_second_lone_request_waits_until_two_have_come_together():
    async def story(bench):
        async def turn(*names):
            bench.submit(*names)
            await asyncio.sleep(0)

        await turn("a")
        await turn()
        await turn("b")
        assert bench.batches == ["a", "b"]
        await turn("c", "d")
        await turn("e")
        await turn()
        assert bench.batches[2:] == ["cde"]
        await turn("f")
        assert bench.batches[3:] == []

    bench(story, pool=ApartPool(9), slots=9, max_size=64, cores=1)


@pytest.mark.parametrize("row_s, batches", [(0.00001, ["z", "abc"]), (0.002, ["z", "a"])])
def test_on_one_core_quick_rows_that_run_one_by_one_leave_together(row_s, batches):
    async def story(bench):
        bench.submit("z")
        await asyncio.sleep(0)
        bench.pool.complete(model_s=row_s)
        for name in "abc":
            bench.submit(name)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.batches == batches

    bench(story, max_size=1, bundle_s=0.001, cores=1)


@pytest.mark.parametrize("cores, batches", [(1, ["abc"]), (2, ["a", "b", "c"])])
def test_on_one_core_what_is_answered_apart_leaves_together(cores, batches):
    async def story(bench):
        for name in "abc":
            bench.submit(name)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.batches == batches
        assert bench.queue.running == 0

    bench(story, pool=ApartPool(9), slots=9, max_size=64, cores=cores)


def test_on_one_core_a_full_batch_leaves_at_once():
    async def story(bench):
        bench.submit(*"abcdef")
        await asyncio.sleep(0)
        assert bench.batches == ["abcd"]

    bench(story, idle="gather", cores=1)


def test_a_batch_is_put_off_for_a_millisecond_at_most():
    async def story(bench):
        for _ in range(12):
            bench.submit("a")
            await asyncio.sleep(0)
            bench.clock.advance(0.0003)
        assert 4 <= len(bench.batches[0]) <= 6

    bench(story, idle="gather", cores=1, max_size=64)


@pytest.mark.parametrize("settings", [{"model_s": 0.001}, {"idle": "go"}, {"idle": "wait"}, {"key": ALONE}])
def test_what_need_not_share_or_takes_long_is_not_put_off(settings):
    async def story(bench):
        bench.submit("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bench.pool.complete(model_s=settings.get("model_s", 0.0))
        await asyncio.sleep(0.001)
        bench.batcher.submit(Request(body="b", reply=print, key=settings.get("key")), bench.clock.now)
        await asyncio.sleep(0)
        assert bench.batches == ["a", "b"]

    bench(story, idle=settings.get("idle", "gather"), cores=1)


def test_close_disarms_the_timer():
    async def story(bench):
        bench.submit("a")
        await asyncio.sleep(0)
        bench.batcher.close()
        await asyncio.sleep(5.0)
        assert bench.batches == []

    bench(story, idle="wait", max_wait_s=1.0)


def test_a_pool_that_takes_nothing_fails_a_thousand_batches():
    """G8: an error in `submit` is answered, however many batches wait."""

    async def story(bench):
        def broken(batch, done):
            raise OSError("no")

        bench.pool.submit = broken
        logging.disable()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        bench.submit(*"x" * 1_000)
        await asyncio.sleep(0.001)
        assert len(bench.answered) == 1_000

    try:
        bench(story, max_size=1)
    finally:
        logging.disable(logging.NOTSET)


def resting(story, cores=1, model_s=0.002):
    """Run a story that begins with "a" running, after a batch that took `model_s`."""
    clock = FakeClock()

    async def main():
        bench = Bench(clock, cores=cores, pool=AudiblePool(1, clock))
        bench.submit("0")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bench.pool.complete(model_s=model_s)
        bench.submit("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.batches == ["0", "a"]
        await story(bench)
        bench.batcher.close()

    clock.run(main())


def test_on_one_core_the_loop_rests_while_a_whole_batch_waits_and_no_slot_is_idle():  # F69
    async def story(bench):
        bench.submit(*"bcd")
        await asyncio.sleep(0)
        assert bench.pool.rests == []
        bench.submit("e")
        for _ in range(3):
            await asyncio.sleep(0)
        assert bench.pool.rests == [0.002] * 3
        bench.pool.complete()
        assert bench.batches == ["0", "a", "bcde"]
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(bench.pool.rests) <= 4

    resting(story)


def test_what_a_worker_says_ends_the_rest():
    async def story(bench):
        bench.pool.heard[2] = lambda: asyncio.get_running_loop().call_soon(bench.pool.complete)
        bench.submit(*"bcde")
        for _ in range(6):
            await asyncio.sleep(0)
        assert bench.batches == ["0", "a", "bcde"]
        assert len(bench.pool.rests) <= 3

    resting(story)


@pytest.mark.parametrize("settings", [{"cores": 2}, {"model_s": 0.0005}])
def test_the_loop_does_not_rest_on_several_cores_or_for_quick_batches(settings):
    async def story(bench):
        bench.submit(*"bcde")
        for _ in range(3):
            await asyncio.sleep(0)
        assert bench.pool.rests == []

    resting(story, **settings)


def test_a_turn_holds_one_rest_only():
    async def story(bench):
        pool = AudiblePool(1, bench.clock)
        other = Bench(bench.clock, cores=1, pool=pool)
        other.submit("0")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        other.pool.complete(model_s=0.002)
        for each in (bench, other):
            each.submit(*"bcdefghi")
        for _ in range(4):
            await asyncio.sleep(0)
        assert bench.pool.rests
        assert pool.rests == []
        bench.pool.complete()
        for _ in range(3):
            await asyncio.sleep(0)
        bench.batcher.close()
        other.submit("j")
        await asyncio.sleep(0)
        assert pool.rests
        other.batcher.close()

    resting(story)
