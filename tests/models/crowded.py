# SPDX-License-Identifier: Apache-2.0
"""Models with all kinds of containers in their samples, for attacks on the protocols in front of them."""

from collections.abc import Iterator
from typing import Any

import msgspec

import forebay
from forebay.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FunctionCall,
    RerankRequest,
    SpeechRequest,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    TranscriptionRequest,
)


class Leaf(msgspec.Struct):
    """A part of a sample."""

    weight: float = 0.0
    tags: list[str] = []


class Tree(msgspec.Struct):
    """A sample."""

    name: str = ""
    leaves: list[Leaf] = []
    by_name: dict[str, Leaf] = {}
    numbers: list[float] = []
    more: Any = None


class Typed(forebay.Model):
    """Counts what it gets."""

    def predict(self, batch: list[Tree]) -> list[int]:
        return [len(one.leaves) for one in batch]


class Plain(forebay.Model):
    """Takes anything."""

    def predict(self, batch: list[Any]) -> list[str]:
        return [type(one).__name__ for one in batch]


class Sampled(forebay.Model):
    """Takes arrays of samples."""

    batchable = True

    def predict(self, batch: list[float]) -> list[float]:
        return batch


class Pair(msgspec.Struct):
    """A sample of two tensors."""

    numbers: list[float] = []
    text: str = ""


class Tensors(forebay.Model):
    """Takes tensors."""

    def predict(self, batch: list[Pair]) -> list[float]:
        return [sum(one.numbers) for one in batch]


class Filed(forebay.Model):
    """Takes forms."""

    def predict(self, batch: list[Leaf]) -> list[float]:
        return [one.weight for one in batch]


class Chat(forebay.Model):
    """Answers conversations."""

    def predict(self, batch: list[ChatRequest]) -> list[str]:
        return ["yes" for _ in batch]


class Completion(forebay.Model):
    """Goes on with texts."""

    def predict(self, batch: list[CompletionRequest]) -> list[str]:
        return ["yes" for _ in batch]


class Vectors(forebay.Model):
    """Makes vectors of texts."""

    def predict(self, batch: list[EmbeddingRequest]) -> list[list[float]]:
        return [[0.5] for _ in batch]


class Calling(ChatRequest, frozen=True):
    """A conversation with all that the doors to chats translate."""

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class Agent(forebay.Model):
    """Says the last message again, and calls the tools that it is offered with it."""

    max_batch_size = 1
    max_queue = 100

    def predict(self, batch: list[Calling]) -> Iterator[list[str | TextPart]]:
        (asked,) = batch
        text = asked.messages[-1].text
        yield [text]
        for tool in asked.tools:
            yield [TextPart(tool_calls=[ToolCall(function=FunctionCall(tool.function.name, text))])]


class Ranks(forebay.Model):
    """Ranks documents by their length."""

    max_queue = 5000

    def predict(self, batch: list[RerankRequest]) -> list[float]:
        return [float(len(one.document)) for one in batch]


class Page(msgspec.Struct):
    """A sample whose fields may stand in the query of a request."""

    size: int = 1
    ratio: float = 0.5
    is_new: bool = False
    tags: list[str] = []
    text: str | None = None


class Asked(forebay.Model):
    """Answers with a status and a header of its own."""

    def predict(self, batch: list[Page]) -> list[forebay.Answer]:
        return [forebay.Answer(one, 201, {"x-size": str(one.size)}) for one in batch]


class Says(forebay.Model):
    """Says texts."""

    max_batch_size = 1

    def predict(self, batch: list[SpeechRequest]) -> Iterator[list[bytes]]:
        yield [one.input.encode() for one in batch]


class Hears(forebay.Model):
    """Says how long a recording is."""

    max_batch_size = 1

    def predict(self, batch: list[TranscriptionRequest]) -> Iterator[list[str]]:
        yield [f"{one.file.size} bytes" for one in batch]
