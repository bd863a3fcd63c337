# SPDX-License-Identifier: Apache-2.0
"""Samples from tensors and tensors from results, in the worker beside the model.

What a type says of a sample becomes ports, each an input or output of the tensor face:

| a field, or a sample as a whole | port |
|---|---|
| `NDArray[np.float32]` and the like | a tensor of its type; the model gets rows of the very memory that came |
| a string of a model file | BYTES; the file gets texts, and bytes as they are where they are not text in UTF-8 |
| `float`, `int`, `bool`, `str`, and lists of these in lists | FP64, INT64, BOOL, BYTES; the model gets Python values |
| `bytes` as a whole sample | BYTES, an element for each sample |
| anything else | BYTES; an element is the JSON text of a value |

The first axis counts samples. A sample with fields has a port for each; any other one is called `input` and `output`.
Where a type says nothing, tensors of any name come as Python values, and what a result is says what is sent.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from forebay.arrays.numpy_tensors import as_json, as_raw, from_array, numbers_of, texts_or_bytes, to_array
from forebay.errors import BadOutcome, ValidationError
from forebay.serving.models.array_types import array_type_of, is_array
from forebay.serving.models.sample_errors import refusal
from forebay.serving.models.schema import WireType, is_union, unwrap
from forebay.serving.tensor_face import TensorFace, outcome_of
from forebay.types.call import Item, Media
from forebay.types.datatypes import BY_NUMPY, DATATYPES
from forebay.types.tensor import Tensor, TensorMetadata, elements, join_elements
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    import numpy.typing as npt


Kind = Literal["array", "plain", "bytes", "json"]

_SMALL_BYTES: Final = 16 * 1024
"""Requests up to this are read together."""
_PLAIN: Final = {"integer": "INT64", "number": "FP64", "boolean": "BOOL", "string": "BYTES"}


class TensorPort(msgspec.Struct, frozen=True):
    """One input or output.

    Attributes:
        name: What it is called.
        datatype: Its type.
        shape: Of one sample; None for any number of axes.
        kind: What the model gets and gives: arrays, Python values, bytes, or values that travel as JSON texts.
        is_optional: Whether it may be left out.
        tensor: What the graph of a model file calls it, if that says so.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None = ()
    kind: Kind = "plain"
    is_optional: bool = False
    tensor: str = ""


class TensorSide(msgspec.Struct, frozen=True):
    """What goes in, or what comes out.

    Attributes:
        ports: Its ports; none if the type says nothing.
        is_record: Whether they are fields of a sample; otherwise the only one is all of it.
    """

    ports: Sequence[TensorPort] = ()
    is_record: bool = False


class TensorCodec:
    """Reads the samples of one servable from tensors, and writes its results as such."""

    def __init__(
        self,
        given: TensorSide,
        answer: TensorSide,
        wire: WireType | None = None,
        *,
        has_rows: bool = True,
        signature: str = "",
    ) -> None:
        """Describe both sides.

        Args:
            wire: The type that samples are converted to; None leaves them as they are.
            has_rows: Whether the first axis counts samples; otherwise a request is one.
            signature: What protocols call it where a model has several.
        """
        self._signature = signature
        self._given, self._answer, self._wire, self._has_rows = given, answer, wire, has_rows
        self._ports = {port.name: port for port in given.ports}
        self._convert: Callable[[Any], Any] | None = None
        # What protocols have checked is an array of its type and shape already.
        is_checked = all(port.kind == "array" for port in given.ports) and (
            not given.is_record or typing.is_typeddict(getattr(wire, "annotation", None))
        )
        if wire is not None and not is_checked and any(port.kind != "bytes" for port in given.ports):
            self._convert = wire.converter()

    @property
    def face(self) -> TensorFace:
        """What protocols must know of it."""
        found = face_of(self._given, self._answer, has_rows=self._has_rows)
        return msgspec.structs.replace(found, is_bare=self._wire is None, signature=self._signature)

    def decode(self, data: Sequence[Any], params: Mapping[str, Any], size: int) -> list[Any]:
        """Return the samples of a request.

        Args:
            params: What they say of it.
            size: How many samples it has; a slice of a request has fewer than `params` say.

        Raises:
            InvalidRequest: If it cannot be read; ValidationError if it has the wrong type.
        """
        columns: dict[str, Iterable[Any]] = {}
        has_rows = self._has_rows
        for (name, datatype, shape, is_json), held in zip(params["given"], data, strict=True):
            tensor = Tensor(name, datatype, (size, *shape[1:]) if has_rows else tuple(shape), held, is_json)
            column = self._column(tensor, self._ports.get(name))
            columns[name] = column if has_rows else [column]
        if len(columns) == 1 and not self._given.is_record:
            samples = [*next(iter(columns.values()))]
        else:
            samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        convert = self._convert
        if convert is None:
            return samples
        made, error = caught(lambda: [convert(sample) for sample in samples])
        if error is None:
            return made
        for number, sample in enumerate(samples):
            _, error = caught(convert, sample)
            if error is not None:
                try:
                    raise refusal(error, b"", number if size > 1 else None, self._wire) from None
                finally:
                    del error  # its frames hold this one, and with it the tensors: a circle
        return made

    def decode_all(self, items: Sequence[Item]) -> list[Any] | None:
        """Return the samples of requests that are alike, if that is less work than one by one; else None.

        Small ones are joined and read as one; larger ones are not worth a copy, and seen where they lie.

        Raises:
            InvalidRequest: As `decode`, of any of them.
        """
        first = items[0].params
        if not self._has_rows:
            return None
        for name, datatype, _, is_json in first["given"]:
            if is_json or name not in self._ports or datatype not in DATATYPES or not DATATYPES[datatype].size:
                return None
        if any(item.params is not first and item.params != first for item in items):
            return None
        if sum(map(len, items[0].body)) > _SMALL_BYTES:
            return self._seen(items)
        columns = [b"".join([item.body[place] for item in items]) for place in range(len(first["given"]))]
        return self.decode(columns, first, sum(item.size for item in items))

    def _seen(self, items: Sequence[Item]) -> list[Any] | None:
        """Return the samples of requests that are alike, as parts of what came; None if they have to be converted."""
        name, datatype, shape, _ = items[0].params["given"][0]
        port = self._ports[name]
        if self._given.is_record or self._convert or port.datatype != datatype:
            return None
        import numpy as np

        known, row = DATATYPES[datatype], tuple(shape[1:])
        kind, row_bytes = np.dtype(known.numpy), elements(name, row, known.size) * known.size
        samples: list[Any] = []
        for item in items:
            (data,) = item.body
            if len(data) != item.size * row_bytes:
                return None  # this is told to whom it concerns
            array = np.frombuffer(data, kind).reshape(item.size, *row)
            array.flags.writeable = False
            samples.extend(array)
        return samples

    def encode_all(self, results: Sequence[Any], items: Sequence[Item]) -> list[Any] | None:
        """Return the outcomes of requests that are alike, written as that of one; None if their results are not.

        Raises:
            BadOutcome: As `encode`, of any of them.
        """
        first, size = items[0].params, items[0].size
        if not self._has_rows or first["is_json"] or any(is_json for _, is_json in first["wanted"]):
            return None
        if any((item.params is not first and item.params != first) or item.size != size for item in items):
            return None
        side = self._answer if self._answer.ports else _side_like(results[0])
        found: dict[str, tuple[str, list[npt.NDArray[Any]]]] = {}
        for port in side.ports:
            values = [_field(result, port) for result in results] if side.is_record else results
            alike = _alike(port, values)
            if alike is None:
                return None
            found[port.name] = alike
        names = [name for name, _ in first["wanted"]] or list(found)
        if any(name not in found for name in names):
            return None
        if side.is_record and not self._answer.ports and any(len(result) != len(found) for result in results):
            return None
        specs = [[name, found[name][0], [size, *found[name][1][0].shape], False] for name in names]
        columns = [[value.tobytes() for value in found[name][1]] for name in names]
        if size > 1:
            columns = [[b"".join(column[at : at + size]) for at in range(0, len(column), size)] for column in columns]
        return [[specs, *row] for row in zip(*columns, strict=True)]

    def encode(self, results: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
        """Return the outcome of a request: the results of its samples as tensors.

        Raises:
            BadOutcome: If they are none.
            InvalidRequest: If an output is wanted that is not there, or wanted in JSON, which cannot say it.
        """
        columns = self._columns(results)
        wanted = params["wanted"] or [(name, params["is_json"]) for name in columns]
        tensors: list[Tensor] = []
        for name, is_json in wanted:
            if name not in columns:
                raise ValidationError(f"the model gave {', '.join(map(repr, columns))}, and no output '{name[:80]}'")
            tensor = columns[name]
            tensors.append(as_json(tensor) if is_json else tensor)
        return outcome_of(tensors)

    def _column(self, tensor: Tensor, port: TensorPort | None) -> Any:
        """Return what the model gets of an input, for all samples."""
        if port is None:
            return plain_array(tensor).tolist()
        array = to_array(as_raw(tensor))
        if port.kind == "json":
            return [_from_json(tensor, text) for text in array.ravel()]
        if port.kind == "bytes":
            return array.ravel().tolist()
        if port.datatype == "BYTES":
            array = texts_or_bytes(array) if port.kind == "array" else _texts(tensor, array)
        elif tensor.datatype != port.datatype:
            array = numbers_of(array, tensor.datatype).astype(DATATYPES[port.datatype].numpy)
        return array if port.kind == "array" else array.tolist()

    def _columns(self, results: Sequence[Any]) -> dict[str, Tensor]:
        """Return results by the names of outputs."""
        side = self._answer
        if not self._has_rows:  # one result, whose arrays are whole
            (result,) = results
            named = {_output_name(key): value for key, value in result.items()}
            return {name: _tensor(name, value) for name, value in named.items()}
        if not side.ports:
            side = _side_like(results[0])
        columns: dict[str, Tensor] = {}
        for port in side.ports:
            values = [_field(result, port) for result in results] if side.is_record else results
            if port.is_optional and all(value is _ABSENT for value in values):
                continue
            if any(value is _ABSENT for value in values):
                raise BadOutcome(f"the results of {len(values)} samples do not all have '{port.name}'")
            columns[port.name] = _written(port, values)
        return columns


def codec_of(given: WireType, answer: WireType) -> TensorCodec:
    """Return the codec of a servable whose samples and results have these types."""
    return TensorCodec(side_of(given), side_of(answer), given)


def codec_for(model: type, given: WireType, answer: WireType, method: str = "") -> TensorCodec:
    """Return the codec of `predict`, or of a further method: the class's own, as model files have, or of its types."""
    own: Mapping[str, TensorCodec] = getattr(model, "tensor_codecs", {})
    found = own.get(method)
    return TensorCodec(side_of(given), side_of(answer), given, signature=method) if found is None else found


def face_of(given: TensorSide, answer: TensorSide, *, has_rows: bool = True) -> TensorFace:
    """Return what protocols must know of a servable."""

    def told(side: TensorSide) -> list[TensorMetadata]:
        # Of any number of axes, which no protocol but one has a word for, an axis of any length is told.
        rows, any_axes = ((-1,), ()) if has_rows else ((), (-1,))
        shapes = [any_axes if port.shape is None else port.shape for port in side.ports]
        return [
            TensorMetadata(port.name, port.datatype, (*rows, *shape))
            for port, shape in zip(side.ports, shapes, strict=True)
        ]

    return TensorFace(
        inputs=told(given),
        outputs=told(answer),
        optional=frozenset(port.name for port in given.ports if port.is_optional),
        unranked=frozenset(port.name for port in given.ports if port.shape is None),
        unranked_outputs=frozenset(port.name for port in answer.ports if port.shape is None),
        input_tensors={port.name: port.tensor for port in given.ports if port.tensor},
        output_tensors={port.name: port.tensor for port in answer.ports if port.tensor},
        has_rows=has_rows,
        is_open=not given.ports,
    )


def side_of(wire: Any) -> TensorSide:
    """Read the ports of a type, as far as it or its schema says."""
    name = "input" if getattr(wire, "direction", "input") == "input" else "output"
    if wire.raw:
        return TensorSide([TensorPort(name, "BYTES", kind="bytes")])
    annotation = getattr(wire, "annotation", None)
    hints = _hints(annotation)
    schema, parts = wire.json_schema("#/{name}")
    schema = _resolved(schema, parts)
    if not schema and not is_array(annotation):
        return TensorSide()
    if "properties" not in schema:
        return TensorSide([_port(name, annotation, schema, parts)])
    required = schema.get("required", ())
    names = [field for field in hints if field in schema["properties"]] or [*schema["properties"]]
    names += [field for field in schema["properties"] if field not in names]
    ports: list[TensorPort] = []
    for field in names:
        hint, said, is_optional = hints.get(field), schema["properties"][field], field not in required
        if is_optional and name == "input":
            hint, said = _without_none(hint), _without_null(said)
        ports.append(msgspec.structs.replace(_port(field, hint, said, parts), is_optional=is_optional))
    return TensorSide(ports, is_record=True)


def _without_none(annotation: Any) -> Any:
    """Return what a field is where it is sent: None is said by leaving it out."""
    members = [one for one in typing.get_args(annotation) if one is not types.NoneType]
    return members[0] if is_union(unwrap(annotation)) and len(members) == 1 else annotation


def _without_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    members = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    return members[0] if len(members) == 1 else schema


def _port(name: str, annotation: Any, schema: Mapping[str, Any], parts: Mapping[str, Any]) -> TensorPort:
    array = array_type_of(annotation) if is_array(annotation) and typing.get_args(annotation) else None
    if array is not None:
        return TensorPort(name, array.datatype, array.shape, "array")
    found = None if is_array(annotation) else _plain(schema, parts)
    return TensorPort(name, "BYTES", kind="json") if found is None else TensorPort(name, *found)


def _plain(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """Return type and shape of lists in lists of one plain type; None for everything else."""
    schema = _resolved(schema, parts)
    kind = schema.get("type")
    if kind == "array":
        inner: list[Any] = schema.get("prefixItems") or [schema.get("items") or {}]
        found = {_plain(one, parts) for one in inner}
        if len(found) != 1 or (one := found.pop()) is None:
            return None
        low, high = schema.get("minItems"), schema.get("maxItems")
        return one[0], (low if low is not None and low == high else -1, *one[1])
    if "enum" in schema:
        kinds: set[type] = set(map(type, schema["enum"]))
        return ("BYTES", ()) if kinds == {str} else ("INT64", ()) if kinds == {int} else None
    if not isinstance(kind, str) or kind not in _PLAIN or {"contentEncoding", "contentMediaType"} & schema.keys():
        return None
    return _PLAIN[kind], ()


def _resolved(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(100):  # a type may refer to itself
        reference = schema.get("$ref")
        if reference is None:
            break
        schema = parts.get(reference.removeprefix("#/"), {})
    return schema


def _hints(annotation: Any) -> dict[str, Any]:
    hints, error = caught(lambda: typing.get_type_hints(annotation, include_extras=True))
    return hints if error is None else {}


# ---------------------------------------------------------------------------------------------------------------------
# Values


def plain_array(tensor: Tensor, rows: int | None = None) -> npt.NDArray[Any]:
    """Return what is in a tensor, or in a slice of so many rows: numbers, or texts.

    Raises:
        ValidationError: If shape and data do not agree.
    """
    if rows is not None:
        tensor = msgspec.structs.replace(tensor, shape=(rows, *tensor.shape[1:]))
    array = to_array(as_raw(tensor))
    return _texts(tensor, array) if tensor.datatype == "BYTES" else numbers_of(array, tensor.datatype)


def _texts(tensor: Tensor, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    import numpy as np

    texts = np.empty(array.size, object)
    try:
        texts[:] = [one.decode() for one in array.ravel()]
    except UnicodeDecodeError as error:
        raise ValidationError(f"input '{tensor.name}' holds bytes that are not UTF-8: {error.reason}") from None
    return texts.reshape(array.shape)


def _from_json(tensor: Tensor, text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"input '{tensor.name}' holds the JSON text of each value, and one cannot be read: {error}"
        raise ValidationError(msg) from None


class _Absent:
    """Type of `_ABSENT`."""


_ABSENT: Final = _Absent()


def _field(result: Any, port: TensorPort) -> Any:
    if isinstance(result, Mapping):
        return cast("Mapping[str, Any]", result).get(port.name, _ABSENT)
    name = port.name
    if isinstance(result, msgspec.Struct):
        name = next((one.name for one in msgspec.structs.fields(result) if one.encode_name == name), name)
    else:
        kind = type(cast("object", result))
        named: dict[str, Any] = getattr(kind, "model_fields", {})
        name = next((key for key, one in named.items() if getattr(one, "serialization_alias", None) == name), name)
    return getattr(result, name, _ABSENT)


def _alike(port: TensorPort, values: Sequence[Any]) -> tuple[str, list[npt.NDArray[Any]]] | None:
    """Return the type of an output and its values as arrays of it; None if they are not all of one type and shape.

    None of them changes beside the others then, and each is written by itself.
    """
    import numpy as np

    first = values[0]
    if port.kind not in {"array", "plain"} or port.datatype == "BYTES" or type(first) is not np.ndarray:
        return None
    kind, shape = first.dtype, first.shape
    for value in values:
        if type(value) is not np.ndarray or value.shape != shape or (value.dtype is not kind and value.dtype != kind):
            return None
    known = DATATYPES.get(port.datatype) or BY_NUMPY.get(kind.name)
    if known is None or known.name == "BF16" or kind.kind not in "biuf":
        return None
    wanted = np.dtype(known.numpy).newbyteorder("<")
    arrays: list[npt.NDArray[Any]] = list(values)
    return known.name, arrays if kind == wanted else [array.astype(wanted) for array in arrays]


def _side_like(result: Any) -> TensorSide:
    """Return the outputs that a result without a declared type seems to have."""
    if isinstance(result, Mapping) and result and all(isinstance(name, str) for name in cast("Any", result)):
        fields = cast("Mapping[str, Any]", result)
        return TensorSide(
            [TensorPort(name, "", kind=_kind_of(value)) for name, value in fields.items()], is_record=True
        )
    return TensorSide([TensorPort("output", "", kind=_kind_of(result))])


def _output_name(key: Any) -> str:
    """Return what an output is called whose array has this key.

    Raises:
        BadOutcome: It is neither text nor a number.
    """
    if isinstance(key, str):
        return key
    if isinstance(key, bool) or not isinstance(key, Real):
        from forebay.serving.models.schema import wrong_key

        raise BadOutcome(wrong_key(key))
    return str(key)


def _kind_of(value: Any) -> Kind:
    import numpy as np

    if isinstance(value, bytes | bytearray | memoryview | Media):
        return "bytes"
    array = caught(np.asarray, value)[0]
    return "plain" if array is not None and array.dtype.kind in "biufU" else "json"


def _written(port: TensorPort, values: Sequence[Any]) -> Tensor:
    """Make a tensor of the values of one output; raises a `BadOutcome` if they are not what the port is."""
    import numpy as np

    if port.kind == "json":
        from forebay.serving.models.schema import plain

        texts = [msgspec.json.encode(value, enc_hook=plain) for value in values]
        return Tensor(port.name, "BYTES", (len(texts),), join_elements(port.name, texts))
    if port.kind == "bytes":
        held = [value.body if isinstance(value, Media) else value for value in values]
        return Tensor(port.name, "BYTES", (len(held),), join_elements(port.name, held))
    is_text = port.datatype == "BYTES"
    try:
        if len(values) > 1 and all(isinstance(value, np.ndarray) for value in values):
            array = np.stack(cast("Any", values))
        elif len(values) == 1:
            array = np.asarray(values[0], object if is_text else None)[np.newaxis]
        else:
            array = np.array(values, object if is_text else None)
    except ValueError:
        raise BadOutcome(f"'{port.name}' has unlike shapes for the samples of a call; send them one by one") from None
    if port.datatype and not is_text:
        if array.dtype.kind == "O" and any(one is None for one in array.ravel()):  # it would become NaN
            raise BadOutcome(f"'{port.name}': expected a tensor of {port.datatype}, got None for a sample")
        array = array.astype(DATATYPES[port.datatype].numpy, copy=False)
    return _tensor(port.name, array)


def _tensor(name: str, value: Any) -> Tensor:
    """Make a tensor with memory of its own: the model may write its next results where it has put these.

    Raises:
        BadOutcome: There is no tensor of such elements.
    """
    import numpy as np

    try:
        tensor = from_array(name, np.asarray(value))
    except ValidationError as error:  # it is not the client who has to cast it
        raise BadOutcome(error.message) from error
    return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))
