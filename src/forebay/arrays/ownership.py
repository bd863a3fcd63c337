# SPDX-License-Identifier: Apache-2.0
"""Results of a function become the property of its caller.

Theory of operation. A function may keep what it returns and write to it again: a buffer that it reuses for every
batch, rows of a table. An array that nobody refers to any more but its holder is safe, and the interpreter counts the
references to it; that is asked where it is simple, for an array by itself or in a plain container that is new as well.
Everything else is copied.
"""

from __future__ import annotations

import sys
from typing import Any, Final, cast

from forebay.arrays.libraries import kind_of
from forebay.arrays.tree_structure import map_leaves


def taken_over(box: list[Any]) -> Any:
    """Return the tree that is the only element of `box`, with arrays that nobody else can write to.

    The result has plain containers, as if its rows had been joined. A caller that keeps a reference of its own to the
    tree has it copied.

    Raises:
        InvalidRequest: See `flatten`.
    """
    if _is_counted(box[0]):
        return box[0] if _is_last_holder(box, 0) else _copy(box[0])
    is_new = _references(box, 0) <= _ONE
    tree: Any = box[0]
    cls = cast("object", type(box[0]))
    if is_new and cls is dict and all(map(_is_counted, tree.values())):
        return {key: tree[key] if _is_last_holder(tree, key) else _copy(tree[key]) for key in tree}
    if is_new and (cls is tuple or cls is list) and all(map(_is_counted, tree)):
        items: list[Any] = [
            tree[place] if _is_last_holder(tree, place) else _copy(tree[place]) for place in range(len(tree))
        ]
        return items if cls is list else tuple(items)
    return map_leaves(_copy, tree)


def _copy(leaf: Any) -> Any:
    return kind_of(leaf).copy(leaf)


def _is_counted(tree: Any) -> bool:
    """Return whether it is an array whose references say who may write to it, or give it away as jax can."""
    numpy, jax = sys.modules.get("numpy"), sys.modules.get("jax")
    if numpy is not None and type(tree) is numpy.ndarray:
        return True
    return jax is not None and isinstance(tree, jax.Array)


def _is_last_holder(holder: Any, place: Any) -> bool:
    """Return whether the array of numpy or jax that `holder` has is reached through nothing else."""
    if _references(holder, place) > _ONE:
        return False
    array = holder[place]
    if kind_of(array).name != "numpy":
        return True
    if not array.flags.writeable:  # what is read-only here may be written to elsewhere, and callers may write to theirs
        return False
    base = array.base
    if base is None:
        return array.flags.owndata
    return type(base) is type(array) and base.base is None and base.flags.owndata and sys.getrefcount(base) <= _ONE


def _references(holder: Any, place: Any) -> int:
    found = holder[place]
    return sys.getrefcount(found)


_ONE: Final = _references([object()], 0)
"""What is counted where the holder has the only reference; interpreters differ in how they count their own."""
