# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays: every container, what is refused, and the operations on their rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.later import jax, jnp

from forebay.arrays.tree_rows import concatenate, flatten, map_leaves, rows, slice_rows, to_host
from forebay.arrays.tree_structure import MAX_DEPTH
from forebay.errors import BatchMismatch, InvalidRequest


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Point:
    x: Any
    y: Any = None


class Record(msgspec.Struct):
    ids: Any
    rest: Any


TREES = [
    np.arange(3),
    7,
    2.5,
    True,
    1j,
    np.float32(1),
    {"b": 1, "a": [2, (3, 4)]},
    [],
    (1,),
    None,
    Pair(1, {"x": 2}),
    Point(1, Point(2, None)),
    Record(np.ones(2), [1, 2]),
    {1: 1, "one": 2, (1, 2): 3},
]


@pytest.mark.parametrize("tree", [*TREES, "of jax"], ids=repr)
def test_a_tree_that_was_taken_apart_is_put_together_again(tree):
    tree = jnp.arange(3) if isinstance(tree, str) else tree
    leaves, structure = flatten(tree)
    assert len(leaves) == structure.size == len(structure.paths())
    again = structure.unflatten(leaves)
    assert type(again) is type(tree)
    assert repr(again) == repr(structure.unflatten(flatten(again)[0]))
    assert flatten(again)[1] == structure
    assert hash(flatten(again)[1]) == hash(structure)
    if isinstance(tree, dict):
        assert again == tree


def test_dicts_are_alike_whatever_the_order_of_their_keys():
    left, right = flatten({"a": 1, "b": 2}), flatten({"b": 2, "a": 1})
    assert left == right


def test_a_structure_refuses_another_number_of_leaves():
    _, structure = flatten([1, 2])
    with pytest.raises(ValueError, match="has 2 leaves, 3 were given"):
        structure.unflatten([1, 2, 3])


def test_what_is_no_array_is_named_with_its_place():
    with pytest.raises(InvalidRequest, match=r"\$\.a\[0\]\['b c'\]\.x is a str: a tree holds arrays"):
        flatten({"a": [{"b c": Point("text")}]})
    with pytest.raises(InvalidRequest, match=r"\$ is a type"):
        flatten(Point)


def test_a_tree_that_contains_itself_is_refused():
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(InvalidRequest, match=f"deeper than {MAX_DEPTH} levels"):
        flatten(tree)


def test_the_rows_of_a_tree_are_its_common_first_axis():
    assert rows({"a": np.ones((3, 2)), "b": [np.ones(3)]}) == 3
    with pytest.raises(BatchMismatch, match=r"same value for first axis, got 3 and 2 \(at \$\.a and \$\.b\)"):
        rows({"a": np.ones(3), "b": np.ones(2)})
    with pytest.raises(BatchMismatch, match=r"scalar tensor: \$\[1\] is int64\[\]"):
        rows((np.ones(3), 1))
    with pytest.raises(BatchMismatch, match=r"empty container: \{'a': None\}"):
        rows({"a": None})


def test_slices_of_numpy_arrays_are_views():
    tree = {"a": np.arange(6).reshape(3, 2), "b": (np.arange(3),)}
    part = slice_rows(tree, 1, 3)
    assert part["a"].tolist() == [[2, 3], [4, 5]]
    assert np.shares_memory(part["a"], tree["a"])
    assert np.shares_memory(part["b"][0], tree["b"][0])


@pytest.mark.parametrize("make", [int, np.float32, np.array, lambda one: jnp.float32(one)])  # noqa: PLW0108 - only then is it imported
def test_a_scalar_has_no_rows_to_slice(make):
    with pytest.raises(BatchMismatch, match=r"scalar tensor: \$\[0\] is"):
        slice_rows([make(1)], 0, 1)


def test_trees_are_joined_on_the_first_axis():
    joined = concatenate([Pair(np.ones(2), [np.zeros((2, 1))]), Pair(np.ones(1), [np.zeros((1, 1))])])
    assert isinstance(joined, Pair)
    assert joined.left.tolist() == [1, 1, 1]
    assert joined.right[0].shape == (3, 1)


def test_a_single_tree_is_not_copied():
    tree = {"a": np.ones(2)}
    assert concatenate([tree]) is tree


def test_trees_that_differ_are_not_joined():
    with pytest.raises(
        BatchMismatch, match=r"tree 1 with tree 0: they differ at \$\.b, expected .*float64\[3\].* got .*float64\[2\]"
    ):
        concatenate([{"a": np.ones(2), "b": np.ones((2, 3))}, {"a": np.ones(2, int), "b": np.ones((2, 2))}])
    with pytest.raises(BatchMismatch, match=r"they differ at \$, expected int64\[\], got <U1"):
        concatenate([np.ones(2, int), np.array(["a"])])
    with pytest.raises(BatchMismatch, match=r"jax\.float32"):
        concatenate([np.ones(2, np.float32), jnp.ones(2)])
    with pytest.raises(ValueError, match="at least one tree"):
        concatenate([])


def test_dtypes_that_promote_are_joined():  # F37
    joined = concatenate([{"a": np.array(["abc"]), "b": jnp.ones(1)}, {"a": np.array(["defghi"]), "b": jnp.arange(1)}])
    assert joined["a"].tolist() == ["abc", "defghi"]
    assert joined["b"].tolist() == [1.0, 0.0]
    numbers = concatenate([np.array([True]), np.array([2]), np.array([0.5], np.float32)])
    assert numbers.dtype == np.float64
    assert numbers.tolist() == [1.0, 2.0, 0.5]


def test_jax_arrays_stay_jax_arrays():
    tree = {"a": jnp.arange(6).reshape(3, 2)}
    part = slice_rows(tree, 1, 3)
    assert isinstance(part["a"], jax.Array)
    joined = concatenate([tree, part, slice_rows(tree, 0, 3)])
    assert isinstance(joined["a"], jax.Array)
    assert joined["a"].device == tree["a"].device
    assert joined["a"].tolist() == [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]


def test_keys_of_jaxs_random_generator_are_joined():
    keys = jax.random.split(jax.random.key(0), 3)
    joined = concatenate([keys, slice_rows(keys, 0, 1)])
    numbers = jax.random.key_data(keys).tolist()
    assert jax.random.key_data(joined).tolist() == [*numbers, numbers[0]]


def test_to_host_makes_numpy_arrays():  # S54
    tree = to_host({"a": jnp.ones(2), "b": 3, "c": np.ones(1)})
    assert all(isinstance(leaf, np.ndarray) for leaf in tree.values())
    assert tree["a"].tolist() == [1, 1]


def test_map_leaves_keeps_the_containers():
    assert map_leaves(lambda leaf: leaf + 1, Point(1, [2])) == Point(2, [3])
