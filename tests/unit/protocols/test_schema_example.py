# SPDX-License-Identifier: Apache-2.0
"""Examples of samples are values that the model takes, or there is none."""

import pytest

from forebay.protocols.schema_example import example_of


@pytest.mark.parametrize(
    "bounds, number",
    [
        ({"minimum": -(2**31), "maximum": 2**31 - 1}, 1),
        ({"minimum": 7}, 7),
        ({"exclusiveMinimum": 1}, 2),
        ({"maximum": 0}, 0),
        ({"exclusiveMaximum": 0}, -1),
    ],
)
def test_a_number_is_a_usual_one_that_the_bounds_allow(bounds, number):
    assert example_of({"type": "integer", **bounds}, {}) == number


def test_an_array_is_as_long_as_it_must_be_or_there_is_no_example():
    numbers = {"type": "array", "items": {"type": "number"}}
    assert example_of({**numbers, "minItems": 16}, {}) == [1.5] * 16
    with pytest.raises(ValueError, match="at least 2048 items"):
        example_of({**numbers, "minItems": 2048}, {})
