# SPDX-License-Identifier: Apache-2.0
"""Lists that become arrays: whether there is a text in them, beside a look at every element."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.serving.models.array_types import array_of

LEAVES = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=2), st.binary(max_size=2), st.just(10**400)
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


def holds_a_text(value):
    return isinstance(value, str | bytes) or (isinstance(value, list) and any(map(holds_a_text, value)))


def made(make, value):
    try:
        return make(value)
    except (ValueError, OverflowError):
        return None


@given(st.lists(VALUES, max_size=4))
def test_texts_are_never_widened_and_numbers_are_what_numpy_makes_of_them(value):
    array, plain = made(array_of, value), made(np.asarray, value)
    if holds_a_text(value):
        assert array is None or array.dtype.hasobject
    elif plain is None or not plain.dtype.hasobject:
        np.testing.assert_equal(array, plain)
