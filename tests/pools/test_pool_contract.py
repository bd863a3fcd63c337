# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
"""What every pool promises to the batcher, held against all of them; processes are real ones."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests import waiting
from tests.pools.guests import AttachedByThreads
from tests.processes import freeze
from tests.waiting import PATIENCE_S
from tests.waiting import reached as eventually

from forebay.errors import BadOutcome, Code, ConfigError, ModelError, RunnerFailed, Unavailable, ValidationError
from forebay.observe.logs import model_log
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.workers.pool import CREDIT, Pool
from forebay.workers.pools import process_pool
from forebay.workers.pools.health_checks import HealthChecks
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.seating import PORTION
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.processes.supervisor import MAX_FAILURES
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire import frames

HERE = "tests.pools.runners"
ROOT = str(Path(__file__).parents[2])
ALL = ["inline", "async", "threads", "processes", "attached"]


def pool_of(kind, runner="Told", workers=1, threads=1, seats=0, **kwargs):
    if kind == "async" and runner == "Told":
        runner = "ToldAsync"
    spec = RunnerSpec(f"{HERE}:{runner}", kwargs)
    if kind == "threads":
        return ThreadPool(spec, workers=workers, threads=threads, seats=seats)
    if kind == "processes":
        return ProcessPool(spec, workers=workers, threads=threads, seats=seats, path=[ROOT])
    if kind == "attached":
        return AttachedByThreads(spec, workers=workers, threads=threads, seats=seats)
    return InlinePool(spec, slots=workers * threads, seats=seats)


def run(coroutine):
    """Runs a test; what a failed one leaves behind is collected here and not while pytest writes about it."""
    failed = None
    try:
        asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE_S))
    except BaseException as error:
        failed = "".join(traceback.format_exception(error))
    if failed is not None:
        gc.collect()
        pytest.fail(failed, pytrace=False)


class Rig:
    """A started pool that counts its answers."""

    def __init__(self, pool, grace_s=PATIENCE_S):
        self.pool = pool
        self.grace_s = grace_s
        self.answers = {}
        self.thread = threading.get_ident()

    async def __aenter__(self):
        await asyncio.wait_for(self.pool.start(), PATIENCE_S)
        return self

    async def __aexit__(self, *_):
        await self.pool.stop(self.grace_s)
        await asyncio.sleep(0)
        self.check()

    def check(self):
        """G2: `done` exactly once per batch. And nothing is left in memory that is shared."""
        assert [len(found) for found in self.answers.values()] == [1] * len(self.answers)
        assert self.pool.idle == 0
        entrance = getattr(self.pool, "_entrance", None)
        assert entrance is None or not Path(entrance.path).exists()

    def submit(self, *bodies, on_parts=None, **fields):
        entries = [Request(body=body, reply=lambda *_: None, **fields) for body in bodies]
        on_steps = None if on_parts is None else functools.partial(one_by_one, on_parts)
        batch = EntryBatch(entries=entries, key=None, rows=sum(entry.size for entry in entries), on_steps=on_steps)
        self.answers[batch] = []

        def done(batch, outcomes):
            assert threading.get_ident() == self.thread
            self.answers[batch].append(outcomes)

        self.pool.submit(batch, done)
        return batch

    async def outcomes(self, batch):
        await eventually(lambda: self.answers[batch])
        return self.answers[batch][0]

    async def run(self, *bodies, **fields):
        await eventually(lambda: self.pool.idle)
        return await self.outcomes(self.submit(*bodies, **fields))


def codes(outcomes):
    return [one.error.code if type(one) is Failure else one for one in outcomes]


def errors(outcomes):
    return [type(one.error) for one in outcomes]


def one_by_one(on_parts, steps, release):
    """Hands out steps; there is room for as many more once each of them was released."""
    held = len(steps)

    def let_go():
        nonlocal held
        held -= 1
        if held == 0:
            release()

    for step in steps:
        on_parts(step, let_go)


each = pytest.mark.parametrize("kind", ALL)
streaming = pytest.mark.parametrize("kind, seats", [*((kind, 2) for kind in ALL), ("processes", 0), ("attached", 0)])
"""What streams are made in: seats, or processes that run one batch at a time."""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_worker_that_has_something_to_say_ends_the_rest_of_the_loop(kind):  # F69
    async def story():
        async with Rig(pool_of(kind)) as rig:
            began = time.monotonic()
            batch = rig.submit(b"a")
            while not rig.answers[batch]:
                rig.pool.rest(10 * PATIENCE_S)
                await asyncio.sleep(0.001)
            assert time.monotonic() - began < PATIENCE_S
            rig.pool.rest(0.001)  # with nobody to wait for, it only ends

    run(story())


def test_a_batch_that_its_worker_never_read_was_not_tried_there_whoever_hears_first_of_the_end():
    async def main():
        pool = ProcessPool(RunnerSpec("tests.pools.runners:Told"), path=[ROOT])
        async with Rig(pool) as rig:
            supervisor = pool._workers[0].supervisor
            freeze(supervisor.pid)
            batch = rig.submit("x")
            await asyncio.sleep(0)
            assert batch.attempts == 1
            os.kill(supervisor.pid, signal.SIGKILL)
            # Who watches the process is first, for the loop stands meanwhile.
            waiting.eventually(lambda: not supervisor.is_ready)
            time.sleep(0.05)  # noqa: ASYNC251 - so that both ends are there when it goes on
            assert await rig.outcomes(batch) == ["x"]
            assert batch.attempts == 1

    run(main())


# For a shell and for Python: a first line names no interpreter in a folder with a space.  # F110
DIES = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''
import os, sys
from pathlib import Path
from forebay.workers.processes import child
from forebay.workers.wire import worker_connection

def say_hello_and_die(self, message):
    send(self, message)
    os._exit(1)

was_there = Path(__file__).with_suffix(".was")
if not was_there.exists():
    was_there.touch()
    send, worker_connection.WorkerConnection.send = worker_connection.WorkerConnection.send, say_hello_and_die
sys.exit(child.main(sys.argv[4:]))
"""
"""An interpreter whose first process is gone before its hello is answered."""


def test_a_hello_that_is_heard_late_is_not_taken_for_that_of_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setattr(process_pool, "LIVED_S", 0.0)
    python = tmp_path / "python"
    python.write_text(DIES)
    python.chmod(0o755)

    async def main():
        pool = ProcessPool(RunnerSpec("tests.pools.runners:Told"), path=[ROOT], python=str(python))
        starting = asyncio.ensure_future(pool.start())
        supervisor = await waiting.reached(lambda: pool._workers[0].supervisor)
        first = await waiting.reached(lambda: supervisor.pid)
        waiting.eventually(lambda: supervisor.pid != first)  # the loop stands meanwhile
        await starting
        assert pool.restarts == 1
        await pool.stop(PATIENCE_S)

    run(main())


def test_what_the_loop_does_with_an_answer_is_not_said_by_the_thread_that_gave_it(monkeypatch):
    monkeypatch.setattr(model_log, "level", logging.INFO)

    async def main():
        said = []
        async with Rig(pool_of("threads")) as rig:
            batch = EntryBatch(entries=[Request(body="x", reply=print)], key=None, rows=1)
            rig.pool.submit(batch, lambda *_: said.append(model_log.origin.get()))
            await eventually(lambda: said)
        assert said == [None]

    run(main())


# Outcomes


@each
def test_a_pool_has_no_more_to_say_of_a_batch_that_just_runs(kind):
    async def main():
        async with Rig(pool_of(kind)) as rig:
            assert isinstance(rig.pool, Pool)
            batch = rig.submit("a")
            assert (rig.pool.room, rig.pool.standing, rig.pool.whereabouts(batch.entries[0])) == (None, 0, "")
            assert await rig.outcomes(batch) == ["a"]

    run(main())


@each
def test_outcomes_are_matched_by_position(kind):
    """G4."""

    async def main():
        async with Rig(pool_of(kind)) as rig:
            assert await rig.run("a", b"b", 3, None) == ["a", b"b", 3, None]
            assert await rig.run(*range(100)) == list(range(100))

    run(main())


@each
def test_a_runner_sees_sizes_and_params(kind):
    async def main():
        async with Rig(pool_of(kind)) as rig:
            shared = {"name": "x"}
            assert await rig.run(["sizes"], ["sizes"], params=shared) == [[1, "x"], [1, "x"]]
            entries = [Request(body=["sizes"], reply=print, size=size, params={"name": size}) for size in (2, 1)]
            batch = EntryBatch(entries=entries, key=None, rows=3)
            rig.answers[batch] = []
            rig.pool.submit(batch, lambda batch, outcomes: rig.answers[batch].append(outcomes))
            assert await rig.outcomes(batch) == [[2, 2], [1, 1]]

    run(main())


@each
@pytest.mark.parametrize("returned", [["count", 1], ["count", 3], ["count", 0], ["none"]])
def test_a_wrong_number_of_outcomes_fails_the_batch_loudly(kind, returned):
    """G4: Nucleus hangs."""

    async def main():
        async with Rig(pool_of(kind)) as rig:
            assert errors(await rig.run(returned, "x")) == [BadOutcome] * 2
            assert await rig.run("next") == ["next"]

    run(main())


@each
def test_what_a_runner_raises_fails_its_batch_only(kind):
    """G8."""

    async def main():
        async with Rig(pool_of(kind)) as rig:
            outcomes = await rig.run(["raise", "boom"], "x")
            assert errors(outcomes) == [RunnerFailed] * 2
            assert outcomes[0].error.message == "ValueError: boom"
            assert "do_raise" in outcomes[0].error.trace
            (refused,) = await rig.run(["refuse"])
            assert type(refused.error) is ValidationError
            assert (refused.error.message, refused.error.detail) == ("not so", {"path": "$.x"})
            assert await rig.run("next") == ["next"]

    run(main())


@each
def test_a_failure_is_of_its_item_only(kind):
    async def main():
        async with Rig(pool_of(kind)) as rig:
            outcomes = await rig.run(["fail"], 1, 2, 3)
            assert codes(outcomes) == ["fine", Code.INVALID_ARGUMENT, "fine", Code.INTERNAL]
            assert outcomes[1].error.detail == {"path": "$"}

    run(main())


@pytest.mark.parametrize(
    "kind",
    [
        "inline",
        "async",
        "threads",
        "processes",
        "attached",
    ],
)
def test_a_user_who_exits_does_not_take_the_worker_along(kind):
    """G8."""

    async def main():
        async with Rig(pool_of(kind)) as rig:
            assert errors(await rig.run(["exit"], "x")) == [RunnerFailed] * 2
            assert await rig.run("next") == ["next"]
            assert rig.pool.statistics().restarts == 0

    run(main())


@pytest.mark.parametrize("what", ["odd", "odd_detail"])
def test_a_result_that_cannot_be_sent_fails_the_batch_and_not_the_worker(what):
    """G8: `detail` is the user's: raising ValidationError(..., detail=object()) must not kill workers."""

    async def main():
        async with Rig(pool_of("processes")) as rig:
            outcomes = await rig.run([what], "x")
            assert type(outcomes[0].error) in {BadOutcome, ValidationError}
            assert rig.pool.statistics().restarts == 0

    run(main())


def test_a_body_that_cannot_be_sent_fails_its_batch_and_keeps_the_slot():
    """G8."""

    async def main():
        async with Rig(pool_of("processes"), grace_s=0.0) as rig:
            assert codes(await rig.run(object())) == [Code.INTERNAL]
            assert rig.pool.idle == 1

    run(main())


@each
def test_the_time_in_the_model_is_measured(kind):
    async def main():
        async with Rig(pool_of(kind)) as rig:
            batch = rig.submit("x")
            await rig.outcomes(batch)
            assert 0.0 < batch.model_s < PATIENCE_S

    run(main())


# Slots


@each
def test_idle_counts_the_free_slots(kind, tmp_path):
    async def main():
        async with Rig(pool_of(kind, workers=2)) as rig:
            await eventually(lambda: rig.pool.idle == 2)
            statistics = rig.pool.statistics()
            assert (statistics.slots, statistics.idle, statistics.restarts) == (2, 2, 0)
            if kind != "inline":
                go = tmp_path / "go"
                batch = rig.submit(["until", str(tmp_path / "started"), str(go)])
                assert rig.pool.idle == 1
                go.touch()
                await rig.outcomes(batch)
            await eventually(lambda: rig.pool.idle == 2)

    run(main())


@pytest.mark.parametrize("kind", ["threads", "processes", "attached"])
def test_threads_of_a_worker_share_one_runner_and_run_side_by_side(kind, tmp_path):
    async def main():
        log = tmp_path / "log"
        async with Rig(pool_of(kind, threads=3, log=str(log))) as rig:
            await eventually(lambda: rig.pool.idle == 3)
            batches = [rig.submit(["meet"]) for _ in range(3)]
            assert sorted([(await rig.outcomes(batch))[0] for batch in batches]) == [0, 1, 2]
            assert await rig.run(["context"]) == [[0, 3]]
        assert log.read_text() == "open close "

    run(main())


@pytest.mark.parametrize("kind", ["threads", "processes", "attached"])
def test_workers_know_their_number(kind):
    async def main():
        async with Rig(pool_of(kind, workers=2)) as rig:
            found = set()
            while len(found) < 2:
                found.add(tuple((await rig.run(["context"]))[0]))
            assert found == {(0, 1), (1, 1)}

    run(main())


def test_the_loop_is_free_while_a_thread_works():
    async def main():
        async with Rig(pool_of("threads")) as rig:
            assert await rig.run(["thread"]) != [threading.get_ident()]

    run(main())


# Work after the answer


def test_work_after_the_answer_follows_it_on_the_loop(tmp_path):
    async def main():
        done, go = tmp_path / "done", tmp_path / "go"
        go.touch()
        async with Rig(pool_of("inline")) as rig:
            batch = EntryBatch(entries=[Request(body=["after", str(done), str(go)], reply=print)], key=None, rows=1)
            rig.answers[batch] = []
            rig.pool.submit(batch, lambda batch, outcomes: rig.answers[batch].append((list(outcomes), done.exists())))
            assert await rig.outcomes(batch) == (["after"], False)
            await eventually(lambda: rig.pool.idle)
            assert done.read_text() == "."

    run(main())


@pytest.mark.parametrize("kind", ["threads", "processes", "attached"])
def test_work_after_the_answer_holds_the_slot(kind, tmp_path):
    async def main():
        done, go = tmp_path / "done", tmp_path / "go"
        async with Rig(pool_of(kind)) as rig:
            woken = []
            rig.pool.watch(lambda: woken.append(done.exists()))
            batch = rig.submit(["after", str(done), str(go)], ["after"])
            assert await rig.outcomes(batch) == ["after", "after"]
            assert not done.exists()
            assert (rig.pool.idle, woken) == (0, [])
            go.touch()
            await eventually(lambda: rig.pool.idle)
            assert done.read_text() == ".."
            assert woken == [True]
            assert await rig.run("next") == ["next"]

    run(main())


@pytest.mark.parametrize("kind", ["inline", "threads", "processes", "attached"])
def test_work_after_the_answer_that_fails_is_only_logged(kind):
    """G8."""

    async def main():
        async with Rig(pool_of(kind)) as rig:
            assert await rig.run(["broken_after"], "x") == ["fine", "fine"]
            assert await rig.run("next") == ["next"]

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["inline", "threads", "processes", "attached"])
def test_work_after_the_answer_may_not_end_the_worker(kind):
    """G8."""

    async def main():
        async with Rig(pool_of(kind)) as rig:
            assert await rig.run(["after_exit"]) == ["fine"]
            await eventually(lambda: rig.pool.idle)
            assert await rig.run("next") == ["next"]
            assert rig.pool.statistics().restarts == 0

    run(main())


# Streamed answers


class Sink:
    """Takes parts and releases them when told."""

    def __init__(self, is_open=False):
        self.parts = []
        self.held = []
        self.is_open = is_open

    def __call__(self, parts, release):
        self.parts.append(list(parts))
        if self.is_open:
            release()
        else:
            self.held.append(release)

    def let_go(self):
        held, self.held = self.held, []
        for release in held:
            release()


@streaming
def test_parts_come_in_order_and_done_follows(kind, seats, tmp_path):
    async def main():
        async with Rig(pool_of(kind, seats=seats)) as rig:
            sink = Sink(is_open=True)
            assert await rig.run(["stream", 50, str(tmp_path / "steps")], "x", on_parts=sink) == [None, None]
            assert sink.parts == [[step * 10, step * 10 + 1] for step in range(50)]
            assert (tmp_path / "steps").read_text() == "." * 50 + "closed"
            assert await rig.run("next") == ["next"]

    run(main())


@streaming
def test_a_generator_is_not_stepped_beyond_its_credit(kind, seats, tmp_path):
    """Side walk 'streaming': a slow client's generator is simply not stepped."""

    async def main():
        steps = tmp_path / "steps"
        async with Rig(pool_of(kind, seats=seats)) as rig:
            sink = Sink()
            batch = rig.submit(["stream", 100, str(steps)], on_parts=sink)
            await eventually(lambda: len(sink.parts) == CREDIT)
            await asyncio.sleep(0.05)
            assert len(sink.parts) == CREDIT
            assert steps.read_text().count(".") <= CREDIT + 1
            sink.let_go()
            await eventually(lambda: len(sink.parts) >= CREDIT + PORTION)
            assert len(sink.parts) <= 2 * CREDIT
            assert rig.answers[batch] == []
            sink.is_open = True
            sink.let_go()
            await rig.outcomes(batch)
            assert len(sink.parts) == 100

    run(main())


@streaming
@pytest.mark.parametrize("ends, error", [("raise", RunnerFailed), ("short", BadOutcome)])
def test_a_stream_that_fails_in_the_middle_says_so(kind, seats, ends, error, tmp_path):
    async def main():
        async with Rig(pool_of(kind, seats=seats)) as rig:
            sink = Sink(is_open=True)
            assert errors(await rig.run(["stream", 3, str(tmp_path / "s"), ends], "x", on_parts=sink)) == [error] * 2
            assert len(sink.parts) == 3
            assert await rig.run("next") == ["next"]

    run(main())


@streaming
def test_a_stream_nobody_reads_ends(kind, seats, tmp_path):
    """Elsewhere: deadlines and cancellation reach generators (Triton, TorchServe, OpenLLM)."""

    async def main():
        steps = tmp_path / "steps"
        async with Rig(pool_of(kind, seats=seats), grace_s=1.0) as rig:
            sink = Sink(is_open=True)
            batch = rig.submit(["stream", 1_000_000, str(steps)], on_parts=sink)
            await eventually(lambda: len(sink.parts) > 20)
            call_off(batch)
            await rig.outcomes(batch)
            assert steps.read_text().endswith("closed")
            assert await rig.run("next") == ["next"]

    run(main())


@streaming
def test_a_stream_nobody_reads_ends_also_without_credit(kind, seats, tmp_path):
    """The client that has gone away releases nothing any more."""

    async def main():
        steps = tmp_path / "steps"
        sink = Sink()
        async with Rig(pool_of(kind, seats=seats), grace_s=0.1) as rig:
            batch = rig.submit(["stream", 1_000_000, str(steps)], on_parts=sink)
            await eventually(lambda: len(sink.parts) == CREDIT)
            await asyncio.sleep(0.02)
            call_off(batch)
            try:
                await eventually(lambda: rig.answers[batch])
            finally:
                sink.is_open = True
                sink.let_go()
            assert await rig.run("next") == ["next"]

    run(main())


def call_off(batch):
    """What the batcher does when nobody waits any more."""
    batch.cancelled = True
    if batch.on_cancel is not None:
        batch.on_cancel()


def test_parts_released_late_are_no_credit_for_the_next_stream(tmp_path):
    async def main():
        async with Rig(pool_of("processes")) as rig:
            slow, sink = Sink(), Sink()
            await rig.run(["stream", CREDIT, str(tmp_path / "first")], on_parts=slow)
            batch = rig.submit(["stream", 100, str(tmp_path / "second")], on_parts=sink)
            slow.let_go()
            await eventually(lambda: len(sink.parts) >= CREDIT)
            await asyncio.sleep(0.05)
            found = len(sink.parts)
            sink.is_open = True
            sink.let_go()
            await rig.outcomes(batch)
            assert found == CREDIT

    run(main())


@pytest.mark.parametrize("kind", ["async", "threads", "processes", "attached"])
def test_a_long_predict_sees_that_it_is_cancelled(kind, tmp_path):
    """Elsewhere: no way to stop work nobody waits for."""

    async def main():
        started = tmp_path / "started"
        async with Rig(pool_of(kind)) as rig:
            batch = rig.submit(["until_cancelled", str(started)])
            await eventually(started.exists)
            await asyncio.sleep(0.02)
            assert started.read_text() == "."
            call_off(batch)
            assert await rig.outcomes(batch) == ["told"]
            again = rig.submit(["until_cancelled", str(tmp_path / "again")])  # the next batch is not
            await eventually((tmp_path / "again").exists)
            await asyncio.sleep(0.02)
            assert rig.answers[again] == []
            call_off(again)
            await rig.outcomes(again)

    run(main())


@pytest.mark.parametrize("kind", ["async", "threads", "processes", "attached"])
def test_a_coroutine_that_was_ended_with_its_batch_has_not_failed(kind, tmp_path):
    async def main():
        started = tmp_path / "started"
        async with Rig(pool_of(kind)) as rig:
            batch = rig.submit(["end_by_cancelling", str(started)])
            await eventually(started.exists)
            call_off(batch)
            (outcome,) = await rig.outcomes(batch)
            assert (type(outcome.error), outcome.error.message) == (Unavailable, "the request was cancelled")

    run(main())


# Large bodies


@each
def test_large_bodies_arrive_both_ways(kind):
    async def main():
        async with Rig(pool_of(kind)) as rig:
            for megabytes in (1, 6, 2):
                bodies = [bytes([number]) * (600 * 1024) for number in range(megabytes * 2)]
                assert await rig.run(*bodies, "small") == [*bodies, "small"]

    run(main())


SERVER = """
import asyncio, os, signal, sys
sys.path.insert(0, {root!r})
from forebay.workers.processes import private_folder
from tests.pools.test_pool_contract import Rig, pool_of
private_folder.PREFIX = {prefix!r}

async def main():
    async with Rig(pool_of("processes", workers=2)) as rig:
        await rig.run(b"x" * (600 * 1024))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.linux
def test_nothing_is_left_in_memory_of_a_server_that_was_killed(tmp_path):
    """F26."""
    prefix = f"forebay-test-{os.getpid()}-left-"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER.format(root=ROOT, prefix=prefix)], env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as server:
        assert server.wait(PATIENCE_S) == -signal.SIGKILL
    assert [*Path("/dev/shm").glob(prefix + "*"), *tmp_path.iterdir()] == []


def test_a_worker_that_hangs_on_work_nobody_waits_for_is_replaced(tmp_path):
    """peers.md: a stuck worker holds its slot for ever while health stays green."""

    async def main():
        started, never = tmp_path / "started", tmp_path / "never"
        pool = pool_of("processes")
        pool._stuck_s = 0.1
        async with Rig(pool, grace_s=0.0) as rig:
            batch = rig.submit(["until", str(started), str(never)])
            await eventually(started.exists)
            call_off(batch)
            await eventually(lambda: rig.pool.restarts == 1 and rig.pool.idle == 1)
            assert errors(rig.answers[batch][0]) == [Unavailable]
            assert await rig.run("next") == ["next"]

    run(main())


def test_a_thread_that_hangs_on_work_nobody_waits_for_is_left_behind(tmp_path):
    async def main():
        started, end, log = tmp_path / "started", tmp_path / "end", tmp_path / "log"
        pool = pool_of("threads", log=str(log))
        pool._stuck_s = 0.05
        async with Rig(pool) as rig:
            batch = rig.submit(["until", str(started), str(end)])
            await eventually(started.exists)
            call_off(batch)
            await eventually(lambda: rig.pool.idle == 1)
            assert errors(rig.answers[batch][0]) == [Unavailable]
            assert await rig.run("next") == ["next"]
            statistics = rig.pool.statistics()
            assert (statistics.restarts, statistics.alive) == (1, 1)
            end.touch()  # it comes back, and takes no more work
            await eventually(lambda: log.read_text() == "open open close ")
            assert await rig.run("next") == ["next"]
        assert log.read_text() == "open open close close "

    run(main())


def test_a_runner_that_several_threads_call_goes_on_with_another_one(tmp_path):
    async def main():
        started, end, log = tmp_path / "started", tmp_path / "end", tmp_path / "log"
        pool = pool_of("threads", threads=2, log=str(log))
        pool._stuck_s = 0.05
        async with Rig(pool) as rig:
            batches = [rig.submit(["until", f"{started}{number}", str(end)]) for number in range(2)]
            for number, batch in enumerate(batches):
                await eventually(Path(f"{started}{number}").exists)
                call_off(batch)
            await eventually(lambda: rig.pool.idle == 2)
            assert await rig.run("next") == ["next"]
            assert rig.pool.statistics().restarts == 2
            end.touch()
            assert await rig.run("next") == ["next"]
            assert log.read_text() == "open "
        await eventually(lambda: log.read_text() == "open close ")

    run(main())


class Overdue(Exception):
    """A call has taken too long."""


def interrupt(thread):
    """Set an exception in a thread, as libraries do that limit the time of a call: it comes when the call is over."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Overdue))


def test_an_exception_that_is_set_in_a_thread_without_a_batch_costs_no_request(tmp_path):
    async def main():
        pool: Any = pool_of("threads", log=str(tmp_path / "log"))
        async with Rig(pool) as rig:
            for _ in range(3):
                assert await rig.run("before") == ["before"]
                (thread,) = pool._threads
                interrupt(thread)
                assert await rig.run("after") == ["after"]
            await eventually(lambda: pool.idle == 1)
        assert (tmp_path / "log").read_text() == "open close "

    run(main())


def test_a_stream_that_hangs_on_what_nobody_waits_for_is_left_behind(tmp_path):
    async def main():
        started, end = tmp_path / "started", tmp_path / "end"
        pool = pool_of("threads", seats=1)
        pool._stuck_s = 0.05
        async with Rig(pool) as rig:
            batch = rig.submit(["stream_until", str(started), str(end)], on_parts=lambda parts, release: release())
            await eventually(started.exists)
            call_off(batch)
            await eventually(lambda: rig.pool.idle == 1)
            assert await rig.run("next") == ["next"]
            end.touch()

    run(main())


def test_a_thread_that_is_late_but_comes_back_keeps_its_place(tmp_path):
    async def main():
        started, end = tmp_path / "started", tmp_path / "end"
        pool = pool_of("threads")
        pool._stuck_s = 0.2
        async with Rig(pool) as rig:
            batch = rig.submit(["until", str(started), str(end)])
            await eventually(started.exists)
            call_off(batch)
            end.touch()
            assert await rig.outcomes(batch) == ["done"]
            await asyncio.sleep(0.3)
            assert rig.pool.statistics().restarts == 0
            assert rig.pool.idle == 1

    run(main())


def test_no_more_threads_than_a_bound_are_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.workers.pools.threads.MAX_LEFT", 1)

    async def main():
        pool = pool_of("threads")
        pool._stuck_s = 0.05
        async with Rig(pool) as rig:
            for number in range(2):
                await eventually(lambda: rig.pool.idle)
                started = tmp_path / f"started{number}"
                batch = rig.submit(["until", str(started), str(tmp_path / f"end{number}")])
                await eventually(started.exists)
                call_off(batch)
                await rig.outcomes(batch)
            await eventually(lambda: rig.pool.statistics().problem)
            statistics = rig.pool.statistics()  # which readiness tells
            assert statistics.alive == statistics.idle == 0
            assert "1 threads hang in calls that do not end" in statistics.problem
            (refused,) = await rig.run("refused")
            assert refused.error.message == statistics.problem
            (tmp_path / "end0").touch()
            await eventually(lambda: rig.pool.statistics().problem == "")
            assert await rig.run("next") == ["next"]
            assert rig.pool.statistics().alive == 1
            (tmp_path / "end1").touch()

    run(main())


def test_a_runner_that_cannot_be_opened_in_place_of_a_stuck_one_is_tried_again(tmp_path):
    async def main():
        started, end, log = tmp_path / "started", tmp_path / "end", tmp_path / "log"
        pool = pool_of("threads", "Unwilling", how="raise", log=str(log), times=1)
        pool._stuck_s = 0.05
        async with Rig(pool) as rig:
            batch = rig.submit(["until", str(started), str(end)])
            await eventually(started.exists)
            call_off(batch)
            await eventually(lambda: log.read_text().count("open") == 2)
            log.write_text("")
            assert await rig.run("next") == ["next"]
            end.touch()

    run(main())


def test_large_results_of_one_batch_survive_the_next():
    async def main():
        async with Rig(pool_of("processes")) as rig:
            first = await rig.run(["large", 100_000, 700_000], "x")
            second = await rig.run(["large", 3_000_000, 1], "x")
            assert first == [bytes(100_000), b"\x01" * 700_000]
            assert second == [bytes(3_000_000), b"\x01"]

    run(main())


# Opening


@pytest.mark.parametrize("kind", ALL)
def test_a_runner_that_cannot_be_opened_is_a_model_error(kind):
    async def main():
        pool = pool_of(kind, "Unwilling")
        with pytest.raises(ModelError, match="RuntimeError: no weights") as caught:
            await asyncio.wait_for(pool.start(), PATIENCE_S)
        assert "in open" in caught.value.trace
        await pool.stop(0.0)

    run(main())


@pytest.mark.parametrize("how", ["init", "exit", "missing"])
@pytest.mark.parametrize("kind", ["inline", "threads", "processes", "attached"])
def test_whatever_keeps_a_runner_from_opening_is_a_model_error(kind, how):
    async def main():
        pool = pool_of(kind, "Missing") if how == "missing" else pool_of(kind, "Unwilling", how=how)
        with pytest.raises(ModelError, match=r"no weights|Missing"):
            await asyncio.wait_for(pool.start(), PATIENCE_S)
        await pool.stop(0.0)

    run(main())


def test_a_worker_that_dies_while_it_opens_is_a_model_error():
    async def main():
        with pytest.raises(ModelError, match="ended by signal 9 before it was ready"):
            await asyncio.wait_for(pool_of("processes", "Unwilling", how="kill").start(), PATIENCE_S)

    run(main())


def test_a_process_that_cannot_be_started_is_a_model_error(tmp_path):
    """G8: never a silent wait."""

    async def main():
        pool = ProcessPool(RunnerSpec(f"{HERE}:Told"), path=[ROOT], cwd=str(tmp_path / "missing"))
        try:
            with pytest.raises(ModelError, match="worker 0 cannot be started: No such file"):  # F19
                await asyncio.wait_for(pool.start(), PATIENCE_S)
        finally:
            await pool.stop(0.0)

    run(main())


def test_a_worker_that_dies_late_while_it_opens_is_a_model_error(monkeypatch, tmp_path):
    # F20
    monkeypatch.setattr("forebay.workers.processes.supervisor.LIVED_S", 0.0)  # any life is long enough

    async def main():
        log = tmp_path / "log"
        with pytest.raises(ModelError, match="worker 0 ended by signal 9 before it was ready"):
            await asyncio.wait_for(pool_of("processes", "Unwilling", how="kill", log=str(log)).start(), PATIENCE_S)
        assert log.read_text().count("open") == MAX_FAILURES

    run(main())


def test_process_workers_need_a_runner_that_has_a_name():
    with pytest.raises(ConfigError, match="import by name"):
        ProcessPool(RunnerSpec("", local=lambda: None))


# Stopping


def test_what_a_worker_says_last_is_heard_though_its_end_is_known_first(tmp_path):
    async def main():
        started, go = tmp_path / "started", tmp_path / "go"
        pool: Any = pool_of("processes")
        rig = Rig(pool)
        async with rig:
            batch = rig.submit(["until", str(started), str(go)])
            await eventually(started.exists)
            supervisor = pool._workers[0].supervisor
            stopping = asyncio.ensure_future(rig.pool.stop(PATIENCE_S))
            await asyncio.sleep(0.02)
            go.touch()
            supervisor._thread.join(PATIENCE_S)  # the loop stands still meanwhile: it has much to do
            await stopping
            assert await rig.outcomes(batch) == ["done"]

    run(main())


@pytest.mark.parametrize("kind", ["async", "threads", "processes", "attached"])
def test_stop_lets_a_running_batch_end(kind, tmp_path):
    async def main():
        started, go = tmp_path / "started", tmp_path / "go"
        rig = Rig(pool_of(kind))
        async with rig:
            batch = rig.submit(["until", str(started), str(go)])
            await eventually(started.exists)
            stopping = asyncio.ensure_future(rig.pool.stop(PATIENCE_S))
            await asyncio.sleep(0.02)
            go.touch()
            await stopping
            assert await rig.outcomes(batch) == ["done"]

    run(main())


@pytest.mark.parametrize(
    "kind",
    [
        "async",
        "threads",
        "processes",
        "attached",
    ],
)
def test_a_stopped_pool_offers_no_slot(kind, tmp_path):
    """G2: what is submitted while it stops would never be done."""

    async def main():
        started, go = tmp_path / "started", tmp_path / "go"
        rig = Rig(pool_of(kind))
        await rig.pool.start()
        batch = rig.submit(["until", str(started), str(go)])
        await eventually(started.exists)
        stopping = asyncio.ensure_future(rig.pool.stop(PATIENCE_S))
        await asyncio.sleep(0.02)
        go.touch()
        await rig.outcomes(batch)
        idle = rig.pool.idle
        await stopping
        assert (idle, rig.pool.idle) == (0, 0)

    run(main())


@pytest.mark.parametrize(
    "kind",
    ["async", "threads", "processes", "attached"],
)
def test_stop_answers_what_is_late_as_unavailable(kind, tmp_path):
    """G2, G5."""

    async def main():
        started, go = tmp_path / "started", tmp_path / "go"
        rig = Rig(pool_of(kind))
        await rig.pool.start()
        batch = rig.submit(["until", str(started), str(go)])
        await eventually(started.exists)
        try:
            await asyncio.wait_for(rig.pool.stop(0.05), PATIENCE_S)
            await asyncio.sleep(0.01)
            assert errors(rig.answers[batch][0]) == [Unavailable]
        finally:
            go.touch()
        await asyncio.sleep(0.05)
        rig.check() if kind in {"processes", "attached"} else None
        assert len(rig.answers[batch]) == 1

    run(main())


@pytest.mark.parametrize("kind", ["threads", "processes", "attached"])
def test_runners_are_closed(kind, tmp_path):
    async def main():
        log = tmp_path / "log"
        async with Rig(pool_of(kind, workers=2, log=str(log))):
            pass
        assert sorted(log.read_text().split()) == ["close", "close", "open", "open"]

    run(main())


def test_a_runner_is_not_closed_while_one_of_its_threads_uses_it(tmp_path):
    async def main():
        log, started = tmp_path / "log", tmp_path / "started"
        rig = Rig(pool_of("threads", threads=2, log=str(log)))
        await rig.pool.start()
        for _ in range(2):
            rig.submit(["until_named", str(tmp_path)])
        await eventually(lambda: started.exists() and started.read_text() == "..")
        stopping = asyncio.ensure_future(rig.pool.stop(PATIENCE_S))
        (tmp_path / "forebay-worker-0-0").touch()
        await eventually(lambda: "end" in log.read_text())
        await asyncio.sleep(0.02)
        (tmp_path / "forebay-worker-0-1").touch()
        await stopping
        await eventually(lambda: "close" in log.read_text())
        assert log.read_text() == "open end end close "

    run(main())


@pytest.mark.parametrize("kind", ALL)
def test_stop_twice_and_stop_before_start_do_no_harm(kind):
    async def main():
        await pool_of(kind).stop(0.0)
        pool = pool_of(kind)
        await pool.start()
        await pool.stop(1.0)
        await pool.stop(1.0)

    run(main())


# Workers die


def test_a_batch_whose_worker_dies_is_handed_on_once(tmp_path):
    """G2; elsewhere: a worker killed by the kernel hangs its requests for ever (MLServer, Triton, TorchServe)."""

    async def main():
        async with Rig(pool_of("processes", workers=2)) as rig:
            batch = rig.submit(["kill_once", str(tmp_path / "killed")], "x")
            assert await rig.outcomes(batch) == ["survived"] * 2
            assert batch.attempts == 2
            await eventually(lambda: rig.pool.statistics().alive == 2)
            assert rig.pool.statistics().restarts == 1
            assert rig.pool.idle == 2

    run(main())


def test_a_lone_worker_that_dies_is_replaced_and_its_batch_runs(tmp_path):
    async def main():
        async with Rig(pool_of("processes")) as rig:
            (before,) = await rig.run(["pid"])
            assert await rig.run(["kill_once", str(tmp_path / "killed")]) == ["survived"]
            (after,) = await rig.run(["pid"])
            assert before != after

    run(main())


def test_a_batch_that_kills_twice_is_answered_with_errors():
    """G2: each sample gets its own error; the third worker is spared."""

    async def main():
        async with Rig(pool_of("processes", workers=2)) as rig:
            outcomes = await rig.run(["kill"], "x")
            assert errors(outcomes) == [Unavailable] * 2
            assert "died (twice)" in outcomes[0].error.message
            assert await rig.run("next") == ["next"]
            await eventually(lambda: rig.pool.statistics().alive == 2)
            assert rig.pool.statistics().restarts == 2

    run(main())


def test_an_idle_worker_that_dies_is_seen_at_once():
    """Elsewhere: health stays green."""

    async def main():
        async with Rig(pool_of("processes")) as rig:
            (pid,) = await rig.run(["pid"])
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: rig.pool.idle == 0)
            assert rig.pool.statistics().alive == 0
            woken = []
            rig.pool.watch(lambda: woken.append(rig.pool.idle))
            await eventually(lambda: woken)
            assert woken == [1]
            assert await rig.run("next") == ["next"]

    run(main())


def test_a_process_in_the_place_of_another_has_failed_no_check_yet():
    async def main():
        async with Rig(pool_of("processes", "Unwell")) as rig:
            pool, answered = rig.pool, []
            health = HealthChecks(2 * PATIENCE_S, 2, pool.check, pool.replace, lambda: answered.append(len(answered)))
            pool.health = health

            async def pid_after_checks(count):
                health.ask_all(pool.checked)
                await eventually(lambda: len(answered) == count)
                return (await rig.run(["pid"]))[0]

            first = await pid_after_checks(1)
            os.kill(first, signal.SIGKILL)
            second = await rig.run(["pid"])
            assert [await pid_after_checks(2)] == second != [first], "its first failure, the second of the worker"
            assert [await pid_after_checks(3)] != second, "its second failure in a row"
            health.stop()

    run(main())


def test_a_batch_nobody_waits_for_is_not_handed_on(tmp_path):
    async def main():
        started = tmp_path / "started"
        async with Rig(pool_of("processes", workers=2)) as rig:
            pids = {(await rig.run(["pid"]))[0] for _ in range(2)}
            batch = rig.submit(["until", str(started), str(tmp_path / "never")])
            await eventually(started.exists)
            call_off(batch)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert errors(await rig.outcomes(batch)) == [Unavailable]
            assert batch.attempts == 1

    run(main())


def test_a_stream_that_has_begun_is_not_begun_again(tmp_path):
    async def main():
        async with Rig(pool_of("processes")) as rig:
            (pid,) = await rig.run(["pid"])
            sink = Sink()
            batch = rig.submit(["stream", 100, str(tmp_path / "steps")], on_parts=sink)
            await eventually(lambda: len(sink.parts) == CREDIT)
            os.kill(pid, signal.SIGKILL)
            assert errors(await rig.outcomes(batch)) == [Unavailable]
            assert sink.parts[0] == [0]
            assert len(sink.parts) == CREDIT

    run(main())


def test_a_worker_that_keeps_dying_is_started_with_pauses(tmp_path):
    """Back-off: 0.1, 0.2, 0.4 ... seconds between the starts."""

    async def main():
        log = tmp_path / "log"
        async with Rig(pool_of("processes", "Unwilling", log=str(log), times=1), grace_s=0.0) as rig:
            (pid,) = await rig.run(["pid"])
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            await eventually(lambda: log.read_text().count("open") >= 5)
            assert time.monotonic() - killed > 0.1 + 0.2 + 0.4 - 0.01
            assert rig.pool.statistics().alive == 0  # and after three attempts who asks is told so

    run(main())


async def gives_up_and_comes_back(pool, breaks, mends, why):
    """Kills the only worker while it cannot be replaced: who asks is told why at once, until it can."""
    async with Rig(pool, grace_s=0.0) as rig:
        (pid,) = await rig.run(["pid"])
        breaks()
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: why in rig.pool.statistics().problem)  # which readiness tells
        outcomes = await rig.run("x", "y")
        assert errors(outcomes) == [Unavailable] * 2
        assert why in outcomes[0].error.message
        assert (rig.pool.statistics().alive, rig.pool.statistics().idle) == (0, 0)
        mends()
        await eventually(lambda: rig.pool.statistics().alive)
        assert await rig.run("again") == ["again"]
        assert rig.pool.statistics().problem == ""


def test_requests_are_refused_while_no_worker_can_be_started(tmp_path):
    # F19
    python, away = tmp_path / "python", tmp_path / "away"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    pool = ProcessPool(RunnerSpec(f"{HERE}:Told"), path=[ROOT], python=str(python))
    why = "worker 0 cannot be started: No such file or directory"
    run(gives_up_and_comes_back(pool, lambda: python.rename(away), lambda: away.rename(python), why))


def test_requests_are_refused_while_workers_die_as_they_load(tmp_path):
    # F20
    log = tmp_path / "log"
    pool = pool_of("processes", "Unwilling", how="kill", log=str(log), times=1)
    run(gives_up_and_comes_back(pool, lambda: None, log.unlink, "worker 0 ended by signal 9 before it was ready"))


def test_a_load_that_hangs_does_not_keep_others_from_being_replaced(tmp_path):
    # F26
    async def main():
        spec = RunnerSpec(f"{HERE}:Told", {"hold": str(tmp_path / "hold")})
        pool = ProcessPool(spec, workers=2, path=[ROOT], stagger=True)
        async with Rig(pool, grace_s=0.0) as rig:
            first, second = rig.pool.pids()
            (tmp_path / "hold").touch()
            os.kill(first, signal.SIGKILL)
            await eventually((tmp_path / "hold.0").exists)  # the first one hangs as it loads again
            (tmp_path / "hold").unlink()
            os.kill(second, signal.SIGKILL)
            await eventually(lambda: rig.pool.statistics().alive == 1 and rig.pool.idle == 1)
            assert await rig.run("x") == ["x"]

    run(main())


def test_a_batch_whose_worker_cannot_be_replaced_is_told_why(tmp_path):
    async def main():
        log, killed = tmp_path / "log", tmp_path / "killed"
        async with Rig(pool_of("processes", "Unwilling", log=str(log), times=1), grace_s=0.0) as rig:
            batch = rig.submit(["kill_once", str(killed)])
            await eventually(lambda: rig.answers[batch])
            assert "no weights" in rig.answers[batch][0][0].error.message

    run(main())


def test_a_batch_whose_worker_cannot_return_is_answered_at_stop(tmp_path):
    """G2."""

    async def main():
        log, killed = tmp_path / "log", tmp_path / "killed"
        async with Rig(pool_of("processes", "Unwilling", log=str(log), times=1), grace_s=0.0) as rig:
            batch = rig.submit(["kill_once", str(killed)])
            await eventually(lambda: rig.pool.statistics().restarts)
            assert rig.answers[batch] == []
        assert errors(rig.answers[batch][0]) == [Unavailable]

    run(main())


# Somebody else dials in


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        frames.encode(["hello", 99, {"worker": 0, "first": True}]),
        frames.encode(["hello", frames.VERSION, {"worker": 7, "first": True}]),
        frames.encode(["hello", frames.VERSION, {}]),
        frames.encode(["nonsense"]),
        frames.encode([]),
        frames.encode(7),
        frames.encode({"__reduce__": 1}),
        frames.encode(["result", 1, [], None, 0.0, True]) + frames.encode(["round", 1, [], []]) + frames.encode(["x"]),
    ],
)
def test_who_does_not_speak_the_protocol_is_hung_up_on(said):
    """G9: nothing read is evaluated or unpickled; the pool goes on."""

    async def main():
        async with Rig(pool_of("processes")) as rig:
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.setblocking(False)
                await loop.sock_connect(stranger, rig.pool._entrance.path)
                await loop.sock_sendall(stranger, said)
                try:
                    assert await asyncio.wait_for(loop.sock_recv(stranger, 100), PATIENCE_S) == b""
                except ConnectionResetError:
                    pass
            assert await rig.run("next") == ["next"]
            assert rig.pool.statistics().restarts == 0

    run(main())
