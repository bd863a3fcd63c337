# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Python objects go to worker processes and come back as they were."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.workers.object_runners import Doing

from forebay.batching.queue import BatchConfig
from forebay.errors import BadOutcome, ConfigError, ForebayError, RunnerFailed, Unavailable
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.model import load_module
from forebay.workers.memory import shm
from forebay.workers.memory.shm import THRESHOLD_BYTES
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire.frames import FrameReader, encode
from forebay.workers.wire.objects import Outputs, Packed, is_packed, open_outcome, pack, packed, unpack

ROOT = str(Path(__file__).parents[3])
LARGE = THRESHOLD_BYTES // 4
"""Elements of a float32 array that is large enough for shared memory."""


def endpoint(**kwargs):
    """An endpoint of one worker process that takes batches of up to four."""
    pool = ProcessPool(packed(RunnerSpec("tests.unit.workers.object_runners:Doing", kwargs)), path=[ROOT])
    return Endpoint(EndpointConfig(name="doing", timeout_s=30), BatchConfig(max_size=4, capacity=100), pool)


def with_worker(use, **kwargs):
    """Runs a coroutine function with a function that asks a worker process and opens its answer."""

    async def whole():
        served = endpoint(**kwargs)
        await served.start()

        async def ask(do, x=None, **others):
            return open_outcome(await served.call(pack({"do": do, "x": x, **others})))

        ask.endpoint = served
        try:
            return await use(ask)
        finally:
            await served.drain(5)

    return asyncio.run(whole())


# ---------------------------------------------------------------------------------------------------------------------
# packing

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(values=st.dictionaries(st.text(max_size=8), PLAIN, max_size=5))
@settings(max_examples=60, deadline=None)
def test_what_is_packed_comes_out_again(values):
    parts = pack(values)
    assert is_packed(parts)
    assert unpack(parts) == values
    # Nobody who passes the values on has to load them.
    assert unpack(pack(open_outcome(parts).by_port)) == values


def test_large_arrays_stand_beside_the_pickle_and_small_ones_inside():
    array, small = np.arange(LARGE, dtype=np.float32), np.arange(5)
    parts = pack({"a": {"image": array, "size": small}, "b": 1})
    assert [memoryview(part).nbytes for part in parts if memoryview(part).nbytes >= THRESHOLD_BYTES] == [array.nbytes]
    found = unpack(parts)
    assert np.array_equal(found["a"]["image"], array)
    assert np.array_equal(found["a"]["size"], small)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(LARGE * 2, dtype=np.int64).reshape(2, LARGE)),
        np.arange(LARGE * 4, dtype=np.float32)[::2],
        np.zeros((0, 3)),
        np.array(5.0),
        np.array(["2026-01-01"] * LARGE, dtype="datetime64[D]"),
        np.array([{"any": 1}, None], dtype=object),
    ],
    ids=["fortran", "strided", "empty", "scalar", "dates", "objects"],
)
def test_any_array_arrives(array):
    found = unpack(pack({"x": array}))["x"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_each_load_is_a_value_of_its_own_that_may_be_written_to():
    source = np.ones(LARGE, np.float32)
    value = open_outcome(pack({"x": {"a": source}})).by_port["x"]
    first, second = value.load(), value.load()
    first["a"] += 1
    first["b"] = 2
    assert second["a"].max() == 1
    assert second.keys() == {"a"}
    assert source.max() == 1


@pytest.mark.parametrize("size", [3, LARGE])
def test_an_array_that_is_read_only_stays_so(size):
    source = np.ones(size, np.float32)
    source.flags.writeable = False
    assert not unpack(pack({"x": source}))["x"].flags.writeable


def test_a_packed_value_inside_of_another_one_arrives_loaded():
    inner = open_outcome(pack({"x": np.ones(LARGE)})).by_port["x"]
    assert isinstance(inner, Packed)
    inner = Packed([bytes(part) for part in inner.parts])  # as it comes from a worker process
    first, second = (unpack(pack({"several": [1, {"deep": inner}]}))["several"][1]["deep"] for _ in range(2))
    assert first.sum() == second.sum() == LARGE
    first[0] = 5
    assert second[0] == 1


def test_what_cannot_be_pickled_is_named_with_its_type():
    with pytest.raises(BadOutcome, match=r"the value of 'lock', of type lock, cannot be sent to another process: .+"):
        pack({"fine": 1, "lock": threading.Lock()})


def test_a_value_whose_class_is_not_here_says_so(tmp_path):
    file = tmp_path / "shapes.py"
    file.write_text("class Point:\n    pass\n")
    module = load_module(file)
    parts = pack({"x": module.Point()})
    delattr(module, "Point")
    with pytest.raises(RunnerFailed, match="cannot be loaded here: AttributeError") as caught:
        unpack(parts)
    assert "Traceback" in caught.value.trace


@pytest.mark.parametrize("outcome", [5, None, "text", [5], [b"\xc1"], [b""]], ids=repr)
def test_an_outcome_that_is_not_packed_says_so(outcome):
    with pytest.raises(BadOutcome, match=r"is its runner `packed`\?"):
        open_outcome(outcome)


def leave():
    raise SystemExit(3)


class Leaving:
    def __reduce__(self):
        return leave, ()


def test_a_value_that_ends_the_program_when_it_is_loaded_does_not():
    with pytest.raises(RunnerFailed, match="cannot be loaded here: SystemExit"):
        unpack(pack({"x": Leaving()}))


def test_a_runner_that_other_processes_cannot_build_is_refused():
    with pytest.raises(ConfigError, match="import by name"):
        packed(RunnerSpec("here", local=Doing))


# ---------------------------------------------------------------------------------------------------------------------
# the arena

Parts = [b"index", b"x" * THRESHOLD_BYTES, b"y" * (THRESHOLD_BYTES + 1)]


@pytest.mark.linux
@pytest.mark.parametrize(
    "bodies",
    [
        [Parts, [b"small"], Parts],
        [[Parts, Parts], [[b"a"]], []],
        [b"z" * THRESHOLD_BYTES, Parts, None, "text", 5],
        [[None, {"a": 1}], [Parts]],
    ],
    ids=["parts", "samples", "mixed", "plain"],
)
def test_large_parts_of_a_body_ride_in_the_arena(bodies):
    arenas = shm.Arenas()
    reader, writer = shm.open_arenas(arenas.handle) or pytest.fail("out of reach")
    frame = encode([arenas.place(bodies)])
    assert len(frame) < THRESHOLD_BYTES
    (message,) = FrameReader(reader.view).feed(frame)

    def copied(value):
        if isinstance(value, list):
            return [copied(element) for element in value]
        return bytes(value) if isinstance(value, memoryview) else value

    assert copied(message[0]) == bodies
    for end in (arenas, writer, reader):
        end.close()


# ---------------------------------------------------------------------------------------------------------------------
# through a worker process


def test_values_go_through_a_worker_process_and_back():
    async def use(ask):
        assert (await ask("echo", {"text": "é", "n": [1, 2.5, None]})).load() == {"text": "é", "n": [1, 2.5, None]}
        assert (await ask("names", 1, b=1, a=2)).load() == ["a", "b"]
        assert (await ask("kind", b"x" * THRESHOLD_BYTES)).load() == "builtins.bytes"
        assert (await ask("after", 5)).load() == 5
        ports = await ask("ports", np.ones(LARGE))
        assert isinstance(ports, Outputs)
        assert {port: type(value) for port, value in ports.by_port.items()} == {"left": Packed, "right": Packed}
        assert ports.by_port["right"].load()[1].sum() == LARGE
        assert (await ask("nothing")).by_port == {}

    with_worker(use)


def test_arrays_may_be_written_to_and_kept_by_the_worker():
    async def use(ask):
        for number in range(3):
            doubled = (await ask("double_in_place", np.full(LARGE, number, np.float32))).load()
            assert (doubled == 2 * number).all()
            doubled += 1  # and by who gets it back
        for number in range(3):
            kept = (await ask("keep", np.full(LARGE, number))).load()
            assert kept == list(range(number + 1))

    with_worker(use)


def test_a_value_goes_from_worker_to_worker_without_being_loaded_between():
    async def use(ask):
        value = await ask("echo", np.ones(LARGE, np.float32))
        for _ in range(3):
            value = await ask("double_in_place", value)
            assert isinstance(value, Packed)
        assert (value.load() == 8).all()

    with_worker(use)


@pytest.mark.linux
def test_large_arrays_do_not_go_through_the_socket(monkeypatch):  # P145
    array = np.arange(1 << 20, dtype=np.float32)
    sent = []
    for name in ("send", "sendmsg"):  # a loop uses the one or the other, as its release pleases
        send = getattr(socket.socket, name)
        monkeypatch.setattr(
            socket.socket, name, lambda self, data, send=send: sent.append(send(self, data)) or sent[-1]
        )

    async def use(ask):
        value = array
        for _ in range(3):
            value = await ask("double_in_place", value)
        assert np.array_equal(value.load(), array * 8)

    with_worker(use)
    assert sum(sent) < array.nbytes / 100
    monkeypatch.setattr(shm, "make_arenas", lambda places: None)
    sent.clear()
    with_worker(use)
    assert sum(sent) > 3 * array.nbytes


def test_objects_of_the_users_classes_go_both_ways(tmp_path):
    # The module has the same name in every process, though its file is no package and string hashes are random.
    file = tmp_path / "shapes.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n")
    module = load_module(file)

    async def use(ask):
        point = (await ask("point", (3, 4))).load()
        assert point == module.Point(3, 4)
        assert (await ask("kind", point)).load() == f"{module.__name__}.Point"
        assert (await ask("echo", [point])).load() == [point]

    with_worker(use, path=str(file))


def test_what_cannot_travel_fails_its_own_item_only():
    async def use(ask):
        answers = await asyncio.gather(
            ask("lock"), ask("echo", 1), ask("lock_on_a_port"), ask("fail"), return_exceptions=True
        )
        assert isinstance(answers[0], BadOutcome)
        assert "the result, of type dict, cannot be sent to another process" in str(answers[0])
        assert answers[1].load() == 1
        assert "the value of 'locked', of type lock" in str(answers[2])
        assert str(answers[3]) == "no"

    with_worker(use)


class Grumpy:
    """Can be pickled and not be loaded."""

    def __reduce__(self):
        return (int, ("grumpy",))


def test_a_body_that_cannot_be_loaded_fails_its_own_item_only():
    async def use(ask):
        answers = await asyncio.gather(
            ask("echo", 1), ask("echo", Grumpy()), ask("echo", 3), ask("echo", Grumpy()), return_exceptions=True
        )
        assert [answers[0].load(), answers[2].load()] == [1, 3]
        for failed in (answers[1], answers[3]):
            assert isinstance(failed, RunnerFailed)
            assert "cannot be loaded here: ValueError" in str(failed)

    with_worker(use)


def test_samples_of_an_item_are_packed_one_by_one():
    async def use(ask):
        async def spread(bodies):
            return open_outcome(await ask.endpoint.call([pack(body) for body in bodies], size=len(bodies)))

        answer = await spread([{"x": np.full(LARGE, number)} for number in range(3)])
        assert [found[0] for found in answer.load()] == [0, 1, 2]
        # More samples than a batch takes: the endpoint cuts and joins them.
        assert (await spread([{"x": number} for number in range(11)])).load() == list(range(11))
        with pytest.raises(BadOutcome, match="1 result for 2 samples"):
            await spread([{"few": 1}, {}])
        with pytest.raises(ForebayError, match="no"):
            await spread([{"x": 1}, {"do": "fail"}])

    with_worker(use)


def test_a_worker_that_dies_leaves_the_next_one_with_whole_values():
    async def use(ask):
        value = np.arange(LARGE, dtype=np.int64)
        with pytest.raises(Unavailable):
            await ask("die", value)
        for _ in range(3):
            assert np.array_equal((await ask("echo", value)).load(), value)

    with_worker(use)
