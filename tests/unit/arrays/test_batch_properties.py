# SPDX-License-Identifier: Apache-2.0
"""Batches against lists of rows: stacked, merged, split and padded, rows stay in order and are never lost."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import Batch

entries = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=8)
"""Entries to add: stacked or of so many rows."""


class Made:
    """A batch, and the rows and the padding that it should have."""

    def __init__(self, plan: list[tuple[bool, int]], padding: int, first: int = 1) -> None:
        self.batch = Batch()
        self.rows: list[int] = []
        self.padding = padding
        for stacked, count in plan:
            values = [first + len(self.rows) + offset for offset in range(1 if stacked else count)]
            self.rows += values
            tree = tree_of(np.array(values, np.int32))
            if stacked:
                self.batch = Batch.stack([{"id": tree["id"][0], "wide": (tree["wide"][0][0],)}], onto=self.batch)
            else:
                self.batch = Batch.concatenate([tree], onto=self.batch)
        self.batch = self.batch.pad(padding)


def tree_of(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"id": values, "wide": (np.stack([values * 2.0, values * 3.0], axis=1),)}


def check(batch: Batch, rows: list[int], padding: int) -> None:
    assert (batch.size, len(batch), batch.padding) == (len(rows), len(rows), padding)
    if rows:
        tree, oracle = batch.realize(), tree_of(np.array(rows + [0] * padding, np.int32))
        np.testing.assert_array_equal(tree["id"], oracle["id"], strict=True)
        np.testing.assert_array_equal(tree["wide"][0], oracle["wide"][0], strict=True)
    assert [int(row["id"]) for row in batch] == rows


@given(entries, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_rows_are_realised_in_the_order_of_the_calls(plan, padding):  # S3 S7 S9 S15
    made = Made(plan, padding)
    check(made.batch, made.rows, padding)


@given(st.lists(st.tuples(entries, st.integers(0, 3)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_merging_joins_rows_and_sums_padding(plans):  # S10
    made: list[Made] = []
    for plan, padding in plans:
        made.append(Made(plan, padding, first=1 + sum(len(one.rows) for one in made)))
    merged = Batch.merge(one.batch for one in made)
    check(merged, [row for one in made for row in one.rows], sum(one.padding for one in made))


@given(entries, st.integers(0, 5), st.lists(st.integers(1, 7), max_size=6))
@settings(max_examples=100, deadline=None)
def test_splitting_loses_nothing(plan, padding, cuts):  # S11
    made = Made(plan, padding)
    rest, rows, zeros, parts = made.batch, made.rows, padding, []
    for n in cuts:
        left, rest = rest.split(n)
        kept = min(zeros, n - len(rows)) if n >= len(rows) else 0
        check(left, rows[:n], kept)
        check(rest, rows[n:], zeros - kept)
        rows, zeros = rows[n:], zeros - kept
        parts.append(left)
    check(Batch.merge([*parts, rest]), made.rows, padding)
