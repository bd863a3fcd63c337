# SPDX-License-Identifier: Apache-2.0
"""Rows of arrays that are executed together, joined only when the joined form is needed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec.structs import replace

from forebay.arrays.lazy import Lazy
from forebay.arrays.libraries import Piece, kind_of
from forebay.arrays.template import Template
from forebay.arrays.tree_structure import flatten, list_of_numbers, map_leaves
from forebay.errors import BatchMismatch, InvalidRequest

if TYPE_CHECKING:
    from forebay.arrays.libraries import Allocator

DEFAULT_KEY = "default"
"""Key of a batch that was not given one."""


class EntryRows(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One entry, or some of its rows.

    Attributes:
        leaves: The arrays of the entry as they were given.
        start: First row that counts.
        stop: Row after the last one that counts.
        stacked: Whether the entry is a single row, without a batch axis.
    """

    leaves: list[Any]
    start: int
    stop: int
    stacked: bool

    def piece(self, index: int) -> Piece:
        """Return one leaf, and which of its rows count."""
        leaf = self.leaves[index]
        array = leaf.realize() if isinstance(leaf, Lazy) else leaf
        return array, None if self.stacked else slice(self.start, self.stop)

    def equals(self, other: EntryRows) -> bool:
        """Return whether both are rows with equal values; lazy arrays are not made to find that out."""
        same = (self.start, self.stop, self.stacked) == (other.start, other.stop, other.stacked)
        return same and all(map(_equal, self.leaves, other.leaves))


class Batch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An immutable, lazy batch: entries of equal structure, row shape and dtype.

    `Batch()` is empty. Rows come in with `stack` and `concatenate`; nothing is copied before `realize`. Iterating
    realises the batch and gives its rows one by one, the padding left out.

    Attributes:
        size: Rows, the padding not counted; also `len(batch)`.
        padding: Zero rows that `realize` appends.
        batch_key: Batches are only merged with batches of an equal key.
        template: What one row looks like; None for a batch that never had one.
        is_owned: Whether `realize` always gives arrays of their own, which may be written to and kept; so it is for
            the batches that a serving's function gets.
        parts: The entries, as they were given.
    """

    parts: tuple[EntryRows, ...] = ()
    size: int = 0
    padding: int = 0
    batch_key: Hashable = DEFAULT_KEY
    template: Template | None = None
    is_owned: bool = False

    @staticmethod
    def new() -> Batch:
        """Return an empty batch."""
        return Batch()

    @staticmethod
    def stack(entries: Iterable[Any], onto: Batch | None = None) -> Batch:
        """Add entries that are one row each: every leaf gets a new first axis.

        Args:
            onto: The batch to extend, which is not changed; a new one if None.

        Raises:
            BatchMismatch: An entry differs from the others in structure, shape, dtype, kind or device, or is empty.
            InvalidRequest: An entry is not a tree of arrays.
        """
        return _extend(Batch() if onto is None else onto, entries, stacked=True)

    @staticmethod
    def concatenate(entries: Iterable[Any], onto: Batch | None = None) -> Batch:
        """Add entries of any number of rows each: every leaf is joined on its first axis.

        Args:
            onto: The batch to extend, which is not changed; a new one if None.

        Raises:
            BatchMismatch: An entry differs from the others in structure, row shape, dtype, kind or device, its leaves
                have first axes of different lengths, or it is empty.
            InvalidRequest: An entry is not a tree of arrays.
        """
        return _extend(Batch() if onto is None else onto, entries, stacked=False)

    @staticmethod
    def merge(batches: Iterable[Batch]) -> Batch:
        """Join batches in order; sizes and padding are summed, the padding is at the end.

        Raises:
            BatchMismatch: The keys or the templates differ.
        """
        batches = list(batches)
        if not batches:
            return Batch()
        first = batches[0]
        template = first.template
        for batch in batches[1:]:
            if batch.batch_key != first.batch_key:
                raise BatchMismatch(
                    f"cannot merge batches with different batch keys: {first.batch_key!r} and {batch.batch_key!r}"
                )
            if template is None:
                template = batch.template
            elif batch.template is not None and batch.template != template:
                raise BatchMismatch(
                    "cannot merge batches due to incompatible tensors/containers: " + template.contrast(batch.template)
                )
        return replace(
            first,
            parts=tuple([part for batch in batches for part in batch.parts]),
            size=sum(batch.size for batch in batches),
            padding=sum(batch.padding for batch in batches),
            template=template,
        )

    def key(self, batch_key: Hashable) -> Batch:
        """Return the batch with this key.

        Raises:
            TypeError: The key is not hashable.
        """
        hash(batch_key)
        return replace(self, batch_key=batch_key)

    def owned(self) -> Batch:
        """Return the batch such that each `realize` makes arrays of its own."""
        return replace(self, is_owned=True)

    def pad(self, n: int) -> Batch:
        """Return the batch with `n` zero rows to be appended by `realize`, instead of those it had before.

        Raises:
            ValueError: `n` is negative.
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"a batch is padded with 0 or more rows, got {n}")
        return replace(self, padding=n)

    def split(self, n: int) -> tuple[Batch, Batch]:
        """Return the first `n` rows, and the rest with the padding.

        With `n` rows or less in the batch, all rows stay on the left with as much padding as fits up to `n`, and the
        rest of the padding goes to an empty batch. Nothing is copied. Key and template are kept on both sides.

        Raises:
            ValueError: `n` is less than 1.
        """
        n = operator.index(n)
        if n < 1:
            raise ValueError(f"a batch is split after 1 or more rows, got {n}")
        if n >= self.size:
            kept = min(self.padding, n - self.size)
            return replace(self, padding=kept), replace(self, parts=(), size=0, padding=self.padding - kept)
        left: list[EntryRows] = []
        missing = n
        for part in self.parts:  # no further than the cut: one batch may be cut again and again
            rows = part.stop - part.start
            if rows > missing:
                break
            left.append(part)
            missing -= rows
        right = self.parts[len(left) :]
        if missing:
            part = right[0]
            middle = part.start + missing
            left.append(replace(part, stop=middle))
            right = (replace(part, start=middle), *right[1:])
        return replace(self, parts=tuple(left), size=n, padding=0), replace(self, parts=right, size=self.size - n)

    def realize(self, into: Allocator | None = None) -> Any:
        """Join the rows and the padding, and return them in the structure of the entries.

        Every leaf is copied once, into one contiguous buffer; not at all if the batch is a single contiguous entry
        (or some rows of one) without padding: then the arrays share their memory with the entry, unless the batch is
        `owned`. Each call joins anew.

        Args:
            into: Called with the shape and dtype of each numpy leaf, returns the array to join it in; for memory
                that is shared with a process or a device. Arrays of torch and jax are joined by their library.

        Raises:
            InvalidRequest: The batch has no rows.
            BatchMismatch: A `Lazy` leaf does not keep to its template.
            ValueError: `into` returned an array of another shape or dtype.
        """
        if self.template is None or not self.parts:
            raise InvalidRequest("cannot traverse/jit/compile Batch without entries")
        arrays: list[Any] = []
        for index in range(len(self.template.specs)):
            pieces = [part.piece(index) for part in self.parts]
            arrays.append(kind_of(pieces[0][0]).join(pieces, self.padding, into, owned=self.is_owned))
        return self.template.structure.unflatten(arrays)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        if self.size:
            tree = self.pad(0).realize()
            for row in range(self.size):
                yield map_leaves(_pick(row), tree)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        mine, theirs = self.parts, other.parts
        return (
            (self.size, self.padding, self.batch_key, self.template, len(mine))
            == (other.size, other.padding, other.batch_key, other.template, len(theirs))
        ) and all(map(EntryRows.equals, mine, theirs))

    __hash__: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]  # it compares by the values of arrays, which may change

    def __repr__(self) -> str:
        return f"Batch(size={self.size}, padding={self.padding}, key={self.batch_key!r}, template={self.template})"


def _extend(batch: Batch, entries: Iterable[Any], *, stacked: bool) -> Batch:
    template, size = batch.template, batch.size
    parts: list[EntryRows] = []
    for index, entry in enumerate(entries):
        leaves, structure = flatten(entry)
        if (numbers := list_of_numbers(structure, leaves)) is not None:
            raise InvalidRequest(
                f"entry {index}: {numbers[0]} is a list of numbers, which would be one array each; write "
                f"np.array({numbers[1]!r:.60})"
            )
        if stacked:
            found, rows = Template.of_row(leaves, structure), 1
        else:
            found, rows = Template.of_rows(leaves, structure)
        if template is None:
            template = found
        elif found != template:
            raise BatchMismatch(
                f"cannot add to batch due to incompatible tensors/containers: entry {index} does not fit the rows "
                f"before it; {template.contrast(found)}"
            )
        if rows:
            parts.append(EntryRows(leaves, 0, rows, stacked))
            size += rows
    return replace(batch, parts=(*batch.parts, *parts), size=size, template=template)


def _pick(row: int) -> Callable[[Any], Any]:
    return lambda array: array[row]


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, Lazy) or isinstance(right, Lazy):
        return False
    kind = kind_of(left)
    return kind is kind_of(right) and kind.equal(left, right)
