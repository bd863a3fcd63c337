# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages` as Anthropic's clients ask it: its bodies as those of chats, answers and errors in its form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from forebay.errors import ForebayError
from forebay.openai.request_fields import Stops
from forebay.protocols import native
from forebay.protocols.openai import openai_errors
from forebay.protocols.openai.answer_blocks import Block, BlockAnswer, written
from forebay.protocols.openai.request_reading import FIELDS, as_chat, decoded
from forebay.protocols.openai.texts import Choice
from forebay.types.first_use import known

_FOREIGN: Final = ("max_completion_tokens", "n", "stop", "stream_options")
"""Fields of chats that are said otherwise here."""
_ENDS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Turn(Struct):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class _Choice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Struct):
    type: Literal["disabled"]


class _Said(Struct):
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[_Turn], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Stops | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    cache_control: Any = None


_arguments: Final = msgspec.json.Decoder(dict[str, Any])
_said: Final = msgspec.json.Decoder(known(_Said))


def chat_body(body: bytes) -> bytes:
    """Return what a body asks as the body of a chat.

    Raises:
        InvalidRequest: If it cannot be read, or asks for what is not possible here.
    """
    said = decoded(_said, body)
    found = {
        "max_tokens": said.max_tokens,
        "messages": _messages(said),
        "stop": said.stop_sequences or None,
        "tools": [_tool(one) for one in said.tools or ()] or None,
        "tool_choice": _choice(said.tool_choice),
        "parallel_tool_calls": False if said.tool_choice and said.tool_choice.disable_parallel_tool_use else None,
    }
    return as_chat("/v1/messages", decoded(FIELDS, body), _FOREIGN, _Said.__struct_fields__, found)


def _tool(tool: _Tool) -> dict[str, Any]:
    about = {"name": tool.name, "parameters": tool.input_schema, "description": tool.description}
    return {"type": "function", "function": about}


def _choice(choice: _Choice | None) -> Any:
    if choice is None or choice.type in {"auto", "none"}:
        return choice and choice.type
    return "required" if choice.type == "any" else {"type": "function", "function": {"name": choice.name}}


def _messages(said: _Said) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if said.system:
        found.append({"role": "system", "content": _texts(said.system)})
    for turn in said.messages:
        if isinstance(turn.content, str):
            found.append({"role": turn.role, "content": turn.content})
            continue
        kinds: dict[str, list[dict[str, Any]]] = {"tool_use": [], "tool_result": [], "": []}
        for piece in turn.content:
            kinds.get(str(piece.get("type")), kinds[""]).append(piece)
        for piece in kinds["tool_result"]:
            told = _texts(piece.get("content", ""))
            found.append({"role": "tool", "tool_call_id": piece.get("tool_use_id"), "content": told})
        message: dict[str, Any] = {"role": turn.role, "content": _texts(kinds[""]) or None}
        if calls := [_call(piece) for piece in kinds["tool_use"]]:
            message["tool_calls"] = calls
        if kinds[""] or calls:
            found.append(message)
    return found


def _call(piece: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(piece.get("input", {})).decode()
    return {"id": piece.get("id"), "type": "function", "function": {"name": piece.get("name"), "arguments": arguments}}


def _texts(content: Any) -> Any:
    """Return texts without hints on how to keep them; other pieces stay as they were sent."""
    if not isinstance(content, list):
        return content
    pieces = cast("list[Any]", content)
    objects = [cast("dict[str, Any]", one) if isinstance(one, dict) else {} for one in pieces]
    return [
        {"type": "text", "text": told.get("text", "")} if told.get("type") == "text" else one
        for one, told in zip(pieces, objects, strict=True)
    ]


class MessageBlocks(BlockAnswer):
    """An answer as Anthropic's clients read it."""

    def _answer(self, choice: Choice) -> Mapping[str, Any]:
        content = [self._content(block) for block in self.blocks]
        return {**self._told(content), **self._end_of(choice), "usage": _usage(choice)}

    def _opened(self, choice: Choice) -> Iterator[bytes]:
        message = {**self._told([]), "stop_reason": None, "stop_sequence": None, "usage": _usage(choice)}
        yield written("message_start", {"message": message})

    def _block_opened(self, number: int, block: Block) -> bytes:
        return written("content_block_start", {"index": number, "content_block": self._content(block)})

    def _block_piece(self, number: int, block: Block, piece: str) -> bytes:
        is_call = bool(block.call)
        delta = (
            {"type": "input_json_delta", "partial_json": piece} if is_call else {"type": "text_delta", "text": piece}
        )
        return written("content_block_delta", {"index": number, "delta": delta})

    def _block_closed(self, number: int, block: Block) -> bytes:
        del block
        return written("content_block_stop", {"index": number})

    def _closed(self, choice: Choice) -> Iterator[bytes]:
        yield written("message_delta", {"delta": self._end_of(choice), "usage": _usage(choice)})
        yield written("message_stop", {})

    def _told(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"type": "message", "role": "assistant", "model": self.asked.model, "content": content}
        return {"id": f"msg_{self.id}", **about}

    def _content(self, block: Block) -> dict[str, Any]:
        if not block.call:
            return {"type": "text", "text": block.text}
        try:
            given = _arguments.decode(block.text or "{}")
        except msgspec.MsgspecError:  # the model did not hold to JSON; what it wrote was in a stream's pieces
            given = {"": block.text}
        return {"type": "tool_use", "id": block.call, "name": block.tool, "input": given}

    def _end_of(self, choice: Choice) -> dict[str, Any]:
        why = choice.finish_reason or ""
        reason = "stop_sequence" if choice.stop else _ENDS.get(why, "end_turn" if why == "stop" else why)
        return {"stop_reason": reason, "stop_sequence": choice.stop or None}


def _usage(choice: Choice) -> dict[str, int]:
    return {"input_tokens": choice.prompt_tokens, "output_tokens": choice.tokens}


def error_body(error: ForebayError, request_id: str) -> bytes:
    """Return the JSON body of an error."""
    return openai_errors.body_of(error, request_id, _error_body)


def _error_body(error: ForebayError, request_id: str) -> bytes:
    status = openai_errors.status_of(error)
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, "message": native.message_of(error)}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": request_id or None}, enc_hook=str)
