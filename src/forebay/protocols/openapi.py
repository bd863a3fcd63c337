# SPDX-License-Identifier: Apache-2.0
"""The native HTTP protocol, and OpenAI's where models speak it, described as an OpenAPI 3.1 document.

Made from the same wire types that decode and encode, so that it cannot say anything else than what the server does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import quote

import msgspec

from forebay.protocols.openai import openapi_paths as openai
from forebay.protocols.openapi_components import COMPONENTS, Documented, Json, Schemas, as_form, claim

PUBLIC_PATHS: Final = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""What is answered without an API key: probes carry none, and the page must load before a key can be typed into it."""


def public_paths(*, metrics: bool) -> frozenset[str]:
    """Return what is answered without an API key, where metrics may be as well."""
    return PUBLIC_PATHS | {"/metrics"} if metrics else PUBLIC_PATHS


_SERVER_IDS: Final = (
    *("list_models", "live", "ready", "metrics", "openapi", "docs"),
    *("load_version", "swap_version", "unload_version", "share"),
    *openai.IDS,
)
_JSON: Final = "application/json"
_MSGPACK: Final = ("application/msgpack", "application/x-msgpack")
_BINARY: Final = "application/octet-stream"
_FORM: Final = "multipart/form-data"
_EVENTS: Final = "text/event-stream"

# Groups of operations beside those of the models, whose names have no spaces.
_SERVER: Final = "the server"
_MANAGEMENT: Final = "version management"

PREDICT: Final = "predict"
"""The method of a model that is asked at its own path."""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What the document has to know of one endpoint."""

    name: str
    input: Documented
    output: Documented
    version: str | None = None
    description: str = ""
    streams: bool = False
    is_named: bool = False
    """A sample may also be a form, or with a stream a query."""
    batchable: bool = False
    """The body is a JSON array of samples, and so is the answer."""
    query: Mapping[str, Documented] = msgspec.field(default_factory=dict[str, Documented])
    """Parameters in the query, all of which may be left out."""
    path: str = ""
    """Where it answers below the model."""
    verbs: tuple[str, ...] = ("POST",)
    """The methods of HTTP that ask it."""
    call: str = PREDICT
    """The method of the model."""
    methods: Sequence[Described] = ()
    """Further methods of the same model."""


def document(
    title: str,
    version: str,
    endpoints: Sequence[Described],
    *,
    api_key: bool = False,
    manages: bool = False,
    public: Collection[str] = PUBLIC_PATHS,
    apart: Collection[Described] = (),
) -> Json:
    """Describe a server.

    Args:
        endpoints: What it serves. Those of one name are its versions, first the one that answers what names none. If
            there is one name, it also answers at `/`.
        manages: Whether versions may be managed over HTTP.
        public: Paths that need no API key.
        apart: Versions that nobody asks who names none.
    """
    schemas = Schemas()
    separate = set(map(id, apart))
    paths = _inference(endpoints, separate, schemas, api_key=api_key)
    asked: dict[str, list[tuple[str, Json]]] = {}
    for one in [one for endpoint in endpoints if id(endpoint) not in separate for one in (endpoint, *endpoint.methods)]:
        if one.input.openai:
            asked.setdefault(one.input.openai, []).append((one.name, schemas.add(one.input, one.name)))
    paths |= openai.paths_of(asked, schemas, api_key=api_key)
    paths |= _housekeeping(api_key=api_key, public=public)
    if manages:
        paths |= _management(api_key=api_key)
    components: Json = {
        "schemas": schemas.components,
        "parameters": _PARAMETERS,
        "responses": {name: _error(text, headers) for name, text, headers in _ERRORS.values()},
    }
    result: Json = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "servers": [{"url": "."}],  # where this document lies: also below the prefix of a proxy
        "tags": _tags(endpoints),
        "paths": paths,
        "components": components,
    }
    if api_key:
        components["securitySchemes"] = {
            "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "Bearer": {"type": "http", "scheme": "bearer"},
        }
        result["security"] = [{"ApiKey": []}, {"Bearer": []}]
    return copy.deepcopy(result)  # the parts that every document has stay as they are, whatever the caller does


def _tags(endpoints: Sequence[Described]) -> list[Json]:
    """Return a group for each model, with its versions and what it says of itself."""
    models: dict[str, list[Described]] = {}
    for endpoint in endpoints:
        models.setdefault(endpoint.name, []).append(endpoint)
    return [{"name": name, "description": _about(versions)} for name, versions in models.items()]


def _about(versions: Sequence[Described]) -> str:
    named = [one.version for one in versions if one.version is not None]
    told = f"{'version' if len(named) == 1 else 'versions'} {', '.join(named)}" if named else ""
    return ": ".join(filter(None, (told, _title(versions[0]))))


def _title(described: Described, otherwise: str = "") -> str:
    """Return the first line of a docstring."""
    return described.description.strip().partition("\n")[0].rstrip(".") or otherwise


def _inference(
    endpoints: Sequence[Described], separate: Collection[int], schemas: Schemas, *, api_key: bool
) -> dict[str, Json]:
    """Describe the paths where models answer; `separate` has the identities of versions `apart`."""
    ids: set[str] = set(_SERVER_IDS)
    paths: dict[str, Json] = {}
    models: dict[str, list[Described]] = {}
    for endpoint in endpoints:
        models.setdefault(endpoint.name, []).append(endpoint)
    for name, versions in models.items():
        path = f"/models/{quote(name)}"
        places = [("/", "", versions[0])] if len(models) == 1 else []
        places.append((path, f"_{name}", versions[0]))
        if len(versions) > 1:
            told = [(str(one.version), one) for one in versions]
            places += [(f"{path}/versions/{quote(v, safe='')}", f"_{name}_version_{v}", one) for v, one in told]
        for place, suffix, endpoint in places:
            paths[place] = _operations(endpoint, suffix, ids, schemas, api_key=api_key)
            # At a path that several versions share there are the methods of each.
            sharing = [endpoint] if "/versions/" in place else [one for one in versions if id(one) not in separate]
            for method in (method for one in sharing for method in one.methods):
                if (at := place.rstrip("/") + method.path) not in paths:
                    paths[at] = _operations_of_method(method, suffix, ids, schemas, api_key=api_key)
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# Operations


def written(title: str, version: str, endpoints: Sequence[Described], **more: Any) -> bytes:
    """Return the document as JSON; called in a thread, it lets other threads run between the endpoints."""
    return _encoded(document(title, version, endpoints, **more), 3)


def _encoded(value: Any, levels: int) -> bytes:
    """Encode the upper levels one by one: the encoder would hold the interpreter for as long as all of it takes."""
    if not levels or not isinstance(value, dict):
        return msgspec.json.encode(value)
    fields = cast("Json", value).items()
    parts = [msgspec.json.encode(name) + b":" + _encoded(part, levels - 1) for name, part in fields]
    return b"{" + b",".join(parts) + b"}"


def _operations(endpoint: Described, suffix: str, ids: set[str], schemas: Schemas, *, api_key: bool) -> Json:
    """Return what can be done at one path of a model."""
    request, answer = _bodies(endpoint, schemas)
    query = [
        {"name": name, "in": "query", "schema": schemas.add(wire_type, endpoint.name)}
        for name, wire_type in endpoint.query.items()
    ]
    post = _predict(endpoint, _operation_id(f"predict{suffix}", ids), request, answer, api_key=api_key)
    post["parameters"] += query
    get = _describe(endpoint, _operation_id(f"describe{suffix}", ids), api_key=api_key)
    if endpoint.is_named and endpoint.streams:
        get["summary"] += ", or call it with a query, as an EventSource does"
        get["parameters"] = [*_HEADERS, _sample_in_query(endpoint, schemas), *query]
        get["responses"]["200"]["content"] |= answer
        get["responses"] |= _failures([*_REFUSALS, "403"], api_key=api_key)
    return {"post": post, "get": get}


def _operations_of_method(method: Described, suffix: str, ids: set[str], schemas: Schemas, *, api_key: bool) -> Json:
    """Return what can be done at the path of a further method."""
    bodies = _bodies(method, schemas)
    found: Json = {}
    if "POST" in method.verbs:
        operation_id = _operation_id(f"{method.call}{suffix}", ids)
        found["post"] = _predict(method, operation_id, *bodies, api_key=api_key)
    if "GET" in method.verbs or method.streams:
        operation_id = _operation_id(f"{method.call}{suffix}" if not found else f"get_{method.call}{suffix}", ids)
        get = found["get"] = _predict(method, operation_id, *bodies, api_key=api_key)
        del get["requestBody"]
        get["parameters"] += [_sample_in_query(method, schemas)]
        get["responses"] |= _failures(["403"], api_key=api_key)
    return found


def _sample_in_query(endpoint: Described, schemas: Schemas) -> Json:
    sample = {"name": "sample", "in": "query", "schema": schemas.add(endpoint.input, endpoint.name)}
    return sample | {"description": "The fields of a sample", "style": "form", "explode": True}


def _predict(endpoint: Described, operation_id: str, request: Json, answer: Json, *, api_key: bool) -> Json:
    # What streams or is bytes has one format, whatever the client takes.
    codes = [*_REFUSALS, *([] if endpoint.streams or endpoint.output.raw else ["406"])]
    operation: Json = {
        "operationId": operation_id,
        "summary": _title(endpoint, f"Call {endpoint.name}{endpoint.path}"),
        "tags": [endpoint.name],
        "parameters": [*_HEADERS],
        "requestBody": {"required": True, "content": request},
        "responses": {
            "200": {"description": "The parts of the answer, as events" if endpoint.streams else "The answer"}
            | {"content": answer},
            **_failures(codes, api_key=api_key),
        },
    }
    if endpoint.description:
        operation["description"] = endpoint.description
    return operation


def _describe(endpoint: Described, operation_id: str, *, api_key: bool) -> Json:
    return {
        "operationId": operation_id,
        "summary": f"Describe {endpoint.name}",
        "tags": [endpoint.name],
        "responses": {
            "200": _answer("What is known about the model", _JSON, {"$ref": COMPONENTS + "ForebayModel"}),
            **_failures(["404"], api_key=api_key),
        },
    }


def _housekeeping(*, api_key: bool, public: Collection[str]) -> dict[str, Json]:
    models = {
        "type": "object",
        "required": ["models"],
        "properties": {"models": {"type": "array", "items": {"$ref": COMPONENTS + "ForebayModel"}}},
    }
    text = {"type": "string"}
    # path, operation, summary, media type, schema, failures
    rows: list[tuple[str, str, str, str, Json, list[str]]] = [
        ("/models", "list_models", "List the models", _JSON, models, []),
        ("/healthz", "live", "Report whether the server is alive", _JSON, _STATUS, ["503"]),
        ("/readyz", "ready", "Report whether every model can be called", _JSON, _STATUS, ["503"]),
        ("/metrics", "metrics", "Metrics in Prometheus format", "text/plain", text, []),
        ("/openapi.json", "openapi", "This document", _JSON, {"type": "object"}, []),
        ("/docs", "docs", "This document as a page", "text/html", text, []),
    ]
    paths: dict[str, Json] = {}
    for path, operation_id, summary, media, schema, codes in rows:
        operation: Json = {
            "operationId": operation_id,
            "summary": summary,
            "tags": [_SERVER],
            "responses": {
                "200": _answer(summary, media, schema),
                **_failures(codes, api_key=api_key and path not in public),
            },
        }
        if api_key and path in public:
            operation["security"] = []
        paths[path] = {"get": operation}
    return paths


def _management(*, api_key: bool) -> dict[str, Json]:
    def operation(operation_id: str, summary: str, parameters: Sequence[str], **more: Json) -> dict[str, Json]:
        responses = {
            "200": _answer("The versions of the model", _JSON, _VERSIONS),
            **_failures(["400", "403", "404", "413", "500", "503", "504"], api_key=api_key),
        }
        found = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters]
        told = {"operationId": operation_id, "summary": summary, "tags": [_MANAGEMENT], "parameters": found}
        return {"post": {**told, "responses": responses, **more}}

    weight = {"type": "integer", "minimum": 0, "maximum": 1_000_000}
    weights = {"type": "object", "additionalProperties": weight, "examples": [{"1": 90, "2": 10}]}
    summaries = {
        "load": "Load a version of the project, or reload it",
        "swap": "Load a version and replace the others with it",
        "unload": "Unload a version",
    }
    paths = {
        f"/models/{{name}}/versions/{{version}}/{what}": operation(f"{what}_version", summary, ["name", "version"])
        for what, summary in summaries.items()
    }
    body: Json = {"required": True, "content": {_JSON: {"schema": weights}}}
    shared = operation("share", "Split requests among versions by weight", ["name"], requestBody=body)
    return paths | {"/models/{name}/weights": shared}


def _answer(description: str, media: str, schema: Json) -> Json:
    return {"description": description, "content": {media: {"schema": schema}}}


def _failures(codes: list[str], *, api_key: bool) -> Json:
    chosen = sorted([*codes, "401"] if api_key else codes)
    return {code: {"$ref": f"#/components/responses/{_ERRORS[code][0]}"} for code in chosen}


def _bodies(endpoint: Described, schemas: Schemas) -> tuple[Json, Json]:
    """Return the `content` of the request and of the answer."""
    sample = schemas.add(endpoint.input, endpoint.name)
    result = schemas.add(endpoint.output, endpoint.name)
    if endpoint.input.raw:
        request: Json = {_BINARY: {"schema": sample}}
        if endpoint.is_named:
            request[_FORM] = {"schema": {"type": "object", "additionalProperties": sample, "maxProperties": 1}}
    else:
        sent = {"type": "array", "items": sample, "minItems": 1} if endpoint.batchable else sample
        request = {media: {"schema": sent} for media in (_JSON, *_MSGPACK)}
        if endpoint.is_named and not endpoint.batchable:
            request[_FORM] = {"schema": as_form(sample, schemas)}
    others: Json = {"*/*": {"schema": {"type": "string", "format": "binary"}}} if endpoint.output.has_media else {}
    if endpoint.streams:
        # 3.1 has no word for the type of one event; 3.2 calls it itemSchema.
        events = {"type": "string", "description": "Server-sent events; the data of each is one part of the answer"}
        return request, {_EVENTS: {"schema": events, "x-itemSchema": result}}
    if endpoint.output.raw:
        return request, {_BINARY: {"schema": result}} | others
    got = {"type": "array", "items": result} if endpoint.batchable else result
    return request, {media: {"schema": got} for media in (_JSON, _MSGPACK[0])} | others


# ---------------------------------------------------------------------------------------------------------------------
# What every server has

_PARAMETERS: Final[Mapping[str, Json]] = {
    "Timeout": {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "Time limit of the request, in milliseconds.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "RequestId": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "Names the request in logs and errors; made up by the server if missing.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"},
    },
}

_HEADERS: Final = [{"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS]

_RETRY_AFTER: Final[Json] = {
    "Retry-After": {
        "description": "Seconds to wait before trying again",
        "schema": {"type": "integer", "minimum": 0},
    },
    "Retry-After-Ms": {
        "description": "The same in milliseconds",
        "schema": {"type": "integer", "minimum": 1},
    },
}

# By status: the name of the component, what it means, its headers.
_ERRORS: Final[Mapping[str, tuple[str, str, Json]]] = {
    "400": ("Malformed", "The request cannot be read", {}),
    "401": ("Unauthorized", "The API key is missing or wrong", {}),
    "403": ("Forbidden", "A web page of another origin asks for what costs something", {}),
    "404": ("NotFound", "There is no such model", {}),
    "406": ("NotAcceptable", "The model answers in no media type that the client accepts", {}),
    "413": ("TooLarge", "The body is larger than allowed", {}),
    "415": ("UnsupportedMediaType", "The media type of the body is not supported", {}),
    "422": ("Invalid", "The body can be read but does not fit the declared type", {}),
    "429": ("TooManyRequests", "The queue is full; try again later", _RETRY_AFTER),
    "500": ("Failed", "The model or the server failed", {}),
    "503": ("Unavailable", "Loading, draining, or the worker was lost", _RETRY_AFTER),
    "504": ("DeadlineExceeded", "The time of the request was over before its answer was ready", {}),
}

_REFUSALS: Final = ("400", "404", "413", "415", "422", "429", "500", "503", "504")
"""What a model's answer may be instead of a result."""

_VERSIONS: Final[Json] = {
    "type": "object",
    "required": ["name", "versions"],
    "properties": {
        "name": {"type": "string"},
        "versions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["version", "state", "weight"],
                "properties": {
                    "version": {"type": "string"},
                    "state": {"enum": ["loading", "ready", "leaving", "failed"]},
                    "weight": {"type": "integer"},
                    "error": {"type": "string"},
                },
            },
        },
    },
}

_STATUS: Final[Json] = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


def _error(description: str, headers: Json) -> Json:
    response = _answer(description, _JSON, {"$ref": COMPONENTS + "ForebayError"})
    return response | {"headers": headers} if headers else response


def _operation_id(wanted: str, taken: set[str]) -> str:
    """Operation ids become method names in generated clients: letters, digits and underscores, each once."""
    return claim(re.sub(r"\W", "_", wanted, flags=re.ASCII), taken)
