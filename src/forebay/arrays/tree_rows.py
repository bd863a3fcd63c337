# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays as a whole: what goes into a batch and what comes out of a function of one.

Whatever `structure` calls a tree will do: an array, a number, or dicts, lists, tuples, dataclasses and
`msgspec.Struct`s of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay.arrays.libraries import Spec, find_kind, kind_of
from forebay.arrays.template import Template, common_rows
from forebay.arrays.tree_structure import Structure, flatten, map_leaves
from forebay.errors import BatchMismatch

__all__ = ["Structure", "concatenate", "copy_rows", "flatten", "map_leaves", "rows", "slice_rows", "to_host"]


_ALL = slice(None)


def rows(tree: Any) -> int:
    """Return the length of the first axis that all leaves have in common.

    Raises:
        BatchMismatch: A leaf has no axes, the lengths differ, or there are no leaves.
        InvalidRequest: See `flatten`.
    """
    leaves, structure = flatten(tree)
    return common_rows(structure, [kind_of(leaf).spec(leaf) for leaf in leaves])


def slice_rows(tree: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` up to `stop` of every leaf: views, where the library of the leaf has views.

    Raises:
        BatchMismatch: A leaf has no axes.
        InvalidRequest: See `flatten`.
    """
    try:
        return map_leaves(lambda leaf: kind_of(leaf).rows(leaf, slice(start, stop)), tree)
    except (IndexError, TypeError):
        rows(tree)  # says which leaf it is
        raise


def copy_rows(tree: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` up to `stop` of every leaf, in memory of their own; see `slice_rows`."""
    rows = slice(start, stop)
    kind = find_kind(tree)
    if kind is not None and _has_rows(tree):  # one array, as it mostly is: there is no tree to take apart
        return kind.copy(kind.rows(tree, rows))
    return map_leaves(lambda leaf: kind_of(leaf).copy(leaf), slice_rows(tree, start, stop))


def concatenate(trees: Sequence[Any]) -> Any:
    """Join trees along the first axis of every leaf, with one copy for each leaf; a single tree is returned as it is.

    Arrays stay with their library. What several batches returned for one caller may differ in what depends on the
    values of a batch and where it ran: numbers of different dtypes are promoted, texts get the widest one's width, and
    arrays on several devices come to the device of the first.

    Raises:
        BatchMismatch: The trees differ in structure, row shape or kind, or in dtypes without a common one; or see
            `rows`.
        InvalidRequest: See `flatten`.
        ValueError: There are no trees.
    """
    if not trees:
        raise ValueError("expected at least one tree to concatenate, got none")
    if len(trees) == 1:
        return trees[0]
    flat = [flatten(tree) for tree in trees]
    templates = [Template.of_rows(leaves, structure)[0] for leaves, structure in flat]
    for index, template in enumerate(templates):
        if template != templates[0] and not templates[0].joins(template):
            msg = f"cannot concatenate tree {index} with tree 0: {templates[0].contrast(template, Spec.joins)}"
            raise BatchMismatch(msg)
    structure, kinds = flat[0][1], [kind_of(leaf) for leaf in flat[0][0]]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return structure.unflatten(
        kind.join([(array, _ALL) for array in column], 0, None) for kind, column in zip(kinds, columns, strict=True)
    )


def to_host(tree: Any) -> Any:
    """Return the same tree with numpy arrays, from whatever library and device; waits for what is still computed.

    torch's bfloat16, which numpy does not have, becomes float32.

    Raises:
        InvalidRequest: See `flatten`.
    """
    return map_leaves(lambda leaf: kind_of(leaf).host(leaf), tree)


def _has_rows(leaf: Any) -> bool:
    return bool(getattr(leaf, "shape", ()))
