# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalCall=false
"""Streams on the loop whose clients leave: they end at once, and nobody else is hurt, however long a step takes."""

from __future__ import annotations

import asyncio

import pytest
from tests.waiting import PATIENCE_S

from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.workers.pools import inline_streams
from forebay.workers.pools.inline import InlinePool
from forebay.workers.runner import Runner, RunnerSpec

SOON_S = 0.02


class Gated(Runner):
    """Each stream gives its parts once its gate is open, `deaf` ones do not hear that they were cancelled."""

    def __init__(self):
        self.gates = {}
        self.begun = []

    def run_async(self, items):
        (item,) = items
        name = item.body.decode()
        self.begun.append(name)
        gate = self.gates[name] = asyncio.Event()
        return deaf(gate) if name.startswith("deaf") else parts(gate)


async def parts(gate):
    for number in (1, 2):
        await gate.wait()
        gate.clear()
        yield [f"{number}"]


async def deaf(gate):
    while not gate.is_set():
        try:
            await gate.wait()
        except asyncio.CancelledError:
            pass
    return [Failure(ValueError("too late"))]


class Rig:
    """A pool, and one stream after the other."""

    def __init__(self, seats=4):
        self.model = Gated()
        self.pool = InlinePool(RunnerSpec("", local=lambda: self.model), seats=seats)

    async def __aenter__(self):
        await self.pool.start()
        return self

    async def __aexit__(self, *_):
        for gate in self.model.gates.values():
            gate.set()
        await self.pool.stop(1.0)

    def ask(self, name):
        return Stream(self, name)

    async def until(self, is_so):
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():  # noqa: ASYNC110 - what it waits for has many causes
                await asyncio.sleep(0.001)


class Stream:
    """What one client hears."""

    def __init__(self, rig, name):
        self.rig, self.name = rig, name
        self.parts, self.outcome = [], []
        self.batch = EntryBatch([Request(body=name.encode(), reply=print)], None, 1, on_steps=self._told)
        rig.pool.submit(self.batch, lambda _, outcomes: self.outcome.extend(outcomes))

    def _told(self, steps, release):
        self.parts += [part for (part,) in steps]
        release()

    async def begun(self):
        await self.rig.until(lambda: self.name in self.rig.model.begun)
        return self

    def leave(self):
        self.batch.cancelled = True
        self.batch.on_cancel()

    async def ended(self):
        await self.rig.until(lambda: self.outcome)

    async def whole(self):
        for count in (1, 2):
            self.rig.model.gates[self.name].set()
            await self.rig.until(lambda: len(self.parts) == count or self.outcome)  # noqa: B023
        await self.ended()
        return self.parts == ["1", "2"] and self.outcome == [None]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(inline_streams, "CANCEL_S", SOON_S)


async def looked():
    """Wait until whoever looks after hanging coroutines has had its time, and more."""
    for _ in range(10):
        await asyncio.sleep(SOON_S)


def test_who_joins_as_another_leaves_is_answered_however_long_its_first_part_takes():
    async def main():
        async with Rig() as rig:
            first = await rig.ask("first").begun()
            first.leave()
            second = await rig.ask("second").begun()
            await first.ended()
            await looked()
            assert await second.whole()

    asyncio.run(main())


def test_who_leaves_frees_its_seat_while_the_others_wait_for_their_next_part():
    async def main():
        async with Rig(seats=2) as rig:
            first, second = await rig.ask("first").begun(), await rig.ask("second").begun()
            assert rig.pool.idle == 0
            first.leave()
            await first.ended()
            assert rig.pool.idle == 1
            third = await rig.ask("third").begun()
            await looked()
            assert await third.whole()
            assert await second.whole()

    asyncio.run(main())


def test_who_leaves_before_anything_has_begun_is_gone_at_once(caplog):
    async def main():
        async with Rig() as rig:
            first = rig.ask("first")
            first.leave()
            await first.ended()
            assert await (await rig.ask("second").begun()).whole()
            assert rig.model.begun == ["second"]

    asyncio.run(main())
    assert caplog.messages == []  # nothing is left behind


def test_a_coroutine_that_does_not_hear_is_left_behind_and_who_came_after_it_is_answered(caplog):
    async def main():
        async with Rig() as rig:
            first = await rig.ask("deaf").begun()
            first.leave()
            second, third = rig.ask("second"), rig.ask("third")
            third.leave()
            await first.ended()
            await third.ended()
            assert [type(one.outcome[0]) for one in (first, third)] == [Failure, Failure]
            await second.begun()
            assert await second.whole()
            assert "third" not in rig.model.begun
            await rig.until(lambda: rig.pool.idle == 4)
            rig.model.gates["deaf"].set()

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if record.name == "forebay.workers"] == [
        f"a coroutine did not stop {SOON_S:g} s after it was cancelled; abandoning it"
    ]


def test_a_slow_step_of_others_does_not_make_a_hanging_one_of_who_left():
    """Clients leave one after the other while somebody waits for a part that takes long."""

    async def main():
        async with Rig(seats=8) as rig:
            patient = await rig.ask("patient").begun()
            for number in range(5):
                other = await rig.ask(f"other {number}").begun()
                other.leave()
                await other.ended()
                await asyncio.sleep(SOON_S)
            await looked()
            assert await patient.whole()

    asyncio.run(main())
