# SPDX-License-Identifier: Apache-2.0
"""Samples from named values: the fields and files of a form, or the parameters of a query.

The schema of a field says what its value is, and the request does not: it becomes bytes where bytes are declared, a
number where a number is declared, and is read as JSON where an object is declared. A field that holds an array takes
all values of its name. A type without fields takes the one value there is, whatever its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec

from forebay.errors import InvalidRequest, ValidationError
from forebay.types.did_you_mean import nearest
from forebay.types.file import File, FormPart
from forebay.types.first_use import known
from forebay.types.query import query_parameters

Schema: TypeAlias = Mapping[str, Any]

_JSON: Final = "application/json"
_BOOLEANS: Final = {"on": True, "yes": True, "off": False, "no": False}
"""Beside true, false, 1 and 0, which types read: what a checkbox of HTML sends, and others write."""
_parts: Final = msgspec.msgpack.Decoder(known(list[FormPart]))


class NamedReader:
    """Reads samples of one type."""

    def __init__(self, schema: Schema, parts: Mapping[str, Schema], convert: Callable[[Any], Any]) -> None:
        """Prepare to read.

        Args:
            parts: The schemas it refers to, as `#/NAME`.
            convert: Makes a sample of plain values, reading texts as numbers where numbers belong.
        """
        self._parts = parts
        self._convert = convert
        self._whole = schema
        choices = self._choices(schema)
        objects = [one for one in choices if _is_object(one)]
        self._has_fields = bool(objects) or not choices
        self._fields: dict[str, Schema] = {}
        self._others: Schema = {}
        for one in objects:
            self._fields |= one.get("properties", {})
            others: Any = one.get("additionalProperties")
            self._others = cast("Schema", others) if isinstance(others, dict) else self._others

    def form(self, body: Any) -> Any:
        """Read the parts of a form as the server wrote them; raises a `ValidationError` if they are not a sample."""
        return self._read([(part.name, part) for part in _parts.decode(body)], "the form")

    def query(self, body: Any) -> Any:
        """Read a query string.

        Raises:
            InvalidRequest: If it has too many parameters, or is not UTF-8.
            ValidationError: If they are not a sample.
        """
        return self._read(_in_text(query_parameters(bytes(body), "ascii")), "the query")

    def beside(self, given: Sequence[tuple[str, str]], body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of fields beside a body; raises an `InvalidRequest` if it has one of them itself."""
        for name, _ in given:
            if name in body:
                raise InvalidRequest(f"'{name}' is in the query and in the body; send it in one of them")
        return self._named(_in_text(given))

    def _read(self, given: Sequence[tuple[str, FormPart]], where: str) -> Any:
        if not self._has_fields:
            if len(given) != 1:
                found = ", ".join(f"'{name[:40]}'" for name, _ in given[:10]) or "nothing"
                raise ValidationError(f"{where} has {found}; this model takes one value", detail={"path": "$"})
            return self._convert(self._value(self._whole, [given[0][1]], given[0][0]))
        if self._fields:
            self._require_fields(dict(given), where)
        return self._convert(self._named(given))

    def _named(self, given: Iterable[tuple[str, FormPart]]) -> dict[str, Any]:
        """Return the values of fields by their names."""
        values: dict[str, list[FormPart]] = {}
        for name, part in given:
            values.setdefault(name, []).append(part)
        return {name: self._value(self._of(name), parts, name) for name, parts in values.items()}

    def _of(self, name: str) -> Schema:
        return self._fields.get(name, self._others)

    def _require_fields(self, values: Mapping[str, Any], where: str) -> None:
        """Refuse a form in which no name is a field, or one is written as that of an array (`tags[]`).

        Its sender expects it to be read in some other way. Other names that are not fields are left to the type, which
        ignores or refuses them as it does in JSON.
        """
        strange = [] if self._others else [name for name in values if name not in self._fields]
        if len(strange) < len(values):
            strange = [name for name in strange if name.endswith("[]") and name[:-2] in self._fields]
        if strange:
            name = strange[0]
            hint = nearest(name, self._fields)
            meant = f"; did you mean '{hint}'?" if hint else f", it has {', '.join(map(repr, self._fields))}"
            msg = f"{where} has '{name[:40]}', which a sample does not have{meant}"
            raise ValidationError(msg, detail={"path": "$"})

    def _value(self, schema: Schema, parts: Sequence[FormPart], name: str) -> Any:
        choices = self._choices(schema)
        arrays = [one for one in choices if one.get("type") == "array"]
        if arrays and not (len(parts) == 1 and _is_json(parts[0], b"[")):
            items = cast("Schema", arrays[0].get("items") or {})
            return [self._one(self._choices(items), part, name) for part in parts]
        # What may be anything may be a list; what is not a field, the type ignores or refuses, as it does in JSON.
        if len(parts) > 1 and (not choices or (self._fields and name not in self._fields)):
            return [self._one((), part, name) for part in parts]
        if len(parts) > 1:
            msg = f"'{name[:40]}' is there {len(parts)} times, and takes one value"
            raise ValidationError(msg, detail={"path": f"$.{name}"})
        return self._one(choices, parts[0], name)

    def _one(self, choices: Sequence[Schema], part: FormPart, name: str) -> Any:
        kinds = {one.get("type") for one in choices}
        is_json_text = any(one.get("contentMediaType") == _JSON for one in choices)  # pydantic's `Json` reads it itself
        for one in () if is_json_text else choices:
            if "contentMediaType" in one:
                return File.of(part)
            if "contentEncoding" in one or one.get("format") == "binary":
                return File.of(part).read()
        if not choices and (part.filename is not None or part.size >= 0):
            return File.of(part)
        try:
            text = File.of(part).read().decode()
        except UnicodeDecodeError as error:
            msg = f"'{name[:40]}' is not UTF-8: {error.reason}"
            raise ValidationError(msg, detail={"path": f"$.{name}"}) from None
        if text == "null" and "null" in kinds:
            return None
        if is_json_text:
            return text
        if part.type == _JSON or (kinds & {"object", "array"} and _is_json(part, b"{", b"[")):
            return _loaded(text, name)
        if "boolean" in kinds and "string" not in kinds and (word := text.lower()) in _BOOLEANS:
            return _BOOLEANS[word]
        return _choice(choices, text)

    def _choices(self, schema: Schema) -> list[Schema]:
        """Return what a value may be, without references; empty if it may be anything."""
        found: list[Schema] = []
        todo = [schema]
        for _ in range(100):  # a type may refer to itself
            if not todo:
                break
            one = todo.pop()
            reference = one.get("$ref")
            if reference is not None:
                todo.append(self._parts.get(reference.removeprefix("#/"), {}))
            elif inner := one.get("anyOf") or one.get("oneOf") or one.get("allOf"):
                todo += inner
            elif isinstance(kinds := one.get("type"), list):
                found += [{**one, "type": kind} for kind in cast("list[str]", kinds)]
            elif one and ("type" in one or "enum" in one or "const" in one or "properties" in one):
                found.append(one)
        return found


def _in_text(given: Iterable[tuple[str, str]]) -> list[tuple[str, FormPart]]:
    return [(name, FormPart(name, value.encode())) for name, value in given]


def _choice(choices: Sequence[Schema], text: str) -> Any:
    """Return which of a few values a text is, such as 2 of `Literal[1, 2]`; the text if it is none, or itself one."""
    values = [value for one in choices for value in one.get("enum", [one["const"]] if "const" in one else [])]
    if text in values:
        return text
    return next((value for value in values if msgspec.json.encode(value).decode() == text), text)


def _is_object(schema: Schema) -> bool:
    return schema.get("type") == "object" or "properties" in schema


def _is_json(part: FormPart, *begins: bytes) -> bool:
    return part.type == _JSON or (part.size < 0 and part.content.lstrip()[:1] in begins)


def _loaded(text: str, name: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValidationError(f"'{name[:40]}' is not JSON: {error}", detail={"path": f"$.{name}"}) from None


def named(parts: Iterable[FormPart]) -> bytes:
    """Write down the parts of a form, for `NamedReader.form`."""
    return msgspec.msgpack.encode(list(parts))
