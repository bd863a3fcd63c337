# SPDX-License-Identifier: Apache-2.0
"""What `predict` is asked in JSON: rows (`instances`) or columns (`inputs`), as samples or as tensors.

Nothing here asks how long a body is: all is read in steps (`types/element_limits.py`), and a short one has few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.tfserving.json_tensors import SAMPLE_BYTES, is_b64, tensor_in_lists
from forebay.protocols.tfserving.odd_numbers import holds, with_marks
from forebay.types.first_use import known
from forebay.types.json_segments import StepPace, elements, joined, members

if TYPE_CHECKING:
    from forebay.serving.tensor_face import TensorFace
    from forebay.types.element_limits import Data, Steps
    from forebay.types.tensor import Tensor

MAX_INPUTS: Final = 4096
"""Names of one row, or of columns; each is a step of Python, on the loop."""
MAX_NAMES: Final = 200_000
"""Names of all rows together."""

_NO_PREDICT: Final = 'body: expected {"instances": [...]} or {"inputs": ...}'
_NULL: Final = memoryview(b"null")
_NOTHING: Final = memoryview(b"")


class PredictBody(msgspec.Struct, frozen=True):
    """What `predict` is asked: one of rows and columns, unread.

    Attributes:
        rows: The rows; None for columns.
        value: The array of rows, or the columns.
        signature: The name of the signature; empty without one.
        is_odd: Whether it has NaN or infinities, which only tensors can hold.
    """

    rows: list[memoryview] | None
    value: memoryview
    signature: str
    is_odd: bool


class _Signature(msgspec.Struct):
    signature_name: str = ""


_signature: Final = msgspec.json.Decoder(known(_Signature))


def read_predict(body: Data, limit: int, *, is_odd: bool = False) -> Steps[PredictBody]:
    """Read what `predict` is asked.

    Args:
        limit: The most rows that are wanted.
        is_odd: Whether its odd numbers are marked.

    Raises:
        InvalidRequest: If it is neither rows nor columns, or both.
        TooLarge: If it has more rows.
    """
    marked = None
    try:
        return (yield from _read(body, limit, is_odd=is_odd))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not is_odd and not isinstance(error, msgspec.ValidationError):
            marked = yield from with_marks(body)
        if marked is None:
            raise InvalidRequest(f"{_NO_PREDICT}: {error}") from None
    return (yield from read_predict(marked, limit, is_odd=True))


def _read(body: Data, limit: int, *, is_odd: bool) -> Steps[PredictBody]:
    named = yield from members(body, MAX_INPUTS)
    if named is None:
        raise _too_many_names()
    rows, columns = named.get("instances", _NULL), named.get("inputs", _NOTHING)
    signature = _name_in(named["signature_name"]) if "signature_name" in named else ""
    if (rows == _NULL) == (len(columns) == 0):
        found = "neither" if rows == _NULL else "both"
        msg = f'expected "instances" (rows) or "inputs" (columns), got {found}'
        raise InvalidRequest(msg)
    if rows == _NULL:
        return PredictBody(None, columns, signature, is_odd)
    try:
        listed = yield from elements(rows, limit)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{error} - at `$.instances`") from None
    if listed is None:
        raise TooLarge(f"instances: expected at most {limit} samples, which is what the queue holds, got more")
    if not listed:
        raise InvalidRequest("instances: expected at least one sample, got none")
    return PredictBody(listed, rows, signature, is_odd)


def _name_in(data: memoryview) -> str:
    if len(data) > SAMPLE_BYTES:
        raise InvalidRequest("the name of the signature is longer than any is")
    return _signature.decode(b'{"signature_name":%b}' % data).signature_name


def as_samples(asked: PredictBody, name: str) -> Steps[list[memoryview]]:
    """Return rows as samples; with a name bare ones as objects, whose only field it is."""
    samples, pace = asked.rows or [], StepPace()
    if not name:
        return samples
    for place, row in enumerate(samples):
        if _is_bare(row):
            samples[place] = memoryview((yield from joined([b'{"%b":' % name.encode(), row, b"}"])))
        if pace.is_over(len(row)):
            yield
    return samples


def as_tensors(asked: PredictBody, face: TensorFace) -> Steps[list[Tensor]]:
    """Return rows or columns as tensors.

    Raises:
        InvalidRequest: If rows have not the same fields, or a column is not a list of one shape.
        TooLarge: If there is too much in them.
    """
    only = face.inputs[0].name if len(face.inputs) == 1 else "input" if face.is_open else ""
    if asked.rows is None:
        columns = yield from _fields(asked.value, only)
    elif only and not (yield from holds(asked.value, b"{")):  # as nearly always
        columns = {only: asked.value}
    else:
        columns = yield from _columns(asked.rows, only)
    tensors: list[Tensor] = []
    for name, value in columns.items():
        tensors.append((yield from tensor_in_lists(name, value, face, is_odd=asked.is_odd)))
        yield
    return tensors


def _columns(rows: Iterable[memoryview], only: str) -> Steps[Mapping[str, memoryview]]:
    """Return the values of rows as a list for each input."""
    columns: dict[str, list[Data]] = {}
    names, pace = 0, StepPace()
    for place, row in enumerate(rows):
        fields = yield from _fields(row, only)
        if pace.is_over(len(row)):
            yield
        if place and fields.keys() != columns.keys():
            msg = f"instance {place} has the inputs {', '.join(fields) or 'none'}, and others {', '.join(columns)}"
            raise InvalidRequest(msg)
        names += len(fields)
        if names > MAX_NAMES:
            raise TooLarge(f"the instances have more than {MAX_NAMES} inputs together; send fewer at a time")
        for name, value in fields.items():
            columns.setdefault(name, [b"["]).extend((value, b","))
    found: dict[str, memoryview] = {}
    for name, parts in columns.items():
        parts[-1] = b"]"
        found[name] = memoryview((yield from joined(parts)))
    return found


def _fields(value: memoryview, only: str) -> Steps[Mapping[str, memoryview]]:
    """Return the fields of a row or of columns; a bare value is that of the only input."""
    if _is_bare(value):
        if not only:
            msg = "a value without a name came; the model has several inputs, so it takes objects with their names"
            raise InvalidRequest(msg)
        return {only: value}
    try:
        named = yield from members(value, MAX_INPUTS)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the names of inputs cannot be read: {error}") from None
    if named is None:
        raise _too_many_names()
    return named


def _is_bare(value: memoryview) -> bool:
    return bytes(value[:1]) != b"{" or is_b64(value)


def _too_many_names() -> TooLarge:
    return TooLarge(f"more than {MAX_INPUTS} inputs came, which is as many as are taken")
