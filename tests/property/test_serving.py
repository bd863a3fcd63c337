# SPDX-License-Identifier: Apache-2.0
"""A started serving's sans-I/O part, driven by hand: whatever arrives, leaves, crashes and stops in whatever order."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay import Serving
from forebay.arrays.array_batch import Batch
from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull, ServingCrashed, ServingStopped
from forebay.serving.nx_serving.dispatch import Dispatch, Submission
from forebay.serving.nx_serving.execution import Executed

NEVER = float("inf")
WAIT_S = 3.0
KEYS = ["a", "b", "c"]


class ServingMachine(RuleBasedStateMachine):
    """The oracle is what each caller would get alone: its own rows, doubled, in order."""

    @initialize(
        limit=st.integers(1, 5),
        partitions=st.integers(1, 3),
        capacity=st.integers(5, 40),
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
    @rule(
        size=st.integers(1, 12),
        key=st.sampled_from(KEYS),
        lives=st.sampled_from([NEVER, NEVER, NEVER, 2.0]),
        patient=st.booleans(),
    )
    def offer(self, size, key, lives, patient):
        if self.hooks:
            size = min(size, self.limit)
        ids = np.arange(self.number, self.number + size)
        self.number += size
        batch = Batch.concatenate([ids]).key(key)
        divisible = size != self.limit and not self.hooks
        call = Submission(batch, None, deadline=self.now + lives, divisible=divisible, streamed=self.streamed)
        waiting = self.dispatch.waiting
        try:
            self.dispatch.offer(call, self.now, patient=patient)
        except QueueFull:
            assert not patient
            assert waiting + (size if size <= self.capacity else self.limit) > self.capacity
            return
        assert waiting + size <= self.capacity or patient or size > self.capacity  # F36: it is fed in
        assert self.dispatch.waiting <= self.capacity
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
            self.dispatch.feed(self.now)  # as `take` does first: room that a caller left is somebody else's by then
            self.note_ready()
            ready = dict(self.ready)
            full = {key: self.waiting_of(key) >= self.limit for key in KEYS}
            work = self.dispatch.take(self.now)
            if work is None:
                break
            self.free -= 1
            self.running.append(work)
            self.check(work, ready, full)
        if self.free:
            late = [entry for entry in self.queued() if not entry.taken and entry.arrived + WAIT_S <= self.now]
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
        return sum(entry.size for entry in self.queued() if entry.key == key)

    def queued(self):
        """Return what is in the queue: calls, or the parts of those that are fed in."""
        for call in self.rows:
            if not call.done and not call.taken:
                yield from [call] if call.waiting is None else call.waiting

    def note_ready(self):
        """Write down since when each key has a batch that may leave."""
        self.ready.clear()
        for key in KEYS:
            heads = [entry.arrived for entry in self.queued() if entry.key == key]
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
        for _ in range(1000):
            if not self.running and not self.dispatch.waiting:
                break
            if self.running:
                self.end(0, crashes=False, surplus=0)
            self.wait(WAIT_S)
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


# Answers


def reusing(buffer):
    def run(rows, out=buffer):
        return np.multiply(rows, 2, out=out[: len(rows)])

    return run


def in_a_dict(run):
    return lambda rows: {"a": run(rows), "b": (rows,)}


def writing(rows):
    rows *= 2
    return rows


def keeping():
    kept = []

    def run(rows):
        kept.append(rows)
        return {"out": rows * 2, "older": kept[0][:1] * 0 + kept[-1]}

    return run


def padded(rows):
    return np.concatenate([rows * 2, np.full(3, -1)])


FUNCTIONS = {
    "new": lambda: lambda rows: rows * 2,
    "echo": lambda: lambda rows: rows,
    "view": lambda: lambda rows: np.stack([rows, rows * 2], axis=1)[:, 1],
    "reusing": lambda: reusing(np.zeros(64, dtype=np.int64)),
    "in a dict": lambda: in_a_dict(reusing(np.zeros(64, dtype=np.int64))),
    "writing": lambda: writing,
    "writing and echoing": lambda: lambda rows: {"a": writing(rows), "b": rows},
    "keeping": keeping,
    "padded": lambda: padded,
    "texts": lambda: lambda rows: np.array(["x" * int(n % 7) for n in rows]),
    "promoting": lambda: lambda rows: rows if (rows % 3).all() else rows * 1.0,
}


def joined(events):
    outputs = [output for kind, output, *_ in events if kind == "batch"]
    if isinstance(outputs[0], dict):
        return {name: joined([("batch", output[name]) for output in outputs]) for name in outputs[0]}
    if isinstance(outputs[0], tuple):
        return [joined([("batch", output[0]) for output in outputs])]
    return [value for output in outputs for value in output.tolist()]


@settings(max_examples=25, deadline=None)
@given(
    function=st.sampled_from(sorted(FUNCTIONS)),
    limit=st.integers(1, 6),
    partitions=st.integers(1, 2),
    capacity=st.integers(6, 30),
    streaming=st.booleans(),
    callers=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=5),
)
def test_answers_are_those_of_each_call_alone_on_a_copy(function, limit, partitions, capacity, streaming, callers):
    """F32, F33, F36, F37: whatever a function does with its arrays, and whoever shares a batch with whom."""

    def build(options):
        run = FUNCTIONS[function]()
        return lambda batch: run(batch.realize())

    serving = Serving.new(build)
    number = itertools.count(1)
    given_rows = [
        [np.array([next(number) for _ in range(size)], dtype=np.int64) for size in sizes] for sizes in callers
    ]
    kept_rows = [[rows.copy() for rows in each] for each in given_rows]

    def alone(rows):
        outputs = [serving.run(Batch.concatenate([rows[start : start + 1].copy()])) for start in range(len(rows))]
        return joined([("batch", output) for output in outputs])

    def asking(each):
        answers = []
        for rows in each:
            while True:
                try:
                    answer = process.batched_run(Batch.concatenate([rows]))
                    answers.append(list(answer) if streaming else answer)
                    break
                except QueueFull:
                    time.sleep(0.001)
        return answers

    started = serving.streaming() if streaming else serving
    options = {"batch_size": limit, "partitions": partitions, "max_queue_rows": capacity}
    with started.start(batch_timeout_ms=1, **options) as process, ThreadPoolExecutor(len(callers)) as pool:
        found = list(pool.map(asking, given_rows))
    for each, rows_of_each in zip(found, kept_rows, strict=True):
        for answer, rows in zip(each, rows_of_each, strict=True):
            expected = alone(rows)
            assert (joined(answer) if streaming else joined([("batch", answer)])) == expected
    assert [[rows.tolist() for rows in each] for each in given_rows] == [
        [rows.tolist() for rows in each] for each in kept_rows
    ], "a caller's array was written to"
