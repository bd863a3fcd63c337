# SPDX-License-Identifier: Apache-2.0
"""A service, described as an OpenAPI 3.0 document.

Pydantic describes schemas in later dialects than OpenAPI 3.0 knows; they are translated, and what cannot be said is
left out: the document then allows more than the service takes, never less.
"""

from __future__ import annotations

import json
import logging
import math
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from forebay.types.failures import text_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.ventu.schema import Schema

Node: TypeAlias = dict[str, Any]

log = logging.getLogger("ventu.service")

_REFS: Final = "#/components/schemas/"

_KEPT: Final = frozenset(
    (
        *("default", "deprecated", "description", "discriminator", "enum", "example", "format", "maxItems"),
        *("maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf"),
        *("nullable", "pattern", "readOnly", "required", "title", "type", "uniqueItems", "writeOnly"),
    )
)
_STATUS: Final[Node] = {
    "title": "ServiceStatus",
    "description": "service health status",
    "type": "object",
    "properties": {
        "inference": {"type": "string", "enum": ["OK", "Error"]},
        "service": {"type": "string", "enum": ["OK"]},
    },
    "required": ["inference", "service"],
}
_PROBLEMS: Final[Node] = {
    "title": "ValidationErrors",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "loc": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
            "msg": {"type": "string"},
            "type": {"type": "string"},
            "ctx": {"type": "object"},
        },
        "required": ["loc", "msg", "type"],
    },
}


def document(*, title: str, version: str, summary: str, media: str, request: Schema, response: Schema) -> str:
    """Describe a service, in JSON.

    Args:
        summary: What it does, in a line.
        media: Media type of bodies and answers.
    """
    components: dict[str, Node] = {"ServiceStatus": _STATUS, "ValidationErrors": _PROBLEMS}
    asked, answered = _add(request, components), _add(response, components)
    problems = _answer("The body does not fit the schema", media, _ref("ValidationErrors"))
    paths: Node = {
        "/": {"get": _operation("Paths of this service", "home", _answer("Paths", media, {"type": "object"}))},
        "/health": {"get": _operation("Health check", "health", _answer("Status", media, _ref("ServiceStatus")))},
        "/metrics": {
            "get": _operation("Prometheus metrics", "metrics", _answer("Metrics", "text/plain", {"type": "string"}))
        },
        "/inference": {
            "post": {
                **_operation(summary, "inference", _answer("The result", media, answered)),
                "requestBody": {"required": True, "content": {media: {"schema": asked}}},
            }
        },
    }
    paths["/inference"]["post"]["responses"] |= {
        "400": {"description": f"The body is not {media}"},
        "415": {"description": "The body is of another media type"},
        "422": problems,
        "500": {"description": "The model failed, or its result does not fit the schema"},
    }
    return json.dumps(
        _as_json(
            {
                "openapi": "3.0.3",
                "info": {"title": title, "version": version},
                "paths": paths,
                "components": {"schemas": components},
            }
        )
    )


def _operation(summary: str, name: str, answer: Node) -> Node:
    return {"operationId": name, "summary": summary, "responses": {"200": answer}}


def _answer(description: str, media: str, schema: Node) -> Node:
    return {"description": description, "content": {media: {"schema": schema}}}


def _ref(name: str) -> Node:
    return {"$ref": _REFS + name}


def _add(schema: Schema, components: dict[str, Node]) -> Node:
    """Add a schema with its definitions to the components; returns the reference to it."""
    own = re.sub(r"[^\w.-]", "_", schema.model.__name__)
    prefix = ""
    while True:
        found, error = caught(schema.document, _REFS + prefix)
        if error is not None:  # a type that pydantic cannot describe is still one it can check
            log.warning("cannot describe %s in the API document: %s", own, text_of(error))
            found: Node = {"type": "object"}
        nested: Node = {**found.pop("definitions", {}), **found.pop("$defs", {})}
        new = {prefix + key: _translated(node) for key, node in nested.items()}
        target = prefix + own
        if "$ref" in found:  # it refers to itself, and so stands among its own definitions
            target = found["$ref"].removeprefix(_REFS)
        else:
            new[target] = _translated(found)
        if schema.example is not None:
            new[target]["example"] = _as_json(schema.example)
        if all(components.get(key, node) == node for key, node in new.items()):
            components |= new
            return _ref(target)
        prefix += f"{own}_"  # another schema has something else under one of these names


def _as_json(value: Any) -> Any:
    """Return data with what JSON cannot hold as text: bytes in base64, dates as ISO 8601 has them; infinity is null."""
    return json.loads(json.dumps(value, default=_as_text, skipkeys=True), parse_constant=lambda _: None)


def _is_endless(value: Any) -> bool:
    """Tell whether a default or a bound is a number that JSON does not have."""
    return isinstance(value, float) and not math.isfinite(value)


def _as_text(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, enc_hook=str)
    except (TypeError, ValueError):
        return str(value)


def _translated(node: Any) -> Node:
    """Return a schema in OpenAPI 3.0."""
    if not isinstance(node, dict):  # true and false: anything, nothing
        return {} if node else {"not": {}}
    given = cast("Node", node)
    if "$ref" in given:
        reference: Node = {"$ref": given["$ref"]}
        siblings = _translated({key: value for key, value in given.items() if key != "$ref"})
        return {"allOf": [reference], **siblings} if siblings else reference
    made: Node = {key: value for key, value in given.items() if key in _KEPT and not _is_endless(value)}
    if isinstance(examples := given.get("examples"), list) and examples:
        made["example"] = _as_json(examples[0])
    if "const" in given:
        made["enum"] = [given["const"]]
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if exclusive in given:
            made |= {bound: given[exclusive], exclusive: True}
    if isinstance(properties := given.get("properties"), dict):
        made["properties"] = {name: _translated(value) for name, value in cast("Node", properties).items()}
    for key in ("not", "additionalProperties"):
        if key in given:
            made[key] = given[key] if isinstance(given[key], bool) else _translated(given[key])
    if given.get("type") == "null":
        return {"nullable": True, "enum": [None]}
    if given.get("type") == "array":
        made["items"] = _items(given)
    for key in ("allOf", "anyOf", "oneOf"):
        if key in given:
            _add_choices(made, key, given[key])
    return made


def _items(given: Node) -> Node:
    """Return one schema for all items, also of a tuple that has one for each."""
    items = given.get("prefixItems", given.get("items", {}))
    if isinstance(items, list):
        choices = [_translated(item) for item in cast("list[Any]", items)]
        return {"anyOf": choices} if choices else {}
    return _translated(items)


def _add_choices(made: Node, key: str, given: list[Any]) -> None:
    choices = [_translated(choice) for choice in given if choice != {"type": "null"}]
    if len(choices) < len(given):
        made["nullable"] = True
    if len(choices) == 1 and "$ref" not in choices[0]:
        made |= {name: value for name, value in choices[0].items() if name not in made}
    elif choices:
        made["allOf" if len(choices) == 1 else key] = choices
