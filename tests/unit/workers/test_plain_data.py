# SPDX-License-Identifier: Apache-2.0
"""What a stranger may send as a description of itself."""

from __future__ import annotations

import datetime as dt

import pytest

from forebay.errors import InvalidRequest
from forebay.workers.wire.plain_data import MAX_DEPTH, MAX_VALUES, require_plain


def nested(levels, value=None):
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize(
    "value", [None, "x", 1, 1.5, True, [], {}, nested(MAX_DEPTH - 1), [{"a": [1, {"b": None}]}], [0] * (MAX_VALUES - 1)]
)
def test_plain_data_passes(value):
    require_plain(value)


@pytest.mark.parametrize(
    "value, reason",
    [
        ({None: 1}, "key of type NoneType"),
        ({"a": [{1: 1}]}, "key of type int"),
        ({"a": {b"a": 1}}, "key of type bytes"),
        ([b"x"], "got bytes"),
        ({"a": dt.datetime.now(dt.UTC)}, "got datetime"),
        (nested(MAX_DEPTH), "nested more than 64 levels"),
        (nested(100_000), "nested more than 64 levels"),
        ([0] * MAX_VALUES, "more than 50000 values"),
        ([[0] * 300] * 300, "more than 50000 values"),
    ],
)
def test_what_is_not_plain_too_deep_or_too_much_is_refused(value, reason):
    """F15."""
    with pytest.raises(InvalidRequest, match=reason):
        require_plain(value)
