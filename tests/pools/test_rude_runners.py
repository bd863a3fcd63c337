# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""Whatever a runner raises, returns or awaits is an outcome of its batch, and its slot goes on, in every pool."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest
from tests.pools.guests import AttachedByThreads
from tests.pools.rude import FAULTS_OF_THE_CLIENT, HELD, RAISED
from tests.pools.test_pool_contract import ALL, ROOT, Rig, call_off, eventually, run, streaming
from tests.waiting import PATIENCE_S

from forebay.errors import Code, ModelError, Unavailable
from forebay.protocols import native
from forebay.types.call import Failure
from forebay.workers.pools import inline
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec


def pool_of(kind, runner="Rude", workers=1, threads=1, seats=0, **kwargs):
    if kind == "async" and runner == "Rude":
        runner = "RudeAsync"
    spec = RunnerSpec(f"tests.pools.rude:{runner}", kwargs)
    if kind == "threads":
        return ThreadPool(spec, workers=workers, threads=threads, seats=seats)
    if kind == "processes":
        return ProcessPool(spec, workers=workers, threads=threads, seats=seats, path=[ROOT])
    if kind == "attached":
        return AttachedByThreads(spec, workers=workers, threads=threads, seats=seats)
    return InlinePool(spec, slots=workers * threads, seats=seats)


def told(outcome):
    """The error of an outcome, as a client is told of it."""
    assert type(outcome) is Failure
    assert len(native.error_body(outcome.error, "id")) < 100_000
    msgspec.json.encode([outcome.error.message, outcome.error.detail, getattr(outcome.error, "trace", "")])
    return outcome.error


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("threads", [1, 2])
def test_whatever_is_raised_fails_the_batch_and_nothing_else(kind, threads):  # F18, F27
    async def main():
        async with Rig(pool_of(kind, threads=threads)) as rig:
            await eventually(lambda: rig.pool.idle == threads)
            for what in RAISED:
                outcomes = await rig.run(["raise", what], "x")
                expected = Code.INVALID_ARGUMENT if what in FAULTS_OF_THE_CLIENT else Code.INTERNAL
                assert [told(one).code for one in outcomes] == [expected] * 2, what
                (alone, *others) = await rig.run(["one", what], "x", "y")
                assert (told(alone).code, others) == (expected, ["fine", "fine"]), what
            for what in HELD:
                (alone, *others) = await rig.run(["hold", what], "x")
                assert told(alone).code == (Code.INVALID_ARGUMENT if what == "no_init" else Code.INTERNAL), what
                assert others == ["fine"]
            await eventually(lambda: rig.pool.idle == threads)
            assert await rig.run("next") == ["next"]
            statistics = rig.pool.statistics()
            assert (statistics.restarts, statistics.left) == (0, 0)

    run(main())


@pytest.mark.parametrize("kind", ALL)
def test_the_texts_of_a_user_reach_the_client_as_far_as_they_can_be_written(kind):  # F27
    async def main():
        async with Rig(pool_of(kind)) as rig:
            (error,) = map(told, await rig.run(["raise", "surrogate"]))
            assert error.message == "ValueError: caf\\udce9"
            (error,) = map(told, await rig.run(["raise", "mute"]))
            assert "whose text cannot be made" in error.message
            (error,) = map(told, await rig.run(["raise", "teapot"]))
            assert (error.kind, error.message, error.detail) == ("RequestError", "short and stout", {"path": "$"})
            (error,) = map(told, await rig.run(["raise", "detail_surrogate"]))
            assert "caf\\udce9" in str(error.detail)

    run(main())


@streaming
@pytest.mark.parametrize("what", ["", "own", "keyboard", "mute"])
def test_a_stream_is_closed_where_it_ran_however_it_ends(kind, seats, what, tmp_path):  # F18, F31
    path = tmp_path / "log"

    async def main():
        async with Rig(pool_of(kind, seats=seats)) as rig:
            parts = []

            def on_parts(found, release):
                parts.append(found)
                release()

            batch = rig.submit(["stream", str(path), what], on_parts=on_parts)
            await eventually(lambda: len(parts) > 2)
            if not what:
                call_off(batch)
            (outcome,) = await rig.outcomes(batch)
            if what:
                assert told(outcome).code == Code.INTERNAL
            await eventually(path.exists)
            assert await rig.run("next") == ["next"]

    run(main())


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
@pytest.mark.parametrize("what", ["own", "cancelled", "exit", "mute", "surrogate"])
def test_a_runner_that_cannot_be_opened_is_a_model_error(kind, what):  # F18, F27
    async def main():
        pool = pool_of(kind, "Refuses", what=what)
        with pytest.raises(ModelError):
            await pool.start()
        await pool.stop(0.0)

    run(main())


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_what_an_unload_raises_does_not_stop_the_pool_from_stopping(kind):
    async def main():
        async with Rig(pool_of(kind, "Unloads")) as rig:
            assert await rig.run("x") == ["x"]

    run(main())


# Coroutines on the loop


def test_a_coroutine_is_cancelled_once_nobody_waits(tmp_path):  # F30
    path = tmp_path / "log"

    async def main():
        async with Rig(pool_of("async")) as rig:
            batch = rig.submit(["for_ever", str(path)])
            await eventually(path.exists)
            call_off(batch)
            (outcome,) = await rig.outcomes(batch)
            assert type(outcome.error) is Unavailable
            assert path.read_text() == "began ended "
            assert await rig.run("next") == ["next"]

    run(main())


def test_a_coroutine_that_is_called_off_before_it_begins_never_does(tmp_path, caplog, recwarn):
    path = tmp_path / "log"
    gc.collect()  # what other tests have left is told before this one looks
    caplog.clear()
    recwarn.clear()

    async def main():
        async with Rig(pool_of("async")) as rig:
            batch = rig.submit(["for_ever", str(path)])
            call_off(batch)
            (outcome,) = await rig.outcomes(batch)
            assert type(outcome.error) is Unavailable
            assert not path.exists()
            assert await rig.run("next") == ["next"]

    run(main())
    gc.collect()
    assert (caplog.messages, list(recwarn)) == ([], [])  # it is neither left behind nor forgotten


def test_a_coroutine_that_swallows_its_cancellation_gives_its_slot_back(tmp_path, monkeypatch):  # F30
    monkeypatch.setattr(inline, "CANCEL_S", 0.05)
    path = tmp_path / "log"

    async def main():
        async with Rig(pool_of("async")) as rig:
            batch = rig.submit(["swallow", str(path)])
            await eventually(path.exists)
            call_off(batch)
            await rig.outcomes(batch)
            assert await rig.run("next") == ["next"]
            assert path.read_text() == "began swallowed "

    run(main())


def test_a_server_that_stops_does_not_wait_for_a_coroutine_that_swallows_its_cancellation(tmp_path, monkeypatch):
    monkeypatch.setattr(inline, "CANCEL_S", 0.05)
    path = tmp_path / "log"

    async def main():
        rig = Rig(pool_of("async"))
        await rig.pool.start()
        batch = rig.submit(["swallow", str(path)])
        await eventually(path.exists)
        await asyncio.wait_for(rig.pool.stop(0.0), PATIENCE_S)
        assert [type(one.error) for one in rig.answers[batch][0]] == [Unavailable]

    run(main())


def test_a_coroutine_that_cancels_itself_fails_its_batch(tmp_path):  # F18
    async def main():
        async with Rig(pool_of("async")) as rig:
            (outcome,) = await rig.run(["cancel_itself"])
            assert told(outcome).code == Code.INTERNAL
            assert await rig.run("next") == ["next"]

    run(main())
