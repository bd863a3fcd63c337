# SPDX-License-Identifier: Apache-2.0
"""The types of samples and results, turned into codecs; `annotations.py` reads which they are off a model.

| annotation | on the wire |
|---|---|
| whatever msgspec knows (structs, dataclasses, typed dicts, unions, `Annotated[..., Meta]`) | JSON or msgpack |
| whatever involves pydantic v2 (models, `Field`, `annotated_types`) | JSON or msgpack, by a `TypeAdapter` |
| `NDArray[np.float32]` and the like (`array_types.py`) as input | lists in lists; a tensor where there are any |
| `bytes` as input | the body untouched, whatever its media type; the one file of a form |
| `AsyncIterator[bytes]`, `Iterator[bytes]` as input | the body as it arrives |
| `forebay.File`, `bytes` inside other types | base64 in JSON, bytes in msgpack; a file of a form |
| `bytes` as output | `application/octet-stream` |
| `forebay.Media` as output, also in a union with others | its own media type |
| `forebay.Answer` as output, in a union with X or alone | as X or as anything, with its own status and headers |

Results are held to the declared type (`outputs.py`, or pydantic): another value is an error. Array objects of numpy and
the like are sent as lists, and count as such. Types that nothing could read back are not enforced.

JSON has no NaN and no infinity: in results they become `null`. msgpack carries them as they are.
A NaT of pandas is `null` in both, and so is its NA.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias, cast, final

import msgspec

from forebay.errors import ConfigError
from forebay.openai.request_fields import AnyRequest
from forebay.serving.models import default_fields, empty_fields
from forebay.serving.models.array_types import array_type_of, is_array
from forebay.serving.models.json_rows import row_encoder
from forebay.serving.models.named import NamedReader
from forebay.serving.models.schema_places import PREFIX
from forebay.serving.models.vectors import vector_in_base64
from forebay.types.call import FIELDS, Media
from forebay.types.call_signature import as_written
from forebay.types.failures import words_of
from forebay.types.file import SCHEMA as FILE_SCHEMA
from forebay.types.file import File
from forebay.types.first_use import known
from forebay.types.model_answer import Answer
from forebay.types.type_names import named_by
from forebay.workers.memory.landing import own
from forebay.workers.user_calls.user_code import caught

if typing.TYPE_CHECKING:
    from pydantic import TypeAdapter


Buffer: TypeAlias = bytes | bytearray | memoryview
Decode: TypeAlias = Callable[[Buffer], Any]
Encode: TypeAlias = Callable[[Any], bytes]
_FORMATS: Final = ("json", "msgpack")
_NAMED: Final = ("form", "query")
FORMATS: Final = (*_FORMATS, *_NAMED)
"""What a sample may come in."""
WRITTEN: Final = (*_FORMATS, "base64", "rows")
"""What a result may be written in; base64 is for vectors, rows are those of TensorFlow Serving's JSON."""


@final
class WireType:
    """One type in one direction.

    Args:
        annotation: A resolved annotation; no strings.
        direction: `input` makes the decoders at once, so that a type nobody can read is found when the server starts.

    Raises:
        ConfigError: The type cannot travel.
    """

    __slots__ = (
        "_adapter",
        "_decoders",
        "_encoders",
        "_hook",
        "_names",
        "_places",
        "annotation",
        "direction",
        "has_media",
        "in_pieces",
        "raw",
        "refers",
    )

    def __init__(self, annotation: Any, direction: Literal["input", "output"] = "input") -> None:
        if direction == "output" and (annotation := without(Answer, annotation)) is Answer:
            annotation = Any
        encoded = without(Media, annotation) if direction == "output" else annotation
        self.has_media = encoded is Media or encoded is not annotation
        """Whether a value may be a `Media`, which is not encoded; `annotation` then says what else it may be."""
        self.annotation = Any if encoded is object else encoded
        self.direction = direction
        self.in_pieces = False  # whether a model is given an iterator of it, while it arrives
        self.raw = encoded is Media or unwrap(encoded) is bytes
        self._adapter = None if self.raw else _pydantic_adapter(self.annotation)
        customs = [] if direction == "output" or self.raw else list(_parts(self.annotation, {}))
        self._hook = _read_custom if any(part is File or is_array(part) for part in customs) else None
        self._decoders: dict[str, Decode] = {}
        self._encoders: dict[str, Encode] = {}
        self._names: frozenset[str] | None = None
        self._places: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.refers = False
        """Whether a decoded value can refer to the body it was read from."""
        if direction == "input":
            self._require_readable()

    def __repr__(self) -> str:
        return f"WireType({spell(self.annotation)}, {self.direction!r})"

    def decoder(self, format: str) -> Decode:
        """Return what reads a body; for msgspec types it is the bound method of a C decoder, and nothing around it.

        Only samples of OpenAI's protocol, and dataclasses with defaults, have something around it: see `unsaid` and
        `left_out`.

        It raises what msgspec, pydantic and the interpreter (`RecursionError` for a nesting bomb) raise: catch
        `Exception` and ask `explain`.
        """
        found = self._decoders.get(format)
        if found is None:
            named = format in _NAMED
            found = self._named_decoder(format) if named else self._make_decoder(_checked(format))
            self._decoders[format] = found
        return found

    def reader(self, params: Mapping[str, Any]) -> Decode:
        """Return what reads the body of a request with these params, which may have fields in its query."""
        fields, kind = params.get(FIELDS), params["in"]
        decode = _as_it_is if self.in_pieces else self.decoder(kind)
        if not fields or kind not in _FORMATS:
            return decode
        codec = msgspec.json if kind == "json" else msgspec.msgpack

        def read_beside(body: Buffer) -> Any:
            try:  # its members stay as they are: the type is to see them before objects are made of them
                members = codec.decode(body, type=known(dict[str, msgspec.Raw])) if len(body) else {}
            except msgspec.ValidationError:
                return decode(body)  # which says what it is, if not an object
            named = NamedReader(*self.places, self.converter(strict=False)).beside(fields, members)
            return self._lax_decoder(kind)(codec.encode(members | named, enc_hook=File.read))

        return read_beside

    def _lax_decoder(self, format: str) -> Decode:
        """Return what reads samples whose numbers may be texts."""
        name = f"lax {format}"
        if name not in self._decoders:
            self._decoders[name] = self._make_decoder(format, strict=False)
        return self._decoders[name]

    def encoder(self, format: str) -> Encode:
        """Return what writes a result; whatever it raises is the model's fault, not the client's."""
        found = self._encoders.get(format)
        if found is None:
            if format == "base64":
                found = vector_in_base64
            elif format == "rows" and not self.raw:
                found = row_encoder(self._adapter, plain)
            else:
                found = self._make_encoder(_checked("json" if format == "rows" else format))
            self._encoders[format] = found
        return found

    @property
    def openai(self) -> str:
        """The path at which it is asked in OpenAI's protocol; empty if there is none."""
        kind = unwrap(self.annotation)
        return getattr(kind, "openai", "") if isinstance(kind, type) and issubclass(kind, AnyRequest) else ""

    @property
    def is_checked(self) -> bool:
        """Whether the encoder holds results to the type, as pydantic's does."""
        return self._adapter is not None

    def json_schema(self, ref_template: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Describe the type in JSON Schema 2020-12.

        Args:
            ref_template: How to point to a component, such as `#/components/schemas/{name}`.

        Returns:
            The schema and the components it points to. What cannot be described is `{}`, that is anything: a type that
            works on the wire must not fail for want of documentation.
        """
        if self.raw:
            return {"type": "string", "format": "binary"}, {}
        if self._adapter is None:
            return _msgspec_schema(self.annotation, ref_template)
        mode = "validation" if self.direction == "input" else "serialization"
        template = ref_template.replace("{name}", "{model}")
        schema, error = caught(lambda: cast("Any", self._adapter).json_schema(mode=mode, ref_template=template))
        if error is not None:
            return {}, {}
        return schema, schema.pop("$defs", {})

    @property
    def field_names(self) -> frozenset[str]:
        """The names of all fields inside."""
        if self._names is None:
            schema, parts = self.places
            self._names = frozenset(name for part in (schema, *parts.values()) for name in part.get("properties", ()))
        return self._names

    @property
    def places(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The schema of `json_schema`, for looking up what may stand where; see `schema_places`."""
        if self._places is None:
            self._places = self.json_schema(PREFIX + "{name}")
        return self._places

    def _make_decoder(self, format: str, *, strict: bool = True) -> Decode:
        if self.raw:
            if self.annotation is bytes:
                return own  # of bytes it is the same object: nothing is copied
            convert = partial(msgspec.convert, type=known(self.annotation))  # Annotated[bytes, Meta(max_length=...)]
            return lambda body: convert(own(body))
        if self._adapter is None:
            codec = msgspec.json if format == "json" else msgspec.msgpack
            decode = codec.Decoder(known(self.annotation), strict=strict, dec_hook=self._hook_of(strict=strict)).decode
            if self.openai:
                decode = empty_fields.reader(decode, unwrap(self.annotation), self.openai, codec)
            return self._filled(decode)
        if format == "json":
            validate_json = self._adapter.validate_json
            return lambda body: validate_json(own(body) if isinstance(body, memoryview) else body)
        unpack, validate = msgspec.msgpack.Decoder().decode, self.converter(strict=strict)
        return lambda body: validate(unpack(body))

    def converter(self, *, strict: bool = True) -> Callable[[Any], Any]:
        """Return what makes a sample of plain values and arrays; `strict` reads no texts as numbers."""
        if self._adapter is not None:
            return _converter(self._adapter) if strict else partial(self._adapter.validate_python, strict=False)
        if self.annotation is Any:
            return _as_it_is
        hook = self._hook_of(strict=strict)
        return self._filled(partial(msgspec.convert, type=known(self.annotation), strict=strict, dec_hook=hook))

    def _hook_of(self, *, strict: bool) -> Callable[..., Any] | None:
        return self._hook if strict or self._hook is None else partial(self._hook, strict=False)

    def _filled(self, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what reads whole objects, where this does not; see `left_out`."""
        defaults = default_fields.defaults_in(nodes_of(self.annotation))
        return default_fields.reader(read, defaults) if defaults else read

    def _named_decoder(self, format: str) -> Decode:
        reader = NamedReader(*self.places, self.converter(strict=False))
        return reader.form if format == "form" else reader.query

    def _make_encoder(self, format: str) -> Encode:
        if self.annotation is Media:
            return _no_bytes
        if self.raw:
            return _raw_bytes
        if self._adapter is None:
            if format == "json":
                return msgspec.json.Encoder(enc_hook=plain).encode
            return msgspec.msgpack.Encoder(enc_hook=plain).encode
        # Names as in the schema: by alias. A value of another type is an error, not a warning in a log nobody reads.
        if format == "json":
            return partial(self._adapter.dump_json, by_alias=True, warnings="error", fallback=plain)
        # In JSON mode, so that both formats carry the same values: the ones the schema speaks of.
        dump = partial(self._adapter.dump_python, mode="json", by_alias=True, warnings="error", fallback=plain)
        pack = msgspec.msgpack.Encoder(enc_hook=plain).encode
        return lambda value: pack(dump(value))

    def _require_readable(self) -> None:
        nodes, error = caught(self._nodes)
        if error is not None:
            raise ConfigError(f"{spell(self.annotation)} cannot be read from a request: {words_of(error)}") from error
        customs = [node.cls for node in nodes if isinstance(node, msgspec.inspect.CustomType)]
        arrays = [array_type_of(part) for part in _parts(self.annotation, {}) if is_array(part)]
        custom = next((cls for cls in customs if cls is not File and not (arrays and is_array(cls))), None)
        self.refers = any(isinstance(node, _REFERRING) for node in nodes) or any(arrays)
        if custom is not None:
            raise ConfigError(
                f"{spell(custom)} cannot be read from a request; take a type that one can carry, such as bytes or an "
                "array of NumPy, and build the object in `preprocess` or `predict`"
            )

    def _nodes(self) -> list[Any]:
        for each in _FORMATS:
            self.decoder(each)
        return [] if self.raw or self._adapter is not None else list(nodes_of(self.annotation))


def part_encoder(answer: WireType) -> Encode:
    """Return what writes a part of a stream as JSON, in one line where the type may hold what others have written."""
    encode = answer.encoder("json")
    nodes, error = caught(lambda: list(nodes_of(answer.annotation)))
    if error is not None or not any(isinstance(node, _QUOTING) for node in nodes):
        return encode
    return lambda part: in_one_line(encode(part))


def in_one_line(written: bytes) -> bytes:
    """Return JSON without line ends, which would end a line of an event; they only ever stand between its tokens."""
    return written.translate(_NO_LINE_ENDS)


_QUOTING: Final = (msgspec.inspect.RawType, msgspec.inspect.AnyType)
_NO_LINE_ENDS: Final = bytes.maketrans(b"\r\n", b"  ")


def without(kind: type, annotation: Any) -> Any:
    """Return a type of results without this class, whose objects are sent in a way of their own.

    The very annotation comes back where it has none; the class where there is nothing else.
    """
    whole = unwrap(annotation)
    if whole is kind:
        return kind
    members = typing.get_args(whole) if is_union(whole) else ()
    if kind not in members:
        return annotation
    return typing.Union[tuple(member for member in members if member is not kind)]  # noqa: UP007


def plain(value: Any) -> Any:
    """Turn what encoders do not know into what JSON can carry.

    That is arrays and scalars of numpy and what quacks like one, pydantic models, and objects of classes that inherit
    from a text, a number or a time, such as the times of pandas. Numpy lists `datetime64[ns]` as an integer of
    nanoseconds, and so it is sent; of a `longdouble` the digits beyond a double are lost, of a time of another library
    those beyond microseconds.
    """
    listed = getattr(value, "tolist", None)
    if listed is not None:
        result = listed()
        # longdouble lists as itself, and would come back here for ever.
        return float(result) if type(result) is type(value) else result
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        # For what pydantic does not know, such as an array; a method of the user's own need not take it.
        more = {"fallback": plain} if getattr(dump, "__module__", "") == "pydantic.main" else {}
        return dump(mode="json", by_alias=True, **more)
    if type(value) in ONLY_AS_KEYS:
        raise TypeError(wrong_key(value))
    if type(value).__name__ == "NAType" and type(value).__module__.startswith("pandas."):
        return None
    for kind, made in _INHERITED.items():
        if isinstance(value, kind) and type(value) is not kind:
            return made(value)
    # A table gives its cells without the names of its columns: nobody would know what is what.
    if hasattr(value, "__array__") and not hasattr(value, "columns"):
        import numpy as np

        result = np.asarray(value).tolist()
        if result is not value:
            return result
    if isinstance(value, Media | Answer):
        raise TypeError(f"a result holds a forebay.{type(value).__name__}; only a whole result can be one")
    rows = 'its rows, as `to_dict("records")` makes them' if hasattr(value, "columns") else "plain values or arrays"
    msg = f"a result holds {spell(type(value))}, which cannot be sent; return {rows}, or bytes as a forebay.Media"
    raise TypeError(msg)


def wrong_key(key: Any) -> str:
    """Say that a key of a result is none that can be sent."""
    return f"a result holds a dict with a key that is {spell(type(key))}; only texts and numbers can be"


def _base_time(value: dt.datetime) -> dt.datetime | None:
    # As NaN, NaT of pandas is of its type and no time, and not equal to itself; numpy's own is None as well.
    return dt.datetime.combine(value.date(), value.timetz()) if value == value else None  # noqa: PLR0124


# The encoders take objects of these very classes only. In this order: a datetime is a date as well.
_INHERITED: Final[Mapping[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    dt.datetime: _base_time,
    dt.date: lambda value: dt.date.fromordinal(value.toordinal()),
    dt.timedelta: lambda value: dt.timedelta(value.days, value.seconds, value.microseconds),
}
ONLY_AS_KEYS: Final = frozenset({types.NoneType, bool, tuple})
"""What encoders know as values; they ask for it only where it is a key."""


# ---------------------------------------------------------------------------------------------------------------------
# Encoders and schemas


def _checked(format: str) -> str:
    if format not in _FORMATS:
        raise ValueError(f"format is {format!r}, expected one of {', '.join(_FORMATS)}")
    return format


def _raw_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(cast("Buffer", value))
    # bytes(5) would be five zeros: never call it on what is not a buffer.
    raise TypeError(f"the model returned {spell(type(value))}, but its output is annotated bytes")


def _no_bytes(value: Any) -> bytes:
    raise TypeError(f"the model returned {spell(type(value))}, but its output is annotated forebay.Media")


def _msgspec_schema(annotation: Any, ref_template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    described = partial(msgspec.json.schema_components, schema_hook=_any_schema, ref_template=ref_template)
    found, error = caught(described, (annotation,))
    if error is not None:
        members = typing.get_args(annotation) if is_union(annotation) else ()
        if not members:
            return {}, {}
        # A union that cannot be read back (of untagged structs, say) is still a good output.
        each = [_msgspec_schema(member, ref_template) for member in members]
        merged: dict[str, Any] = {}
        for _, parts in each:
            merged.update(parts)
        return {"anyOf": [part for part, _ in each]}, merged
    (schema,), components = found
    return schema, components


def _any_schema(custom: type) -> dict[str, Any]:
    return dict(FILE_SCHEMA) if custom is File else {"type": "array", "items": {}} if is_array(custom) else {}


def _read_custom(kind: Any, value: Any, *, strict: bool = True) -> Any:
    if kind is File:
        return File.read_from(value)
    array = array_type_of(kind)
    if array is None:
        raise NotImplementedError
    return array.read(value, strict=strict)


def _as_it_is(value: Any) -> Any:
    return value


def is_union(annotation: Any) -> bool:
    """Tell whether a type is a union."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


_REFERRING: Final = (msgspec.inspect.RawType, msgspec.inspect.MemoryViewType)


def nodes_of(annotation: Any) -> Iterator[Any]:
    """Walk over the types inside an annotation as msgspec sees them."""
    root = msgspec.inspect.type_info(annotation)
    seen: set[int] = set()  # recursive structs; `root` keeps every node alive
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
            for name in node.__struct_fields__:
                child = getattr(node, name)
                todo.extend(cast("tuple[Any, ...]", child) if isinstance(child, tuple) else (child,))


# ---------------------------------------------------------------------------------------------------------------------
# pydantic


def _pydantic_adapter(annotation: Any) -> TypeAdapter[Any] | None:
    parts = [part for part in _parts(annotation, {}) if _is_pydantic(part)]
    if not parts:
        return None
    # pydantic 2 makes an adapter of them, which fails with every sample.
    old = next((part for part in parts if _is_of_v1(part)), None)
    if old is not None:
        raise ConfigError(f"{spell(old)} is a model of pydantic.v1; derive it from the BaseModel of pydantic 2")
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise ConfigError(
            f"{spell(annotation)} needs pydantic 2, which is not installed: pip install forebay[pydantic]"
        ) from error
    adapter, error = caught(TypeAdapter, annotation)
    if error is not None:
        reason = words_of(error).partition("\n")[0]
        raise ConfigError(f"pydantic makes no codec of {spell(annotation)}: {reason}") from error
    return adapter


def _converter(adapter: TypeAdapter[Any]) -> Callable[[Any], Any]:
    """Return what makes a sample of plain values that stand for what they would in JSON.

    A strict type takes a text as a time, or a list as a tuple, only of JSON; of Python it wants the object itself.
    """
    validate = adapter.validate_python
    if not _has_strict(adapter.core_schema):
        return validate

    def validate_strict(value: Any) -> Any:
        try:
            text = json.dumps(value)
        except TypeError:  # bytes, say, which are more than JSON can carry
            return validate(value)
        return adapter.validate_json(text)

    return validate_strict


def _has_strict(schema: Any) -> bool:
    """Tell whether anything in a schema of pydantic's core is strict."""
    if isinstance(schema, dict):
        fields = cast("dict[str, Any]", schema)
        return fields.get("strict") is True or any(map(_has_strict, fields.values()))
    return isinstance(schema, list | tuple) and any(map(_has_strict, cast("Sequence[Any]", schema)))


def _is_pydantic(part: Any) -> bool:
    # annotated_types are pydantic's constraints: msgspec would read past them in silence.
    kind: type = part if isinstance(part, type) else type(part)
    if kind is File:
        return False
    if any(base.__module__.partition(".")[0] in _PYDANTIC for base in kind.__mro__):
        return True
    return hasattr(part, "__get_pydantic_core_schema__") or hasattr(part, "__pydantic_core_schema__")


def _is_of_v1(part: Any) -> bool:
    return isinstance(part, type) and any(base.__module__ == "pydantic.v1.main" for base in part.__mro__)


_PYDANTIC: Final = frozenset({"pydantic", "pydantic_core", "annotated_types"})
# The marks of classes whose fields are types themselves.
_FIELDED: Final = ("__dataclass_fields__", "__struct_fields__", "_fields", "__total__", "__attrs_attrs__")


def _parts(annotation: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Walk over everything an annotation is made of: arguments, metadata and the fields of classes."""
    if id(annotation) in seen:
        return
    # The hints of a class are made anew by every call: kept here, or an id would come back for another object.
    seen[id(annotation)] = annotation
    yield annotation
    if is_array(annotation):
        return
    children: list[Any] = list(typing.get_args(annotation))
    children += [typing.get_origin(annotation), getattr(annotation, "__supertype__", None), named_by(annotation)]
    if isinstance(annotation, type) and any(hasattr(annotation, mark) for mark in _FIELDED):
        hints, unresolved = caught(partial(typing.get_type_hints, include_extras=True), annotation)
        if unresolved is None:  # else the decoder reports it, in better words
            children.extend(hints.values())
    for child in children:
        yield from _parts(child, seen)


def unwrap(annotation: Any) -> Any:
    """Strip `Annotated` and type aliases."""
    while True:
        if typing.get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        elif (value := named_by(annotation)) is not None:
            annotation = value
        else:
            return annotation


_OUR_MODULES: Final = re.compile(r"\bforebay_target\.\w+_[0-9a-f]{8}\.")
"""Names that files of users are imported under (`load_module`)."""


def spell(annotation: Any) -> str:
    """Write an annotation as the user wrote it."""
    if annotation is types.NoneType:
        return "`None`"
    text = as_written(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    return f"`{_OUR_MODULES.sub('', text)}`"
