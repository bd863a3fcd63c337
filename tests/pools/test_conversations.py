# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""What one side of a conversation with a worker does, the other side, and everybody else, is safe from."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.pools.test_attached_pool import Scene
from tests.pools.test_pool_contract import ROOT, Rig, codes, pool_of, run

from forebay.errors import Code
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire import frames
from forebay.workers.wire.worker_listener import VisitorLimits

LARGE = 600 * 1024


def nested(levels, value=None):
    for _ in range(levels):
        value = {"a": value}
    return value


# What user code keeps is its own


@pytest.mark.parametrize("kind", ["threads", "processes", "attached"])
@pytest.mark.parametrize("size", [100, LARGE])
def test_a_body_that_the_runner_keeps_stays_as_it_was(kind, size):
    """F17."""

    async def main():
        async with Rig(pool_of(kind, "Keeps")) as rig:
            bodies = [bytes([number]) * size for number in range(1, 4)]
            for count in range(3):
                (kept,) = await rig.run(bodies[count])
                assert kept == bodies[: count + 1]

    run(main())


@pytest.mark.linux
@pytest.mark.parametrize("size", [100, LARGE])
def test_a_body_that_the_runner_promised_to_let_go_is_not_copied(size):
    async def main():
        async with Rig(pool_of("processes", "Borrows")) as rig:
            kind = "memoryview" if size == LARGE else "bytes"
            assert await rig.run(b"x" * size, b"y" * 10) == [[kind, True], ["bytes", True]]

    run(main())


@pytest.mark.parametrize("name", ["KeepsRaw", "KeepsView", "KeepsBytes", "KeepsRows"])
def test_what_a_model_keeps_of_a_sample_stays_as_it_was(name):
    """F17."""

    async def main():
        kwargs = {"path": f"{ROOT}/tests/models/keeping.py", "name": name}
        spec = RunnerSpec("forebay.serving.models.model_runner:from_file", kwargs)
        params = {"in": "msgpack", "out": "json"}
        async with Rig(ProcessPool(spec)) as rig:
            for count in range(1, 4):
                body = bytes([count]) * LARGE
                if name != "KeepsBytes":
                    body = msgspec.msgpack.encode(body)
                (kept,) = await rig.run([body] if name == "KeepsRows" else body, params=params)
                assert json.loads(kept[0] if name == "KeepsRows" else kept) == list(range(1, count + 1))

    run(main())


# Who asks when it is too late


@pytest.mark.parametrize("kind", ["processes", "attached"])
def test_asking_after_the_answer_whether_anybody_waits_takes_nothing_from_the_next_batch(kind):
    """F24."""

    async def main():
        async with Rig(pool_of(kind, "AsksLater")) as rig:
            assert await rig.run("ask") == ["ask"]
            for number in range(200):
                assert await rig.run(number) == [number]

    run(main())


# Frames that are too long


def test_an_answer_that_is_too_long_fails_its_batch_and_the_worker_lives(tmp_path):
    """F26."""

    async def main():
        async with Scene(tmp_path, workers=1, limits=VisitorLimits(frame_bytes=100_000)) as scene:
            batch = scene.rig.submit(["large", *[50_000] * 3], "b", "c")
            outcomes = await scene.rig.outcomes(batch)
            assert codes(outcomes) == [Code.INTERNAL] * 3
            assert "at most 100000" in outcomes[0].error.message
            assert await scene.rig.run("next") == ["next"]
            assert scene.pool.left == 0

    run(main())


# Strangers


def test_who_says_nothing_takes_no_place_from_workers(tmp_path):
    """F16."""

    async def main():
        async with Scene(tmp_path, limits=VisitorLimits(connections=4, hello_s=30.0)) as scene:
            for _ in range(300):
                await scene.dial()
            for number in range(4):
                await scene.join(f"honest {number}")
            assert scene.pool.statistics().slots == 4

    run(main())


# What a worker says of itself


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({None: 1}, "a key of type NoneType"),
        ({"properties": nested(400)}, "nested more than 64 levels deep"),
        ({"examples": [[0] * 300] * 300}, "more than 50000 values"),
        ({"default": msgspec.msgpack.Ext(-1, bytes(4))}, "expected plain data, got"),
    ],
)
def test_a_description_that_no_document_could_hold_is_refused_at_the_door(tmp_path, schema, reason):
    """F15."""

    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.dial()
            peer.say(["hello", frames.VERSION, {"worker": "somebody", "model": {"input": {"schema": schema}}}])
            kind, said = await peer.hear()
            assert kind == "refused"
            assert reason in said
            assert scene.pool.is_deserted

    run(main())
