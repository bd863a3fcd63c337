# SPDX-License-Identifier: Apache-2.0
"""What a model takes and gives: names, types and shapes, and the checks of a call against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import ConfigError, ForebayError, InvalidRequest, ValidationError
from forebay.types.datatypes import DATATYPES
from forebay.types.did_you_mean import nearest
from forebay.types.plurals import counted

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

LOD: Final = ".lod"
"""Behind a name: where the sequences of that array begin, and the last one ends."""


class Value(msgspec.Struct, frozen=True, eq=False):
    """An array and, if it holds sequences of several lengths, where they begin and end.

    Attributes:
        lod: Offsets along the first axis, from 0 to its length; None for an ordinary array.
    """

    array: Array
    lod: Array | None = None


class Var(msgspec.Struct, frozen=True):
    """One input or output.

    Attributes:
        name: What the model calls it.
        alias: What those who ask call it.
        datatype: Its type; None where it is not known or none of ours, and arrays go as they are.
        shape: One sample, that is without the first axis, -1 for an axis of any length; empty where it is not known.
        is_lod: Whether it is sequences of several lengths.
        synonyms: Other names the model has for it.
        rows: Length of the first axis, -1 for any; None where there is none, or where it is not known.
        axes: What the file calls its axes, the first one included; "" for one without a name, none where it names none.
        type: What the file or the server calls its type, for messages.
        is_scalar: Whether it is known to have no axes at all.
        tensor: What a SavedModel's graph calls it.
        examples: Elements that the model is known to take, where it does not take any.
        max_characters: The longest text; 0 where the model takes any, and bytes that are not text.
        is_nullable: Whether null is an element as well, a missing value; in arrays of numbers that is NaN.
    """

    name: str
    alias: str
    datatype: str | None = None
    shape: tuple[int, ...] = ()
    is_lod: bool = False
    synonyms: tuple[str, ...] = ()
    rows: int | None = None
    axes: tuple[str, ...] = ()
    type: str = ""
    is_scalar: bool = False
    tensor: str = ""
    examples: tuple[str | float, ...] = ()
    max_characters: int = 0
    is_nullable: bool = False

    @property
    def dtype(self) -> str | None:
        """NumPy's name of its type; "str" for texts."""
        return None if self.datatype is None else DATATYPES[self.datatype].numpy


Feed = Sequence[tuple[Var, Value]]
"""What a model is given: all of its inputs, in the order of its signature."""


class Signature(msgspec.Struct, frozen=True):
    """What a model takes and gives; `speaks` is the path of OpenAI's protocol that asks for this, if there is one."""

    feeds: tuple[Var, ...]
    fetches: tuple[Var, ...]
    speaks: str = ""

    def bound(self, file: Signature) -> Signature:
        """Return this with the names that a model file has: by its names, else by the aliases, else by position.

        Raises:
            ConfigError: If there are more than the file has.
        """
        return Signature(_bound(self.feeds, file.feeds, "inputs"), _bound(self.fetches, file.fetches, "outputs"))

    def as_in(self, file: Signature) -> Signature:
        """Return what a model file says of these, under their aliases."""
        return Signature(_as_in(self.feeds, file.feeds), _as_in(self.fetches, file.fetches))

    def different(self, other: Signature) -> str | None:
        """Return what would be different for callers of this one if another took its place; None if nothing would.

        It must take and give the same names with the same types, as far as these are known, and take the same shapes.
        """
        return _different("takes", self.feeds, other.feeds) or _different("gives", self.fetches, other.fetches)

    def fed(self, feed: Mapping[str, Any], *, batch: bool) -> list[tuple[Var, Value]]:
        """Check what a model is given and cast it to the declared types.

        Args:
            feed: Arrays by alias, and offsets by alias and `LOD`.
            batch: Whether the first axis counts samples; otherwise it is put before each array.

        Raises:
            InvalidRequest: If the names are not the model's, or offsets do not fit.
            ValidationError: If a value is not an array of the declared type.
        """
        known = {var.alias for var in self.feeds}
        lods = {alias + LOD for alias in known} - known
        given = set(feed) - lods
        if given != known:
            raise _mismatch("is fed", given, known)
        return [(var, _cast(var, feed[var.alias], feed.get(var.alias + LOD), batch=batch)) for var in self.feeds]

    def fetched(self, names: Sequence[str]) -> list[Var]:
        """Return the outputs of these aliases; all of them for none.

        Raises:
            InvalidRequest: If the model has no such output.
        """
        if not names:
            return list(self.fetches)
        known = {var.alias: var for var in self.fetches}
        if not known.keys() >= set(names):
            raise _mismatch("is asked for", set(names), set(known))
        return [known[name] for name in names]


def named(fetches: Sequence[Var], values: Sequence[Value]) -> dict[str, Any]:
    """Return outputs by their aliases; beside one of sequences its offsets, by its alias and `LOD`."""
    answer: dict[str, Array] = {}
    for var, value in zip(fetches, values, strict=True):
        answer[var.alias] = value.array
        if value.lod is not None:
            answer[var.alias + LOD] = value.lod
    return answer


def rows_and_sample(shape: Sequence[int] | None) -> tuple[int | None, tuple[int, ...]]:
    """Take a shape apart into its first axis, which counts samples, and the shape of one; -1 for any length."""
    return (shape[0], tuple(shape[1:])) if shape else (None, ())


def one_feed(feed: Any, *, batch: bool) -> tuple[Mapping[str, Any], bool]:
    """Return what a model is fed as one mapping, and whether its arrays have an axis of samples.

    Args:
        feed: A mapping, or a list of them, one a sample, which are put together along the first axis.
        batch: Whether arrays have an axis of samples already.

    Raises:
        ValidationError: If it is neither.
        InvalidRequest: If the samples of a list cannot be put together.
    """
    if isinstance(feed, Mapping):
        return cast("Mapping[str, Any]", feed), batch
    if (
        not isinstance(feed, (list, tuple))
        or not feed
        or not all(isinstance(one, Mapping) for one in cast("Any", feed))
    ):
        kind = type(cast("object", feed)).__name__
        raise ValidationError(f"a model is fed a dict of arrays, or a list of such dicts, and {kind} came")
    samples = cast("Sequence[Mapping[str, Any]]", feed)
    if len(samples) == 1:
        return samples[0], batch
    try:
        return {name: _joined(samples, name, batch=batch) for name in samples[0]}, True
    except (KeyError, ValueError, TypeError, IndexError) as problem:
        raise InvalidRequest(f"{len(samples)} samples do not fit together: {problem}; feed them one by one") from None


def _bound(described: tuple[Var, ...], file: tuple[Var, ...], what: str) -> tuple[Var, ...]:
    known = {name for var in file for name in (var.name, *var.synonyms)}
    if any(var.name in known for var in described):
        names = [var.name for var in described]
    elif all(var.alias in known for var in described):
        names = [var.alias for var in described]
    elif len(described) <= len(file):
        names = [var.name for var in file[: len(described)]]
    else:
        msg = f"the description has {len(described)} {what}, and the model only {len(file)}: {', '.join(sorted(known))}"
        raise ConfigError(msg)
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"the description names the {what} {', '.join(missing)}, and the model has only {', '.join(sorted(known))}"
        )
    return tuple(msgspec.structs.replace(var, name=name) for var, name in zip(described, names, strict=True))


def _as_in(described: tuple[Var, ...], file: tuple[Var, ...]) -> tuple[Var, ...]:
    known = {name: var for var in file for name in (var.name, *var.synonyms)}
    return tuple(msgspec.structs.replace(known[var.name], alias=var.alias, tensor=var.tensor) for var in described)


def _different(does: str, ours: tuple[Var, ...], theirs: tuple[Var, ...]) -> str | None:
    known = {var.alias: var for var in theirs}
    if known.keys() != {var.alias for var in ours}:
        return f"it {does} {', '.join(sorted(known))} instead of {', '.join(sorted(var.alias for var in ours))}"
    for our in ours:
        their = known[our.alias]
        if None not in {our.datatype, their.datatype} and our.datatype != their.datatype:
            named = [DATATYPES[var.datatype].numpy if var.datatype else "" for var in (their, our)]
            return f"it {does} '{our.alias}' as {' instead of '.join(named)}"
        if our.is_lod != their.is_lod:
            return f"it {does} '{our.alias}' {'with' if their.is_lod else 'without'} the offsets of sequences"
        if does == "takes" and not _fits(our.shape, their.shape):
            return f"it takes '{our.alias}' of the shape {list(their.shape)} instead of {list(our.shape)}"
    return None


def _fits(our: tuple[int, ...], their: tuple[int, ...]) -> bool:
    """Tell whether all samples of our shape are samples of theirs."""
    if not our or not their:  # one of them is not known
        return True
    return len(our) == len(their) and all(to in {-1, axis} for axis, to in zip(our, their, strict=True))


def _joined(samples: Sequence[Mapping[str, Any]], name: str, *, batch: bool) -> Array:
    import numpy as np

    parts: list[Array] = [np.asarray(sample[name]) for sample in samples]
    if name.endswith(LOD) and name.removesuffix(LOD) in samples[0]:
        ends = np.cumsum([part.ravel()[-1] for part in parts])
        return np.concatenate(
            [parts[0].ravel(), *(part.ravel()[1:] + end for part, end in zip(parts[1:], ends, strict=False))]
        )
    return np.concatenate(parts) if batch or name + LOD in samples[0] else np.stack(parts)


def _cast(var: Var, value: Any, lod: Any, *, batch: bool) -> Value:
    import numpy as np

    if not isinstance(value, (np.ndarray, np.generic)):
        kind = type(value).__name__
        raise ValidationError(f"feed '{var.alias}' is {kind}; a model is fed NumPy arrays: numpy.array(...)")
    array: Array = np.asarray(cast("Any", value))
    try:
        if var.dtype not in {None, "str"}:
            array = array.astype(var.dtype, copy=False)
    except (ValueError, TypeError):
        text = f"feed '{var.alias}' is an array of {array.dtype}, which cannot be made {var.dtype}"
        raise ValidationError(text) from None
    if not batch and lod is None and not var.is_lod:
        array = array[np.newaxis]
    return Value(array, None if lod is None else _offsets(var.alias, lod, len(array) if array.ndim else 0))


def _offsets(alias: str, lod: Any, rows: int) -> Array:
    import numpy as np

    try:
        offsets = np.asarray(lod, dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        offsets = np.empty((0, 0), np.int64)
    offsets = offsets[0] if offsets.ndim == 2 and len(offsets) == 1 else offsets
    rises = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    if not rises or offsets[-1] != rows:
        wanted = f"offsets that rise from 0 to the {counted(rows, 'row')} of '{alias}'"
        raise InvalidRequest(f"'{alias}{LOD}' must be {wanted}")
    return offsets


def _mismatch(does: str, given: set[str], known: set[str]) -> ForebayError:
    wrong, missing = sorted(map(str, given - known)), sorted(known - given)
    text = f"the model {does} {', '.join(sorted(map(str, given))) or 'nothing'}, and has {', '.join(sorted(known))}"
    hint = nearest(wrong[0], missing or known) if wrong else None
    return InvalidRequest(f"{text}; did you mean '{hint}'?" if hint else text)
