# SPDX-License-Identifier: Apache-2.0
"""What the rows of a batch look like."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forebay.arrays.lazy import Lazy
from forebay.arrays.libraries import Spec, kind_of
from forebay.arrays.tree_structure import Structure
from forebay.errors import BatchMismatch


class Template(msgspec.Struct, frozen=True):
    """One row of a batch without its values.

    Attributes:
        structure: The tree that every entry has.
        specs: Shape (without the batch axis), dtype, library and device of each leaf.
    """

    structure: Structure
    specs: tuple[Spec, ...]

    @classmethod
    def of_row(cls, leaves: Sequence[Any], structure: Structure) -> Template:
        """Return the template of a tree that is one row; raises a `BatchMismatch` if there are no leaves."""
        if not leaves:
            raise _empty(structure)
        return cls(structure, tuple([_spec(leaf) for leaf in leaves]))

    @classmethod
    def of_rows(cls, leaves: Sequence[Any], structure: Structure) -> tuple[Template, int]:
        """Return the template of each row of a tree, and how many rows it has.

        Raises:
            BatchMismatch: See `common_rows`.
        """
        specs = [_spec(leaf) for leaf in leaves]
        rows = common_rows(structure, specs)
        return cls(structure, tuple([spec.row() for spec in specs])), rows

    def joins(self, other: Template) -> bool:
        """Return whether outputs that look like this can be joined along their rows; see `Spec.joins`."""
        return self.structure == other.structure and all(map(Spec.joins, self.specs, other.specs))

    def contrast(self, other: Template, alike: Callable[[Spec, Spec], bool] = operator.eq) -> str:
        """Say where two templates differ first, and show both."""
        place = self.structure.difference(other.structure)
        if place is None:
            pairs = zip(self.structure.paths(), self.specs, other.specs, strict=True)
            place = next((path for path, mine, theirs in pairs if not alike(mine, theirs)), "$")
        return f"they differ at {place}, expected {self}, got {other}"

    def __str__(self) -> str:
        return self.structure.spell(map(str, self.specs))


def common_rows(structure: Structure, specs: Sequence[Spec]) -> int:
    """Return the length of the first axis that all arrays have in common.

    Raises:
        BatchMismatch: An array has no axes, the lengths differ, or there are no arrays.
    """
    if not specs:
        raise _empty(structure)
    for index, spec in enumerate(specs):
        if not spec.shape:
            place = structure.paths()[index]
            raise BatchMismatch(
                f"cannot concatenate scalar tensor: {place} is {spec}, which has no first axis; "
                "a list of numbers becomes one array with numpy.array"
            )
        if spec.shape[0] != specs[0].shape[0]:
            paths = structure.paths()
            raise BatchMismatch(
                "all tensors must have the same value for first axis, "
                f"got {specs[0].shape[0]} and {spec.shape[0]} (at {paths[0]} and {paths[index]})"
            )
    return specs[0].shape[0]


def _spec(leaf: Any) -> Spec:
    return leaf.spec if isinstance(leaf, Lazy) else kind_of(leaf).spec(leaf)


def _empty(structure: Structure) -> BatchMismatch:
    return BatchMismatch(f"cannot have an empty container: {structure.spell(())} holds no arrays")
