# SPDX-License-Identifier: Apache-2.0
"""Worker processes of which there are more and fewer while batches run."""

from __future__ import annotations

import time

from tests.pools.test_pool_contract import HERE, ROOT, Rig, run
from tests.waiting import reached as eventually

from forebay.types.worker_range import WorkerRange
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import RunnerSpec


def rig(least, most, seats=0, **kwargs):
    spec, bounds = RunnerSpec(f"{HERE}:Told", kwargs), WorkerRange(min=least, max=most)
    return Rig(ProcessPool(spec, workers=most, bounds=bounds, seats=seats, path=[ROOT]))


def alive(pool, count):
    return lambda: (pool.statistics().alive, pool.idle) == (count, count)


def test_workers_come_and_go_and_none_of_them_counts_as_lost():
    async def resize():
        async with rig(1, 3) as opened:
            pool = opened.pool
            (first,) = pool.pids()
            pool.resize(3)
            assert pool.statistics().slots == 3
            await eventually(alive(pool, 3))
            pool.resize(1)
            await eventually(lambda: alive(pool, 1)() and len(pool.pids()) == 1)
            assert pool.pids() == [first]
            pool.resize(0)
            await eventually(lambda: not pool.pids())
            assert pool.idle == 0
            pool.resize(2)
            await eventually(alive(pool, 2))
            assert await opened.run("again") == ["again"]
            told = pool.statistics()
            assert (told.restarts, told.wanted, told.problem) == (0, 2, "")

    run(resize())


def test_a_worker_that_is_to_leave_answers_first_and_gets_nothing_more(tmp_path):
    async def leave():
        async with rig(0, 2) as opened:
            pool = opened.pool
            held = opened.submit(["until", str(tmp_path / "started"), str(tmp_path / "go")])
            await eventually((tmp_path / "started").exists)
            (first,) = pool.pids()
            pool.resize(0)
            assert (pool.idle, pool.statistics().alive) == (0, 0)
            pool.resize(1)  # while the other one still has work
            await eventually(alive(pool, 1))
            assert await opened.run(["pid"]) != [first]
            (tmp_path / "go").touch()
            await opened.outcomes(held)
            await eventually(lambda: first not in pool.pids())
            assert alive(pool, 1)()

    run(leave())


def test_a_worker_that_is_still_starting_is_ended_at_once_and_its_place_is_taken_again(tmp_path):
    hold = tmp_path / "hold"

    async def change_ones_mind():
        async with rig(1, 2, hold=str(hold)) as opened:
            hold.touch()
            opened.pool.resize(2)
            await eventually((tmp_path / "hold.1").exists)  # it is in `open`, which takes a minute
            assert opened.pool.start_up(time.monotonic()).starting == 1
            hold.unlink()
            opened.pool.resize(1)
            opened.pool.resize(2)
            assert opened.pool.awaited(time.monotonic()) is None  # one is up
            await eventually(alive(opened.pool, 2))
            opened.pool.resize(0)
            now = time.monotonic()
            assert opened.pool.awaited(now) == (
                opened.pool.start_up(now).start_s,
                1,
            )  # as long as one took, once it is asked

    run(change_ones_mind())


def test_a_worker_with_open_streams_leaves_after_the_last(tmp_path):
    async def leave():
        async with rig(0, 1, seats=2) as opened:
            parts, pool = [], opened.pool

            def sink(found, release):
                parts.append(found)
                release()

            held = opened.submit(["stream_until", str(tmp_path / "started"), str(tmp_path / "go")], on_parts=sink)
            await eventually(lambda: parts)
            pool.resize(0)
            assert pool.idle == 0
            (tmp_path / "go").touch()
            await opened.outcomes(held)
            await eventually(lambda: not pool.pids())

    run(leave())
