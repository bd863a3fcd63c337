# SPDX-License-Identifier: Apache-2.0
"""Contents of requests: equal only for what is the same, and bounded."""

import numpy as np
import pytest

from forebay.types.fingerprint import MAX_BYTES, MAX_DEPTH, MAX_PARTS, content_of, digest_of

ALIKE = [
    *([1], [1.0], [True], ["1"], [b"1"], [[1]], [(1,)], [None], [1, 1], [0.0], [-0.0], [{"a": 1}], [{"a": [1]}]),
    *([b"ab", b"c"], [b"a", b"bc"], ["ab"], ["a", "b"], [[], [1]], [[[1]]], [2], [-1], [10**30]),
    *([np.zeros(4, "f4")], [np.zeros((2, 2), "f4")], [np.zeros(2, "f8")], [np.zeros(4, "i4")], [bytes(16)]),
]


def test_only_what_is_the_same_is_equal():
    contents = [content_of(*values) for values in ALIKE]
    assert all(content is not None for content in contents)
    assert len({tuple(content or ()) for content in contents}) == len(ALIKE)
    assert len({digest_of(content or []) for content in contents}) == len(ALIKE)


def test_bytes_of_all_kinds_are_equal_and_stay_what_they_were():
    data = bytearray(b"abc")
    content = content_of(data)
    assert content == content_of(b"abc") == content_of(memoryview(b"xabcx")[1:4])
    data[0] = 0
    assert content == content_of(b"abc")
    array = np.arange(3)
    content = content_of(array)
    array[0] = 9
    assert content == content_of(np.arange(3))


@pytest.mark.parametrize(
    "value",
    [
        bytes(MAX_BYTES),
        [b"%d" % (MAX_BYTES // 4), *[bytes(MAX_BYTES // 4)] * 4],
        [None] * (2 * MAX_PARTS + 1),
        object(),
        np.array([object()]),
        np.zeros(MAX_BYTES, "f8"),
        memoryview(bytes(16)).cast("d"),
        10**60,
    ],
)
def test_what_is_long_or_unknown_has_no_content(value):
    assert content_of(value) is None


def test_what_is_deep_has_no_content():
    value = []
    for _ in range(MAX_DEPTH):
        value = [value]
    assert content_of(value) is None
