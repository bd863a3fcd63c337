# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalCall=false
"""A step that hangs: who waits for it is called off, its worker is replaced, and the next stream is answered."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, reached

from forebay.batching.queue import BatchConfig
from forebay.errors import Unavailable
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.seats import Seats, follow
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec
from forebay.workers.user_calls import joint_streams
from forebay.workers.user_calls.joint_streams import SideBySide

released = threading.Event()


class Hanging(Runner):
    """Streams that count to two, or hang in their second step."""

    def run(self, items):
        (item,) = items
        yield [b"1"]
        if item.body:
            Path(item.body.decode()).touch()
            released.wait()
        yield [b"2"]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_step_that_hangs_costs_its_worker_and_nothing_else(kind, tmp_path):
    async def main():
        spec = RunnerSpec("tests.pools.test_stuck_streams:Hanging")
        kinds = {"thread": ThreadPool, "process": ProcessPool}
        pool = kinds[kind](spec, stuck_s=0.05, seats=2, **({"path": ["."]} if kind == "process" else {}))
        idle = asyncio.Event()
        pool.watch(idle.set)
        await pool.start()

        async def run(body):
            parts, ended = [], asyncio.Event()
            found = []

            def told(steps, release):
                parts.extend(part for (part,) in steps)
                release()

            def done(_batch, outcomes):
                found.extend(outcomes)
                ended.set()

            batch = EntryBatch([Request(body=body, reply=print)], None, 1, on_steps=told)
            pool.submit(batch, done)
            if body:
                while not began.exists():  # noqa: ASYNC110 - a worker process says so
                    await asyncio.sleep(0.002)
                batch.cancelled = True
                batch.on_cancel()
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
            return parts, found

        began = tmp_path / "began"
        assert pool.statistics().idle == 2
        parts, (outcome,) = await run(bytes(began))
        assert parts == [b"1"]
        assert type(outcome) is Failure
        while pool.idle < 2:
            idle.clear()
            await asyncio.wait_for(idle.wait(), PATIENCE_S)
        assert await run(b"") == ([b"1", b"2"], [None])
        released.set()
        await pool.stop(5.0)

    released.clear()
    asyncio.run(main())


def test_who_finds_every_thread_hanging_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("forebay.workers.pools.threads.MAX_LEFT", 1)

    async def main():
        pool = ThreadPool(RunnerSpec("tests.pools.test_stuck_streams:Hanging"), stuck_s=0.05, seats=2)
        batching = BatchConfig(max_size=1, idle="go")
        endpoint = Endpoint(EndpointConfig(name="hanging", streams=True), batching, pool)
        await endpoint.start()
        for number in range(2):
            began = tmp_path / str(number)
            hanging = asyncio.ensure_future(endpoint.call(bytes(began)))
            await reached(began.exists)
            hanging.cancel()
            await reached(lambda: pool.statistics().problem if number else pool.statistics().restarts)  # noqa: B023
        with pytest.raises(Unavailable, match="1 threads hang in calls that do not end"):
            await endpoint.call(b"")
        released.set()
        await reached(lambda: not pool.statistics().problem)
        assert await endpoint.call(b"") == [b"1", b"2"]
        await endpoint.drain(5.0)

    released.clear()
    asyncio.run(main())


def test_an_async_generator_that_never_ends_is_told_as_ended_and_left_behind_in_the_end(monkeypatch, caplog):
    monkeypatch.setattr(joint_streams, "END_S", 0.001)
    monkeypatch.setattr(joint_streams, "LATE_S", 0.02)

    async def endless():
        try:
            yield [b"1"]
        finally:
            await asyncio.Event().wait()

    async def main():
        seats = Seats(lambda _items: endless(), time.monotonic, watch=lambda _tell: lambda: None)
        seats.join("it", [Request(body=b"", reply=print)])
        assert (await seats.step()).parts == [("it", [b"1"])]
        await seats.leave("it")
        assert [name for name, *_ in seats.told().ended] == ["it"]
        assert not len(seats)
        async with asyncio.timeout(PATIENCE_S):
            while seats.can_step:  # or a worker that is told to stop would never
                await seats.step()

    asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage() == "an async generator did not close within 0.02 s; abandoning it"


def test_a_worker_that_is_told_to_stop_has_a_generator_end_first_that_takes_long(monkeypatch):
    monkeypatch.setattr(joint_streams, "END_S", 0.001)
    released.clear()
    ended = []

    async def slow():
        try:
            yield [b"1"]
        finally:
            await asyncio.to_thread(released.wait)
            ended.append("slow")

    class Server:
        """Says something after each round, and lets the generator end when it has nothing to say any more."""

        told = 0

        def __init__(self):
            items = [Request(body=b"", reply=print)]
            self.says = {0: [("join", "it", items)], 1: [("heard", 1), ("leave", "it")], 2: [("heard", 2), ("stop",)]}

        def receive(self, *, wait):
            if not self.says:
                released.set()
            return self.says.pop(self.told, [])

        def tell(self, number, told):
            self.told = number

    def watch(tell):  # as if it said something at once
        tell()
        return lambda: None

    server = Server()
    with asyncio.Runner() as runner:
        steps = SideBySide(slow(), 1, wait=runner.run)
        follow(Seats(lambda _items: steps, time.monotonic, watch=watch), server)
        found = (server.told, [*ended])
        released.set()  # or a thread would be waited for, where it fails
    assert found == (2, ["slow"])
