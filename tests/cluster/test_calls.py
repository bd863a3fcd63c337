# SPDX-License-Identifier: Apache-2.0
"""Calls of servings that run in other programs: what the caller gets is what it would get of one of its own."""

import asyncio
import contextlib
import gc
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.cluster.conftest import cat, knows, programs
from tests.waiting import PATIENCE_S, eventually

import forebay
from forebay import (
    Batch,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    Serving,
    ServingCrashed,
    ServingNotFound,
)
from forebay.errors import RunnerFailed

ONE = ("double", "crash", "gate", "plus", "halt", "hooked", "doubled", "coroutine", "texts", "odd", "refusing", "where")


def told(events):
    """Return events as plain lists."""
    return [(kind, output.tolist(), *metadata) for kind, output, *metadata in events]


@pytest.fixture(scope="module")
def cluster(launch, tmp_path_factory):
    """Three servers that are peers, and at each a program that has joined it; one of them is this one."""
    folder = tmp_path_factory.mktemp("cluster")
    addresses = [f"unix:{folder}/door-{number}" for number in range(3)]
    for address in addresses:
        launch(None, "--attach", address, *(f"--attach-peer={one}" for one in addresses))
    membership: Any
    with programs() as start, forebay.cluster.join(addresses[0]) as membership:
        membership.others = [start(addresses[1], *ONE, "who:3"), start(addresses[2], "who")]
        for other in membership.others:
            other.wait_ready()
        knows(membership, where=1, who=2)
        yield membership


@pytest.fixture(scope="module")
def first(cluster):
    """The program that runs most servings."""
    return cluster.others[0]


# ---------------------------------------------------------------------------------------------------------------------
# Where it runs


def test_a_serving_that_does_not_run_here_is_found_in_the_cluster(cluster):
    # S65
    assert forebay.batched_run("double", cat(1, 2)).tolist() == [2, 4]
    assert asyncio.run(forebay.batched_run_async("double", cat(3))).tolist() == [6]


def test_a_serving_of_this_program_goes_first(cluster, first):
    # S65
    with Serving.new(lambda _options: lambda batch: np.full(batch.size, os.getpid())).start(name="who"):
        knows(cluster, who=3)
        assert {forebay.batched_run("who", cat(1))[0] for _ in range(20)} == {os.getpid()}
        assert forebay.batched_run(("local", "who"), cat(1))[0] == os.getpid()
        pids = {first.pid, cluster.others[1].pid, os.getpid()}
        calls = (forebay.batched_run("who", cat(1), where="distributed")[0] for _ in range(1000))
        found = set()
        while found != pids:
            found.add(next(calls))
        assert forebay.batched_run(("distributed", "who"), cat(1))[0] in pids
    knows(cluster, who=2)
    with pytest.raises(ServingNotFound):
        forebay.batched_run("who", cat(1), where="local")


def test_members_are_called_as_often_as_their_weights_say(cluster, first):
    # S66: one of them has the weight 3 and the other 1; 400 calls are off by more once in 10,000 times
    with ThreadPoolExecutor(8) as pool:
        found = Counter(pool.map(lambda _: int(forebay.batched_run("who", cat(1))[0]), range(400)))
    assert 300 - 36 < found[first.pid] < 300 + 36


def test_partitions_count_as_weight(cluster):
    # S66
    serving = Serving.new(lambda _options: lambda batch: batch.realize())
    with serving.start(name="many", partitions=2, distribution_weight=3):
        knows(cluster, many=1)
        assert [one.weight for one in cluster.directory.members["many"]] == [6]


def test_hooks_run_where_they_should(cluster, first):
    # S67
    sent = []

    def before(rows):
        sent.append((os.getpid(), threading.get_ident()))
        return {"rows": rows, "seen": [["before", os.getpid()]]}

    answer = forebay.batched_run("where", np.array([1, 2]), before)
    assert sent == [(os.getpid(), threading.get_ident())]
    assert answer["rows"].tolist() == [1, 2]
    assert answer["seen"] == [
        ["before", os.getpid()],
        [first.pid, "beside"],
        [first.pid, "partition"],
        [first.pid, "beside"],
    ]
    assert answer["last"] == [first.pid, "beside"]


def test_hooks_may_be_coroutine_functions(cluster):
    # S67
    assert forebay.batched_run("coroutine", [1, 2]).tolist() == [3, 6]


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_a_crash_is_raised_here_and_not_tried_again(cluster, first):
    # S68
    before = int(first.say("count crash"))
    with pytest.raises(ServingCrashed, match="thirteen, for the"):
        forebay.batched_run("crash", cat(1))
    assert int(first.say("count crash")) == before + 1


def test_an_error_of_a_hook_is_raised_here(cluster):
    with pytest.raises(RunnerFailed, match="KeyError: 'absent'"):
        forebay.batched_run("refusing", {"a": 1})


def test_a_mistake_of_the_caller_is_raised_here(cluster):
    with pytest.raises(InvalidRequest, match="unknown batch key: 'other'"):
        forebay.batched_run("double", cat(1).key("other"))
    with pytest.raises(InvalidRequest, match="cannot run with empty Batch"):
        forebay.batched_run("double", Batch())


def test_a_name_that_nobody_runs(cluster):
    with pytest.raises(ServingNotFound, match="could not find a serving named 'nobody' in the cluster"):
        forebay.batched_run("nobody", cat(1))


def test_values_that_are_no_data_are_refused_with_a_sentence(cluster):
    # S70
    with pytest.raises(InvalidRequest, match=r"the input cannot be sent .*\$\['f'\] is a function; .*forebay.to_host"):
        forebay.batched_run("double", {"f": lambda: 1})
    with pytest.raises(InvalidRequest, match=r"the answer cannot be sent .* a set; .*distributed_postprocessing"):
        forebay.batched_run("odd", cat(1))


def test_arrays_of_other_libraries_are_brought_here_by_the_hook(cluster):
    # S67
    jax = pytest.importorskip("jax")
    rows = jax.numpy.arange(2)
    with pytest.raises(InvalidRequest, match=r"forebay\.to_host"):
        forebay.batched_run("coroutine", rows)
    assert forebay.batched_run("coroutine", rows, forebay.to_host).tolist() == [0, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines and cancellation


def gate_of(path):
    return Batch.concatenate([np.frombuffer(str(path).encode().ljust(512, b"\0"), np.uint8)[None]])


def test_a_deadline_travels(cluster, tmp_path):
    path = tmp_path / "gate"
    with pytest.raises(DeadlineExceeded):
        forebay.batched_run("gate", gate_of(path), timeout_s=0.2)
    path.touch()
    assert forebay.batched_run("gate", gate_of(path), timeout_s=PATIENCE_S).size == 1


def test_a_cancelled_task_takes_its_rows_back(cluster, tmp_path, first):
    """While one call holds the only partition, a second is cancelled, and never runs."""
    held, never = tmp_path / "held", tmp_path / "never"

    async def main():
        holding = asyncio.create_task(forebay.batched_run_async("gate", gate_of(held)))
        await asyncio.to_thread(eventually, (tmp_path / "held.begun").exists)
        cancelled = asyncio.create_task(forebay.batched_run_async("gate", gate_of(never)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.sleep(0.05)
        held.touch()
        assert (await holding).tolist() == [first.pid]

    asyncio.run(main())
    assert forebay.batched_run("gate", gate_of(held)).tolist() == [first.pid]
    assert not (tmp_path / "never.begun").exists()


def test_a_full_queue_of_a_member_is_said_at_once(cluster, tmp_path):
    path = tmp_path / "gate"
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(forebay.batched_run, "gate", gate_of(path)) for _ in range(2)]
        eventually((tmp_path / "gate.begun").exists)

        async def main():
            calls = [forebay.batched_run_async("gate", gate_of(path)) for _ in range(200)]
            found = asyncio.gather(*calls, return_exceptions=True)
            await asyncio.sleep(0.1)
            path.touch()
            return await found

        found = asyncio.run(main())
        [one.result(PATIENCE_S) for one in running]
    assert 0 < sum(isinstance(one, QueueFull) for one in found) < 200
    assert {type(one) for one in found} == {QueueFull, np.ndarray}


def test_many_threads_and_tasks_call_at_the_same_time(cluster):
    async def main(first_number):
        numbers = range(first_number, first_number + 40)
        found = await asyncio.gather(*[forebay.batched_run_async("double", cat(number)) for number in numbers])
        return [one.tolist() for one in found] == [[2 * number] for number in numbers]

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda number: asyncio.run(main(number)), (0, 1000, 2000)))


@pytest.mark.parametrize("rows", [1, 100_000])
def test_large_values_travel(cluster, rows):
    array = np.arange(rows * 8, dtype=np.float64).reshape(rows, 8)
    np.testing.assert_array_equal(forebay.batched_run("double", Batch.concatenate([array[:2]])), array[:2] * 2)
    np.testing.assert_array_equal(forebay.batched_run("where", array, lambda x: {"rows": x, "seen": []})["rows"], array)


# ---------------------------------------------------------------------------------------------------------------------
# Streams


def test_answers_are_streamed(cluster):
    # S69
    assert told(forebay.batched_run("plus", cat(1, 2, 3))) == [
        ("batch", [2, 3], "server_info"),
        ("batch", [4], "server_info"),
    ]

    async def main():
        return told([event async for event in await forebay.batched_run_async("plus", cat(1, 2, 3))])

    assert asyncio.run(main()) == told(forebay.batched_run("plus", cat(1, 2, 3)))


def test_values_of_hooks_are_streamed(cluster):
    # S69
    assert told(forebay.batched_run("hooked", cat(1, 2))) == [("double", [2, 4]), ("batch", [3, 5], "server_info")]


def test_a_postprocessing_of_the_stream_runs_there(cluster):
    # S67, S69
    assert told(forebay.batched_run("doubled", cat(1, 2, 3))) == [("batch", [4, 6]), ("batch", [8])]


def test_inputs_are_streamed_as_they_are_consumed(cluster):
    # S69
    taken = []

    def batches():
        for number in range(40):
            taken.append(number)
            yield cat(number)

    events = forebay.batched_run("plus", batches())
    assert next(events)[1].tolist() == [1]
    assert len(taken) < 10
    assert told(events) == [("batch", [number + 1], "server_info") for number in range(1, 40)]
    assert taken == [*range(40)]


def test_an_input_is_streamed_through_a_preprocessing_into_one_answer(cluster):
    # S69
    assert forebay.batched_run("texts", iter(["a", "bcd", "", "ef"])).tolist() == [1, 3, 0, 2]

    async def items():
        for text in ("a", "bcd"):
            await asyncio.sleep(0)
            yield text

    assert asyncio.run(forebay.batched_run_async("texts", items())).tolist() == [1, 3]
    with pytest.raises(InvalidRequest, match="batched_run_async only"):
        forebay.batched_run("texts", items())


def test_an_error_of_the_callers_iterator_reaches_the_caller(cluster):
    # S69
    def batches():
        yield cat(1)
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        list(forebay.batched_run("plus", batches()))
    assert told(forebay.batched_run("plus", cat(1))) == [("batch", [2], "server_info")]


def test_a_crash_ends_a_stream_where_it_comes(cluster):
    # S69
    events = forebay.batched_run("halt", cat(1, 2, 13, 4))
    assert next(events)[1].tolist() == [1, 2]
    with pytest.raises(ServingCrashed):
        next(events)


def test_streams_that_are_dropped_take_nothing_from_others(cluster):
    # S69
    for number in range(100):
        with contextlib.closing(forebay.batched_run("plus", cat(*range(50)))) as events:
            if number % 2:
                next(events)
    gc.collect()
    abandoned = forebay.batched_run("plus", (cat(one) for one in range(1000)))
    next(abandoned)
    del abandoned
    assert told(forebay.batched_run("plus", cat(1))) == [("batch", [2], "server_info")]
    eventually(lambda: not cluster._calls)


def test_a_slow_consumer_holds_up_nobody(cluster):
    # S69
    slow = forebay.batched_run("plus", cat(*range(500)))
    next(slow)
    assert told(forebay.batched_run("plus", cat(1, 2, 3)))[1] == ("batch", [4], "server_info")
    assert sum(len(output) for _, output, *_ in told(slow)) == 498


# ---------------------------------------------------------------------------------------------------------------------
# A program


def test_a_program_joins_once(cluster):
    with pytest.raises(ConfigError, match="has joined a cluster already"):
        forebay.cluster.join("unix:/nowhere")


def test_what_is_started_and_stopped_is_known_at_once(cluster, first):
    # S65
    assert "fresh" not in cluster.directory.members
    with Serving.new(lambda _options: lambda batch: batch.realize()).start(name="fresh"):
        knows(cluster, fresh=1)
    knows(cluster, fresh=0)
