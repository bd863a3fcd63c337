# SPDX-License-Identifier: Apache-2.0
"""One value that a JSON schema allows, for people who want to see what a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from forebay.protocols.openapi_components import COMPONENTS, Json

_DEEPEST: Final = 6
_DEEPEST_ITEM: Final = 2
_MOST_ITEMS: Final = 16


def example_of(schema: Json, parts: Mapping[str, Json], depth: int = 0) -> Any:
    """Return an example: the schema's own, its default or first choice, or one made of its required fields.

    Args:
        parts: Components that it refers to, by name.
        depth: How deep it lies in the example; beyond six levels there is nothing.

    Raises:
        ValueError: If an array in it has more than 16 items, so that nobody would read the example.
    """
    schema = parts.get(str(schema.get("$ref", "")).removeprefix(COMPONENTS), schema)
    for told in ("examples", "enum"):
        if values := schema.get(told):
            return values[0]
    for told in ("example", "const", "default"):
        if told in schema:
            return schema[told]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return example_of(choices[0], parts, depth)
    if depth == _DEEPEST:
        return None
    kind = schema.get("type", "object" if "properties" in schema else "string")  # where all is allowed, a text
    kind = cast("str", kind[0] if isinstance(kind, list) else kind)
    if kind == "object":
        fields: Json = schema.get("properties", {})
        return {name: example_of(fields.get(name, {}), parts, depth + 1) for name in schema.get("required", ())}
    if kind == "array":
        least = schema.get("minItems", 1 if depth < _DEEPEST_ITEM else 0)  # a type may hold items of its own kind
        if least > _MOST_ITEMS:
            raise ValueError(f"an array has at least {least} items")
        items: list[Json] = schema.get("prefixItems") or [schema.get("items") or {}] * max(int(not depth), least)
        return [example_of(item, parts, depth + 1) for item in items]
    if kind == "string":
        return "text".ljust(schema.get("minLength", 0), "t")[: schema.get("maxLength")]
    if kind in {"integer", "number"}:
        return _number(schema, kind)
    return {"boolean": True}.get(kind)


def _number(schema: Json, kind: str) -> float:
    """Return a number within the bounds, where there is a whole one."""
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    highest = schema.get("maximum", schema.get("exclusiveMaximum"))
    usual = 1 if kind == "integer" else 1.5
    if (lowest is None or lowest < usual) and (highest is None or usual < highest):
        return usual
    if lowest is not None:
        return lowest + ("exclusiveMinimum" in schema)
    return usual if highest is None else highest - ("exclusiveMaximum" in schema)
