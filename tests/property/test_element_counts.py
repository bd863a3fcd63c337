# SPDX-License-Identifier: Apache-2.0
"""Elements are counted in bytes as the decoders make them: never fewer, and at most twice as many (F73, F74, F75)."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ForebayError, TooLarge
from forebay.protocols.samples import samples_in_steps
from forebay.types import json_elements as json_module
from forebay.types import msgpack_elements as msgpack_module
from forebay.types.element_limits import at_once
from forebay.types.json_elements import json_elements
from forebay.types.msgpack_elements import msgpack_elements

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.sampled_from('ab"\\,:[]{}\n\u00fc\U0001f600'), max_size=6)
VALUES = st.recursive(
    st.one_of(SCALARS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=30,
)

HOSTILE = [*range(256), *[0, 1, 2, 0x81, 0x91, 0x92, 0xA1, 0xC4, 0xCB, 0xCC, 0xD9, 0xDC, 0xDE] * 20]
"""Bytes with which values begin more often than by chance."""


def made(value):
    """Count what a decoder made: items of lists, and objects with their members."""
    items = members = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            items += len(one)
            waiting += one
        elif isinstance(one, dict):
            members += 1 + len(one)
            waiting += one.values()
    return items, members


def least(passes, most):
    """Return the least limit that passes; every greater one does, too."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle + 1, high)
    return low


def is_taken(steps):
    try:
        at_once(steps)
    except TooLarge:
        return False
    return True


def counted_json(data):
    """Return the least limits that take it, each while the other takes anything."""
    most = len(data) + 1
    items = least(lambda limit: is_taken(json_elements(data, limit, most)), most)
    return items, least(lambda limit: is_taken(json_elements(data, most, limit)), most)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Let a text, an escape and a run come to lie in several steps."""
    monkeypatch.setattr(json_module, "BOUND_BYTES", 7)
    monkeypatch.setattr(json_module, "EXACT_BYTES", 3)
    monkeypatch.setattr(msgpack_module, "STEP_BYTES", 40)
    monkeypatch.setattr(msgpack_module, "STRIDE_BYTES", 12)


@settings(max_examples=300)
@given(value=VALUES, indent=st.sampled_from([-1, 0, 1]))
def test_no_fewer_are_counted_in_json_than_are_made(value, indent):
    data = msgspec.json.format(msgspec.json.encode(value), indent=indent)
    items, members = made(msgspec.json.decode(data))
    found_items, found_members = counted_json(data)
    assert items <= found_items <= 2 * items + members + 1  # of empty objects the members are not told apart
    assert found_members == members


@settings(max_examples=500)
@given(st.text(st.sampled_from('[]{}:,"\\1a '), max_size=40))
def test_what_decodes_of_any_nonsense_was_counted(text):
    data = text.encode()
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return
    items, members = made(value)
    assert all(few <= found for few, found in zip((items, members), counted_json(data), strict=True))


def test_a_text_that_looks_like_lists_is_a_text():
    data = msgspec.json.encode({"a": ',[{:"\\' * 5000, "b": "\\" * 999, "c": [1, 2, 3]})
    assert counted_json(data) == (3, 4)


def values_in(value):
    """Count the values in what msgpack says, and the names in its maps."""
    if isinstance(value, list):
        return 1 + sum(map(values_in, value))
    if isinstance(value, dict):
        return 1 + sum(values_in(name) + values_in(one) for name, one in value.items())
    return 1


MSGPACK = st.recursive(
    st.one_of(
        SCALARS, st.text(max_size=40), st.binary(max_size=300), st.builds(lambda n: "x" * n, st.integers(0, 70_000))
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=3), inner, max_size=20)),
    max_leaves=30,
)


@settings(max_examples=200)
@given(MSGPACK)
def test_as_many_are_counted_in_msgpack_as_are_made(value):
    data = msgspec.msgpack.encode(value)
    assert least(lambda limit: is_taken(msgpack_elements(data, limit)), len(data)) in {values_in(value), len(data)}


def test_runs_of_msgpack_are_counted_one_by_one():
    chosen = random.Random(7)
    kinds = [
        0,
        1,
        -1,
        2**7,
        2**15,
        2**31,
        2**63,
        -(2**7),
        -(2**15),
        -(2**31),
        -(2**63),
        0.5,
        None,
        True,
        [],
        {},
        "",
        "abc",
        b"x",
    ]
    kinds += ["x" * 40, "x" * 300, b"x" * 300, msgspec.msgpack.Ext(5, b"xy"), msgspec.msgpack.Ext(5, b"xyz"), [1] * 20]
    for _ in range(200):
        value = [one for _ in range(20) for one in [chosen.choice(kinds)] * chosen.randrange(1, 9)]
        data = msgspec.msgpack.encode(value)
        assert is_taken(msgpack_elements(data, values_in(value)))
        assert not is_taken(msgpack_elements(data, values_in(value) - 1))


def test_what_decodes_of_any_bytes_was_counted():
    chosen = random.Random(8)
    for _ in range(20_000):
        data = chosen.randbytes(chosen.randrange(1, 30))
        try:
            value = msgspec.msgpack.decode(data, type=list)
        except (ValueError, TypeError, RecursionError):
            continue
        assert is_taken(msgpack_elements(data, values_in(value)))
        assert values_in(value) == 1 or not is_taken(msgpack_elements(data, values_in(value) - 1))


def samples_in(data):
    return [bytes(one) for one in at_once(samples_in_steps(data, {"in": "msgpack"}, len(data) + 1, len(data)))]


def require_the_same_samples(data):
    """Samples are found as the decoder finds them, or nothing is read."""
    try:
        expected = [bytes(one) for one in msgspec.msgpack.decode(data, type=list[msgspec.Raw])]
    except msgspec.DecodeError as error:
        if "invalid opcode" not in str(error):  # whoever reads the sample tells of one
            with pytest.raises(ForebayError):
                samples_in(data)
    else:
        assert not expected or samples_in(data) == expected


@settings(max_examples=300)
@given(st.lists(MSGPACK, min_size=1, max_size=40), st.data())
def test_samples_in_msgpack_end_where_the_decoder_says(value, drawn):
    data = msgspec.msgpack.encode(value)
    require_the_same_samples(data)
    at = drawn.draw(st.integers(0, len(data) - 1))
    require_the_same_samples(data[:at])
    require_the_same_samples(data[:at] + drawn.draw(st.binary(max_size=3)) + data[at + 1 :])


def test_runs_end_with_the_sample_that_they_are_in():
    chosen = random.Random(9)
    rows = [[one] * chosen.randrange(9, 40) for one in (1, -1, 200, 0.5, None, [], [1], {}, "", "abc", "x" * 40, b"xy")]
    for _ in range(200):
        inner = [chosen.choice(rows) for _ in range(chosen.randrange(1, 20))]
        require_the_same_samples(msgspec.msgpack.encode([inner, *inner, inner] if chosen.random() < 0.5 else inner))


def test_any_bytes_have_the_samples_that_the_decoder_finds():
    chosen = random.Random(10)
    for _ in range(20_000):
        head = bytes([chosen.choice([0x91, 0x92, 0x93, 0x9F, 0xDC, 0xDD])])
        require_the_same_samples(head + bytes(chosen.choices(HOSTILE, k=chosen.randrange(40))))
