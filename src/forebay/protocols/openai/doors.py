# SPDX-License-Identifier: Apache-2.0
"""Where models are asked that say so by the type of their samples."""

from __future__ import annotations

from typing import Final, NamedTuple

from forebay.protocols.openai.request_reading import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, SCORE


class Door(NamedTuple):
    """What is asked in one form.

    Attributes:
        path: What the form is called.
        sample: The type of the samples of models that are asked so.
        spoken: What these models say they are asked; several forms may ask the same.
        targets: Where. The first one is documented.
    """

    path: str
    sample: str
    spoken: str
    targets: tuple[str, ...]


DOORS: Final = (
    Door(CHAT, "ChatRequest", CHAT, ("/v1/chat/completions",)),
    Door(COMPLETIONS, "CompletionRequest", COMPLETIONS, ("/v1/completions",)),
    Door(EMBEDDINGS, "EmbeddingRequest", EMBEDDINGS, ("/v1/embeddings",)),
    Door(RERANK, "RerankRequest", RERANK, ("/v1/rerank", "/v2/rerank", "/rerank")),
    Door(SCORE, "RerankRequest", RERANK, ("/v1/score", "/score")),
)
WHOLE: Final = frozenset({EMBEDDINGS, RERANK, SCORE})
"""Forms whose answers do not come in parts."""
