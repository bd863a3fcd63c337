# SPDX-License-Identifier: Apache-2.0
"""Where models are asked that say so by the type of their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from forebay.errors import ForebayError
from forebay.protocols.openai import anthropic_messages, openai_errors, responses
from forebay.protocols.openai.answer_blocks import BlockAnswer
from forebay.protocols.openai.audio import SPEECH, TRANSCRIPTS, TranscriptAnswer, form_body
from forebay.protocols.openai.request_reading import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE


class Door(NamedTuple):
    """What is asked in one form.

    Attributes:
        path: What the form is called.
        sample: The type of the samples of models that are asked so.
        spoken: What these models say they are asked; several forms may ask the same.
        targets: Where. The first one is documented.
        chat_body: Returns what a body asks as the body of a chat, if the form is another one of that.
        answer: What writes the answers then.
        error_body: Writes errors.
        error_event: What comes before an error in a stream.
    """

    path: str
    sample: str
    spoken: str
    targets: tuple[str, ...]
    chat_body: Callable[[bytes], bytes] | None = None
    answer: type[BlockAnswer] | None = None
    error_body: Callable[[ForebayError, str], bytes] = openai_errors.body_of
    error_event: bytes = b""

    @property
    def form(self) -> str:
        """The form in which a body is read."""
        return self.path if self.chat_body is None else self.spoken


DOORS: Final = (
    Door(CHAT, "ChatRequest", CHAT, ("/v1/chat/completions",)),
    Door(RESPONSES, "ChatRequest", CHAT, ("/v1/responses",), responses.chat_body, responses.ResponseBlocks),
    Door(
        MESSAGES,
        "ChatRequest",
        CHAT,
        ("/v1/messages",),
        anthropic_messages.chat_body,
        anthropic_messages.MessageBlocks,
        anthropic_messages.error_body,
        b"event: error\n",
    ),
    Door(COMPLETIONS, "CompletionRequest", COMPLETIONS, ("/v1/completions",)),
    Door(EMBEDDINGS, "EmbeddingRequest", EMBEDDINGS, ("/v1/embeddings",)),
    Door(RERANK, "RerankRequest", RERANK, ("/v1/rerank", "/v2/rerank", "/rerank")),
    Door(SCORE, "RerankRequest", RERANK, ("/v1/score", "/score")),
    Door(SPEECH, "SpeechRequest", SPEECH, ("/v1/audio/speech",)),
    Door(TRANSCRIPTS, "TranscriptionRequest", TRANSCRIPTS, ("/v1/audio/transcriptions",), form_body, TranscriptAnswer),
)
