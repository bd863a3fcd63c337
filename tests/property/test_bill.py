# SPDX-License-Identifier: Apache-2.0
"""What the answers of a model cost adds up to what its workers were busy, whatever becomes of them."""

from __future__ import annotations

import functools
import random

import pytest
from tests.checked_queue import CheckedQueue

from forebay.batching.bill import divide
from forebay.batching.queue import BatchConfig
from forebay.errors import Unavailable
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.types.call import ALONE, Failure, Request, Slice
from forebay.types.tenant import Tenant
from forebay.workers.pools.seating import Seating
from forebay.workers.pools.slot_pool import apart

BATCHES = 1500
"""Batches of one test; 100,000 of each were run once."""


def nothing(*_):
    pass


def billed(seats, clock):
    accounts = Accounts()
    accounts.are_kept = True
    return Seating(seats, nothing, nothing, clock, accounts)


class World:
    """A queue that tenants share and workers that are stepped by hand, some of which die."""

    def __init__(self, seed, tenants=4):
        self.now = 1.0
        self.luck = random.Random(seed)
        self.queue = CheckedQueue(BatchConfig(max_size=8, idle="go", capacity=200))
        self.queue.check = nothing
        self.fair = self.queue.share()
        self.tenants = [Tenant(str(number), 1, 2.0**number) for number in range(tenants)]
        self.cost = [1.0, 8.0, 2.0, 1.0]
        self.busy_s = self.paid_s = 0.0
        self.tenants_paid = dict.fromkeys(self.tenants, 0.0)
        self.batches = 0

    def fill(self):
        luck = self.luck
        while self.queue.waiting < 40:
            tenant = luck.choice(self.tenants)
            key = ALONE if luck.random() < 0.05 else None
            whole = Request(body=0, reply=print, size=luck.randint(1, 6), key=key, tenant=tenant)
            entries = [whole]
            if luck.random() < 0.2:  # as one is cut that is larger than a batch
                whole.size = 11
                entries = [Slice(whole, [0] * size, nothing, size=size, tenant=tenant) for size in (8, 3)]
            if luck.random() < 0.1:
                entries[0].deadline = self.now + 0.001
            for entry in entries:
                self.queue.offer(entry, self.now)
            if luck.random() < 0.1:
                self.queue.cancel(entries[0])

    def take(self):
        self.fill()
        batch = self.queue.take(self.now)
        assert batch is not None
        return batch

    def ran(self, batch):
        """Divide what a batch has cost."""
        self.batches += 1
        self.pay(batch)
        self.queue.answered(batch, self.now)

    def stepped(self, batch):
        """Divide what a round has cost."""
        self.pay(batch)
        self.fair.stepped(batch)
        batch.billed_s = batch.worker_s

    def pay(self, batch):
        parts = divide(batch, self.fair)
        assert min(parts) >= 0.0
        assert sum(parts) == pytest.approx(batch.worker_s - batch.billed_s, abs=1e-9)
        self.paid_s += sum(parts)
        for entry, part in zip(batch.entries, parts, strict=True):
            self.tenants_paid[entry.tenant] += part

    def seconds(self, batch):
        return 0.002 + 0.001 * sum(entry.size * self.cost[self.tenants.index(entry.tenant)] for entry in batch.entries)


def run(world, batch, done, retries=1):
    """Run a batch in a worker that may die on the way, and then as a pool does that isolates what ends workers."""
    seats = billed(0, lambda: world.now)
    sitting = seats.join(batch, done)
    seconds = world.seconds(batch)
    if world.luck.random() < 0.2:
        seconds *= world.luck.random()
        world.now += seconds
        world.busy_s += seconds
        seats.clear()
        world.now += world.luck.choice([0.0, 0.01])  # until another worker has it
        if not retries:
            done(batch, [Failure(Unavailable("it died"))] * len(batch.entries))
        elif len(batch.entries) > 1 and world.luck.random() < 0.5:
            for single, single_done in apart(batch, done):
                run(world, single, single_done, 0)
        else:
            run(world, batch, done, 0)
        return
    if world.luck.random() < 0.1:
        batch.entries[0].done = True  # its client has gone; it pays all the same
    world.now += seconds
    world.busy_s += seconds
    seats.end(sitting.name, seconds)
    sitting.done(batch, [None] * len(batch.entries))


@pytest.mark.parametrize("seed", range(2))
def test_the_parts_of_all_batches_add_up_to_what_the_workers_were_busy(seed):
    world = World(seed)
    while world.batches < BATCHES:
        batch = world.take()
        run(world, batch, lambda batch, outcomes: world.ran(batch))
        world.now += world.luck.choice([0.0, 0.004])
    assert world.paid_s == pytest.approx(world.busy_s, abs=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_streams_divide_the_rounds_of_their_worker_and_a_paused_one_pays_nothing(seed):
    world = World(seed)
    luck = world.luck
    seats = billed(24, lambda: world.now)
    held = {}  # of each batch that sits, what its clients are to take yet

    def join():
        while seats.free >= 8 and luck.random() < 0.7:
            batch = world.take()
            held[batch] = []
            batch.on_steps = functools.partial(step, batch)
            seats.join(batch, lambda batch, outcomes: world.ran(batch))

    def step(batch, steps, release):
        held[batch].append(release)
        world.stepped(batch)

    def take():
        for one in seats.open.values():
            if luck.random() < 0.5:
                releases = held[one.batch]
                while releases:
                    releases.pop()()

    def hear():
        able = [one for one in seats.open.values() if one.room > 0]
        stepped = luck.sample(able, luck.randint(1, len(able))) if able else []
        count = luck.choice([1, 1, 3])
        parts = [(one.name, [b"x"] * len(one.batch.entries)) for one in stepped for _ in range(min(count, one.room))]
        ended = [(one.name, [None] * len(one.batch.entries), 9.0) for one in stepped if luck.random() < 0.1]
        before = [(one, one.batch.busy_s) for one in seats.open.values() if one not in stepped]
        seats.hear(parts, ended, nothing, nothing)
        assert all(one.batch.busy_s == busy_s for one, busy_s in before)

    def die():
        if luck.random() < 0.02:
            for sitting in seats.clear():
                world.ran(sitting.batch)

    while world.batches < BATCHES:
        gap = luck.choice([0.0, 0.001, 0.02])
        world.now += gap
        world.busy_s += gap * any(one.room > 0 for one in seats.open.values())
        luck.choice([join, take, hear, hear, hear, die])()
    for sitting in seats.clear():
        world.ran(sitting.batch)
    assert world.paid_s == pytest.approx(world.busy_s, abs=1e-6)


def billed_beside_truth(world, batches, pause=0.0):
    """Run so many batches, and return what each tenant was billed beside what its rows have cost."""
    world.tenants_paid = dict.fromkeys(world.tenants, 0.0)
    truth = dict.fromkeys(world.tenants, 0.0)
    for _ in range(batches):
        batch = world.take()
        seconds = world.seconds(batch)
        if world.luck.random() < pause:
            seconds *= 5.0
        batch.model_s = seconds * world.luck.gauss(1.0, 0.03)
        for entry in batch.entries:
            cost = world.cost[world.tenants.index(entry.tenant)]
            part = entry.size * (0.002 / batch.rows + 0.001 * cost) / world.seconds(batch)
            truth[entry.tenant] += batch.model_s * part
        world.now += batch.model_s
        world.ran(batch)
    return [world.tenants_paid[tenant] / truth[tenant] for tenant in world.tenants]


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_cost_more_are_billed_for_it_from_the_first_batches_on(seed):
    world = World(seed, tenants=3)
    world.cost = [8.0, 1.0, 8.0]
    assert billed_beside_truth(world, 60) == pytest.approx([1.0] * 3, rel=0.08)
    assert billed_beside_truth(world, 200, pause=0.03) == pytest.approx([1.0] * 3, rel=0.03)


def test_what_rows_cost_is_learned_anew_when_it_changes():
    world = World(1, tenants=2)
    world.cost = [1.0, 8.0]
    billed_beside_truth(world, 300)
    world.cost = [8.0, 1.0]
    billed_beside_truth(world, 100)
    assert billed_beside_truth(world, 200) == pytest.approx([1.0] * 2, rel=0.03)
