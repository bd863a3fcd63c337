# SPDX-License-Identifier: Apache-2.0
"""Pad samples of different lengths to one shape, and cut each result back to the length of its sample.

`Pad` is a value of the model class. Two sides use it: the front asks for the bucket of a sample (`key_of`, in plain
Python because it runs on the loop). The worker measures each sample by itself, so that one that does not fit fails
alone, and puts those that can run together into one array per field (`together`). Only the worker imports numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar, cast

import msgspec

from forebay.errors import BadOutcome, ConfigError, ValidationError
from forebay.serving.models.fields import BARE, field_of, fields_of_type, kind_of, with_fields
from forebay.types.call import Failure
from forebay.types.did_you_mean import listed, meant
from forebay.types.plurals import counted

S = TypeVar("S")

Axes: TypeAlias = tuple[str | None, ...]

_NUMBERS: Final = "biufc"  # kinds of numpy: bool, integers, floats, complex


class Padded(list[S], Generic[S]):
    """A batch after padding: the list of its samples, all of equal shape now, and the same samples stacked.

    Attributes:
        arrays: The padded fields by name, each of shape `(samples, ...)`. What stands in the samples are rows of
            these, not copies. Samples without fields have one array, named "".
        lengths: For each named axis how long it was in each sample: an integer array of shape `(samples,)`.
        sizes: For each named axis how long it is now.
    """

    arrays: dict[str, Any]
    lengths: dict[str, Any]
    sizes: dict[str, int]

    @property
    def array(self) -> Any:
        """The stacked array of a batch that has only one, of shape `(samples, ...)`."""
        (only,) = self.arrays.values()
        return only

    def mask(self, axis: str | None = None) -> Any:
        """Return where the samples are and where padding is.

        Args:
            axis: Name of the axis; it may be left out where there is only one.

        Returns:
            A bool array of shape `(samples, size of the axis)`, True where something was before padding.

        Raises:
            KeyError: If there is no such axis, or several and none was named.
        """
        import numpy as np

        if axis is None and len(self.sizes) == 1:
            (axis,) = self.sizes
        if axis not in self.sizes:
            found = "no name was given" if axis is None else f"there is no axis '{axis}'"
            raise KeyError(f"{found}; the padded axes are {listed(self.sizes)}")
        return np.arange(self.sizes[axis]) < self.lengths[axis][:, None]


class Measured(msgspec.Struct, frozen=True, eq=False):
    """One sample with its fields as arrays and the lengths of its named axes."""

    sample: Any
    arrays: Mapping[str, Any]
    lengths: Mapping[str, int]


@dataclass(frozen=True)
class Pad:
    """Which fields of a sample are padded, along which axes, and what for.

    Named axes are padded to the longest of the batch, or to the smallest of their `buckets` that holds it. The same
    name stands for the same length: fields that share it must agree within a sample.

        pad = Pad({"ids": ("length",), "types": ("length",)}, buckets={"length": [16, 32, 64, 128]})
        pad = Pad((None, "height", "width"))  # the sample itself is an array, its first axis is left alone

    Attributes:
        axes: For each padded field the names of its axes from the first on, None for one that is left as it is; axes
            beyond those named are left as well. A tuple alone if the sample is an array and has no fields.
        value: What is filled in: one number, or one for each field.
        buckets: Sizes an axis may be padded to, by the name of the axis. A sample that is longer than the largest is
            refused. Without a `batch_key` of the model, only samples of the same buckets share a batch.
        outputs: Which fields of a result have padded axes, written like `axes`: they are cut back to the sample's own
            length. A tuple alone if the result is an array or list and has no fields.

    Raises:
        ConfigError: If these do not fit together.
    """

    axes: Mapping[str, Sequence[str | None]] | Sequence[str | None]
    value: float | Mapping[str, float] = field(default=0, kw_only=True)
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]], kw_only=True)
    outputs: Mapping[str, Sequence[str | None]] | Sequence[str | None] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Check, and bring `axes` and `outputs` into the form with fields."""
        axes, outputs = _checked_axes("axes", self.axes), _checked_axes("outputs", self.outputs)
        names = _names(axes)
        if not names:
            raise ConfigError("Pad: axes names no axis; write for example {'ids': ('length',)}")
        _require_known("outputs", _names(outputs), names, "axis")
        _check_value(self.value, axes)
        buckets = _checked_buckets(self.buckets, names)
        for name, made in (("axes", axes), ("outputs", outputs), ("buckets", buckets)):
            object.__setattr__(self, name, made)

    def __call__(self, samples: Iterable[S]) -> Padded[S]:
        """Pad a batch of at least one sample, as a worker does before `predict`.

        Raises:
            ValidationError: If a sample has no such field, is not an array of numbers, is longer than any bucket or
                differs from the others in an axis that has no name.
        """
        measured = [self.measure(sample) for sample in samples]
        if len(self.alike(measured)) > 1:
            raise ValidationError("the samples cannot be stacked: they differ in an axis that has no name")
        return self.together(measured)

    def key_of(self, sample: Any) -> tuple[int, ...]:
        """Return the buckets of a sample, one for each axis that has buckets; needs no numpy.

        Raises:
            ValidationError: If the sample is longer than the largest bucket, or has no such field or axis.
        """
        lengths: dict[str, int] = {}
        for name, axes in self._axes.items():
            value: Any = _field(sample, name)
            for place, axis in enumerate(axes):
                size = _length(value, name)
                if axis is not None and axis in self.buckets:
                    lengths[axis] = max(size, lengths.get(axis, 0))
                if place + 1 < len(axes):
                    value = value[0] if size else []
        return tuple([self._target(axis, lengths[axis]) for axis in self.buckets])

    def measure(self, sample: Any) -> Measured:
        """Read the fields of one sample as arrays.

        Raises:
            ValidationError: If the sample has no such field, is not an array of numbers or is longer than any bucket.
        """
        arrays: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        first: dict[str, str] = {}
        for name, axes in self._axes.items():
            array = arrays[name] = self._array(_field(sample, name), name)
            if array.ndim < len(axes):
                _refuse(name, f"expected {counted(len(axes), 'axis', 'axes')}, got {array.ndim}")
            for axis, size in zip(axes, array.shape, strict=False):
                if axis is None:
                    continue
                if lengths.setdefault(axis, size) != size:
                    _refuse(
                        name, f"its {axis} is {size}, that of '{first[axis]}' is {lengths[axis]}; they must be equal"
                    )
                first.setdefault(axis, name)
        for axis in self.buckets:
            self._target(axis, lengths[axis])
        return Measured(sample, arrays, lengths)

    def alike(self, samples: Sequence[Measured], *, in_buckets: bool = False) -> list[list[int]]:
        """Return the places of the samples that can be stacked: those whose axes without a name are of equal size.

        Args:
            in_buckets: Keep samples of unlike buckets apart.
        """
        shapes: list[Any] = [
            [
                tuple(size if axis is None else -1 for axis, size in _named(axes, one.arrays[name].shape))
                for name, axes in self._axes.items()
            ]
            for one in samples
        ]
        if in_buckets:
            for shape, one in zip(shapes, samples, strict=True):
                shape.append(tuple([self._target(axis, one.lengths[axis]) for axis in self.buckets]))
        if all(shape == shapes[0] for shape in shapes):
            return [list(range(len(samples)))]
        places = sorted(range(len(samples)), key=shapes.__getitem__)
        return [list(group) for _, group in groupby(places, key=shapes.__getitem__)]

    def together(self, samples: Sequence[Measured]) -> Padded[Any]:
        """Stack samples that are alike; at least one."""
        import numpy as np

        lengths = {axis: np.array([one.lengths[axis] for one in samples]) for axis in samples[0].lengths}
        sizes = {axis: self._target(axis, int(found.max())) for axis, found in lengths.items()}
        arrays: dict[str, Any] = {}
        for name, axes in self._axes.items():
            column = [one.arrays[name] for one in samples]
            shape = [size if axis is None else sizes[axis] for axis, size in _named(axes, column[0].shape)]
            dtype = np.result_type(*{array.dtype for array in column})
            stacked = arrays[name] = np.full((len(column), *shape), self._value(name), dtype)
            for row, array in zip(stacked, column, strict=True):
                row[tuple(map(slice, array.shape))] = array
        rows = zip(*arrays.values(), strict=True)
        padded: Padded[Any] = Padded(
            with_fields(one.sample, dict(zip(arrays, row, strict=True))) for one, row in zip(samples, rows, strict=True)
        )
        padded.arrays, padded.lengths, padded.sizes = arrays, lengths, sizes
        return padded

    def sizes(self, samples: Sequence[Measured]) -> list[float]:
        """Return what each of some samples that are stacked causes: its size, and the longest ones the padding."""
        most = {axis: max(one.lengths[axis] for one in samples) for axis in samples[0].lengths}
        own: list[float] = [
            math.prod(self._target(axis, length) for axis, length in one.lengths.items()) for one in samples
        ]
        setters = [place for place, one in enumerate(samples) if any(one.lengths[axis] == most[axis] for axis in most)]
        padding = len(own) * math.prod(self._target(axis, size) for axis, size in most.items()) - sum(own)
        for place in setters:
            own[place] += padding / len(setters)
        return own if sum(own) else [1.0] * len(own)

    def undo(self, batch: Padded[Any], results: Sequence[Any]) -> list[Any]:
        """Cut the padding off the results of a padded batch, in order.

        Returns:
            The results, cut; in place of one whose `outputs` are not of the padded size, a `BadOutcome`. Results that
            are errors stay what they are.
        """
        if not self.outputs:
            return list(results)
        undone: list[Any] = []
        for place, result in enumerate(results):
            lengths = {axis: int(found[place]) for axis, found in batch.lengths.items()}
            undone.append(self._cut(result, lengths, batch.sizes))
        return undone

    def require_fields(self, place: str, annotation: Any) -> None:
        """Check that samples of this type have the fields, as far as the type tells.

        Raises:
            ConfigError: Naming the place, the field and the nearest that exists.
        """
        known = fields_of_type(annotation)
        for name in self._axes:
            if known is None or name in known:
                continue
            pads = f"pads the field '{name}'" if name else "pads samples that are arrays"
            there_is = f"have {listed(known)}" if known != [BARE] else "have no fields"
            did_you_mean = meant(name, known)
            raise ConfigError(f"{place} {pads}, samples of the type `{annotation.__name__}` {there_is}{did_you_mean}")

    @property
    def _axes(self) -> Mapping[str, Axes]:
        return cast("Mapping[str, Axes]", self.axes)

    def _value(self, name: str) -> float:
        return self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value

    def _target(self, axis: str, length: int) -> int:
        """Return what a length is padded to."""
        sizes = self.buckets.get(axis)
        if sizes is None:
            return length
        for size in sizes:
            if length <= size:
                return size
        name = next(name for name, axes in self._axes.items() if axis in axes)
        return _refuse(name, f"expected {axis} <= {sizes[-1]}, got {length}")

    def _array(self, value: Any, name: str) -> Any:
        import numpy as np

        try:
            array: Any = np.asarray(value)
        except (ValueError, TypeError, OverflowError) as error:
            return _refuse(name, f"expected an array: {error}")
        if array.dtype.kind not in _NUMBERS and array.size:
            odd = (kind_of(one) for one in array.flat if not isinstance(one, int | float))
            found = next(odd, "a number beyond 64 bits")
            return _refuse(name, f"expected an array of numbers, got {found} in it")
        if not array.size and not hasattr(value, "dtype"):  # an empty list is of no type, numpy takes it for floats
            array = array.astype(np.asarray(self._value(name)).dtype)
        return array

    def _cut(self, result: Any, lengths: Mapping[str, int], sizes: Mapping[str, int]) -> Any:
        if isinstance(result, Exception | Failure):
            return result
        cut: dict[str, Any] = {}
        try:
            for name, axes in cast("Mapping[str, Axes]", self.outputs).items():
                marked = [None if axis is None else (axis, lengths[axis], sizes[axis]) for axis in axes]
                cut[name] = _cut(field_of(result, name), marked)
            return with_fields(result, cut)
        except (LookupError, TypeError, ValueError) as error:
            return BadOutcome(f"the padding of a result cannot be undone: {error}")


def require_numpy(place: str) -> None:
    """Load numpy, before the first sample needs it; raises a `ConfigError` if it is not installed."""
    try:
        import numpy as np  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        raise ConfigError(f"{place} needs numpy where the model runs; install it there: pip install numpy") from error


def _named(axes: Axes, shape: Sequence[int]) -> list[tuple[str | None, int]]:
    """Return the name and size of each axis of an array."""
    return list(zip((*axes, *[None] * (len(shape) - len(axes))), shape, strict=True))


def _names(fields: Mapping[str, Axes]) -> list[str]:
    return [axis for axes in fields.values() for axis in axes if axis is not None]


def _checked_axes(what: str, given: Any) -> dict[str, Axes]:
    fields: Mapping[Any, Any] = cast("Mapping[Any, Any]", given) if isinstance(given, Mapping) else {BARE: given}
    made: dict[str, Axes] = {}
    for name, axes in fields.items():
        if not isinstance(name, str):
            raise ConfigError(f"Pad: {what}: expected the name of a field, got {name!r}")
        of = f" of '{name}'" if name else ""
        if not isinstance(axes, list | tuple):
            written = f"({axes!r},)" if isinstance(axes, str) else "('length',)"
            raise ConfigError(f"Pad: {what}{of}: expected a tuple of names such as {written}, got {axes!r}")
        for axis in cast("Sequence[Any]", axes):
            if axis is not None and not (isinstance(axis, str) and axis):
                raise ConfigError(f"Pad: {what}{of}: expected the name of an axis, or None to leave it, got {axis!r}")
        if axes:
            made[name] = tuple(cast("Sequence[str | None]", axes))
    return made


def _check_value(value: Any, fields: Iterable[str]) -> None:
    each: Mapping[Any, Any] = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
    _require_known("value", each, fields, "field")
    for one in each.values() if isinstance(value, Mapping) else (value,):
        if not isinstance(one, int | float):
            raise ConfigError(f"Pad: value: expected a number, or a number for each field, got {one!r}")


def _checked_buckets(buckets: Any, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    if not isinstance(buckets, Mapping):
        raise ConfigError(f"Pad: buckets: expected sizes for each axis such as {{'length': [16, 32]}}, got {buckets!r}")
    made: dict[str, tuple[int, ...]] = {}
    each = cast("Mapping[Any, Any]", buckets)
    _require_known("buckets", each, names, "axis")
    for name, given in each.items():
        sizes = cast("Sequence[Any]", given) if isinstance(given, Sequence) else ()
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(f"Pad: buckets of '{name}': expected a list of whole numbers >= 1, got {given!r}")
        made[name] = tuple(sorted(set(sizes)))
    return made


def _require_known(what: str, given: Iterable[Any], known: Iterable[str], kind: str) -> None:
    known = list(dict.fromkeys(known))
    for name in given:
        if name not in known:
            did_you_mean = meant(str(name), known)
            raise ConfigError(f"Pad: {what} names the {kind} {name!r}, there is {listed(known)}{did_you_mean}")


def _refuse(name: str, why: str) -> NoReturn:
    """Refuse a sample for one of its fields, by a `ValidationError`."""
    shown, path = (f"'{name}'", f"$.{name}") if name else ("the sample", "$")
    raise ValidationError(f"{shown} cannot be padded: {why} - at `{path}`", detail={"path": path})


def _field(sample: Any, name: str) -> Any:
    try:
        return field_of(sample, name)
    except LookupError as error:
        return _refuse(name, str(error))


def _length(value: Any, name: str) -> int:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return _refuse(name, f"expected an array, got {kind_of(cast('Any', value))}")
    return len(value)


def _cut(value: Any, axes: Sequence[tuple[str, int, int] | None]) -> Any:
    """Cut nested lists or an array along their first axes, each (name, own length, padded size) or None to leave it.

    Raises:
        ValueError: If an axis is not of the padded size. TypeError: If it is not there.
    """
    if not axes:
        return value
    if hasattr(value, "shape"):
        if len(value.shape) < len(axes):
            raise ValueError(f"it has {len(value.shape)} axes, `outputs` names {len(axes)}")
        for axis, size in zip(axes, value.shape, strict=False):
            _require_padded(axis, size)
        return value[tuple(slice(None if axis is None else axis[1]) for axis in axes)]
    axis, rest = axes[0], axes[1:]
    _require_padded(axis, len(value))
    kept = value if axis is None else value[: axis[1]]
    return [_cut(inner, rest) for inner in kept] if rest else kept


def _require_padded(axis: tuple[str, int, int] | None, size: int) -> None:
    if axis is not None and size != axis[2]:
        msg = f"its {axis[0]} is {size}, that of the batch is {axis[2]}; return all of it, or name it not in `outputs`"
        raise ValueError(msg)
