# SPDX-License-Identifier: Apache-2.0
"""From the vectors or scores of each text to one answer.

Ranks come as Cohere and Jina tell them, the best first, and scores as vLLM does. Workers wrote vectors as lists or in
base64, and nothing is read anew here. Each function also returns how many tokens the texts were, and raises BadOutcome
if a result is something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from forebay.errors import BadOutcome
from forebay.openai import Score
from forebay.protocols.openai.request_reading import EMBEDDINGS, RANKING, RERANK, SCORE, Asked, decoded
from forebay.types.first_use import known


class _Counted(msgspec.Struct):
    vector: msgspec.Raw
    tokens: int


_documents: Final = msgspec.json.Decoder(list[msgspec.Raw])
_score: Final = msgspec.json.Decoder(known(float | Score))
_counted: Final = msgspec.json.Decoder(known(_Counted))
_OTHER: Final = "the model answered with something else than"


def embedded(asked: Asked, _id: str, _created: int, _body: bytes, vectors: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the answer with vectors."""
    tokens = 0
    written: list[bytes] = []
    for index, vector in enumerate(vectors):
        if vector[:1] == b"{":
            try:
                counted = _counted.decode(vector)
            except msgspec.MsgspecError as error:
                raise BadOutcome(f"{_OTHER} a vector: {error}") from None
            tokens += counted.tokens
            vector = bytes(counted.vector)  # noqa: PLW2901
        if vector[:1] != (b'"' if asked.is_base64 else b"["):
            raise BadOutcome(f"{_OTHER} a vector: {vector[:40].decode(errors='replace')}")
        written.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector))
    usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    model = msgspec.json.encode(asked.model)
    return b'{"object":"list","data":[%b],"model":%b,%b}' % (b",".join(written), model, usage), tokens


def ranked(asked: Asked, id: str, _created: int, body: bytes, found: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the answer with ranks."""
    told = decoded(RANKING, body)
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


def scored(asked: Asked, id: str, created: int, _body: bytes, found: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the answer with scores."""
    scores, usage = _read(found)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{id}", "object": "list", "created": created, "model": asked.model}
    return msgspec.json.encode({**head, "data": data, "usage": usage}), usage["total_tokens"]


JOINED: Final = {EMBEDDINGS: embedded, RERANK: ranked, SCORE: scored}
"""By form, what makes the answer."""


def _read(found: Sequence[bytes]) -> tuple[list[float], dict[str, int]]:
    try:
        read = [_score.decode(one) for one in found]
    except msgspec.MsgspecError as error:
        raise BadOutcome(f"{_OTHER} a score: {error}") from None
    tokens = sum(one.tokens for one in read if isinstance(one, Score))
    scores = [one.score if isinstance(one, Score) else one for one in read]
    return scores, {"prompt_tokens": tokens, "total_tokens": tokens}
