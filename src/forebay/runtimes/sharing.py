# SPDX-License-Identifier: Apache-2.0
"""Whether requests may share a run of a model: its file says so, and the model is tried.

A first axis that may have any length counts samples, if all inputs and outputs have one. Further axes of any length are
padded where that changes nothing. No file says either for sure: shapes inside may be fixed all the same, an output may
count something else, and zeros behind a text move a mean. So the model is asked a few times with made-up values. Where
it answers for two samples what it answered for each, they are put together; where zeros behind a sample leave what it
was answered without them, samples of unlike length are. A model that cannot be run on made-up values is believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ForebayError
from forebay.runtimes.signature import Signature, Value, Var

if TYPE_CHECKING:
    from forebay.runtimes.model_file import ModelFile
    from forebay.runtimes.signature import Array

Axes = tuple[str | None, ...]

_ROWS: Final = 3
_MADE_UP: Final = re.compile(r"unk__\d+|\?|.*DynamicDimension.*|")
"""Names of axes that exporters made up: equal ones mean nothing, and unlike ones neither."""
_SIZES: Final = ((5, 7, 11, 13, 17, 19), (64, 96, 128, 160, 192, 224))
"""What free axes are tried with: unlike sizes tell them apart, and pictures are not to be too small for a network."""
_ONE_SIZE: Final = 16
_SAME: Final = 1e-3
"""How far numbers may be apart, by the largest of them, that zeros behind a sample are to leave alone."""
_ALIKE: Final = 0.05
"""The same for samples with others beside them: libraries sum up in another order then, and a network that is shown
nonsense may make a per cent of that."""


class Sharing(msgspec.Struct, frozen=True):
    """How samples may share a run.

    Attributes:
        has_rows: Whether the first axis of all inputs and outputs counts samples.
        feeds: For each input the names of the axes of one sample that are padded, None for others.
        fetches: For each output likewise, those axes that are as long as a padded one.
        why_not: Why samples share no run although the file declares it; empty if they do, or if it does not.
    """

    has_rows: bool = False
    feeds: dict[str, Axes] = {}
    fetches: dict[str, Axes] = {}
    why_not: str = ""

    @property
    def is_padded(self) -> bool:
        """Whether there is an axis to pad."""
        return any(name is not None for axes in self.feeds.values() for name in axes)


def sharing_of(model: ModelFile) -> Sharing:
    """Find out how samples may share a run of a model."""
    signature = model.signature()
    if not _declares_rows(signature):
        return Sharing()
    tries = (_Try(model, sizes) for sizes in (*_SIZES, None))
    found = next((one for one in tries if one.is_possible), None)
    if found is None:
        return Sharing(has_rows=True)
    why_not = found.rows_differ()
    return Sharing(why_not=why_not) if why_not else found.padding()


class _Try:
    """A model and made-up values for it.

    Args:
        sizes: Lengths of its free axes, one after the other; None for one length of all, where axes without a name
            stand for the same in all inputs.
    """

    def __init__(self, model: ModelFile, sizes: Sequence[int] | None) -> None:
        import numpy as np

        self._np = np
        self._model = model
        self._signature = model.signature()
        self._names = {var.alias: _names(var, are_alike=sizes is None) for var in self._signature.feeds}
        free = list(dict.fromkeys(name for names in self._names.values() for name in names if name is not None))
        self._sizes = {name: sizes[at % len(sizes)] if sizes else _ONE_SIZE for at, name in enumerate(free)}
        self._random = np.random.default_rng(0)
        self.is_possible = self._ask(self._made(1)) is not None

    def rows_differ(self) -> str:
        """Return why samples cannot share a run; empty if they can."""
        samples = [self._made(1) for _ in range(_ROWS)]
        alone = [self._ask(sample) for sample in samples]
        together = self._ask({name: self._np.concatenate([one[name] for one in samples]) for name in samples[0]})
        if together is None:
            return f"it cannot be run on {_ROWS} samples"
        for name, array in together.items():
            if array.shape[:1] != (_ROWS,):
                return f"its output '{name}' has the shape {list(array.shape)} for {_ROWS} samples"
            for row, one in enumerate(alone):
                if (
                    one is not None
                    and not self._equal(one[name], array[row : row + 1], _ALIKE)
                    and self._repeats(samples[row])
                ):
                    return f"its output '{name}' is another one for a sample that has others beside it"
        return ""

    def padding(self) -> Sharing:
        """Return which axes can be padded."""
        padded: set[str] = set()
        names = {var.alias: [None] * len(var.shape) for var in self._signature.fetches}
        fetches: dict[str, list[str | None]] = {name: list(axes) for name, axes in names.items()}
        for axis in self._sizes:
            ties = self._ties(axis)
            if ties is None or any(fetches[name][at] is not None for name, at in ties):
                continue
            padded.add(axis)
            for name, at in ties:
                fetches[name][at] = axis
        feeds = {name: tuple(one if one in padded else None for one in axes) for name, axes in self._names.items()}
        return Sharing(has_rows=True, feeds=feeds, fetches={name: tuple(axes) for name, axes in fetches.items()})

    def _ties(self, axis: str) -> set[tuple[str, int]] | None:
        """Return the axes of outputs that are as long as this one, None if it cannot be padded."""
        found: set[tuple[str, int]] | None = None
        for sign in (1, -1):
            given = self._made(1, sign)
            longer = {name: self._longer(name, array, axis) for name, array in given.items()}
            can_be_longer = all(array is not None for array in longer.values())
            short, long = self._ask(given), self._ask(longer) if can_be_longer else None
            if short is None or long is None:
                return None
            ties: set[tuple[str, int]] = set()
            for name, array in short.items():
                if array.ndim != long[name].ndim:
                    return None
                grown = [at for at, size in enumerate(array.shape) if long[name].shape[at] != size]
                if any(array.shape[at] != self._sizes[axis] for at in grown):
                    return None
                if not self._equal(array, long[name][tuple(map(slice, array.shape))]):
                    return None
                ties |= {(name, at - 1) for at in grown}
            if found is not None and found != ties:
                return None
            found = ties
        return found

    def _longer(self, name: str, array: Array, axis: str) -> Any:
        """Return an input twice as long along an axis; None if it cannot be padded."""
        places = [at + 1 for at, one in enumerate(self._names[name]) if one == axis]
        if places and array.dtype.kind not in "biuf":
            return None
        return self._np.pad(array, [(0, size if at in places else 0) for at, size in enumerate(array.shape)])

    def _made(self, rows: int, sign: int = 0) -> dict[str, Array]:
        """Make values up: whole numbers are 0 and 1, which every table has; with a sign 1, as masks have."""
        made: dict[str, Array] = {}
        for var in self._signature.feeds:
            names = self._names[var.alias]
            shape = (
                rows,
                *[size if name is None else self._sizes[name] for name, size in zip(names, var.shape, strict=True)],
            )
            made[var.alias] = self._values(var, shape, sign)
        return made

    def _values(self, var: Var, shape: tuple[int, ...], sign: int) -> Array:
        if var.dtype == "str":
            return self._np.full(shape, "a", object)
        if self._np.dtype(var.dtype).kind == "f":
            found = self._random.uniform(0.5, 1.5, shape) * sign if sign else self._random.standard_normal(shape)
            return found.astype(var.dtype)
        found = self._np.ones(shape, var.dtype) if sign else self._random.integers(0, 2, shape).astype(var.dtype)
        if found.size:
            found.reshape(shape[0], -1)[:, 0] = 1  # a mask that hides everything leaves nothing to compare
        return found

    def _ask(self, arrays: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run the model; None if it cannot be."""
        feed = [(var, Value(arrays[var.alias])) for var in self._signature.feeds]
        try:
            values = self._model.run(feed, self._signature.fetches)
        except ForebayError:
            return None
        return {var.alias: value.array for var, value in zip(self._signature.fetches, values, strict=True)}

    def _repeats(self, arrays: Mapping[str, Array]) -> bool:
        """Tell whether the model answers the same to the same."""
        one, two = self._ask(arrays), self._ask(arrays)
        return one is not None and two is not None and all(self._equal(one[name], two[name]) for name in one)

    def _equal(self, one: Array, two: Array, tolerance: float = _SAME) -> bool:
        if one.shape != two.shape:
            return False
        if one.dtype.kind != "f":
            return bool((one == two).all())
        finite = one[self._np.isfinite(one)]
        scale = float(abs(finite).max()) if finite.size else 0.0
        return self._np.allclose(one, two, tolerance, tolerance * scale, equal_nan=True)


def _declares_rows(signature: Signature) -> bool:
    every = (*signature.feeds, *signature.fetches)
    if not signature.feeds or any(var.rows != -1 for var in every):
        return False
    # Axes of unlike names are of unlike length.
    names = {var.axes[0] for var in signature.feeds if var.axes}
    return len({name for name in names if not _MADE_UP.fullmatch(name)}) <= 1


def _names(var: Var, *, are_alike: bool) -> list[str | None]:
    """Name the free axes of one sample of an input; None for those of a fixed length."""
    known = ["" if _MADE_UP.fullmatch(name) else name for name in var.axes[1:]] or [""] * len(var.shape)
    own = "" if are_alike else f"{var.alias}."
    return [
        (name or f"{own}{at + 1}") if size < 0 else None
        for at, (name, size) in enumerate(zip(known, var.shape, strict=True))
    ]
