# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`: its bodies as those of chats, and the answers to chats in its form; nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from forebay.openai import FunctionTool
from forebay.protocols.openai.answer_blocks import Block, BlockAnswer, written
from forebay.protocols.openai.request_reading import FIELDS, as_chat, decoded, invalid
from forebay.protocols.openai.texts import Choice
from forebay.types.first_use import known

_TEXTS: Final = frozenset({"input_text", "output_text", "text"})
_KEPT: Final = ("background", "conversation", "previous_response_id", "prompt")
"""Fields that ask for something that is kept."""
_NOTHING: Final = {"include": b"[]", "truncation": b'"disabled"', "background": b"false", "tools": b"[]"}
"""What says no more than its absence would."""
_FOREIGN: Final = ("messages", "max_tokens", "max_completion_tokens", "n", "response_format")
"""Fields of chats that are said otherwise here."""
_ECHOED: Final = ("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "tools", "top_p")


class _Item(Struct):
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | list[dict[str, Any]] = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[dict[str, Any]] = ""


class _Tool(FunctionTool, frozen=True, kw_only=True):
    type: Literal["function"]


class _NamedTool(Struct):
    type: Literal["function"]
    name: str


class _Said(Struct):
    input: str | Annotated[list[_Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None


_said: Final = msgspec.json.Decoder(known(_Said))


def chat_body(body: bytes) -> bytes:
    """Return what a body asks as the body of a chat.

    Raises:
        InvalidRequest: If it cannot be read, or asks for what is not possible here.
    """
    said = decoded(_said, body)
    fields: dict[str, Any] = {
        name: value for name, value in decoded(FIELDS, body).items() if not _says_nothing(name, value)
    }
    for name in _KEPT:
        if name in fields:
            raise invalid(name, "is not supported, as responses are not stored; send the whole conversation as 'input'")
    for name in _ECHOED:  # as they were sent, and an answer is UTF-8
        try:
            bytes(fields.get(name, b"")).decode()
        except UnicodeDecodeError:
            raise invalid(name, "is not valid UTF-8") from None
    return as_chat("/v1/responses", fields, _FOREIGN, _Said.__struct_fields__, _asked(said))


def _says_nothing(name: str, value: msgspec.Raw) -> bool:
    return bytes(value) == b"null" or (
        name in _NOTHING and len(value) <= 16 and msgspec.json.format(value, indent=-1) == _NOTHING[name]
    )


def _asked(said: _Said) -> dict[str, Any]:
    """Return the fields that have other names or places in a chat."""
    text, choice = said.text or {}, said.tool_choice
    if isinstance(choice, _NamedTool):
        choice = {"type": choice.type, "function": {"name": choice.name}}
    about = [{name: getattr(tool, name) for name in FunctionTool.__struct_fields__} for tool in said.tools or ()]
    return {
        "messages": _messages(said),
        "max_completion_tokens": said.max_output_tokens,
        "tools": [{"type": "function", "function": one} for one in about] or None,
        "tool_choice": choice,
        "response_format": _format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": (said.reasoning or {}).get("effort"),
    }


def _format(given: Any) -> Any:
    if not isinstance(given, dict) or "schema" not in given:  # `{"type": "text"}` says nothing in a chat as well
        return cast("Any", given)
    told = cast("dict[str, Any]", given)
    return {"type": told.get("type"), "json_schema": {name: told[name] for name in told if name != "type"}}


def _messages(said: _Said) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if said.instructions is not None:
        found.append({"role": "system", "content": said.instructions})
    if isinstance(said.input, str):
        return [*found, {"role": "user", "content": said.input}]
    for item in said.input:
        if item.type == "message":
            found.append({"role": item.role, "content": _pieces(item.content)})
        elif item.type == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _pieces(item.output)})
        else:
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant"})
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            found[-1].setdefault("tool_calls", []).append(call)
    return found


def _pieces(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return texts as chats have them; other pieces stay as they were sent."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": one.get("text", "")} if str(one.get("type")) in _TEXTS else one for one in content]


class ResponseBlocks(BlockAnswer):
    """An answer as clients of `/v1/responses` read it."""

    _sequence = 0

    def _answer(self, choice: Choice) -> Mapping[str, Any]:
        why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(choice.finish_reason or "")
        status = "incomplete" if why else "completed"
        usage = {
            "input_tokens": choice.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": choice.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": choice.prompt_tokens + choice.tokens,
        }
        output = [self._item(number, block, status) for number, block in enumerate(self.blocks)]
        return self._told(status, output=output, usage=usage, incomplete_details=why and {"reason": why})

    def _opened(self, choice: Choice) -> Iterator[bytes]:
        del choice
        told = self._told("in_progress", output=[], usage=None, incomplete_details=None)
        yield self._event("response.created", response=told)
        yield self._event("response.in_progress", response=told)

    def _block_opened(self, number: int, block: Block) -> bytes:
        item = self._item(number, block, "in_progress")
        if block.call:
            return self._event("response.output_item.added", output_index=number, item=item)
        part = item["content"].pop()
        added = self._event("response.output_item.added", output_index=number, item=item)
        return added + self._event("response.content_part.added", **self._place(number, block), part=part)

    def _block_piece(self, number: int, block: Block, piece: str) -> bytes:
        kind = "response.function_call_arguments.delta" if block.call else "response.output_text.delta"
        more: dict[str, Any] = {} if block.call else {"logprobs": []}
        return self._event(kind, **self._place(number, block), delta=piece, **more)

    def _block_closed(self, number: int, block: Block) -> bytes:
        item, place = self._item(number, block, "completed"), self._place(number, block)
        if block.call:
            done = {"name": block.tool, "arguments": block.text}
            ends = self._event("response.function_call_arguments.done", **place, **done)
        else:
            ends = self._event("response.output_text.done", **place, text=block.text, logprobs=[])
            ends += self._event("response.content_part.done", **place, part=item["content"][0])
        return ends + self._event("response.output_item.done", output_index=number, item=item)

    def _closed(self, choice: Choice) -> Iterator[bytes]:
        answer = self._answer(choice)
        yield self._event(f"response.{answer['status']}", response=answer)

    def _told(self, status: str, **more: Any) -> dict[str, Any]:
        said = {name: value for name, value in FIELDS.decode(self.body).items() if name in _ECHOED}
        # An event has no line breaks, and what was sent may. It is not decoded: a number in it may be out of range.
        echoed = {
            name: msgspec.Raw(msgspec.json.format(value, indent=-1))
            for name, value in said.items()
            if not _says_nothing(name, value)
        }
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "model": self.asked.model,
            "parallel_tool_calls": True,
            "store": False,
            **dict.fromkeys(_ECHOED),
            "metadata": {},
            "tool_choice": "auto",
            "tools": [],
            **echoed,
            **more,
        }

    def _item(self, number: int, block: Block, status: str) -> dict[str, Any]:
        if block.call:
            about = {"call_id": block.call, "name": block.tool, "arguments": block.text}
            return {"id": self._id(number, block), "type": "function_call", "status": status, **about}
        content: list[dict[str, Any]] = [{"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}]
        about = {"role": "assistant", "content": content}
        return {"id": self._id(number, block), "type": "message", "status": status, **about}

    def _id(self, number: int, block: Block) -> str:
        return f"{'fc' if block.call else 'msg'}_{self.id}_{number}"

    def _place(self, number: int, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(number, block), "output_index": number}
        return place if block.call else {**place, "content_index": 0}

    def _event(self, kind: str, **told: Any) -> bytes:
        self._sequence += 1
        return written(kind, {"sequence_number": self._sequence - 1, **told})
