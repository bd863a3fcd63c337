# SPDX-License-Identifier: Apache-2.0
"""What models take and give that clients of OpenAI's protocol ask. The type of its samples says what a model is.

    from forebay.openai import ChatRequest

    class Parrot(forebay.Model):
        def predict(self, batch: list[ChatRequest]) -> Iterator[list[str]]:
            for word in batch[0].messages[-1].text.split():
                yield [word + " "]

| samples | it answers at |
|---|---|
| `ChatRequest` | `/v1/chat/completions`, `/v1/responses`, `/v1/messages` |
| `CompletionRequest` | `/v1/completions` |
| `EmbeddingRequest` | `/v1/embeddings` |
| `RerankRequest` | `/v1/rerank`, `/v2/rerank`, `/rerank`, `/v1/score`, `/score` |
| `SpeechRequest` | `/v1/audio/speech` |
| `TranscriptionRequest` | `/v1/audio/transcriptions` |

A further method with `@forebay.endpoint`, or the input of a composition, may have these types as well. Texts are `str`,
or `TextPart` where more is known of them: whole, or the parts of a stream. What a client may say beside these fields, a
subclass declares: `class Sampling(ChatRequest): top_k: int = 40`. Everything else it says is refused by its name,
unless it says no more than its absence would: `null`, or the default of the protocol.

A model that calls tools, or tells how likely its tokens were, declares that as well:

    class Agent(ChatRequest, frozen=True):
        tools: list[Tool] = []
        tool_choice: ToolChoice | None = None
        logprobs: bool = False
"""

from typing import Literal

from forebay.openai.request_fields import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FunctionCall,
    FunctionTool,
    Message,
    NamedTool,
    RerankRequest,
    SpeechRequest,
    Tool,
    ToolCall,
    TranscriptionRequest,
)
from forebay.openai.results import Embedding, Logprob, Score, TextPart, TimedText, Transcript

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "Embedding",
    "EmbeddingRequest",
    "FunctionCall",
    "FunctionTool",
    "Logprob",
    "Message",
    "NamedTool",
    "RerankRequest",
    "Score",
    "SpeechRequest",
    "TextPart",
    "TimedText",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Transcript",
    "TranscriptionRequest",
]

ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""Whether a model may, must or must not call a tool; or which."""
