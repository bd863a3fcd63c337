# SPDX-License-Identifier: Apache-2.0
"""Chat models that say what those said whose answers were recorded, in the same pieces."""

from collections.abc import Iterator

import forebay
from forebay.openai import ChatRequest, FunctionCall, TextPart, Tool, ToolCall

WEATHER = (
    "I can't provide real-time updates, but you can easily check the current weather in San Francisco using a weather "
    "website or app. Typically, San Francisco has cool, foggy summers and mild winters, so it's good to be prepared "
    "for variable weather!"
)


class Calling(ChatRequest, frozen=True):
    """A request with tools."""

    tools: tuple[Tool, ...] = ()


class Answering(forebay.Model):
    """Answers with a whole text."""

    name = "gpt-4o-mini"

    def predict(self, batch: list[ChatRequest]) -> list[TextPart]:
        return [TextPart(WEATHER, tokens=50, prompt_tokens=14) for _ in batch]


class Greeting(forebay.Model):
    """Streams a text."""

    name = "claude-3-opus-latest"
    max_batch_size = 1

    def predict(self, batch: list[ChatRequest]) -> Iterator[list[TextPart]]:
        del batch
        yield [TextPart("Hello", prompt_tokens=11)]
        yield [TextPart(" there")]
        yield [TextPart("!", tokens=4)]


class Asking(forebay.Model):
    """Streams a text, and then the call of a tool."""

    name = "claude-sonnet-4-20250514"
    max_batch_size = 1

    def predict(self, batch: list[Calling]) -> Iterator[list[TextPart]]:
        name = batch[0].tools[0].function.name
        yield [TextPart("I", prompt_tokens=377)]
        yield [TextPart("'ll check the current weather in Paris for you.", tokens=14)]
        yield [
            TextPart(tokens=0, tool_calls=[ToolCall(function=FunctionCall(name), id="toolu_01NRLabsLyVHZPKxbKvkfSMn")])
        ]
        for number, piece in enumerate(('{"locati', 'on": "P', "ar", 'is"}')):
            tokens = 20 if number < 2 else 5
            yield [TextPart(tokens=tokens, tool_calls=[ToolCall(function=FunctionCall(arguments=piece))])]
