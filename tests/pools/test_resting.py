# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""A loop that rests while its workers are busy (F69) serves several clients as one that does not rest."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from tests.pools.runners import PATIENCE_S
from tests.pools.test_pool_contract import HERE, eventually, pool_of, run

from forebay.batching.queue import BatchConfig
from forebay.errors import Cancelled, DeadlineExceeded
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Failure, Request
from forebay.workers.pools.inline import InlinePool
from forebay.workers.runner import RunnerSpec

CONFIG = EndpointConfig(name="x", timeout_s=PATIENCE_S, max_timeout_s=PATIENCE_S)
each_kind = pytest.mark.parametrize("kind", ["threads", "processes"])


class Scene:
    """An endpoint whose loop may rest, and another one beside it, with a worker on the loop."""

    def __init__(self, kind, **batching):
        pool = pool_of(kind, "Numbers")
        self.rests, rest = 0, pool.rest

        def counted(seconds):
            self.rests += 1
            rest(seconds)

        pool.rest = counted
        self.endpoint = Endpoint(CONFIG, BatchConfig(max_size=4, **batching), pool)
        self.other = Endpoint(CONFIG, BatchConfig(), InlinePool(RunnerSpec(f"{HERE}:Told"), slots=1))
        self.told = {}
        self.order = []

    async def __aenter__(self):
        await self.endpoint.start()
        await self.other.start()
        return self

    async def __aexit__(self, *_):
        await self.other.drain(PATIENCE_S)
        await self.endpoint.drain(PATIENCE_S)

    def submit(self, name, timeout_s=PATIENCE_S, **fields):
        def reply(request, outcome):
            assert name not in self.told
            self.told[name] = outcome

        request = Request(body=name, reply=reply, deadline=time.monotonic() + timeout_s, **fields)
        self.order.append(name)
        self.endpoint.submit(request)
        return request

    def ran(self):
        """What was run, in the order in which the worker saw it."""
        return sorted((name for name in self.told if type(self.told[name]) is not Failure), key=lambda n: self.told[n])


def cores(monkeypatch, count):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(count)), raising=False)


async def storm(scene, seed):
    """Five clients with bursts of requests of several sizes, some of them called off; returns who was."""
    cancelled, is_over = set(), False

    async def client(number):
        rng = random.Random(f"{seed} {number}")
        for burst in range(4):
            count = rng.randint(1, 12)
            requests = [scene.submit(f"{number} {burst} {k}", size=rng.randint(1, 3)) for k in range(count)]
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
            for request in rng.sample(requests, count // 4):
                if not request.done:
                    cancelled.add(request.body)
                    scene.endpoint.cancel(request)
            await eventually(lambda requests=requests: all(request.body in scene.told for request in requests))

    async def neighbour():
        calls = 0
        while not is_over:
            assert await scene.other.call("next") == "next"
            calls += 1
        assert calls

    beside = asyncio.create_task(neighbour())
    await asyncio.gather(*map(client, range(5)))
    is_over = True
    await beside
    return cancelled


@each_kind
def test_the_same_requests_are_answered_in_the_same_order_with_and_without_rests(kind, monkeypatch):
    async def main(seed):
        async with Scene(kind) as scene:
            cancelled = await storm(scene, seed)
        for name, outcome in scene.told.items():
            assert type(outcome) is not Failure or (name in cancelled and type(outcome.error) is Cancelled), outcome
        assert scene.ran() == [name for name in scene.order if name not in cancelled]  # one worker, first come
        return scene

    for seed in range(3):
        cores(monkeypatch, 1)
        resting = asyncio.run(main(seed))
        cores(monkeypatch, 2)
        other = asyncio.run(main(seed))
        assert resting.rests > 0
        assert other.rests == 0
        assert set(resting.told) == set(other.told)


@each_kind
def test_who_waits_while_the_loop_rests_may_leave_is_told_in_time_and_keeps_nobody_up(kind, monkeypatch, tmp_path):
    cores(monkeypatch, 1)

    async def main():
        async with Scene(kind) as scene:
            first, go = tmp_path / "first", tmp_path / "go"
            scene.submit(f"until {first}")
            await eventually(lambda: scene.endpoint.pool.idle == 0)
            scene.submit(f"until {go}")
            waiting = [scene.submit(str(number)) for number in range(12)]
            first.touch()  # after it the loop knows that batches take their time
            await eventually(lambda: scene.rests > 3)
            scene.submit("late", timeout_s=0.05)
            await eventually(lambda: "late" in scene.told)
            assert type(scene.told["late"].error) is DeadlineExceeded
            scene.endpoint.cancel(waiting[5])
            assert type(scene.told["5"].error) is Cancelled
            for _ in range(10):
                assert await scene.other.call("next") == "next"
            assert set(scene.told) == {f"until {first}", "5", "late"}
            before = scene.rests
            await eventually(lambda: scene.rests > before + 3)
            go.touch()
            await eventually(lambda: len(scene.told) == len(scene.order))
            assert scene.ran() == [name for name in scene.order if name not in {"5", "late"}]

    run(main())
