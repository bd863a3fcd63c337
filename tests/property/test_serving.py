# SPDX-License-Identifier: Apache-2.0
"""A started serving's sans-I/O part, driven by hand: whatever arrives, leaves, crashes and stops in whatever order."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.arrays.batch import Batch
from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull, ServingCrashed, ServingStopped
from forebay.serving.servings.dispatch import Call, Dispatch
from forebay.serving.servings.execution import Executed

NEVER = float("inf")
WAIT_S = 3.0
KEYS = ["a", "b", "c"]


class ServingMachine(RuleBasedStateMachine):
    """The oracle is what each caller would get alone: its own rows, doubled, in order."""

    @initialize(
        limit=st.integers(1, 5),
        partitions=st.integers(1, 3),
        capacity=st.integers(4, 40),
        hooks=st.booleans(),
        streamed=st.booleans(),
    )
    def start(self, limit, partitions, capacity, hooks, streamed):
        self.limit = limit
        self.hooks = hooks
        self.streamed = streamed
        self.capacity = capacity
        self.free = partitions
        self.dispatch = Dispatch(BatchConfig(max_size=limit, max_wait_s=WAIT_S, capacity=capacity, idle="wait"))
        self.now = 1.0
        self.number = 0
        self.rows = {}
        self.running = []
        self.woken = []
        self.gone = set()
        self.crashed = set()
        self.executed = []
        self.ready = {}
        self.full_since = {}
        self.is_stopped = False

    @precondition(lambda self: not self.is_stopped)
    @rule(size=st.integers(1, 12), key=st.sampled_from(KEYS), lives=st.sampled_from([NEVER, NEVER, NEVER, 2.0]))
    def offer(self, size, key, lives):
        if self.hooks:
            size = min(size, self.limit)
        ids = np.arange(self.number, self.number + size)
        self.number += size
        batch = Batch.concatenate([ids]).key(key)
        divisible = size != self.limit and not self.hooks
        call = Call(batch, None, deadline=self.now + lives, divisible=divisible, streamed=self.streamed)
        waiting = self.dispatch.waiting
        try:
            self.dispatch.offer(call, self.now)
        except QueueFull:
            assert waiting + size > self.capacity
            return
        assert waiting + size <= self.capacity
        self.rows[call] = ids
        self.note_ready()
        self.settle()

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 1000))
    def leave(self, which):
        """A caller goes away: cancelled, or past its deadline."""
        self.withdraw(list(self.rows)[which % len(self.rows)])

    @rule(seconds=st.sampled_from([0.5, 1.0, WAIT_S]))
    def wait(self, seconds):
        self.now += seconds
        for call in [call for call in self.rows if call.deadline <= self.now and not call.done]:
            self.withdraw(call)
        self.note_ready()
        self.settle()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), crashes=st.sampled_from([False, False, False, True]), surplus=st.integers(0, 2))
    def end(self, which, crashes, surplus):
        work = self.running.pop(which % len(self.running))
        self.free += 1
        if crashes:
            calls = self.dispatch.fail(work, ServingCrashed("crash"))
            self.crashed.update(calls)
            self.note_ready()
        else:
            output = np.concatenate([work.batch().realize() * 2, np.full(surplus, -1)])
            calls = self.dispatch.finish(work, Executed(output, "metadata", len(output)))
        for call in calls:
            assert call not in self.gone
            assert call.done or self.streamed
            if call.done:
                self.woken.append(call)
        self.settle()

    @precondition(lambda self: not self.is_stopped)
    @rule(chance=st.integers(0, 9))
    def stop(self, chance):
        if chance:
            return  # rarely, so that long runs happen as well
        self.is_stopped = True
        calls = self.dispatch.close(ServingStopped("stopped"), running=False)
        self.woken += calls
        assert self.dispatch.waiting == 0
        assert all(type(call.error) is ServingStopped for call in calls)

    def withdraw(self, call):
        was_open = not call.done
        assert self.dispatch.cancel(call) == was_open
        if was_open:
            self.gone.add(call)
            self.note_ready()

    def settle(self):
        """Give free partitions all they may take, as the threads do."""
        while self.free:
            ready = dict(self.ready)
            full = {key: self.waiting_of(key) >= self.limit for key in KEYS}
            work = self.dispatch.take(self.now)
            if work is None:
                break
            self.free -= 1
            self.running.append(work)
            self.check(work, ready, full)
        if self.free:
            late = [
                call for call in self.rows if not call.done and not call.taken and call.arrived + WAIT_S <= self.now
            ]
            assert late == [], "a row waits longer than the timeout although a partition is free"
            assert not self.dispatch.is_pressing()

    def check(self, work, ready, full):
        assert work.rows == sum(entry.size for entry in work.entries) <= self.limit
        assert {entry.key for entry in work.entries} == {work.key}
        assert not {entry.call for entry in work.entries} & self.gone, "a row runs although its caller has gone"
        batch = work.batch()
        assert batch.size == work.rows
        assert batch.batch_key == work.key
        self.executed += batch.realize().tolist()
        if not full[work.key]:
            assert min(entry.arrived for entry in work.entries) + WAIT_S <= self.now, "a small batch left too early"
        # Keys that were ready before are served before.
        assert all(ready[work.key] <= since for key, since in ready.items() if key != work.key)
        self.full_since.pop(work.key, None)
        self.note_ready()

    def waiting_of(self, key):
        return sum(call.size for call in self.rows if call.key == key and not call.done and not call.taken)

    def note_ready(self):
        """Write down since when each key has a batch that may leave."""
        self.ready.clear()
        for key in KEYS:
            heads = [call.arrived for call in self.rows if call.key == key and not call.done and not call.taken]
            if self.waiting_of(key) >= self.limit:
                self.full_since.setdefault(key, self.now)
            else:
                self.full_since.pop(key, None)
            since = min(self.full_since.get(key, NEVER), min(heads, default=NEVER) + WAIT_S)
            if since <= self.now:
                self.ready[key] = since

    @invariant()
    def nothing_runs_twice(self):
        if hasattr(self, "dispatch"):
            assert len(self.executed) == len(set(self.executed))
            assert self.dispatch.open == sum(not call.done for call in self.rows)
            assert len(self.woken) == len(set(map(id, self.woken))), "a caller was woken twice"

    def teardown(self):
        if not hasattr(self, "dispatch"):
            return
        while self.running:
            self.end(0, crashes=False, surplus=1)
            self.wait(WAIT_S)
        self.wait(WAIT_S)
        while self.running:
            self.end(0, crashes=False, surplus=0)
        for call, ids in self.rows.items():
            assert call.done
            assert (call in self.gone) != (call in self.woken), "every caller has gone or was told once"
            if call in self.gone:
                continue
            if call.error is None:
                output, metadata = call.result()
                assert output.tolist() == (ids * 2).tolist()
                assert metadata == "metadata"
            else:
                assert (call in self.crashed) == (type(call.error) is ServingCrashed)
        assert self.dispatch.open == self.dispatch.waiting == 0
        assert self.dispatch.close(ServingStopped("stopped"), running=True) == []
        assert self.dispatch.next_due() is None


ServingMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestServing = ServingMachine.TestCase
