# SPDX-License-Identifier: Apache-2.0
"""Whether requests may share a run of a model: its file says so, and the model is tried.

A first axis that may have any length counts samples, if all inputs and outputs have one. Further axes of any length are
padded where that changes nothing. No file says either for sure: shapes inside may be fixed all the same, an output may
count something else, and zeros behind a text move a mean. So the model is asked a few times with made-up values.
Samples are put together where each is answered the same whatever is beside it, also samples of another size and sign;
where zeros behind a sample leave what it was answered without them, samples of unlike length are as well.

How exact "the same" is: a library sums up in another order where there are more rows, so that a sample by itself and
one among others may differ by a little. Among others like itself it is computed as among others unlike it: there it may
differ by no more than two runs on the same values do. What no made-up value shows, because a rounded or chosen output
hides it, operators tell that are known to compute over all samples (`onnx_operators.py`). A model that cannot be run on
made-up values runs one request at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ForebayError
from forebay.runtimes.encoder import Encoder
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
_SAME: Final = 1e-4
"""How far numbers may be apart, by the largest of them, that zeros behind a sample are to leave alone."""
_ALIKE: Final = 0.05
"""The same for a sample alone and one among copies of itself: libraries sum up in another order then, and a network
that is shown nonsense may make a per cent of that."""
_SCALES: Final = ((1.0, 1.0, 1.0), (1.0, -300.0, 1e-3))
"""What the numbers of the samples are multiplied with that are run together."""
_REPEATS: Final = 3
"""Runs on the same values, which tell how far a model that is not exact answers from itself."""
MAX_NUMBERS: Final = 1 << 22
"""Numbers of a sample that are made up: more of them are 16 MB, and little is gained where such share a run."""


class Sharing(msgspec.Struct, frozen=True):
    """How samples may share a run.

    Attributes:
        has_rows: Whether the first axis of all inputs and outputs counts samples.
        feeds: For each input the names of the axes of one sample that are padded, None for others.
        fetches: For each output likewise, those axes that are as long as a padded one.
        why_not: Why samples share no run although the file declares it; empty if they do, or if it does not. If the
            first axis counts samples all the same, they run one by one.
    """

    has_rows: bool = False
    feeds: dict[str, Axes] = {}
    fetches: dict[str, Axes] = {}
    why_not: str = ""

    @property
    def is_padded(self) -> bool:
        """Whether there is an axis to pad."""
        return any(name is not None for axes in self.feeds.values() for name in axes)


class SignaturePlan(msgspec.Struct, frozen=True):
    """How a signature of a model file is served.

    Attributes:
        signature: What it takes and gives.
        sharing: How samples share runs of it.
    """

    signature: Signature
    sharing: Sharing = Sharing()


def sharing_of(model: ModelFile) -> Sharing:
    """Find out how samples may share a run of a model."""
    signature = model.signature()
    if not _declares_rows(signature):
        return Sharing()
    if why_not := model.runtime.over_samples():
        return Sharing(why_not=why_not)
    tries = (_Try(model, sizes) for sizes in (*_SIZES, None))
    found = next((one for one in tries if one.is_possible), None)
    if found is None:
        return untried(signature, f"it cannot be run on values that are made up: {_Try(model, None).problem}")
    why_not = found.rows_differ()
    return Sharing(why_not=why_not) if why_not else found.padding()


def untried(signature: Signature, why: str) -> Sharing:
    """Return how a model is served that could not be tried: samples are what its file declares, and run alone."""
    return Sharing(has_rows=_declares_rows(signature), why_not=why)


class _Try:
    """A model and made-up values for it.

    Attributes:
        problem: Why it cannot be run on them; empty if it can be.

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
        self.problem = ""
        largest = max(math.prod(self._shape(var, 1)) for var in self._signature.feeds)
        if largest > MAX_NUMBERS:
            self.problem = f"a sample has {largest:,} numbers, and up to {MAX_NUMBERS:,} are tried"
        else:
            self._ask(self._made(1))
        self.is_possible = not self.problem

    def rows_differ(self) -> str:
        """Return why samples cannot share a run; empty if they can."""
        return next((why for scales in _SCALES if (why := self._rows_differ(scales))), "")

    def _rows_differ(self, scales: Sequence[float]) -> str:
        """Return how an answer changes with what is beside a sample; empty if none does."""
        samples = [self._made(1, scale=scale) for scale in scales]
        together = self._beside(samples)
        exact = _SAME if isinstance(self._model.runtime, Encoder) else 0.0  # which pads what is shorter
        if together is None:
            return f"it cannot be run on {_ROWS} samples: {self.problem}"
        for name, array in together.items():
            if array.shape[:1] != (_ROWS,):
                return f"its output '{name}' has the shape {list(array.shape)} for {_ROWS} samples"
        for row, sample in enumerate(samples):
            alone, alike = self._ask(sample), self._beside([sample] * _ROWS)
            for name, array in together.items():
                here = slice(row, row + 1)
                if alone is None or alike is None or array.shape != alike[name].shape:
                    return f"it cannot be run on copies of a sample: {self.problem or 'they have another shape'}"
                if self._equal(array[here], alike[name][here], exact) and self._equal(alone[name], array[here], _ALIKE):
                    continue
                if not self._wavers(name, sample, array[here], alike[name][here], alone[name]):
                    return f"its output '{name}' is another one for a sample that has others beside it"
        return ""

    def _wavers(self, name: str, sample: Mapping[str, Array], array: Array, alike: Array, alone: Array) -> bool:
        """Tell whether a model that answers otherwise from run to run does so by as much as its answers differ here."""
        again = [self._beside([sample] * _ROWS) for _ in range(_REPEATS)]
        rows = [run[name] for run in again if run is not None and run[name].shape[:1] == (_ROWS,)]
        every = [alike, *(run[at : at + 1] for run in rows for at in range(_ROWS))]
        if any(one.shape != array.shape for one in (alone, *every)):
            return False
        if array.dtype.kind not in "fc":
            return any(not self._equal(alike, one, 0.0) for one in every)
        apart = max(self._distance(alike, one) for one in every)
        return apart > 0 and max(self._distance(alike, array), self._distance(alike, alone)) <= 2 * apart

    def _distance(self, one: Array, two: Array) -> float:
        """Return how far numbers are apart at most; infinite where only one of two is a number."""
        with self._np.errstate(all="ignore"):
            apart = abs(self._np.subtract(one, two, dtype=self._np.float64))
        apart[(one == two) | ((one != one) & (two != two))] = 0.0  # noqa: PLR0124 - what is no number is unlike itself
        return float(self._np.nan_to_num(apart, nan=self._np.inf).max(initial=0.0))

    def _beside(self, samples: Sequence[Mapping[str, Array]]) -> dict[str, Array] | None:
        """Run the model on samples that are put together."""
        return self._ask({name: self._np.concatenate([one[name] for one in samples]) for name in samples[0]})

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
        answers: dict[str, list[Array]] = {}
        for sign in (1, -1):
            given = self._made(1, sign)
            longer = {name: self._longer(name, array, axis) for name, array in given.items()}
            can_be_longer = all(array is not None for array in longer.values())
            short, long = self._ask(given), self._ask(longer) if can_be_longer else None
            if short is None or long is None:
                return None
            ties: set[tuple[str, int]] = set()
            for name, array in short.items():
                answers.setdefault(name, []).append(array)
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
        return found if all(map(self._are_telling, answers.values())) else None

    def _are_telling(self, answers: Sequence[Array]) -> bool:
        """Tell whether unlike samples are answered otherwise: nonsense may bring a network to its limit."""
        one, two = answers
        return one.dtype.kind != "f" or not one.size or one.shape != two.shape or bool((one != two).any())

    def _longer(self, name: str, array: Array, axis: str) -> Any:
        """Return an input twice as long along an axis; None if it cannot be padded."""
        places = [at + 1 for at, one in enumerate(self._names[name]) if one == axis]
        if places and array.dtype.kind not in "biuf":
            return None
        return self._np.pad(array, [(0, size if at in places else 0) for at, size in enumerate(array.shape)])

    def _made(self, rows: int, sign: int = 0, scale: float = 1.0) -> dict[str, Array]:
        """Make values up: whole numbers are 0 and 1, which every table has; with the sign 1 they are 1, as masks are.

        Args:
            scale: What numbers are multiplied with; with a small one whole numbers are zeros behind the first, as those
                of a short text.
        """
        return {var.alias: self._values(var, self._shape(var, rows), sign, scale) for var in self._signature.feeds}

    def _shape(self, var: Var, rows: int) -> tuple[int, ...]:
        names = self._names[var.alias]
        sizes = [size if name is None else self._sizes[name] for name, size in zip(names, var.shape, strict=True)]
        return rows, *sizes

    def _values(self, var: Var, shape: tuple[int, ...], sign: int, scale: float) -> Array:
        if var.examples:
            return self._np.full(
                shape, var.examples[0 if scale == 1.0 else -1], object if var.dtype == "str" else var.dtype
            )
        if var.dtype == "str":
            return self._np.full(shape, "a" if scale == 1.0 else "b c", object)
        if self._np.dtype(var.dtype).kind == "f":
            found = self._random.uniform(0.5, 1.5, shape) * sign if sign else self._random.standard_normal(shape)
            return (found * scale).astype(var.dtype)
        if abs(scale) < 1:
            found = self._np.zeros(shape, var.dtype)
        elif sign > 0 or scale < 0:
            found = self._np.ones(shape, var.dtype)
        else:
            found = self._random.integers(0, 2, shape).astype(var.dtype)
        if found.size:
            found.reshape(shape[0], -1)[:, 0] = 1  # a mask that hides everything leaves nothing to compare
        return found

    def _ask(self, arrays: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run the model; None if it cannot be, and `problem` says why."""
        feed = [(var, Value(arrays[var.alias])) for var in self._signature.feeds]
        try:
            values = self._model.run(feed, self._signature.fetches)
        except ForebayError as error:
            self.problem = " ".join(error.message.split())
            return None
        return {var.alias: value.array for var, value in zip(self._signature.fetches, values, strict=True)}

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
