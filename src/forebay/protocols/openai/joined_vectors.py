# SPDX-License-Identifier: Apache-2.0
"""From the vectors of each text to one answer. Workers wrote them, as lists or in base64; nothing is read anew here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import BadOutcome
from forebay.types.first_use import known

if TYPE_CHECKING:
    from forebay.protocols.openai.request_reading import Asked


class _Counted(msgspec.Struct):
    vector: msgspec.Raw
    tokens: int


_counted: Final = msgspec.json.Decoder(known(_Counted))


def whole(asked: Asked, vectors: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the answer, and how many tokens its texts were; raises BadOutcome if a result is no vector."""
    tokens = 0
    written: list[bytes] = []
    for index, vector in enumerate(vectors):
        if vector[:1] == b"{":
            try:
                counted = _counted.decode(vector)
            except msgspec.MsgspecError as error:
                raise _no_vector(str(error)) from None
            tokens += counted.tokens
            vector = bytes(counted.vector)  # noqa: PLW2901
        if vector[:1] != (b'"' if asked.is_base64 else b"["):
            raise _no_vector(vector[:40].decode(errors="replace"))
        written.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector))
    usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    model = msgspec.json.encode(asked.model)
    return b'{"object":"list","data":[%b],"model":%b,%b}' % (b",".join(written), model, usage), tokens


def _no_vector(why: str) -> BadOutcome:
    return BadOutcome(f"the model answered with something else than a vector: {why}")
