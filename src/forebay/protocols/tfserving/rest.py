# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's JSON: rows (`instances`) or columns (`inputs`), examples, and what is answered.

Bytes that are no text stand as `{"b64": "..."}`, in what comes; in what goes also where the name of an output ends in
`_bytes`. A tensor says no shape here: it is what the lists are. NaN and infinities stand as `NaN`, `Infinity` and
`-Infinity`, which no decoder of JSON takes: before a body is read they become texts that nobody else can have written,
and the data of a tensor is given them back.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from forebay.arrays import json_numbers
from forebay.arrays.numpy_tensors import as_raw, raw_in_steps, to_array
from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols import native
from forebay.protocols.samples import MAX_SAMPLES, elements_in, elements_up_to, samples_of
from forebay.protocols.tfserving.examples import with_context
from forebay.serving.models.tensor_codec import plain_array
from forebay.types.element_limits import at_once
from forebay.types.first_use import known
from forebay.types.json_elements import json_elements, outside_texts
from forebay.types.json_segments import (
    LONG_BYTES,
    STEP_BYTES,
    elements,
    elements_in_parts,
    joined,
    members,
    text_in_parts,
)
from forebay.types.tensor import Data, Tensor, join_elements

if TYPE_CHECKING:
    import numpy.typing as npt

    from forebay.protocols.tfserving.examples import Example
    from forebay.serving.tensor_face import TensorFace
    from forebay.types.element_limits import Steps

T = TypeVar("T")

MAX_INPUTS: Final = 4096
"""Names of one row, or of columns; each is a step of Python, on the loop."""
MAX_FEATURES: Final = 200_000
"""Features of all examples of a request together."""
MAX_VALUES: Final = 400_000
"""Elements of the arrays of examples; the loop makes objects of them."""
MANY_BYTES: Final = 512 * 1024
"""A body of rows that could be far too many; of a shorter one all are made, which takes 20 ms at most, and counted."""
MAX_ODD_BYTES: Final = 256 * 1024
"""A body with NaN or infinities, which is looked through for them on the loop."""
MAX_TEXTS: Final = 200_000
"""Texts of an input, and lists of them; each is an object on the loop."""
MAX_BYTES: Final = 50_000
"""Values of an input of which one is bytes in base64; each is several steps of Python, on the loop."""

_DEPTH: Final = 32
_NUMBER_BYTES: Final = 1024
_NAME_BYTES: Final = 64 * 1024
"""Up to which the name of a signature is read, or the beginning of a value."""
_ROW_BYTES: Final = 256
"""What a row costs beside its length."""
_UNSAYABLE: Final = frozenset({"FP16", "BF16"})
"""Numbers that the other protocol does not have in JSON."""
_B64: Final = re.compile(rb'\{\s*+"b64"')
_ROWS: Final = 4096
"""Rows that are written at a time."""
BYTES_SUFFIX: Final = "_bytes"
"""How outputs are called whose texts are told as bytes."""


class PredictBody(msgspec.Struct, frozen=True):
    """What `predict` is asked: one of rows and columns."""

    instances: list[msgspec.Raw] | None = None
    inputs: msgspec.Raw = msgspec.Raw()
    signature_name: str = ""


class OddPredictBody(PredictBody, frozen=True):
    """The same of a body with NaN or infinities, which only tensors can hold."""


class LongPredictBody(PredictBody, frozen=True):
    """The same of a long body that was read in steps.

    Attributes:
        value: The rows or columns, unread.
        columns: The columns by their names; None for rows, and for a single column without a name.
    """

    value: memoryview = memoryview(b"")
    columns: Mapping[str, memoryview] | None = None


class _Examples(msgspec.Struct, frozen=True):
    examples: list[dict[str, Any]]
    context: dict[str, Any] = {}
    signature_name: str = ""


class _Uncut(msgspec.Struct, frozen=True):
    examples: msgspec.Raw


_AS_THEY_ARE: Final = frozenset({int, float, bool})
_NULL: Final = memoryview(b"null")
_NOTHING: Final = memoryview(b"")
_NO_PREDICT: Final = 'the body is no {"instances": [...]} and no {"inputs": ...}'
_NO_EXAMPLES: Final = 'the body is no {"examples": [{"feature": value, ...}, ...]}'
_ODD: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-(?:NaN|Inf(?:inity)?)|NaN|Inf(?:inity)?')
"""Texts, and numbers that JSON has not; a text without an end goes to the end, so that nothing is read twice."""
_MARK: Final = secrets.token_hex(8).encode()
_MARKED: Final = {name: b'"%b%b"' % (_MARK, name) for name in (b"NaN", b"Infinity", b"-Infinity")}
"""What such numbers are while a body is read."""
_NUMBERS: Final = {marked[1:-1].decode(): float(name) for name, marked in _MARKED.items()}
_predict: Final = msgspec.json.Decoder(known(PredictBody))
_examples: Final = msgspec.json.Decoder(known(_Examples))
_uncut: Final = msgspec.json.Decoder(known(_Uncut))
_listed: Final = msgspec.json.Decoder(list[msgspec.Raw])
_texts: Final = msgspec.json.Decoder(list[str])
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything: Final = msgspec.json.Decoder()


def decode_predict(body: bytes | memoryview, limit: int = MAX_SAMPLES) -> PredictBody:
    """Read what `predict` is asked.

    Args:
        limit: The most rows that are wanted.

    Raises:
        InvalidRequest: If it is neither rows nor columns, or both.
        TooLarge: If it has more rows.
    """
    try:
        found = _decoded(body, limit)
    except InvalidRequest:
        marked = _with_marks(body)
        if marked is None:
            raise
        plain = _decoded(marked, limit)
        found = OddPredictBody(plain.instances, plain.inputs, plain.signature_name)
    _check(found, limit)
    return found


def predict_in_steps(body: bytes | memoryview, limit: int) -> Steps[LongPredictBody]:
    """Do the same with a body longer than `LONG_BYTES`.

    Raises:
        InvalidRequest, TooLarge: As `decode_predict`.
    """
    try:
        said = yield from members(body, MAX_INPUTS)
        if said is None:
            raise _too_many_names()
        rows, columns = said.get("instances", _NULL), said.get("inputs", _NOTHING)
        signature = _signature_of(said.get("signature_name", _NOTHING))
        instances = None
        if rows != _NULL:
            instances = yield from elements(rows, limit)
            if instances is None:
                raise _too_many(limit)
    except msgspec.DecodeError as error:
        if not isinstance(error, msgspec.ValidationError) and (yield from holds(body, b"NaN", b"Inf")):
            raise _too_odd() from None
        raise InvalidRequest(f"{_NO_PREDICT}: {error}") from None
    found = PredictBody(None if instances is None else [*map(msgspec.Raw, instances)], msgspec.Raw(columns), signature)
    _check(found, None)
    if instances is not None:
        return LongPredictBody(found.instances, found.inputs, signature, rows)
    named = yield from _columns(columns)
    return LongPredictBody(None, found.inputs, signature, columns, named)


def _signature_of(data: memoryview) -> str:
    """Return the name of a signature; empty if there is none."""
    if len(data) > _NAME_BYTES:
        raise InvalidRequest("the name of the signature is longer than any is")
    return _read(_predict, b'{"signature_name":%b}' % bytes(data), _NO_PREDICT).signature_name if len(data) else ""


def _columns(inputs: memoryview) -> Steps[dict[str, memoryview] | None]:
    """Return columns, or a row, by the names of inputs; None if they are a single one without.

    Raises:
        InvalidRequest: If a name is none.
        TooLarge: If there are too many.
    """
    if bytes(inputs[:1]) != b"{" or _is_b64(bytes(inputs[:_NAME_BYTES])):
        return None
    try:
        named = yield from members(inputs, MAX_INPUTS)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the names of inputs cannot be read: {error}") from None
    if named is None:
        raise _too_many_names()
    return named


def _too_many_names() -> TooLarge:
    return TooLarge(f"more than {MAX_INPUTS} inputs came, which is as many as are taken")


def _check(found: PredictBody, limit: int | None) -> None:
    """Hold what `predict` is asked to what is possible.

    Raises:
        InvalidRequest: If it is neither rows nor columns, or both.
        TooLarge: If it has more rows.
    """
    if limit is not None and found.instances is not None and len(found.instances) > limit:
        raise _too_many(limit)
    if (found.instances is None) == (len(found.inputs) == 0):
        told = "neither" if found.instances is None else "both"
        msg = f'the body has {told} of "instances", which are rows, and "inputs", which are columns; one is needed'
        raise InvalidRequest(msg)
    if found.instances == []:
        raise InvalidRequest("there are no instances; a sample at least is needed")


def _decoded(body: bytes | memoryview, limit: int) -> PredictBody:
    may_be_many = len(body) > MANY_BYTES and limit <= MAX_SAMPLES
    return _up_to(limit, body) if may_be_many else _read(_predict, body, _NO_PREDICT)


def _with_marks(body: bytes | memoryview) -> bytes | None:
    """Return a body whose NaNs and infinities are marked; None if it has none.

    Raises:
        TooLarge: If it is too long to be looked through.
    """
    data = bytes(body)
    if b"NaN" not in data and b"Inf" not in data:
        return None
    if len(data) > MAX_ODD_BYTES:
        raise _too_odd()
    return _ODD.sub(_marked, data)


def _too_odd() -> TooLarge:
    return TooLarge(f"a body of more than {MAX_ODD_BYTES} bytes has NaN or an infinity; ask over gRPC")


def _marked(found: re.Match[bytes]) -> bytes:
    token = found[0]
    if token[:1] == b'"':
        return token
    name = b"NaN" if token.endswith(b"NaN") else b"Infinity"
    return _MARKED[b"-Infinity" if name == b"Infinity" and token[:1] == b"-" else name]


def _without_marks(data: bytes) -> bytes:
    for name, marked in _MARKED.items():
        data = data.replace(marked, name)
    return data


def _up_to(limit: int, body: bytes | memoryview) -> PredictBody:
    """Read rows, or give up at the first one that is too many."""
    try:
        found: Any = _few(limit).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, msgspec.ValidationError) and "of at most length" in str(error):
            raise _too_many(limit) from None
        return _read(_predict, body, _NO_PREDICT)  # says what is wrong
    instances = None if found.instances is None else elements_in(found.instances)
    return PredictBody(instances, found.inputs, found.signature_name)


@cache
def _few(limit: int) -> msgspec.json.Decoder[msgspec.Struct]:
    rest = [("inputs", msgspec.Raw, msgspec.Raw()), ("signature_name", str, "")]
    fields: Any = [("instances", elements_up_to(limit) | None, None), *rest]
    return msgspec.json.Decoder(known(msgspec.defstruct("FewRows", fields, gc=False)))


def _too_many(limit: int) -> TooLarge:
    return TooLarge(f"there are more than {limit} instances, which is as many as may wait here")


def decode_examples(body: bytes | memoryview) -> tuple[list[Example], str]:
    """Read what `classify` and `regress` are asked; returns the examples, and the signature that is named.

    Raises:
        InvalidRequest: If that is not what the body holds.
        TooLarge: If it holds too many.
    """
    at_once(counting_examples(body))
    try:
        _require_few(bytes(body))
        found = _read(_examples, body, _NO_EXAMPLES)
    except InvalidRequest:
        marked = _with_marks(body)
        if marked is None:
            raise
        _require_few(marked)
        found = _read(_examples, marked, _NO_EXAMPLES)
    if len(found.context) + sum(map(len, found.examples)) > MAX_FEATURES:
        raise TooLarge(f"the examples have more than {MAX_FEATURES} features together; send fewer at a time")
    shared = {name: _feature(value) for name, value in found.context.items()}
    rows = [{name: _feature(value) for name, value in one.items()} for one in found.examples]
    return with_context(cast("Example", shared), cast("list[Example]", rows)), found.signature_name


def counting_examples(body: bytes | memoryview) -> Steps[None]:
    """Count the elements of examples: all of them become Python objects here.

    Raises:
        TooLarge: If there are too many.
    """
    return json_elements(body, MAX_VALUES, 3 * MAX_FEATURES, "the request")


def _require_few(body: bytes) -> None:
    """Count examples before anything is made of them.

    Raises:
        TooLarge: If there are too many.
    """
    if body.count(b"{") <= MAX_SAMPLES:
        return
    listed = _read(_uncut, body, _NO_EXAMPLES).examples
    try:
        samples_of(bytes(listed), native.PARAMS["json", "json"])
    except TooLarge:
        raise TooLarge(f"there are more than {MAX_SAMPLES} examples; send fewer at a time") from None
    except InvalidRequest:
        return  # whoever reads them says better what is wrong


def row_of(instance: bytes | memoryview, name: str) -> bytes | memoryview:
    """Return a row as an object, whose only field has this name if the row is bare."""
    data = bytes(instance)
    return data if data[:1] == b"{" and not _is_b64(data) else b'{"%s":%s}' % (name.encode(), data)


def samples_in_steps(asked: LongPredictBody, name: str) -> Steps[list[memoryview]]:
    """Return rows as samples, as objects with this field if there is a name."""
    samples: list[memoryview] = []
    read_bytes = 0
    for one in asked.instances or ():
        if not name:
            samples.append(memoryview(one))
        elif len(one) > LONG_BYTES and bytes(memoryview(one)[:1]) != b"{":
            samples.append(memoryview((yield from joined([row_of(b"", name)[:-1], memoryview(one), b"}"]))))
        else:
            samples.append(memoryview(row_of(memoryview(one), name)))
        read_bytes += len(one) * bool(name) + _ROW_BYTES
        if read_bytes > STEP_BYTES:
            read_bytes = 0
            yield
    return samples


def rows_as_tensors(instances: Sequence[msgspec.Raw], face: TensorFace) -> list[Tensor]:
    """Return rows as tensors.

    Raises:
        InvalidRequest: If they have not the same fields, or are no lists of one shape.
    """
    only = _only(face)
    whole = b",".join(instances)
    if only and b"{" not in whole:  # as nearly always
        return [_tensor(only, b"[%b]" % whole, face)]
    columns = at_once(_by_name(instances, only))
    return [_tensor(name, b"[" + b",".join(values) + b"]", face) for name, values in columns.items()]


def rows_in_steps(asked: LongPredictBody, face: TensorFace) -> Steps[list[Tensor]]:
    """Do the same with the rows of a long body.

    Raises:
        InvalidRequest, TooLarge: As `rows_as_tensors`.
    """
    only = _only(face)
    if only and not (yield from holds(asked.value, b"{")):
        return [(yield from _long_tensor(only, asked.value, face))]
    columns = yield from _by_name(asked.instances or (), only)
    tensors: list[Tensor] = []
    for name, values in columns.items():
        whole = yield from joined([b"[", *_between(values), b"]"])
        tensors.append((yield from _long_tensor(name, memoryview(whole), face)))
    return tensors


def _between(values: Iterable[Data]) -> Iterable[Data]:
    for place, value in enumerate(values):
        if place:
            yield b","
        yield value


def _long_row(instance: msgspec.Raw, only: str) -> Steps[dict[str, Data]]:
    """Return the fields of a long row."""
    named = yield from _columns(memoryview(instance))
    return {_require_name(only): memoryview(instance)} if named is None else {**named}


def _by_name(instances: Iterable[msgspec.Raw], only: str) -> Steps[dict[str, list[Data]]]:
    """Return the values of rows by the names of inputs."""
    columns: dict[str, list[Data]] = {}
    names = read_bytes = 0
    for place, instance in enumerate(instances):
        row = _row(bytes(instance), only) if len(instance) <= LONG_BYTES else (yield from _long_row(instance, only))
        read_bytes += len(instance) + _ROW_BYTES
        if read_bytes > STEP_BYTES:
            read_bytes = 0
            yield
        if place and row.keys() != columns.keys():
            msg = f"instance {place} has the inputs {', '.join(row) or 'none'}, and others {', '.join(columns)}"
            raise InvalidRequest(msg)
        names += len(row)
        if names > MAX_FEATURES:
            raise TooLarge(f"the instances have more than {MAX_FEATURES} inputs together; send fewer at a time")
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def columns_as_tensors(inputs: msgspec.Raw, face: TensorFace) -> list[Tensor]:
    """Return columns as tensors.

    Raises:
        InvalidRequest: If they are no lists.
    """
    return [_tensor(name, bytes(value), face) for name, value in _row(bytes(inputs), _only(face)).items()]


def columns_in_steps(asked: LongPredictBody, face: TensorFace) -> Steps[list[Tensor]]:
    """Do the same with the columns of a long body.

    Raises:
        InvalidRequest, TooLarge: As `columns_as_tensors`.
    """
    columns = asked.columns
    if columns is None:
        columns = {_require_name(_only(face)): asked.value}
    tensors: list[Tensor] = []
    for name, value in columns.items():
        tensors.append((yield from _long_tensor(name, value, face)))
        yield
    return tensors


def _only(face: TensorFace) -> str:
    """Return the name of what goes without one; empty if nothing does."""
    return face.inputs[0].name if len(face.inputs) == 1 else "input" if face.is_open else ""


def encode_rows(tensors: Sequence[Tensor]) -> bytes:
    """Write outputs as rows along their first axis; a single one goes without its name.

    Raises:
        InvalidRequest: If they have no such axis, or unlike numbers of rows.
    """
    count = tensors[0].shape[0] if tensors[0].shape else 0
    for one in tensors:
        if one.shape[:1] != (count,):
            raise InvalidRequest(
                f"output '{one.name}' has the shape {list(one.shape)}, and a first axis of the same length is needed "
                f"in all outputs of rows (here {count}); ask with `inputs` instead"
            )
    if len(tensors) == 1:
        return b'{"predictions":%b}' % _written(tensors[0])
    columns = {one.name: _array(one) for one in tensors}
    parts: list[bytes] = []
    for at in range(0, count, _ROWS):
        listed = [json_numbers.listed(array[at : at + _ROWS]) for array in columns.values()]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*listed, strict=True)]
        parts.append(msgspec.json.encode(rows)[1:-1])
    return b'{"predictions":[%b]}' % b",".join(parts)


def encode_columns(tensors: Sequence[Tensor]) -> bytes:
    """Write outputs as columns; a single one goes without its name."""
    columns = {one.name: msgspec.Raw(_written(one)) for one in tensors}
    return msgspec.json.encode({"outputs": next(iter(columns.values())) if len(columns) == 1 else columns})


def bare(result: bytes, name: str) -> bytes:
    """Return the value of the only field of an object in JSON, or what is none as it is."""
    start = b'{"%s":' % name.encode()
    return result[len(start) : -1] if result.startswith(start) else result


def _row(data: bytes, only: str) -> dict[str, Data]:
    """Return the fields of a row or of columns; a bare value is that of the only input."""
    if data[:1] == b"{" and not _is_b64(data):
        if data.count(b":") > MAX_INPUTS:
            at_once(_require_few_names(data))
        return {name: bytes(value) for name, value in _fields_of(data).items()}
    return {_require_name(only): data}


def _require_name(only: str) -> str:
    if not only:
        msg = "a value without a name came; the model has several inputs, so it takes objects with their names"
        raise InvalidRequest(msg)
    return only


def _fields_of(data: bytes) -> dict[str, msgspec.Raw]:
    fields = _read(_fields, data, "the names of inputs cannot be read")
    if len(fields) > MAX_INPUTS:
        raise TooLarge(f"{len(fields)} inputs came; at most {MAX_INPUTS} are taken")
    return fields


def _require_few_names(data: bytes) -> Steps[None]:
    """Count the names in an object before any is made; those of bytes in base64 are none of inputs.

    Raises:
        TooLarge: If there are too many.
    """
    found = yield from outside_texts(data)
    colons = found.members - found.objects
    if colons <= MAX_INPUTS:
        return
    names = colons - (found.objects - 1)  # at least, since each of bytes has an object of its own
    if names <= MAX_INPUTS:
        names = colons
        at = 0
        while at < len(data):
            end = max(data.rfind(b"{", at + 1, at + STEP_BYTES), 0) or at + STEP_BYTES
            names -= len(_B64.findall(data, at, end))
            at = end
            yield
    if names > MAX_INPUTS:
        raise TooLarge(f"{names} inputs came; at most {MAX_INPUTS} are taken")


def _read(decoder: msgspec.json.Decoder[T], data: bytes | memoryview, otherwise: str) -> T:
    """Read JSON, also what was cut out of it unread: its numbers and texts may still be none.

    Raises:
        InvalidRequest: If it cannot be read; `otherwise` says what it is not.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{otherwise}: {error}") from None


def _is_b64(data: bytes) -> bool:
    """Tell whether an object stands for bytes."""
    return data[1:].lstrip().startswith(b'"b64"')


def _tensor(name: str, data: bytes, face: TensorFace) -> Tensor:
    """Return a tensor in JSON, with the shape that its lists have.

    Raises:
        InvalidRequest: If it holds bytes that are none.
        TooLarge: If it holds too many.
    """
    if _MARK in data:
        data = _without_marks(data)
    shape, first = _shape(name, data)
    declared = _declared(name, first, face)
    if declared == "BYTES" and b'"b64"' in data:
        return _of_b64(name, data, shape)
    tensor = Tensor(name, declared, shape, data if shape else b"[%s]" % data, is_json=True)
    return as_raw(tensor) if declared in _UNSAYABLE else tensor


def _long_tensor(name: str, data: memoryview, face: TensorFace) -> Steps[Tensor]:
    """Do the same with long data, in steps."""
    if len(data) <= LONG_BYTES:
        return _tensor(name, bytes(data), face)
    shape, first = yield from _long_shape(name, data)
    declared = _declared(name, first, face)
    if declared == "BYTES" and (yield from holds(data, b'"b64"')):
        try:
            return (yield from _of_long_b64(name, data, shape))
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"input '{name}' cannot be read: {error}") from None
    tensor = Tensor(name, declared, shape, data if shape else b"[%s]" % data, is_json=True)
    return (yield from raw_in_steps(tensor)) if declared in _UNSAYABLE else tensor


def _declared(name: str, first: bytes, face: TensorFace) -> str:
    return next((one.datatype for one in face.inputs if one.name == name), _kind(first))


def _of_b64(name: str, data: bytes, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of texts and bytes.

    Raises:
        InvalidRequest: If it holds bytes that are none.
        TooLarge: If it holds too many.
    """
    # An object has four quotes, a text has two.
    if data.count(b'"') + 2 * data.count(b"[") > 4 * MAX_BYTES:
        raise _too_many_bytes(name)
    values = _flat(name, _read(_anything, data, f"input '{name}' cannot be read"), len(shape))
    return Tensor(name, "BYTES", shape, join_elements(name, [_bytes(name, value) for value in values]))


def _too_many_bytes(name: str) -> TooLarge:
    return TooLarge(f"input '{name}' has bytes in base64 and more than {MAX_BYTES} values; ask over gRPC")


def _of_long_b64(name: str, data: memoryview, shape: tuple[int, ...]) -> Steps[Tensor]:
    """Do the same with long data, in steps.

    Raises:
        msgspec.DecodeError: If it is malformed, or has lists that are not as deep as the first.
    """
    unreadable = f"input '{name}' cannot be read"
    values, read_bytes = [data], 0
    for _ in shape:
        inner: list[memoryview] = []
        for value in values:
            is_long = len(value) > LONG_BYTES
            rows = (yield from elements(value, MAX_BYTES)) if is_long else _read(_listed, value, unreadable)
            if rows is None or len(inner) + len(rows) > MAX_BYTES:
                raise _too_many_bytes(name)
            inner += map(memoryview, rows)
            read_bytes += len(value) + _ROW_BYTES
            if read_bytes > STEP_BYTES:
                read_bytes = 0
                yield
        values = inner
    parts: list[bytes] = []
    for value in values:
        if len(value) <= LONG_BYTES:
            parts.append(join_elements(name, [_bytes(name, _read(_anything, value, unreadable))]))
        else:
            content = yield from _long_bytes(name, value)
            parts += (sum(map(len, content)).to_bytes(4, "little"), *content)
        read_bytes += len(value) + _ROW_BYTES
        if read_bytes > STEP_BYTES:
            read_bytes = 0
            yield
    return Tensor(name, "BYTES", shape, (yield from joined(parts)))


def _long_bytes(name: str, data: memoryview) -> Steps[list[bytes]]:
    """Return the parts of a long text, or of long bytes in base64.

    Raises:
        msgspec.DecodeError: If it is neither.
        InvalidRequest: If it is no base64.
    """
    if bytes(data[:1]) == b"{":
        fields = yield from members(data, 1)
        if fields is None or fields.keys() != {"b64"}:
            raise InvalidRequest(f'input \'{name}\' takes texts, or bytes as {{"b64": "..."}}')
        return (yield from _long_base64(name, fields["b64"]))
    parts: list[bytes] = []
    for part in text_in_parts(data):
        parts.append(part.encode())
        yield
    return parts


def _long_base64(name: str, data: memoryview) -> Steps[list[bytes]]:
    parts: list[bytes] = []
    carry = ""
    for part in text_in_parts(data):
        carry += part
        end = carry.find("=")
        if end >= 0 and carry[end:].strip("="):
            raise InvalidRequest(f"input '{name}' has a b64 that is no base64: something follows its padding")
        whole = (len(carry) if end < 0 else end) // 4 * 4
        parts.append(_unpacked(name, carry[:whole]))
        carry = carry[whole:].rstrip("=") + "=" * (end >= 0)
        yield
    return [*parts, _unpacked(name, carry)]


def _shape(name: str, data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return how long lists in lists are, and the first value in them; who reads all of it holds the others to that."""
    shape: list[int] = []
    # Of numbers nothing has to be made: who reads all of it holds it to what is counted here.
    is_plain = b'"' not in data and b"{" not in data
    if not is_plain:
        at_once(json_elements(data, MAX_TEXTS, len(data), f"input '{name}'"))
    elif any(space in data for space in (b" ", b"\t", b"\r", b"\n")):
        data = data.translate(None, b" \t\r\n")
    while data[:1] == b"[":
        if len(shape) == _DEPTH:
            raise _deeper_than_possible(name)
        if is_plain and data.find(b"[", 1) < 0 and len(data) > len(b"[]"):
            return (*shape, data.count(b",") + 1), data[1 : data.find(b",")]  # without a comma up to its bracket
        end = b"]" * (_deeper(data) - 1) if is_plain else b""
        if end and end in data:
            shape.append(data.count(end + b",") + 1)
            data = data[1 : data.find(end) + len(end)]
            continue
        if not is_plain:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # else it holds something else
                return (*shape, len(_texts.decode(data))), b'""'
        items = _read(_listed, data, f"input '{name}' is no list")
        shape.append(len(items))
        data = bytes(items[0]) if items else b""
    return tuple(shape), data


def _long_shape(name: str, data: memoryview) -> Steps[tuple[tuple[int, ...], bytes]]:
    """Do the same with long data, in steps."""
    if bytes(data[:1]) != b"[":
        return (), bytes(data[:_NAME_BYTES])
    if not (yield from holds(data, b'"', b"{")):
        return (yield from _plain_shape(name, data))
    yield from json_elements(data, MAX_TEXTS, len(data), f"input '{name}'")
    shape: list[int] = []
    while bytes(data[:1]) == b"[":
        if len(shape) == _DEPTH:
            raise _deeper_than_possible(name)
        count, whole = 0, data
        data = memoryview(b"")
        for part in elements_in_parts(whole):
            data = part[0] if part and not count else data
            count += len(part)
            yield
        shape.append(count)
    return tuple(shape), bytes(data[:_NAME_BYTES])


def _plain_shape(name: str, data: memoryview) -> Steps[tuple[tuple[int, ...], bytes]]:
    """Do the same with lists of numbers.

    A list of the second level ends where as many brackets come together as are open in it, and so on.
    """
    carry, depth, first = b"", 0, b""
    counts: list[int] = []
    ends: list[bytes] = []
    is_over: list[bool] = []
    for at in range(0, len(data), STEP_BYTES):
        piece = bytes(data[at : at + STEP_BYTES]).translate(None, b" \t\r\n")
        if not counts:
            carry += piece
            depth = len(carry) - len(carry.lstrip(b"["))
            if depth <= _DEPTH and len(carry) < depth + _NUMBER_BYTES and at + STEP_BYTES < len(data):
                continue
            if depth > _DEPTH:
                raise _deeper_than_possible(name)
            first = re.split(rb"[\],]", carry[depth : depth + _NUMBER_BYTES], maxsplit=1)[0]
            counts, is_over = [*[1] * (depth - 1), int(bool(first))], [False] * depth
            ends = [b"]" * (depth - level) for level in range(depth)]
            piece, carry = carry, b""
        for level, end in enumerate(ends):
            if is_over[level]:
                continue
            mark = end[1:] + b","
            text = carry[len(carry) - (len(end) - 1) :] + piece if len(end) > 1 else piece
            stop = text.find(end) if level else -1
            is_over[level] = stop >= 0
            counts[level] += text.count(mark, 0, stop + len(end)) if stop >= 0 else text.count(mark)
        carry = (carry + piece)[-_DEPTH:]
        yield
    return tuple(counts), first


def _deeper_than_possible(name: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' is deeper than {_DEPTH} lists")


def holds(data: Data, *texts: bytes) -> Steps[bool]:
    """Tell whether one of these short texts is in data."""
    view = memoryview(data)
    for at in range(0, len(view), STEP_BYTES):
        piece = bytes(view[at : at + STEP_BYTES + len(texts[0]) - 1])
        if any(text in piece for text in texts):
            return True
        yield
    return False


def _deeper(data: bytes) -> int:
    """Return with how many brackets lists in lists begin."""
    return len(data[:_DEPTH]) - len(data[:_DEPTH].lstrip(b"["))


def _kind(value: bytes) -> str:
    """Return the type of a value, for models that do not say one."""
    if value[:1] in {b'"', b"{"}:
        return "BYTES"
    if value in {b"true", b"false"}:
        return "BOOL"
    return "FP64" if set(value) & set(b".eENI") else "INT64"


def _flat(name: str, value: Any, depth: int) -> list[Any]:
    if not depth:
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"the lists of input '{name}' are not all as deep as the first")
    return [found for one in cast("list[Any]", value) for found in _flat(name, one, depth - 1)]


def _bytes(name: str, value: Any) -> bytes | str:
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if fields.keys() == {"b64"}:
        return _unpacked(name, fields["b64"])
    if not isinstance(value, str):
        kind = type(cast("object", value)).__name__
        raise InvalidRequest(f'input \'{name}\' takes texts, or bytes as {{"b64": "..."}}; {kind} came')
    return value


def _unpacked(name: str, value: Any) -> bytes:
    try:
        text = value.rstrip("=")
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, AttributeError, ValueError) as error:
        raise InvalidRequest(f"input '{name}' has a b64 that is no base64: {error}") from None


def _feature(value: Any) -> list[Any]:
    """Return the values of a feature."""
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    values = [_NUMBERS.get(one, one) if type(one) is str else one for one in values]
    if _AS_THEY_ARE.issuperset(map(type, values)):
        return values
    told = [_bytes("of an example", one) if isinstance(one, dict) else one for one in values]
    return [one.encode() if isinstance(one, str) else one for one in told]


def columns_in_lists(outputs: list[Tensor]) -> list[Tensor]:
    """Write the numbers of a slice as lists in JSON, for `encode_columns`; the form of BYTES depends on all of them."""
    return [
        one if one.datatype == "BYTES" else msgspec.structs.replace(one, data=_written(one), is_json=True)
        for one in outputs
    ]


def rows_in_lists(outputs: list[Tensor]) -> list[Tensor]:
    """Do the same for `encode_rows`, which puts several outputs together row by row."""
    return columns_in_lists(outputs) if len(outputs) == 1 else outputs


def _written(tensor: Tensor) -> bytes:
    """Write a tensor as lists in lists."""
    if tensor.is_json:
        return bytes(tensor.data)
    array = _array(tensor)
    return json_numbers.written(array) if array.dtype.kind != "O" else msgspec.json.encode(array.tolist())


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array: of numbers, of truth values, or of what BYTES are in JSON."""
    import numpy as np

    if tensor.datatype != "BYTES":
        return plain_array(tensor)
    found = to_array(tensor)
    if tensor.name.endswith(BYTES_SUFFIX) or not all(map(_is_text, found.ravel())):
        told: list[Any] = [{"b64": base64.b64encode(value).decode()} for value in found.ravel()]
    else:
        told = [value.decode() for value in found.ravel()]
    flat = np.empty(len(told), object)
    flat[:] = told
    return flat.reshape(found.shape)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def encode_classes(rows: Sequence[Sequence[tuple[str, float]]]) -> bytes:
    """Write what `classify` answers."""
    scores = iter(_scores([score for row in rows for _, score in row]))
    return msgspec.json.encode({"results": [[(label, next(scores)) for label, _ in row] for row in rows]})


def encode_values(values: Sequence[float]) -> bytes:
    """Write what `regress` answers."""
    return msgspec.json.encode({"results": _scores(values)})


def _scores(values: Sequence[float]) -> list[Any]:
    """Return numbers as the protocol has them, of 32 bits, and as they are written."""
    import numpy as np

    with np.errstate(over="ignore"):
        return json_numbers.listed(np.array(values, np.float32))
