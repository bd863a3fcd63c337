# SPDX-License-Identifier: Apache-2.0
"""What a function returned is copied exactly where somebody may still write to it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
from tests.later import jax, jnp, torch

from forebay.arrays.libraries import kind_of
from forebay.arrays.ownership import taken_over


@dataclass
class Both:
    left: object
    right: object


KEPT = np.arange(6.0)
KEPT_DICT = {"a": np.arange(6.0)}


@functools.cache
def tensor():
    """One that is kept, as `KEPT` is."""
    return torch.arange(6.0)


FRESH = {
    "an array": lambda: np.arange(6.0),
    "a view of a new array": lambda: np.arange(6.0).reshape(2, 3)[:1],
    "a dict": lambda: {"a": np.arange(6.0), "b": np.arange(6.0)},
    "a tuple": lambda: (np.arange(6.0), np.arange(6.0).reshape(2, 3)),
    "a list": lambda: [np.arange(6.0)],
}
HELD = {
    "the array itself": lambda: KEPT,
    "a view": lambda: KEPT[:3],
    "a read-only view": lambda: np.broadcast_to(KEPT, (2, 6)),
    "a view of a view": lambda: KEPT.reshape(2, 3)[:, 1:],
    "in a new dict": lambda: {"a": KEPT, "b": np.arange(2.0)},
    "in a new list": lambda: [KEPT[1:]],
    "in a new tuple": lambda: (np.arange(2.0), KEPT),
    "in a dict that is kept": lambda: KEPT_DICT,
    "in a dataclass": lambda: Both(KEPT, np.arange(2.0)),
    "below": lambda: {"a": {"b": [KEPT]}},
    "memory of a library": lambda: tensor().numpy(),
    "a tensor": lambda: {"a": tensor()},
}


def leaves(tree):
    if isinstance(tree, Both):
        return leaves([tree.left, tree.right])
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for child in tree for leaf in leaves(child)] if isinstance(tree, list | tuple) else [tree]


def pointers(tree):
    return [leaf.__array_interface__["data"][0] for leaf in leaves(tree)]


@pytest.mark.parametrize("make", FRESH.values(), ids=FRESH.keys())
def test_what_nobody_else_refers_to_is_not_copied(make):
    box = [make()]
    before = pointers(box[0])
    assert pointers(taken_over(box)) == before


@pytest.mark.parametrize("make", HELD.values(), ids=HELD.keys())
def test_what_somebody_may_write_to_is_copied(make):  # F32
    taken = taken_over([make()])
    assert type(taken) is type(make())
    for leaf, kept in zip(leaves(taken), leaves(make()), strict=True):
        assert kind_of(leaf).equal(leaf, kept)
        for memory in (KEPT, KEPT_DICT["a"], tensor().numpy()):
            assert not np.shares_memory(np.asarray(leaf), memory)
        if isinstance(leaf, np.ndarray):
            assert leaf.flags.writeable


def test_two_views_of_one_new_array_are_copied():
    whole = np.arange(6.0)
    pair = (whole[:3], whole[2:])
    del whole
    left, right = taken_over([pair])
    assert not np.shares_memory(left, right)


def test_a_subclass_of_dict_becomes_a_dict_always():  # F37
    assert type(taken_over([OrderedDict(b=np.arange(2.0), a=np.arange(2.0))])) is dict


def test_an_array_of_jax_that_somebody_else_holds_is_copied():  # F107
    array = jnp.arange(3)
    for tree in (array, [array, 2.5], {"a": array}, (array, array)):
        for taken in leaves(taken_over([tree])):
            assert taken is not array
            jax.jit(lambda x: x + 1, donate_argnums=0)(taken)
    assert array.tolist() == [0, 1, 2]


def test_an_array_of_jax_that_nobody_else_holds_is_not_copied():
    box = [jnp.arange(3)]
    number = id(box[0])
    assert id(taken_over(box)) == number


def test_tensors_lose_their_graph():  # F37
    weight = torch.ones(2, requires_grad=True)
    assert not taken_over([weight * 2]).requires_grad
