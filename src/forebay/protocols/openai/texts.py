# SPDX-License-Identifier: Apache-2.0
"""From the parts of each choice to one answer: whole, or as events.

A choice ends where its model ends it, before a stop sequence (cut here, also where it begins in one part and ends in
another), or with as many tokens as were wanted. What may still become a stop sequence is held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import BadOutcome
from forebay.openai import TextPart
from forebay.protocols.openai.requests import CHAT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.protocols.openai.requests import Asked

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream."""

_part: Final = msgspec.json.Decoder(str | TextPart)
_encode: Final = msgspec.json.Encoder().encode


class Cut:
    """Ends a text before the first of several stop sequences."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_over = False

    def take(self, text: str) -> str:
        """Add a piece; returns what is certainly before any stop sequence."""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_over, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """Return what was held back: the text has ended, so it is no stop sequence."""
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
    """One of the texts.

    Attributes:
        is_over: Whether what may still come of it is not wanted.
    """

    __slots__ = ("_cut", "_limit", "finish_reason", "is_over", "prompt_tokens", "texts", "tokens")

    def __init__(self, stops: Sequence[str], limit: int | None) -> None:
        self._cut = Cut(stops) if stops else None
        self._limit = limit
        self.texts: list[str] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.finish_reason: str | None = None
        self.is_over = False

    def take(self, written: bytes, *, is_whole: bool) -> str:
        """Add a part, or the whole; returns the text to hand on.

        Raises:
            BadOutcome: If it is no text.
        """
        try:
            part = _part.decode(written)
        except msgspec.MsgspecError as error:
            msg = f"the model answered with something else than a text: {error}"
            raise BadOutcome(msg) from None
        if type(part) is str:
            text, tokens = part, 0 if is_whole else 1
        else:
            text, tokens = part.text, part.tokens
            self.finish_reason = part.finish_reason or self.finish_reason
            if part.prompt_tokens is not None:
                self.prompt_tokens = part.prompt_tokens
        if self._limit is not None and tokens and self.tokens >= self._limit:
            self.is_over, self.finish_reason = True, "length"
            return ""
        self.tokens += tokens
        if self._cut is None:
            return text
        text = self._cut.take(text)
        if self._cut.is_over:
            self.is_over, self.finish_reason = True, "stop"
        return text

    def end(self) -> str:
        """Settle why it ended; returns the text that was held back."""
        if self.finish_reason is None:
            self.finish_reason = "stop" if self._limit is None or self.tokens < self._limit else "length"
        return "" if self._cut is None else self._cut.rest()


class Texts:
    """The answer to one request: all of its choices, in the order in which they are asked for."""

    def __init__(self, path: str, asked: Asked, id: str, created: int) -> None:
        """Begin an answer.

        Args:
            path: What was asked: `CHAT`, or completions.
            asked: How.
            id: What the answer is called.
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
        self._before = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        self._opening = b',"delta":{"content":' if self._is_chat else b',"text":'
        self._closing = b'},"logprobs":null,' if self._is_chat else b',"logprobs":null,'

    def choice(self) -> Choice:
        """Begin a choice."""
        return Choice(self._stops, self._limit)

    def event(self, index: int, text: str) -> bytes:
        """Write a piece of a choice."""
        written = self._event(index, self._opening + _encode(text) + self._closing + b'"finish_reason":null')
        return self._first(index) + written

    def last_event(self, index: int, choice: Choice, text: str) -> bytes:
        """Write the end of a choice; `text` is what remained of it."""
        before = self.event(index, text) if text else self._first(index)
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
            {"index": index, **self._content("".join(one.texts)), "logprobs": None, "finish_reason": one.finish_reason}
            for index, one in enumerate(choices)
        ]
        return _encode({**self._head, "choices": found, "usage": self._usage(choices)})

    def _content(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}

    def _first(self, index: int) -> bytes:
        """Write who speaks, before the first piece of a choice of a chat."""
        if not self._is_chat or index in self._begun:
            return b""
        self._begun.add(index)
        return self._event(index, b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')

    def _event(self, index: int, rest: bytes) -> bytes:
        return b"%b%d%b}]}\n\n" % (self._before, index, rest)

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Count tokens; the choices of one prompt share its tokens."""
        each = self._asked.choices
        prompts = [max(one.prompt_tokens for one in choices[at : at + each]) for at in range(0, len(choices), each)]
        completion = sum(one.tokens for one in choices)
        return {
            "prompt_tokens": sum(prompts),
            "completion_tokens": completion,
            "total_tokens": sum(prompts) + completion,
        }
