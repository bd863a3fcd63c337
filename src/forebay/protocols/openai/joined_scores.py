# SPDX-License-Identifier: Apache-2.0
"""From the scores of documents to one answer: as reranking tells them, the best first, or as `/score` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from forebay.errors import BadOutcome
from forebay.openai import Score
from forebay.protocols.openai.request_reading import Asked, ranking
from forebay.types.first_use import known

_documents: Final = msgspec.json.Decoder(list[msgspec.Raw])
_score: Final = msgspec.json.Decoder(known(float | Score))


def ranked(asked: Asked, id: str, body: bytes, found: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the answer in the form of Cohere and Jina, and how many tokens its texts were.

    Raises:
        BadOutcome: If a result is no score.
    """
    told = ranking(body)
    scores, usage = _read(found)
    ranks = sorted(range(len(scores)), key=lambda index: -scores[index])[: told.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in ranks]
    if told.return_documents is not False:  # Cohere leaves them out unless they are asked for, Jina and vLLM do not
        is_list = bytes(told.documents)[:1] == b"["
        documents = _documents.decode(told.documents) if is_list else [told.documents]
        for result, index in zip(results, ranks, strict=True):
            document = documents[index]
            result["document"] = {"text": document} if bytes(document)[:1] == b'"' else document
    answer = {"id": f"rerank-{id}", "object": "list", "model": asked.model, "results": results, "usage": usage}
    return msgspec.json.encode(answer), usage["total_tokens"]


def scored(asked: Asked, id: str, created: int, found: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the answer in the form of vLLM, and how many tokens its texts were.

    Raises:
        BadOutcome: If a result is no score.
    """
    scores, usage = _read(found)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{id}", "object": "list", "created": created, "model": asked.model}
    return msgspec.json.encode({**head, "data": data, "usage": usage}), usage["total_tokens"]


def _read(found: Sequence[bytes]) -> tuple[list[float], dict[str, int]]:
    try:
        read = [_score.decode(one) for one in found]
    except msgspec.MsgspecError as error:
        raise BadOutcome(f"the model answered with something else than a score: {error}") from None
    tokens = sum(one.tokens for one in read if isinstance(one, Score))
    scores = [one.score if isinstance(one, Score) else one for one in read]
    return scores, {"prompt_tokens": tokens, "total_tokens": tokens}
