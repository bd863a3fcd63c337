# SPDX-License-Identifier: Apache-2.0
"""The schemas of an OpenAPI document in one namespace, and the names in it, each once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias, cast

Json: TypeAlias = dict[str, Any]

COMPONENTS: Final = "#/components/schemas/"
_REF: Final = COMPONENTS + "{name}"
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")
"""What the names of components have not."""


class Documented(Protocol):
    """A type as the document needs it: a `WireType`, or what another process has told of one."""

    @property
    def raw(self) -> bool:
        """Whether it is bytes."""
        ...

    @property
    def has_media(self) -> bool:
        """Whether answers of it may be of other media types than the document tells."""
        ...

    @property
    def in_pieces(self) -> bool:
        """Whether a model takes it as it arrives."""
        ...

    @property
    def openai(self) -> str:
        """Where requests of it are asked in OpenAI's protocol; empty if nowhere."""
        ...

    def json_schema(self, ref_template: str) -> tuple[Json, Json]:
        """Return the schema and the components it points to."""
        ...


_BUILT_IN: Final[Mapping[str, Json]] = {
    "ForebayError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "request_id"],
                "properties": {
                    "code": {"type": "string"},
                    "message": {"type": "string"},
                    "request_id": {"type": "string"},
                    "detail": {"description": "Data for programs, where there is any"},
                },
            }
        },
    },
    "ForebayModel": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "version": {"type": ["string", "null"]},
            "description": {"type": "string"},
        },
    },
}


class Schemas:
    """The schemas of all endpoints in one namespace.

    Two endpoints may both have an `In`. If they mean the same they share the component; otherwise all components of the
    later type get the name of its endpoint as a prefix, those that differ and those that point to them.
    """

    def __init__(self) -> None:
        self.components: Json = dict(_BUILT_IN)

    def add(self, wire_type: Documented, endpoint: str) -> Json:
        """Add what a type needs to the components and return its own schema."""
        schema, parts = _by_name(*wire_type.json_schema(_REF))
        prefix = ""
        for attempt in itertools.count(2):
            # The third time every name is made unlike all others: what is documented must not decide how often.
            taken = set(self.components) if attempt > 3 else set[str]()
            names = {name: claim(_NO_NAME.sub("_", prefix + name), taken) for name in parts}
            added = {names[name]: _repoint(part, names) for name, part in parts.items()}
            if all(self.components.get(name, part) == part for name, part in added.items()):
                self.components |= added
                return _repoint(schema, names)
            prefix = f"{endpoint}_" if attempt == 2 else f"{endpoint}_{attempt}_"
        raise AssertionError  # itertools.count never ends

    def resolve(self, schema: Json) -> Json:
        """Return the component that a schema refers to, or the schema."""
        return self.components.get(str(schema.get("$ref", "")).removeprefix(COMPONENTS), schema)


def _by_name(schema: Json, parts: Json) -> tuple[Json, Json]:
    """Return the schema of an object that says its name as a component, and a reference to it.

    Pydantic writes the outermost one out. Without a name in the document each place where it stands would be a class of
    its own in a client that was generated.
    """
    name = _NO_NAME.sub("_", str(schema.get("title") or ""))
    if not name or "properties" not in schema or name in parts:
        return schema, parts
    return {"$ref": _REF.format(name=name)}, {**parts, name: schema}


def as_form(sample: Json, schemas: Schemas) -> Json:
    """Return the schema of a sample that comes as a form.

    Bytes are themselves there, and in base64 in JSON; and a value without fields has a name, whichever.
    """
    if not sample:
        return {"type": "object"}
    if not _has_fields(sample, schemas):
        return {"type": "object", "additionalProperties": _as_part(sample), "minProperties": 1, "maxProperties": 1}
    whole = schemas.resolve(sample)
    if "properties" not in whole:
        return sample
    # Written out also where it is the same: a client that was generated knows bodies by the names of their types, and
    # would send every sample as a form.
    return {**whole, "properties": {name: _as_part(field) for name, field in whole["properties"].items()}}


def _has_fields(schema: Json, schemas: Schemas) -> bool:
    """Tell whether a form is read by the names of its parts, as `NamedReader` does."""
    schema = schemas.resolve(schema)
    members = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if members:
        return any(_has_fields(member, schemas) for member in members)
    return not schema or "properties" in schema or "object" in schema.get("type", "")


def _as_part(field: Json, *, may_be_several: bool = True) -> Json:
    if "contentEncoding" in field:
        others = {key: value for key, value in field.items() if key not in {"contentEncoding", "contentMediaType"}}
        return {**others, "format": "binary"}
    found = dict(field)
    for key in {"anyOf", "oneOf"} & found.keys():
        found[key] = [_as_part(member, may_be_several=may_be_several) for member in found[key]]
    if may_be_several and isinstance(found.get("items"), dict):  # that of a tuple is false: no further elements
        found["items"] = _as_part(found["items"], may_be_several=False)
    return found


def claim(wanted: str, taken: set[str]) -> str:
    """Return a name like the one that is wanted, and note that it is taken."""
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    taken.add(name)
    return name


# Keywords that hold data of the user's, where a "$ref" would be no reference, and those that hold schemas by name,
# where "$ref" or "default" would be the name of a field.
_DATA: Final = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs"})


def _repoint(schema: Any, names: Mapping[str, str]) -> Any:
    """Return the schema with its references, and the mappings of its discriminators, under the new names."""
    if isinstance(schema, list):
        return [_repoint(item, names) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for key, value in cast("Json", schema).items():
        if key in _DATA:
            result[key] = value
        elif key in _NAMED:
            result[key] = {name: _repoint(part, names) for name, part in value.items()}
        elif key == "$ref":
            result[key] = _new_reference(value, names)
        elif key == "mapping":
            result[key] = {tag: _new_reference(target, names) for tag, target in value.items()}
        else:
            result[key] = _repoint(value, names)
    return result


def _new_reference(target: str, names: Mapping[str, str]) -> str:
    name = target.removeprefix(COMPONENTS)
    return COMPONENTS + names[name] if name in names else target
