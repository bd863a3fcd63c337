# SPDX-License-Identifier: Apache-2.0
"""The answer to a chat as blocks that follow each other: texts and calls of tools, whole or as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from forebay.protocols.openai.request_reading import Asked
from forebay.protocols.openai.texts import Choice
from forebay.types.call import Media

_encode: Final = msgspec.json.Encoder().encode


class Block(msgspec.Struct):
    """A text, or the call of a tool.

    Attributes:
        call: What the call is named; empty of a text.
        tool: What is called.
    """

    call: str = ""
    tool: str = ""
    pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)


class BlockAnswer(ABC):
    """The answer to one request, as `Texts` is one; there is one choice."""

    def __init__(self, asked: Asked, id: str, created: int, body: bytes) -> None:
        self.asked, self.id, self.created, self.body = asked, id, created, body
        self.blocks: list[Block] = []
        self._is_begun = False

    def choice(self) -> Choice:
        """Begin the choice."""
        return Choice(self.asked.stops, self.asked.limit, f"call_{self.id}")

    def event(self, index: int, choice: Choice, text: str) -> bytes:
        """Write a piece of the choice, with what is new beside its text."""
        del index
        return b"".join(self._events(choice, text))

    def last_event(self, index: int, choice: Choice, text: str) -> bytes:
        """Write what remained of the choice."""
        written = self.event(index, choice, text)
        return written if self.blocks else written + b"".join(self._next(Block()))

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Write what comes after the choice."""
        return b"".join([self._block_closed(len(self.blocks) - 1, self.blocks[-1]), *self._closed(choices[0])])

    def whole(self, choices: Sequence[Choice]) -> bytes | Media:
        """Write the answer as one body."""
        (choice,) = choices
        text = "".join(choice.texts)
        calls = [Block(one["id"], one["function"]["name"], [one["function"]["arguments"]]) for one in choice.calls]
        self.blocks = [Block(pieces=[text]), *calls] if text or not calls else calls
        return _encode(self._answer(choice))

    def tokens(self, choices: Sequence[Choice]) -> tuple[int, int]:
        """Count tokens of the prompt and of the answer so far."""
        return choices[0].prompt_tokens, choices[0].tokens

    def _events(self, choice: Choice, text: str) -> Iterator[bytes]:
        if not self._is_begun:
            self._is_begun = True
            yield from self._opened(choice)
        if text:
            if not self.blocks or self.blocks[-1].call:
                yield from self._next(Block())
            yield self._piece(text)
        for news in choice.news:
            function = news["function"]
            if "id" in news:
                yield from self._next(Block(news["id"], function["name"]))
            if function["arguments"]:
                yield self._piece(function["arguments"])
        choice.news, choice.logprobs = [], []

    def _next(self, block: Block) -> Iterator[bytes]:
        if self.blocks:
            yield self._block_closed(len(self.blocks) - 1, self.blocks[-1])
        self.blocks.append(block)
        yield self._block_opened(len(self.blocks) - 1, block)

    def _piece(self, piece: str) -> bytes:
        self.blocks[-1].pieces.append(piece)
        return self._block_piece(len(self.blocks) - 1, self.blocks[-1], piece)

    @abstractmethod
    def _answer(self, choice: Choice) -> Mapping[str, Any]:
        """Return the answer, of which all blocks are there."""

    def _opened(self, choice: Choice) -> Iterator[bytes]:
        """Write what comes before the first block."""
        return iter(())

    def _block_opened(self, number: int, block: Block) -> bytes:
        """Write that a block begins."""
        return b""

    @abstractmethod
    def _block_piece(self, number: int, block: Block, piece: str) -> bytes:
        """Write a piece of a block."""

    def _block_closed(self, number: int, block: Block) -> bytes:
        """Write that a block has ended."""
        return b""

    @abstractmethod
    def _closed(self, choice: Choice) -> Iterator[bytes]:
        """Write what comes after the last block."""


def written(kind: str, told: Mapping[str, Any]) -> bytes:
    """Write an event that says what it is twice, as its name and in its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **told}))
