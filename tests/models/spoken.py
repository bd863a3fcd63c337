# SPDX-License-Identifier: Apache-2.0
"""Models in OpenAI's protocol whose answers follow from what they are asked, so that a fuzzer knows them."""

import forebay
from forebay.openai import ChatRequest, CompletionRequest, Embedding, EmbeddingRequest, Logprob, RerankRequest, TextPart


def tokens_of(text: str, seed: int) -> list[str]:
    """The text in pieces of one to three letters."""
    found = []
    while text:
        size = (seed + len(text)) % 3 + 1
        found.append(text[:size])
        text = text[size:]
    return found


class Told(ChatRequest, frozen=True):
    """Says whether it wants to know how likely tokens are."""

    logprobs: bool = False


class Saying:
    """Where an answer is."""

    def __init__(self, request: Told) -> None:
        self.text = request.messages[-1].text
        self.tokens = tokens_of(self.text, request.seed or 0)
        self.is_told = request.logprobs
        self.at = 0

    def part(self) -> str | TextPart | forebay.Last:
        if self.at == len(self.tokens):
            return forebay.Last(TextPart("", 0, len(self.text)))
        token = self.tokens[self.at]
        self.at += 1
        if self.is_told:
            return TextPart(token, logprobs=[Logprob(token, -float(self.at))])
        return token if self.at % 2 else TextPart(token)


class Spoken(forebay.Model):
    """Says the last message again."""

    max_batch_size = 8
    max_queue = 1000

    def start(self, sample: Told) -> Saying:
        return Saying(sample)

    def step(self, states: list[Saying]) -> list[str | TextPart | forebay.Last[TextPart]]:
        return [state.part() for state in states]


class Written(forebay.Model):
    """Says a prompt again, at once."""

    max_queue = 1000

    def predict(self, batch: list[CompletionRequest]) -> list[TextPart]:
        return [TextPart(str(one.prompt), tokens=2, prompt_tokens=len(one.prompt)) for one in batch]


class Measured(forebay.Model):
    """The length of a text, and the sum of its letters."""

    max_queue = 5000

    def predict(self, batch: list[EmbeddingRequest]) -> list[Embedding]:
        return [
            Embedding(
                [len(one.input), sum(map(ord, one.input)) if isinstance(one.input, str) else sum(one.input)],
                len(one.input),
            )
            for one in batch
        ]


class Ranked(forebay.Model):
    """The length of a document."""

    max_queue = 5000

    def predict(self, batch: list[RerankRequest]) -> list[float]:
        return [float(len(one.document)) for one in batch]
