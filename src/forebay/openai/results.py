# SPDX-License-Identifier: Apache-2.0
"""What models answer clients of OpenAI's protocol with, where a text or a list of numbers does not say all of it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from forebay.openai.request_fields import ToolCall

_Seconds = Annotated[float, Meta(ge=0, le=1e7)]


class Logprob(Struct, frozen=True, omit_defaults=True):
    """How likely a token was.

    Attributes:
        token: Its text.
        logprob: The logarithm of its probability; of what cannot be (minus infinity) clients are told -9999.
        top: The likeliest tokens in its place.
        bytes: Those of the token, where its text is not all of them: a token may be half a letter.
    """

    token: str
    logprob: float | None
    top: list[Logprob] | None = None
    bytes: list[int] | None = None


class TextPart(Struct, frozen=True, omit_defaults=True):
    """A piece of a text, or the whole, with what is known of it.

    Attributes:
        tokens: How many tokens it is. A `str` counts as one where it is a part of a stream, as none where it is whole.
        prompt_tokens: How many tokens the prompt was; one part is enough to tell.
        finish_reason: Why nothing comes after it: "stop", "length", or another word. If no part tells, it is "length"
            where as many tokens came as were wanted, "tool_calls" where a tool is to be called, else "stop".
        tool_calls: What is to be called.
        logprobs: How likely the tokens of this text were, for clients who ask.
    """

    text: str = ""
    tokens: int = 1
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    tool_calls: list[ToolCall] | None = None
    logprobs: list[Logprob] | None = None


class Embedding(Struct, frozen=True):
    """A vector with the tokens its text was.

    Attributes:
        vector: Numbers: a list or an array.
        tokens: Of its text; they are counted as usage.
    """

    vector: Any
    tokens: int


class Score(Struct, frozen=True):
    """How well a document fits a query, with the tokens that both were.

    Attributes:
        score: The higher the better.
        tokens: Of both texts; they are counted as usage.
    """

    score: float
    tokens: int


class TimedText(Struct, frozen=True):
    """What is said in a piece of a recording, from `start` to `end` in seconds."""

    start: _Seconds
    end: _Seconds
    text: str


class Transcript(TextPart, frozen=True, kw_only=True):
    """What is said in a recording, or a part of that, with its times.

    Attributes:
        duration: Of the recording in seconds; clients are told it as usage, in place of tokens.
    """

    language: str | None = None
    duration: _Seconds | None = None
    segments: list[TimedText] = []
    words: list[TimedText] = []
