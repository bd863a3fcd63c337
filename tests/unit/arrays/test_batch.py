# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false
"""`forebay.Batch`, rule by rule."""

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.later import jax, jnp
from tests.waiting import PATIENCE_S

from forebay import Batch, BatchMismatch, Lazy
from forebay.arrays.libraries import Spec
from forebay.errors import InvalidRequest


@dataclass
class Point:
    x: Any
    y: Any


def array(*values):
    return np.array(values)


def listed(batch):
    return batch.realize().tolist()


def test_no_library_of_arrays_is_loaded_before_there_is_an_array():
    script = (
        "import sys, forebay; forebay.jit(forebay.hook); forebay.Batch().pad(1).split(1); "
        "print({'numpy', 'torch', 'jax'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stacked_entries_are_one_row_each(count):  # S1
    batch = Batch.stack([array(1, 2, 3)] * count)
    assert batch.size == count
    assert listed(batch) == [[1, 2, 3]] * count


def test_containers_are_stacked_leaf_by_leaf():  # S1
    batch = Batch.stack([{"a": 1, "b": (2.0, Point(array(3), 4))}, {"b": (5.0, Point(array(6), 7)), "a": 8}])
    tree = batch.realize()
    assert tree["a"].tolist() == [1, 8]
    assert tree["b"][0].tolist() == [2.0, 5.0]
    assert tree["b"][1].x.tolist() == [[3], [6]]
    assert tree["b"][1].y.tolist() == [4, 7]


def test_concatenated_entries_count_their_rows():  # S2
    batch = Batch.concatenate([array(1, 2), array(3, 4, 5)])
    assert batch.size == 5
    assert listed(batch) == [1, 2, 3, 4, 5]
    batch = Batch.concatenate([(array(1, 2), np.ones((2, 3))), (array(3), np.zeros((1, 3)))])
    assert batch.size == 3
    assert batch.realize()[1].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_a_batch_is_extended_in_order_and_unchanged_itself():  # S3
    first = Batch.stack([array(1, 2, 3), array(4, 5, 6)]).key("k").pad(1)
    more = Batch.concatenate([array(range(7, 10), range(10, 13))], onto=first)
    last = Batch.stack([array(13, 14, 15)], onto=more)
    assert listed(last) == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15], [0, 0, 0]]
    assert (last.size, last.batch_key, last.padding) == (5, "k", 1)
    assert (first.size, more.size) == (2, 4)
    with pytest.raises(AttributeError, match="immutable"):
        first.size = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_an_empty_batch_stays_what_it_is_without_entries():  # S4
    assert (Batch().size, Batch().batch_key, Batch.new()) == (0, "default", Batch())
    batch = Batch.stack([1])
    assert Batch.stack([]) == Batch.concatenate([]) == Batch()
    assert Batch.stack([], onto=batch) == batch == Batch.concatenate([], onto=batch)


def test_batches_are_equal_by_value():  # S4
    one = Batch.stack([{"a": array(1)}])
    assert one == Batch.stack([{"a": array(1)}])
    assert one != Batch.stack([{"a": array(2)}])
    assert one != one.key("other")
    assert one != one.pad(1)
    assert one != Batch.concatenate([{"a": array([1])}])
    assert one != "batch"
    lazy = Lazy(array(1), lambda: pytest.fail("equality made a lazy array"))
    assert Batch.stack([lazy]) == Batch.stack([lazy])
    assert Batch.stack([lazy]) != Batch.stack([array(1)])


@pytest.mark.parametrize(
    "entries, place, templates",
    [
        ([{"a": array(1, 2, 3)}, {"a": array(1, 2)}], "$.a", ("{'a': int64[3]}", "{'a': int64[2]}")),
        ([(1, 2), (1, 2.0)], "$[1]", ("(int64[], int64[])", "(int64[], float64[])")),
        ([{"a": 1}, {"b": 1}], "$", ("{'a': int64[]}", "{'b': int64[]}")),
        ([{"a": [array(1)]}, {"a": (array(1),)}], "$.a", ("{'a': [int64[1]]}", "{'a': (int64[1],)}")),
        ([Point(1, 2), Point(1, None)], "$.y", ("Point(x=int64[], y=int64[])", "Point(x=int64[], y=None)")),
    ],
    ids=["shape", "dtype", "keys", "containers", "fields"],
)
def test_entries_that_differ_are_refused(entries, place, templates):  # S5
    with pytest.raises(BatchMismatch, match=r"^cannot add to batch due to incompatible tensors/containers") as refused:
        Batch.stack([entries[0], *entries])
    assert "entry 2 " in refused.value.message
    assert f" at {place}, expected {templates[0]}, got {templates[1]}" in refused.value.message


def test_entries_must_fit_the_batch_they_extend():  # S5
    with pytest.raises(BatchMismatch, match="entry 0 does not fit"):
        Batch.concatenate([array([1.0])], onto=Batch.stack([array(1)]))


@pytest.mark.parametrize(
    "entry, message",
    [
        (1, "cannot concatenate scalar tensor: $ is int64[]"),
        ({"a": array(1, 2), "b": array(1, 2, 3)}, "same value for first axis, got 2 and 3 (at $.a and $.b)"),
        ((), "cannot have an empty container"),
        ({"a": [None]}, "cannot have an empty container"),
    ],
)
def test_entries_without_common_rows_are_refused(entry, message):  # S6
    with pytest.raises(BatchMismatch, match=re.escape(message)):
        Batch.concatenate([entry])


def test_a_stacked_entry_holds_an_array_at_least():  # S6
    with pytest.raises(BatchMismatch, match="cannot have an empty container"):
        Batch.stack([{}])


def test_a_single_entry_is_not_copied():  # S7
    entry = {"a": np.arange(6).reshape(3, 2)}
    assert np.shares_memory(Batch.concatenate([entry]).realize()["a"], entry["a"])
    left, right = Batch.concatenate([entry]).split(2)
    assert np.shares_memory(left.realize()["a"], entry["a"])
    assert np.shares_memory(right.realize()["a"], entry["a"])


def test_what_is_realised_is_contiguous():  # S7
    turned = np.arange(6).reshape(2, 3).T
    assert Batch.concatenate([turned]).realize().flags.c_contiguous


def test_the_caller_may_supply_the_buffers():  # S7
    asked: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
    pool = np.full(1000, 7, np.float32)

    def allocate(shape, dtype):
        asked.append((shape, dtype))
        return pool[: np.prod(shape)].reshape(shape) if dtype == np.float32 else np.empty(shape, dtype)

    entries = [{"a": np.full(3, index, np.float32), "b": index} for index in range(100)]
    tree = Batch.stack(entries).pad(2).realize(into=allocate)
    assert asked == [((102, 3), np.dtype(np.float32)), ((102,), np.dtype(np.int64))]
    assert np.shares_memory(tree["a"], pool)
    assert tree["a"][:, 0].tolist() == [*range(100), 0, 0]
    entry = np.ones(3, np.float32)
    assert np.shares_memory(Batch.concatenate([entry]).realize(into=allocate), pool)


def test_a_supplied_buffer_of_another_shape_is_refused():  # S7
    batch = Batch.stack([array(1)])
    with pytest.raises(ValueError, match=re.escape("should be int64[1,1], it is int64[2,1]")):
        batch.realize(into=lambda shape, dtype: np.empty((2, 1), dtype))


def test_nothing_is_copied_before_the_batch_is_realised():  # S7
    entry = array(1, 2)
    left, _ = Batch.merge([Batch.stack([entry]), Batch.stack([entry]).pad(2)]).key("k").split(1)
    entry[0] = 9
    assert listed(left) == [[9, 2]]


def test_lazy_arrays_are_made_once_when_realised():  # S8
    calls: list[int] = []

    def make():
        calls.append(1)
        return np.arange(4.0)

    batch = Batch.concatenate([{"a": Lazy(np.zeros(4), make)}, {"a": np.ones(1)}])
    left, right = batch.split(3)
    assert (batch.size, calls) == (5, [])
    assert left.realize()["a"].tolist() == [0, 1, 2]
    assert right.realize()["a"].tolist() == [3, 1]
    assert batch.realize()["a"].tolist() == [0, 1, 2, 3, 1]
    assert calls == [1]


@pytest.mark.parametrize(
    "template", [lambda: np.float32(0), lambda: Spec((), np.dtype("f4")), lambda: jax.ShapeDtypeStruct((), "float32")]
)
def test_lazy_arrays_declare_what_they_will_be(template):  # S8
    lazy = Lazy(template(), lambda: np.float32(3))
    assert listed(Batch.stack([np.float32(1), lazy])) == [1, 3]
    assert repr(lazy) == "Lazy(float32[])"


def test_lazy_arrays_must_keep_to_their_template():  # S8
    with pytest.raises(BatchMismatch, match=re.escape("declared as float64[2], its function returned float64[3]")):
        Batch.stack([Lazy(np.zeros(2), lambda: np.zeros(3))]).realize()
    with pytest.raises(BatchMismatch, match="cannot add to batch"):
        Batch.stack([array(1, 2), Lazy(np.zeros(2), lambda: np.zeros(2))])
    with pytest.raises(TypeError, match="each leaf of an entry has a Lazy of its own"):
        Lazy({"a": 1}, dict)
    with pytest.raises(TypeError, match="function without parameters"):
        Lazy(array(1), array(1))


def test_padding_is_zero_rows_at_the_end():  # S9
    batch = Batch.concatenate([array(1, 2, 3)])
    padded = batch.pad(2)
    assert (padded.size, padded.padding, batch.padding) == (3, 2, 0)
    assert listed(padded) == [1, 2, 3, 0, 0]
    tree = Batch.stack([{"a": np.float16(1), "b": np.array("x"), "c": True}]).pad(1).realize()
    assert {key: (leaf.dtype, leaf.tolist()) for key, leaf in tree.items()} == {
        "a": (np.dtype("f2"), [1, 0]),
        "b": (np.dtype("U1"), ["x", ""]),
        "c": (np.dtype("?"), [True, False]),
    }
    with pytest.raises(ValueError, match="0 or more rows, got -1"):
        batch.pad(-1)


def test_the_byte_order_is_kept():  # S9
    assert Batch.concatenate([np.ones(2, ">f4"), np.ones(1, ">f4")]).pad(1).realize().dtype == ">f4"


def test_merged_batches_keep_their_order_and_sum_their_padding():  # S10
    left = Batch.concatenate([array(1, 2)]).pad(2)
    right = Batch.stack([3]).pad(1)
    merged = Batch.merge([left, Batch(), right])
    assert (merged.size, merged.padding) == (3, 3)
    assert listed(merged) == [1, 2, 3, 0, 0, 0]
    assert Batch.merge([]) == Batch()
    assert Batch.merge([Batch(), left]) == left == Batch.merge([left, Batch()])


def test_batches_that_differ_are_not_merged():  # S10
    with pytest.raises(BatchMismatch, match="cannot merge batches with different batch keys: 'a' and 'b'"):
        Batch.merge([Batch.stack([1]).key("a"), Batch.stack([1]).key("b")])
    with pytest.raises(
        BatchMismatch, match=re.escape("incompatible tensors/containers: they differ at $, expected int64[], got")
    ):
        Batch.merge([Batch(), Batch.stack([1]), Batch.stack([1.0])])


@pytest.mark.parametrize(
    "padding, n, left, right",
    [
        (3, 5, ([1, 2, 3, 4, 5], 0), ([], 3)),
        (3, 6, ([1, 2, 3, 4, 5], 1), ([], 2)),
        (3, 10, ([1, 2, 3, 4, 5], 3), ([], 0)),
        (1, 1, ([1], 0), ([2, 3, 4, 5], 1)),
        (1, 2, ([1, 2], 0), ([3, 4, 5], 1)),
        (1, 3, ([1, 2, 3], 0), ([4, 5], 1)),
        (1, 4, ([1, 2, 3, 4], 0), ([5], 1)),
    ],
)
def test_a_batch_is_split(padding, n, left, right):  # S11
    entries = [(np.array(values), np.array(values) * 10.0) for values in ([1, 2], [3, 4, 5])]
    whole = Batch.concatenate(entries).pad(padding).key("k")
    for half, (values, zeros) in zip(whole.split(n), (left, right), strict=True):
        assert (half.size, half.padding, half.batch_key) == (len(values), zeros, "k")
        assert half.template == whole.template
        if values:
            ones, tens = half.realize()
            assert ones.tolist() == [*values, *[0] * zeros]
            assert tens.tolist() == [*[value * 10 for value in values], *[0] * zeros]


def test_what_is_cut_off_a_batch_costs_no_more_where_the_rest_is_long():
    seen = []

    class Looked(tuple):
        __slots__ = ()

        def __iter__(self):
            for part in super().__iter__():
                seen.append(part)
                yield part

    batch = Batch.stack([array(row) for row in range(100)])
    left, right = replace(batch, parts=Looked(batch.parts)).split(3)
    assert [row.item() for row in left] == [0, 1, 2]
    assert right.size == 97
    assert len(seen) <= 4  # else a long batch that is executed in short ones takes time by the square of its length


def test_a_batch_is_split_after_a_row_at_least():  # S11
    with pytest.raises(ValueError, match="1 or more rows, got 0"):
        Batch.stack([1]).split(0)


def test_the_key_of_a_batch():  # S12
    batch = Batch.stack([1])
    assert batch.batch_key == "default"
    assert batch.key(("double", 2)).batch_key == ("double", 2)
    assert batch.key(None).batch_key is None
    with pytest.raises(TypeError):
        batch.key([])


@pytest.mark.parametrize(
    "batch", [Batch(), Batch().pad(2), Batch.stack([1]).split(1)[1], Batch.concatenate([np.ones(0)])]
)
def test_an_empty_batch_is_not_realised(batch):  # S13
    with pytest.raises(InvalidRequest, match=r"^cannot traverse/jit/compile Batch without entries$"):
        batch.realize()


def test_jax_arrays_stay_jax_arrays():  # S14
    batch = Batch.concatenate([{"a": jnp.ones((2, 2))}, {"a": jnp.zeros((1, 2))}]).pad(1)
    joined = batch.realize()["a"]
    assert isinstance(joined, jax.Array)
    assert joined.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert Batch.stack([jnp.float32(1), jnp.float32(2)]).realize().tolist() == [1, 2]
    assert isinstance(Batch.stack([jnp.ones(2)]).realize(), jax.Array)
    entry = jnp.ones(3)
    assert Batch.concatenate([entry]).realize() is entry


def test_libraries_are_not_mixed():  # S14
    with pytest.raises(
        BatchMismatch, match=r"they differ at \$\.a, expected \{'a': float32\[\]\}, got \{'a': jax.float32"
    ):
        Batch.stack([{"a": np.float32(1)}, {"a": jnp.float32(1)}])


def test_length_and_text():  # S15
    batch = Batch.stack([{"a": np.ones((2, 3))}]).pad(2).key("k")
    assert len(batch) == 1
    assert repr(batch) == "Batch(size=1, padding=2, key='k', template={'a': float64[2,3]})"
    assert repr(Batch()) == "Batch(size=0, padding=0, key='default', template=None)"


def test_iterating_gives_rows_without_the_padding():  # S15
    rows = list(Batch.concatenate([{"a": array(1, 2), "b": np.zeros((2, 1))}]).pad(3))
    assert [(row["a"], row["b"].tolist()) for row in rows] == [(1, [0]), (2, [0])]
    assert list(Batch()) == []
