# SPDX-License-Identifier: Apache-2.0
"""Lists that become arrays: what else than numbers is in them, beside a look at every element."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.serving.models.array_types import array_of

LEAVES = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=2), st.binary(max_size=2), st.just(10**400)
)
ANY = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=12)
NUMBERS = st.one_of(st.integers(-9, 9), st.floats())
PLACES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 8))


@st.composite
def rows(draw):
    """Rows of one length, as NumPy takes them, and perhaps one element that is not as the others."""
    count, width, place = draw(PLACES)
    found = draw(st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=count, max_size=count))
    found[place % count][place % width] = draw(LEAVES)
    return found if draw(st.booleans()) else found[place % count]


VALUES = st.one_of(rows(), st.lists(ANY, max_size=4))


def holds_a_text(value):
    return isinstance(value, str | bytes) or (isinstance(value, list) and any(map(holds_a_text, value)))


def leaves(value):
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


def holds_truth_among_numbers(value):
    return {bool} < set(map(type, leaves(value)))


def made(make, value):
    try:
        return make(value)
    except (ValueError, OverflowError):
        return None


@given(VALUES)
def test_texts_are_never_widened_nor_truth_values_counted_and_numbers_are_what_numpy_makes_of_them(value):
    array, plain = made(array_of, value), made(np.asarray, value)
    if holds_a_text(value) or holds_truth_among_numbers(value):
        assert array is None or array.dtype.hasobject
    elif plain is None or not plain.dtype.hasobject:
        np.testing.assert_equal(array, plain)
