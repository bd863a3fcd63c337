# SPDX-License-Identifier: Apache-2.0
"""Values that travel between members: what comes out is what went in, and nothing else goes in."""

import dataclasses
import math
import pickle
import random

import msgspec
import numpy as np
import pytest

from forebay.arrays.array_batch import Batch
from forebay.cluster.packed_values import pack_value, unpack_value
from forebay.errors import BatchMismatch, ForebayError, InvalidRequest


def sent(value):
    """Pack a value, send it as frames do, and unpack it."""
    buffers = pack_value(value, "the input", "bring it")
    return unpack_value([bytes(one) for one in buffers])


PLAIN = [
    *(None, True, False, 0, -1, 2**64 - 1, -(2**63), 1.5, math.inf, "", "naïve", b"", b"\0\xff"),
    *([], (), {}, [1, (2, [3, (4,)])], ((),), {"a": {"b": (1, 2)}, 7: "seven", b"k": None}, [[], [[]]]),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_arrives_as_it_was(value):
    # S70
    found = sent(value)
    assert found == value
    assert repr(found) == repr(value)


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.zeros((0, 4), np.float32),
    np.array(5.0),
    np.float32(1.5),
    np.array([1 + 2j]),
    np.array(["a", "longer"]),
    np.array([b"x", b""], "S3"),
    np.array([True, False]),
    np.arange(10, dtype=">i4")[::-2],
    np.array(["2020-01-01"], "datetime64[D]"),
    np.arange(100_000, dtype=np.float64).reshape(100, -1).T,
    np.zeros((2, 0, 3), "U0"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_arrive_in_memory_of_their_own(array):
    # S70
    found = sent({"x": (array, [array])})["x"][0]
    assert (found.dtype, found.shape, type(found)) == (array.dtype, array.shape, type(array))
    np.testing.assert_array_equal(found, array)
    assert isinstance(found, np.generic) or found.flags.writeable


def test_large_arrays_are_not_copied_when_they_are_packed():
    array = np.arange(100_000)
    assert np.shares_memory(np.asarray(pack_value(array, "the input", "")[1]), array)


@pytest.mark.parametrize(
    "batch",
    [
        Batch(),
        Batch.concatenate([np.arange(4)]).key("half"),
        Batch.stack([{"a": np.arange(3), "b": (1.5, np.ones(2))}] * 2).pad(3),
        Batch.merge([Batch.stack([np.arange(3)]), Batch.concatenate([np.ones((2, 3), int)])]).key(("k", 1)),
    ],
    ids=repr,
)
def test_batches_arrive_with_key_and_padding(batch):
    found = sent([batch])[0]
    assert (found.size, found.padding, found.batch_key) == (batch.size, batch.padding, batch.batch_key)
    for ours, theirs in zip(found, batch, strict=True):
        np.testing.assert_equal(ours, theirs)


@dataclasses.dataclass
class Point:
    x: int


class Foreign:
    pass


@pytest.mark.parametrize(
    "value, place, found",
    [
        ({1, 2}, "$", "a set"),
        ([1, {"a": Foreign()}], "$[1]['a']", "Foreign"),
        (Point(1), "$", "Point"),
        (lambda: 1, "$", "a function"),
        (2**64, "$", "a whole number of more than 64 bits"),
        (1 + 2j, "$", "a complex"),
        ({(1, 2): 3}, "$", "a dict with a key of type tuple"),
        (np.array([object()]), "$", "an array of object"),
        (np.zeros(2, [("a", int)]), "$", "an array of"),
    ],
)
def test_anything_else_is_refused_with_its_place_and_the_cure(value, place, found):
    # S70
    with pytest.raises(InvalidRequest) as raised:
        sent(value)
    message = raised.value.message
    assert message.startswith(f"the input cannot be sent to another program: {place} is ")
    assert found in message
    assert message.endswith("in dicts, lists, tuples and Batches: bring it")


def test_a_value_that_holds_itself_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(InvalidRequest, match="nested more than 64 levels deep"):
        sent(value)


def packed(tree, *specs):
    return msgspec.msgpack.encode([tree, list(specs)])


ARRAY = msgspec.msgpack.Ext(18, b"")
HOSTILE = [
    None,
    5,
    [],
    [5],
    [b""],
    [b"\xc1"],
    [pickle.dumps(1)],
    [packed(ARRAY)],
    [packed(ARRAY, ["<f8", [1], False])],
    [packed(None, ["<f8", [1], False]), bytes(8)],
    [packed(ARRAY, ["|O", [1], False]), bytes(8)],
    [packed(ARRAY, ["|V8", [1], False]), bytes(8)],
    [packed(ARRAY, ["<f8", [1 << 39, 1 << 39], False]), bytes(8)],
    [packed(ARRAY, ["<f8", [2], False]), bytes(8)],
    [packed(ARRAY, ["<f8", [-1], False]), bytes(8)],
    [packed(ARRAY, ["<U999999999", [0], False]), b""],
    [packed(ARRAY, ["<U0", [1 << 39], False]), b""],
    [packed(ARRAY, ["<f8", [1] * 65, False]), bytes(8)],
    [packed([[ARRAY, ARRAY]], ["<f8", [1], False]), bytes(8)],
    [packed(msgspec.msgpack.Ext(1, b"12345678"))],
    [packed([msgspec.msgpack.Ext(17, b"")])],
    [packed([msgspec.msgpack.Ext(17, b""), None, [1], 0])],
    [packed([msgspec.msgpack.Ext(17, b""), None, "k", 1 << 40])],
    [packed([msgspec.msgpack.Ext(17, b""), [5], "k", 0])],
    [packed([1, msgspec.msgpack.Ext(16, b"")])],
    [b"\x92" + b"\x91" * 10_000 + b"\xc0\x90"],
    [packed([None] * 1_000_001)],
]


@pytest.mark.parametrize("buffers", HOSTILE, ids=range(len(HOSTILE)))
def test_what_was_not_packed_here_is_refused(buffers):
    # S70
    with pytest.raises((InvalidRequest, BatchMismatch)):
        unpack_value(buffers)


def test_bytes_that_were_changed_on_their_way_are_refused_or_read():
    chance = random.Random(70)
    whole = [bytes(one) for one in pack_value({"a": (np.arange(9), [Batch.stack([np.ones(2)])])}, "it", "")]
    for _ in range(3000):
        changed = [bytearray(one) for one in whole]
        one = chance.choice(changed)
        one[chance.randrange(len(one))] = chance.randrange(256)
        try:
            unpack_value([bytes(one) for one in changed])
        except ForebayError:
            pass
