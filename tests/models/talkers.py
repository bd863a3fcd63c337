# SPDX-License-Identifier: Apache-2.0
"""Models that clients of OpenAI's protocol ask."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import forebay
from forebay.openai import ChatRequest, CompletionRequest, Embedding, EmbeddingRequest, TextPart


class Talk(ChatRequest, frozen=True):
    """A request with a parameter of its own."""

    top_k: int = 40


class Words(forebay.Model):
    """Says the words of the last message, one a part."""

    max_batch_size = 1
    max_queue = 4

    def predict(self, batch: list[Talk], context: list[forebay.Context]) -> Iterator[list[str | TextPart | None]]:
        (request,) = batch
        text = request.messages[-1].text
        if text == "params":
            said = {
                **msgspec.to_builtins(request),
                "stop": "".join(request.stops).encode().hex(),
                "limit": request.limit,
            }
            yield [TextPart(msgspec.json.encode(said).decode(), tokens=0)]
            return
        if text == "header":
            yield [context[0].headers["x-tag"]]
            return
        if text.startswith("hold "):
            yield from hold(Path(text[5:]))
            return
        words = text.split(" ")
        for number, word in enumerate(words):
            if word == "fail":
                raise RuntimeError("no such word")
            if number == 0:
                yield [TextPart(word, prompt_tokens=10)]
            else:
                yield [" " + word]

    @forebay.endpoint("/complete")
    def complete(self, batch: list[CompletionRequest]) -> list[TextPart]:
        return [TextPart(f"{one.prompt}, and so on", tokens=4, prompt_tokens=len(one.prompt)) for one in batch]


def hold(until: Path) -> Iterator[list[str | TextPart | None]]:
    """Says numbers until there is a file, and notes when it is ended."""
    try:
        number = 0
        while not until.exists():
            yield [f"{number} "]
            number += 1
            time.sleep(0.005)
    finally:
        until.with_suffix(".ended").touch()


class Whole(forebay.Model):
    """Says all at once how many share its batch."""

    def predict(self, batch: list[ChatRequest]) -> list[str]:
        return [f"{len(batch)} talk STOP here"] * len(batch)


class Vectors(forebay.Model):
    """How long a text is, and how many share its batch; a text that begins with `until ` waits for a file."""

    max_batch_size = 8

    def predict(self, batch: list[EmbeddingRequest]) -> list[Embedding]:
        for one in batch:
            while isinstance(one.input, str) and one.input.startswith("until ") and not Path(one.input[6:]).exists():
                time.sleep(0.005)
        return [Embedding([len(one.input), len(batch), 0.1], len(one.input)) for one in batch]
