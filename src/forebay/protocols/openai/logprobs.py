# SPDX-License-Identifier: Apache-2.0
"""How likely the tokens of a choice were: told with the text that they are part of, and not of what was cut away."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from forebay.openai import Logprob

IMPOSSIBLE: Final = -9999.0
"""What clients are told in place of minus infinity, which JSON has not."""


class Logprobs:
    """The log probabilities of a choice, in order, with the place of each in its text."""

    def __init__(self, held: int) -> None:
        """Begin behind `held` characters that were taken and not told yet."""
        self._taken = held
        self._told = 0
        self._waiting: deque[tuple[int, Logprob]] = deque()

    def take(self, text: str, found: Sequence[Logprob]) -> None:
        """Add a piece of the text with its tokens."""
        at, end = self._taken, self._taken + len(text)
        for one in found:
            self._waiting.append((min(at, end), one))
            at += len(one.token)
        self._taken = end

    def told(self, text: str, *, is_last: bool = False) -> list[tuple[int, Logprob]]:
        """Return those that belong to the next piece of text that is handed on."""
        self._told += len(text)
        found: list[tuple[int, Logprob]] = []
        while self._waiting and (is_last or self._waiting[0][0] < self._told):
            found.append(self._waiting.popleft())
        return found


def of_chat(found: Sequence[tuple[int, Logprob]]) -> dict[str, Any] | None:
    """Return them as a choice of a chat has them."""
    if not found:
        return None
    told = [{**_of_chat(one), "top_logprobs": [_of_chat(each) for each in one.top or ()]} for _, one in found]
    return {"content": told, "refusal": None}


def of_completion(found: Sequence[tuple[int, Logprob]]) -> dict[str, Any] | None:
    """Return them as a choice of a completion has them."""
    if not found:
        return None
    return {
        "tokens": [one.token for _, one in found],
        "token_logprobs": [_number(one) for _, one in found],
        "top_logprobs": [{each.token: _number(each) for each in one.top or ()} for _, one in found],
        "text_offset": [at for at, _ in found],
    }


def _of_chat(one: Logprob) -> dict[str, Any]:
    written = list(one.token.encode(errors="replace")) if one.bytes is None else one.bytes
    return {"token": one.token, "logprob": _number(one), "bytes": written}


def _number(one: Logprob) -> float:
    return IMPOSSIBLE if one.logprob is None else one.logprob
