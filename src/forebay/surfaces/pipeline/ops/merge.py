# SPDX-License-Identifier: Apache-2.0
"""Samples that share a call of the model: stacked before it, cut apart after it.

Arrays are joined along their first axis, so samples may have several rows. Where `x` comes with `x.lod`, the offsets
say which rows of `x` are one sequence, and a sample has as many rows as it has sequences. What cannot be joined without
losing something is not joined: the sample then has a call of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from forebay.types.plurals import counted
from forebay.workers.user_calls.user_code import caught

LOD: Final = ".lod"
"""Ends the name of the offsets that belong to an array."""


class Group(msgspec.Struct):
    """Samples that share a call.

    Attributes:
        members: Their places in the batch.
        feed: What the model is given.
        rows: How many rows each has; empty for a sample on its own, whose result is handed on as it is.
    """

    members: list[int]
    feed: dict[str, Any]
    rows: list[int]


def grouped(samples: Sequence[dict[str, Any]]) -> list[Group]:
    """Decide which samples share a call, in the order in which the first of each group came."""
    together: list[list[int]] = []
    by_form: dict[Hashable, list[list[int]]] = {}
    rows: dict[int, int] = {}
    for place, sample in enumerate(samples):
        count = _rows_of(sample) if len(samples) > 1 else None
        if count is None:
            together.append([place])
            continue
        rows[place] = count
        alike = by_form.setdefault(_form_of(sample), [])
        members = next((found for found in alike if _same_options(samples[found[0]], sample)), None)
        if members is None:
            members = list[int]()
            alike.append(members)
            together.append(members)
        members.append(place)
    return [
        Group(members, _joined([samples[place] for place in members]), [rows[place] for place in members])
        if len(members) > 1
        else Group(members, samples[members[0]], [])
        for members in together
    ]


def split(result: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Cut a result apart by the rows of the samples; values without rows go to each of them.

    Raises:
        ValueError: If it is not a dict, or its number of rows differs from that of the samples.
    """
    if not isinstance(result, dict):
        needed = f"{len(rows)} samples; expected a dict of arrays with a row each"
        raise ValueError(f"process returned {type(result).__name__} for {needed}")  # noqa: TRY004 - as for all misfits
    found = cast("dict[str, Any]", result)
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    bounds = list(itertools.pairwise(starts))
    shares: list[dict[str, Any]] = [{} for _ in rows]
    for name, value in found.items():
        offsets = found.get(f"{name}{LOD}")
        if offsets is not None:
            _require(f"{name}{LOD}", len(offsets), starts[-1] + 1)
            for share, (start, end) in zip(shares, bounds, strict=True):
                share[name] = value[offsets[start] : offsets[end]]
                shifted = [int(offset) - int(offsets[start]) for offset in offsets[start : end + 1]]
                share[f"{name}{LOD}"] = _like(offsets, shifted)
        elif _is_lod(name, found):
            continue
        elif _has_rows(value):
            _require(name, len(value), starts[-1])
            for share, (start, end) in zip(shares, bounds, strict=True):
                share[name] = value[start:end]
        else:
            for share in shares:
                share[name] = value
    return shares


def one_each(result: Any, count: int) -> list[Any]:
    """Cut apart the result of a list of samples: an element each, without the axis of the batch.

    Raises:
        ValueError: If it does not have one for each.
    """
    if isinstance(result, list):
        found = cast("list[Any]", result)
        _require("the list", len(found), count)
        return found
    return [
        {
            name: value[0] if _has_rows(value) and f"{name}{LOD}" not in share and not _is_lod(name, share) else value
            for name, value in share.items()
        }
        for share in split(result, [1] * count)
    ]


def _require(name: str, found: int, needed: int) -> None:
    if found != needed:
        raise ValueError(f"process returned {counted(found, 'row')} as '{name}', the batch needs {needed}")


def _rows_of(sample: Mapping[str, Any]) -> int | None:
    """Return how many rows a sample has; None if it can share no call.

    That is so if its values do not agree, and if it has a list with an element for each row, which nobody joins.
    """
    counts: set[int] = set()
    lengths: set[int] = set()
    for name, value in sample.items():
        if not isinstance(cast("object", name), str):
            return None
        if _is_lod(name, sample):
            if _offsets(value) is None:
                return None
        elif _is_stackable(value):
            offsets = _offsets(sample.get(name + LOD))
            counts.add(len(value) if offsets is None else len(offsets) - 1)
        elif isinstance(value, (list, tuple)):
            lengths.add(len(cast("Sequence[Any]", value)))
    return counts.pop() if len(counts) == 1 and lengths.isdisjoint(counts) else None


def _form_of(sample: Mapping[str, Any]) -> Hashable:
    """Return what samples must have in common: names, and the dtypes and the shapes after the first axis of arrays."""
    form: list[Hashable] = []
    for name in sorted(sample):
        value = sample[name]
        if _is_stackable(value) and not _is_lod(name, sample):
            kind = value.dtype.kind
            # Texts differ in their longest one only; the joined array has room for the longest of all.
            form.append((name, kind if kind in "US" else value.dtype, value.shape[1:]))
        else:
            form.append((name, _is_lod(name, sample)))
    return tuple(form)


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(
        _is_stackable(value) or _is_lod(name, one) or _is_equal(value, other[name]) for name, value in one.items()
    )


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # The values are the user's: arrays inside, say, cannot be compared like this.
    is_equal, _ = caught(lambda: type(one) is type(other) and bool(one == other))
    return is_equal is True


def _joined(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import numpy as np

    first = samples[0]
    feed: dict[str, Any] = {}
    for name, value in first.items():
        if _is_lod(name, first):
            feed[name] = _joined_offsets([sample[name] for sample in samples])
        elif _is_stackable(value):
            feed[name] = np.concatenate([sample[name] for sample in samples])
        else:
            feed[name] = value
    return feed


def _joined_offsets(parts: Sequence[Any]) -> Any:
    joined = [int(parts[0][0])]
    for part in parts:
        joined += [joined[-1] + int(offset) - int(part[0]) for offset in part[1:]]
    return _like(parts[0], joined)


def _like(model: Any, values: list[int]) -> Any:
    if isinstance(model, list):
        return values
    import numpy as np

    return np.array(values, dtype=model.dtype)


def _is_lod(name: str, sample: Mapping[str, Any]) -> bool:
    return str(name).endswith(LOD) and name.removesuffix(LOD) in sample


def _offsets(value: Any) -> Sequence[int] | None:
    """Return offsets of one level; None for anything else, deeper levels included."""
    if isinstance(value, list):
        found = cast("list[Any]", value)
        return found if found and all(isinstance(one, int) for one in found) else None
    is_flat = _is_stackable(value) and value.ndim == 1 and len(value) > 0
    return value if is_flat and value.dtype.kind in "iu" else None


def _is_stackable(value: Any) -> bool:
    """Tell whether something is an array with a first axis, and of no subclass whose additions joining would lose."""
    import numpy as np

    return type(value) is np.ndarray and value.ndim > 0


def _has_rows(value: Any) -> bool:
    import numpy as np

    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)
