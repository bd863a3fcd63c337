# SPDX-License-Identifier: Apache-2.0
"""From the parts of each choice to one answer: whole, or as events.

A choice ends where its model ends it, before a stop sequence (cut here, also where it begins in one part and ends in
another), or with as many tokens as were wanted. What may still become a stop sequence is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from forebay.errors import BadOutcome
from forebay.openai import Logprob, TextPart, ToolCall, Transcript
from forebay.protocols.openai.logprobs import Logprobs, of_chat, of_completion
from forebay.protocols.openai.request_reading import CHAT, Asked
from forebay.types.first_use import known

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream."""
COST: Final = b": forebay-cost %b\n\n"
"""Says what a stream has cost, as a comment: the protocol has no event for it, and clients skip comments."""

_part: Final = msgspec.json.Decoder(known(str | Transcript))
_encode: Final = msgspec.json.Encoder().encode


class Cut:
    """Ends a text before the first of several stop sequences."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_over = False
        self.stop = ""

    def take(self, text: str) -> str:
        """Add a piece; returns what is certainly before any stop sequence."""
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.stop = min(found)
            self.is_over, self._held = True, ""
            return text[:place]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def rest(self) -> str:
        """Return what was held back: the text has ended, so it is not a stop sequence."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how long the longest end of a text is with which a stop sequence begins, short of the whole of it."""
    tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
    at = tail.find(stop[0])
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0


class Choice:
    """One of the texts, and the calls of tools beside it.

    Attributes:
        is_over: Whether what may still come of it is not wanted.
        news: Pieces of calls that were not told yet.
        logprobs: Those of the text that was not told yet, with their places in it.
        heard: Parts that say more of a recording than its text.
    """

    __slots__ = (
        *("_calls", "_cut", "_limit", "_logprobs", "_name", "finish_reason", "heard", "is_over", "logprobs", "news"),
        *("prompt_tokens", "texts", "tokens"),
    )

    def __init__(self, stops: Sequence[str], limit: int | None, name: str | None = None) -> None:
        """Begin a choice.

        Args:
            stops: Before what it ends.
            limit: The most tokens of it.
            name: What calls of tools are named after; None if there can be none.
        """
        self._cut = Cut(stops) if stops else None
        self._limit = limit
        self._name = name
        self._calls: list[dict[str, Any]] = []
        self._logprobs: Logprobs | None = None
        self.news: list[dict[str, Any]] = []
        self.heard: list[Transcript] = []
        self.logprobs: list[tuple[int, Logprob]] = []
        self.texts: list[str] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.finish_reason: str | None = None
        self.is_over = False

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools, each whole."""
        return [
            {**one, "function": {**one["function"], "arguments": "".join(one["function"]["arguments"])}}
            for one in self._calls
        ]

    @property
    def stop(self) -> str:
        """The stop sequence that ended it, if one did."""
        return "" if self._cut is None else self._cut.stop

    def take(self, written: bytes, *, is_whole: bool) -> str:
        """Add a part, or the whole; returns the text to hand on.

        Raises:
            BadOutcome: If it is not text.
        """
        try:
            part = _part.decode(written)
        except msgspec.MsgspecError as error:
            raise BadOutcome(f"the model answered with something else than a text: {error}") from None
        if type(part) is str:
            text, tokens = part, 0 if is_whole else 1
        else:
            text, tokens = part.text, part.tokens
            self.finish_reason = part.finish_reason or self.finish_reason
            if part.prompt_tokens is not None:
                self.prompt_tokens = part.prompt_tokens
            if part.segments or part.words or part.language or part.duration is not None:
                self.heard.append(part)
        if self._limit is not None and tokens and self.tokens >= self._limit:
            self.is_over, self.finish_reason = True, "length"
            return ""
        self.tokens += tokens
        if isinstance(part, TextPart) and (part.logprobs or part.tool_calls or self._logprobs is not None):
            self._take_more(part)
        if self._cut is not None:
            text = self._cut.take(text)
            if self._cut.is_over:
                self.is_over, self.finish_reason = True, "stop"
        if self._logprobs is not None:
            self.logprobs += self._logprobs.told(text)
        return text

    def end(self) -> str:
        """Settle why it ended; returns the text that was held back."""
        if self.finish_reason is None:
            is_short = self._limit is None or self.tokens < self._limit
            self.finish_reason = ("tool_calls" if self._calls else "stop") if is_short else "length"
        text = "" if self._cut is None else self._cut.rest()
        if self._logprobs is not None and not (self._cut is not None and self._cut.is_over):
            self.logprobs += self._logprobs.told(text, is_last=True)
        return text

    def _take_more(self, part: TextPart) -> None:
        if part.logprobs and self._logprobs is None:
            self._logprobs = Logprobs(0 if self._cut is None else self._cut.held)
        if self._logprobs is not None:
            self._logprobs.take(part.text, part.logprobs or ())
        for call in part.tool_calls or ():
            self._call(call)

    def _call(self, call: ToolCall) -> None:
        """Add a call of a tool, or a piece of one."""
        name, arguments = call.function.name, call.function.arguments
        if self._name is None or not (name or self._calls):
            wrong = "it has no name" if self._name is not None else "completions have none"
            raise BadOutcome(f"the model answered with the call of a tool, and {wrong}")
        if not name:
            self._calls[-1]["function"]["arguments"].append(arguments)
            self.news.append({"index": len(self._calls) - 1, "function": {"arguments": arguments}})
            return
        about = {"id": call.id or f"{self._name}_{len(self._calls)}", "type": call.type}
        self.news.append({"index": len(self._calls), **about, "function": {"name": name, "arguments": arguments}})
        self._calls.append({**about, "function": {"name": name, "arguments": [arguments]}})


class Texts:
    """The answer to one request: all of its choices, in the order in which they are asked for."""

    def __init__(self, path: str, asked: Asked, id: str, created: int) -> None:
        """Begin an answer.

        Args:
            path: What was asked: `CHAT`, or completions.
            created: Seconds since 1970.
        """
        self._is_chat = path == CHAT
        self._asked = asked
        self._limit, self._stops = asked.limit, asked.stops
        self._begun: set[int] = set()
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + id,
            "object": kind + ".chunk" if self._is_chat and asked.stream else kind,
            "created": created,
            "model": asked.model,
        }
        self._name = f"call_{id}" if self._is_chat else None
        self._count = 0
        head = {**self._head, "usage": None} if asked.tells_usage else self._head
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":'
        self._opening = b',"delta":{"content":' if self._is_chat else b',"text":'
        self._closing = b'},"logprobs":null,' if self._is_chat else b',"logprobs":null,'

    def choice(self) -> Choice:
        """Begin a choice."""
        self._count += 1
        return Choice(self._stops, self._limit, self._name and f"{self._name}_{self._count}")

    def event(self, index: int, choice: Choice, text: str) -> bytes:
        """Write a piece of a choice, with what is new beside its text."""
        if choice.news or choice.logprobs:
            return self._rich_event(index, choice, text)
        written = self._event(index, self._opening + _encode(text) + self._closing + b'"finish_reason":null')
        return self._first(index) + written

    def last_event(self, index: int, choice: Choice, text: str) -> bytes:
        """Write the end of a choice; `text` is what remained of it."""
        is_more = text or choice.news or choice.logprobs
        before = self.event(index, choice, text) if is_more else self._first(index)
        nothing = b',"delta":{},"logprobs":null,' if self._is_chat else b',"text":"","logprobs":null,'
        return before + self._event(index, nothing + b'"finish_reason":' + _encode(choice.finish_reason))

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Write what comes after all choices."""
        if not self._asked.tells_usage:
            return DONE
        return b"data: " + _encode({**self._head, "choices": [], "usage": self._usage(choices)}) + b"\n\n" + DONE

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Write the answer as one body."""
        found = [
            {
                "index": index,
                **self._content("".join(one.texts), one.calls),
                "logprobs": self._likely(one),
                "finish_reason": one.finish_reason,
            }
            for index, one in enumerate(choices)
        ]
        return _encode({**self._head, "choices": found, "usage": self._usage(choices)})

    def _content(self, text: str, calls: list[dict[str, Any]]) -> dict[str, object]:
        if not self._is_chat:
            return {"text": text}
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message}

    def _likely(self, choice: Choice) -> dict[str, Any] | None:
        return (of_chat if self._is_chat else of_completion)(choice.logprobs)

    def _rich_event(self, index: int, choice: Choice, text: str) -> bytes:
        content: dict[str, Any] = {"content": text} if text or not choice.news else {}
        if choice.news:
            content["tool_calls"] = choice.news
        told: dict[str, Any] = {"delta": content} if self._is_chat else {"text": text}
        told |= {"logprobs": self._likely(choice), "finish_reason": None}
        first = self._first(index, b'""' if text or not choice.news else b"null")
        choice.news, choice.logprobs = [], []
        return first + self._event(index, b"," + _encode(told)[1:-1])

    def _first(self, index: int, content: bytes = b'""') -> bytes:
        """Write who speaks, before the first piece of a choice of a chat."""
        if not self._is_chat or index in self._begun:
            return b""
        self._begun.add(index)
        delta = b',"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null' % content
        return self._event(index, delta)

    def _event(self, index: int, rest: bytes) -> bytes:
        return b"%b%d%b}]}\n\n" % (self._before, index, rest)

    def tokens(self, choices: Sequence[Choice]) -> tuple[int, int]:
        """Count tokens of prompts and of answers so far; the choices of one prompt share its tokens."""
        each = self._asked.choices
        prompts = [max(one.prompt_tokens for one in choices[at : at + each]) for at in range(0, len(choices), each)]
        return sum(prompts), sum(one.tokens for one in choices)

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        prompt, completion = self.tokens(choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
