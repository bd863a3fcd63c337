# SPDX-License-Identifier: Apache-2.0
"""What a JSON Schema allows at a place of a sample, such as `$.messages[0].role`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

Json: TypeAlias = "Mapping[str, Any]"

PREFIX: Final = "#/"
"""How the schema refers to its parts: by this and their names."""

_STEPS: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def values_at(path: str, schema: Json, parts: Mapping[str, Json]) -> list[Any]:
    """Return the values that may stand at a place; none where it is not a matter of a few."""
    found = [one for place in _places(path, schema, parts) for one in place.get("enum", [])]
    return [*dict.fromkeys(one for one in found if one is not None)]


def fields_at(path: str, schema: Json, parts: Mapping[str, Json]) -> list[str]:
    """Return the fields that an object at a place may have."""
    return [*dict.fromkeys(name for place in _places(path, schema, parts) for name in place.get("properties", ()))]


def _places(path: str, schema: Json, parts: Mapping[str, Json]) -> list[Json]:
    found = [*_unfolded(schema, parts)]
    for name, index in _STEPS.findall(path):
        found = [deeper for one in found for inner in _inside(one, name, index) for deeper in _unfolded(inner, parts)]
    return found


def _inside(schema: Json, name: str, index: str) -> Iterator[Json]:
    if name:
        named = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
    else:
        first = schema.get("prefixItems", [])
        named = first[int(index)] if index.isdigit() and int(index) < len(first) else schema.get("items")
        if index == "...":  # msgspec tells no keys of objects that are not structures
            named = schema.get("additionalProperties", named)
    if isinstance(named, dict):
        yield named


def _unfolded(schema: Json, parts: Mapping[str, Json]) -> Iterator[Json]:
    """Return what a schema refers to and offers; the data behind it ends, and so does this."""
    if "$ref" in schema:
        schema = parts.get(schema["$ref"].rpartition("/")[2], {})  # below `PREFIX`, or in an OpenAPI document
    yield schema
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _unfolded(one, parts)
