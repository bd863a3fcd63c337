# SPDX-License-Identifier: Apache-2.0
"""Whatever workers of the batching protocol do: every batch is answered once, and nobody gets another's answer."""

import asyncio
import time
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule

from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.workers.pools.attached_pool import AttachedPool
from forebay.workers.pools.job_slot import JobRefused, JobSlot
from forebay.workers.wire import job_frames
from forebay.workers.wire.job_frames import READY, JobFrameReader, decode_jobs, encode_answer


class Line(asyncio.Transport):
    """A connection that keeps what is written and closes when it is told to."""

    def __init__(self, unwanted):
        super().__init__()
        self.closing = False
        self.unwanted = unwanted
        self.reader = JobFrameReader()
        self.sent = []

    def write(self, data):
        assert not self.closing
        for payload in self.reader.feed(data):
            jobs = decode_jobs(payload)
            assert jobs
            assert self.unwanted.isdisjoint(jobs.values()), "a job nobody waits for was sent"
            self.sent.append(jobs)

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    abort = close


class Untimed(AttachedPool):
    def _be_quiet(self):
        """There is no loop here, and nobody reads the log."""


class Worker:
    def __init__(self, pool, unwanted):
        self.line = Line(unwanted)
        self.slot = JobSlot(pool, 10_000)
        self.slot.connection_made(self.line)
        self.held = {}

    def say(self, data):
        if not self.line.closing:
            self.slot.data_received(data)

    def jobs(self):
        """The jobs it was sent and has not answered."""
        if self.line.sent:
            self.held = self.line.sent.pop()
        return self.held

    def leave(self):
        self.line.closing = True
        self.slot.connection_lost(None)


class Storm(RuleBasedStateMachine):
    """Workers join, answer well or badly, and leave; clients send and give up."""

    workers = Bundle("workers")

    def __init__(self):
        super().__init__()
        self.pool = Untimed("batching", grace_s=None)
        self.count = 0
        self.unwanted = set()
        self.answered = {}
        self.open = []
        self.all_workers = []

    def done(self, batch, outcomes):
        assert batch not in self.open or self.open.remove(batch) is None
        assert id(batch) not in self.answered, "a batch was answered twice"
        self.answered[id(batch)] = batch
        assert len(outcomes) == len(batch.entries)
        for entry, outcome in zip(batch.entries, outcomes, strict=True):
            if type(outcome) is bytes:
                assert outcome == b"did " + entry.body
            else:
                assert type(outcome) is Failure
                if type(outcome.error) is JobRefused:
                    assert outcome.error.body == b"no " + entry.body

    @rule(target=workers, asks=st.booleans())
    def join(self, asks):
        worker = Worker(self.pool, self.unwanted)
        self.all_workers.append(worker)
        if asks:
            worker.say(READY)
        return worker

    @precondition(lambda self: self.pool.idle)
    @rule(size=st.integers(1, 4), late=st.sets(st.integers(0, 3)))
    def send(self, size, late):
        entries = []
        for index in range(size):
            self.count += 1
            deadline = 0.0 if index in late else time.monotonic() + 1000
            if index in late:
                self.unwanted.add(b"%d" % self.count)
            entries.append(Request(b"%d" % self.count, lambda *_: None, deadline=deadline))
        batch = EntryBatch(entries, None, size)
        self.open.append(batch)
        self.pool.submit(batch, self.done)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data):
        entry = data.draw(st.sampled_from(self.open)).entries[0]
        entry.done = True
        self.unwanted.add(entry.body)

    @rule(worker=workers, refused=st.booleans())
    def answer(self, worker, refused):
        jobs = worker.jobs()
        word = b"no " if refused else b"did "
        worker.held = {}
        worker.say(encode_answer({job: word + body for job, body in jobs.items()}, list(jobs) if refused else ()))

    @rule(worker=workers)
    def answer_the_first_only(self, worker):
        jobs = list(worker.jobs().items())[:1]
        worker.held = {}
        worker.say(encode_answer({job: b"did " + body for job, body in jobs}))

    @rule(worker=workers, other=workers)
    def answer_what_another_holds(self, worker, other):
        worker.say(encode_answer(dict.fromkeys(other.jobs(), b"forged") if other is not worker else {}))
        worker.held = {}

    @rule(worker=workers, data=st.binary(min_size=1, max_size=12))
    def talk_nonsense(self, worker, data):
        worker.say(data)

    @rule(worker=workers)
    def ask_again(self, worker):
        worker.say(READY)

    @rule(worker=consumes(workers))
    def leave(self, worker):
        worker.leave()

    def teardown(self):
        asyncio.run(self.pool.stop(0.0))
        for worker in self.all_workers:
            worker.leave()
        assert self.open == [], "a batch was never answered"


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_error_words_are_shown_to_clients_of_other_faces():
    error = JobRefused(msgspec.json.encode([{"msg": "bad"}]))
    assert error.detail == '[{"msg":"bad"}]'
    assert JobRefused(b"\xff" * 5000).detail == "\N{REPLACEMENT CHARACTER}" * 1000


def is_refusal(outcome: Any):
    return type(outcome) is Failure and type(outcome.error) is JobRefused


def test_jobs_that_are_too_long_for_one_frame_take_several(monkeypatch):
    monkeypatch.setattr(job_frames, "_LONGEST", 500)
    pool, found = Untimed("batching", grace_s=None), []
    worker = Worker(pool, set())
    worker.say(READY)
    for again in range(2):
        bodies = [b"%d" % number * 100 for number in range(5)]
        entries = [Request(body, lambda *_: None, deadline=time.monotonic() + 1000) for body in bodies]
        pool.submit(EntryBatch(entries, None, 5), lambda _, outcomes: found.append(outcomes))
        sizes = []
        while len(found) == again:
            (jobs,) = worker.line.sent
            worker.line.sent.clear()
            sizes.append(len(jobs))
            results = {job: body[:2] for job, body in jobs.items()}
            refused = [job for job, body in jobs.items() if body in bodies[1::2]]
            worker.say(encode_answer(results, refused))
        assert sizes == [2, 2, 1]
        told = [(one.error.body, True) if is_refusal(one) else (one, False) for one in found[-1]]
        assert told == [(body[:2], number % 2 == 1) for number, body in enumerate(bodies)]
    too_long = Request(b"x" * 600, lambda *_: None, deadline=time.monotonic() + 1000)
    pool.submit(EntryBatch([too_long], None, 1), lambda _, outcomes: found.append(outcomes))
    assert "a frame takes 500" in found[-1][0].error.message
