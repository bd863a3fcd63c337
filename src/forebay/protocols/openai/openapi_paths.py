# SPDX-License-Identifier: Apache-2.0
"""The paths below `/v1`, as the OpenAPI document has them: what models take, and what clients get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from forebay.openai.request_fields import MAX_CHOICES, MAX_INPUTS
from forebay.protocols.openai.audio import SPEECH, TRANSCRIPTS
from forebay.protocols.openai.doors import DOORS
from forebay.protocols.openai.request_reading import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE
from forebay.protocols.openapi_components import Schemas, as_form

Json: TypeAlias = dict[str, Any]

IDS: Final = ("list_v1_models", "v1_model", *("v1_" + door.path.replace("/", "_") for door in DOORS))
"""The operations described here."""
_TAG: Final = "OpenAI protocol"
_CODES: Final = ("400", "404", "413", "415", "429", "500", "503", "504")


def paths_of(asked: Mapping[str, Sequence[tuple[str, Json]]], schemas: Schemas, *, api_key: bool) -> dict[str, Json]:
    """Describe the paths that are asked.

    Args:
        asked: By what models say they are asked those that answer there, each with the schema of its samples.
    """
    found: dict[str, Json] = {}
    for door in [one for one in DOORS if asked.get(one.spoken)]:
        path = door.path
        bodies: list[Json] = []
        for name, sample in asked[door.spoken]:
            body = _body_of_form(path, name) if path in _FORMS else _body(path, name, schemas.resolve(sample))
            body = as_form(body, schemas) if path == TRANSCRIPTS else body
            alike = next((one for one in bodies if _without_model(one) == _without_model(body)), None)
            if alike is None:
                bodies.append(body)
            elif name not in (names := alike["properties"]["model"]["enum"]):
                names.append(name)
        media = "multipart/form-data" if path == TRANSCRIPTS else "application/json"
        sent = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        found[door.targets[0]] = {
            "post": {
                "operationId": "v1_" + path.replace("/", "_"),
                "summary": _SUMMARIES[path],
                "tags": [_TAG],
                "requestBody": {"required": True, "content": {media: {"schema": sent}}},
                "responses": {
                    "200": {"description": "The answer", "content": _content(path)},
                    **_failures(_CODES, api_key=api_key, error=_ANTHROPIC if path == MESSAGES else _ERROR),
                },
            }
        }
    if found:
        found |= _models(api_key=api_key)
    return found


def _body(path: str, name: str, sample: Json) -> Json:
    """Return the schema of a body: a sample that names its model, or several in one."""
    properties = {**sample.get("properties", {}), "model": {"type": "string", "enum": [name]}}
    several = _SEVERAL.get(path, {})
    limit = MAX_CHOICES if path == COMPLETIONS else MAX_INPUTS
    for field in several.keys() & properties.keys():
        one = properties.pop(field)
        many = {"type": "array", "items": one, "minItems": 1, "maxItems": limit}
        properties[several[field]] = {"anyOf": [one, many]}
    properties |= _SERVERS_OWN.get(path, {})
    return {
        **sample,
        "type": "object",
        "properties": properties,
        "required": ["model", *[several.get(one, one) for one in sample.get("required", ()) if one != "model"]],
    }


def _body_of_form(path: str, name: str) -> Json:
    """Return the schema of a body that asks a chat model in another form: what must be there, and `stream`."""
    must = {"model": {"type": "string", "enum": [name]}, **_FORMS[path]}
    properties = {**must, "stream": {"type": ["boolean", "null"]}}
    return {"type": "object", "properties": properties, "required": [*must]}


def _without_model(body: Json) -> Json:
    return {**body, "properties": {**body["properties"], "model": None}, "title": None, "description": None}


def _content(path: str) -> Json:
    if path == SPEECH:
        return {"audio/*": {"schema": {"type": "string", "format": "binary"}}}
    if path in _WHOLE:
        return {"application/json": {"schema": _WHOLE[path]}}
    if path in _ANSWERS:
        events = {"type": "string", "description": "With `stream`: server-sent events, each with its name"}
        answer = _object(**{name: {"type": kind} for name, kind in _ANSWERS[path].items()})
        others = {"text/plain": {"schema": {"type": "string"}}} if path == TRANSCRIPTS else {}
        return {"application/json": {"schema": answer}, "text/event-stream": {"schema": events}} | others
    chunk, whole = _texts(path, is_chunk=True), _texts(path, is_chunk=False)
    events = {"type": "string", "description": "With `stream`: server-sent events, the last of which is [DONE]"}
    return {"application/json": {"schema": whole}, "text/event-stream": {"schema": events, "x-itemSchema": chunk}}


def _texts(path: str, *, is_chunk: bool) -> Json:
    said: Json = {"text": {"type": "string"}}
    kind = "text_completion"
    if path == CHAT:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        said = {"delta" if is_chunk else "message": _MESSAGE}
    choice = {
        "index": {"type": "integer"},
        **said,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"type": ["string", "null"]},
    }
    return _object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices={"type": "array", "items": _object(**choice)},
        **({} if is_chunk else {"usage": _USAGE}),
    )


def _models(*, api_key: bool) -> dict[str, Json]:
    card = _object(id={"type": "string"}, object={"const": "model"}, created={"type": "integer"})
    listed = _object(object={"const": "list"}, data={"type": "array", "items": card})
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}

    def read(operation_id: str, summary: str, schema: Json, codes: Sequence[str], **more: Any) -> Json:
        answer = {"description": summary, "content": {"application/json": {"schema": schema}}}
        responses = {"200": answer, **_failures(codes, api_key=api_key)}
        return {
            "get": {"operationId": operation_id, "summary": summary, "tags": [_TAG], **more, "responses": responses}
        }

    return {
        "/v1/models": read("list_v1_models", "List the models for OpenAI clients", listed, ()),
        "/v1/models/{name}": read("v1_model", "Describe a model for OpenAI clients", card, ("404",), parameters=[name]),
    }


def _failures(codes: Sequence[str], *, api_key: bool, error: Json | None = None) -> Json:
    whose = "Anthropic" if error is _ANTHROPIC else "OpenAI"
    content = {"application/json": {"schema": error or _ERROR}}
    answer = {"description": f"An error as {whose}'s clients read it", "content": content}
    return dict.fromkeys(sorted([*codes, "401"] if api_key else codes), answer)


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [*properties]}


_SUMMARIES: Final = {
    CHAT: "Continue a conversation",
    RESPONSES: "Respond to a conversation",
    MESSAGES: "Continue a conversation, for Anthropic's clients",
    COMPLETIONS: "Continue a text",
    EMBEDDINGS: "Embed a text, or several",
    RERANK: "Rank documents by how well they fit a query",
    SCORE: "Score how well texts fit each other",
    SPEECH: "Say a text",
    TRANSCRIPTS: "Write down what is said in a recording",
}
_SEVERAL: Final[dict[str, dict[str, str]]] = {
    COMPLETIONS: {"prompt": "prompt"},
    EMBEDDINGS: {"input": "input"},
    RERANK: {"document": "documents"},
    SCORE: {"query": "text_1", "document": "text_2"},
}
"""The fields that may have several, with what bodies call them."""
_SERVERS_OWN: Final[dict[str, Json]] = {
    EMBEDDINGS: {"encoding_format": {"enum": ["float", "base64"], "default": "float"}},
    RERANK: {"top_n": {"type": "integer", "minimum": 0}, "return_documents": {"type": "boolean", "default": True}},
}
"""The fields that no sample has."""
_MESSAGE: Final[Json] = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
}
_USAGE: Final = _object(
    prompt_tokens={"type": "integer"}, completion_tokens={"type": "integer"}, total_tokens={"type": "integer"}
)
_VECTOR: Final[Json] = {
    "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "contentEncoding": "base64"}]
}
_TEXT_USAGE: Final = _object(prompt_tokens={"type": "integer"}, total_tokens={"type": "integer"})


def _list_of(name: str, *, items: Json, **more: Json) -> Json:
    answer = {"object": {"const": "list"}, name: {"type": "array", "items": items}, "model": {"type": "string"}}
    return _object(**answer, **more, usage=_TEXT_USAGE)


_WHOLE: Final = {
    EMBEDDINGS: _list_of(
        "data", items=_object(object={"const": "embedding"}, index={"type": "integer"}, embedding=_VECTOR)
    ),
    RERANK: _list_of(
        "results",
        items=_object(index={"type": "integer"}, relevance_score={"type": "number"}),
        id={"type": "string"},
    ),
    SCORE: _list_of(
        "data",
        items=_object(object={"const": "score"}, index={"type": "integer"}, score={"type": "number"}),
        id={"type": "string"},
        created={"type": "integer"},
    ),
}
_FORMS: Final[dict[str, Json]] = {
    RESPONSES: {"input": {"type": ["string", "array"], "minItems": 1}},
    MESSAGES: {
        "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        "max_tokens": {"type": "integer", "minimum": 1},
    },
}
"""What must be there in other forms of chats."""
_SAID: Final = {"id": "string", "model": "string", "usage": "object"}
_ANSWERS: Final = {
    RESPONSES: {**_SAID, "object": "string", "created_at": "integer", "status": "string", "output": "array"},
    TRANSCRIPTS: {"text": "string", "usage": "object"},
    MESSAGES: {**_SAID, "type": "string", "role": "string", "content": "array", "stop_reason": "string"},
}
"""The types of the members of their answers."""
_ERROR: Final = _object(
    error=_object(
        message={"type": "string"},
        type={"type": "string"},
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    )
)
_ANTHROPIC: Final = _object(
    type={"const": "error"},
    error=_object(type={"type": "string"}, message={"type": "string"}),
    request_id={"type": ["string", "null"]},
)
