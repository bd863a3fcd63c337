# SPDX-License-Identifier: Apache-2.0
"""Models that clients of OpenAI's protocol ask."""

import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

import forebay
from forebay.openai import (
    ChatRequest,
    CompletionRequest,
    Embedding,
    EmbeddingRequest,
    FunctionCall,
    Logprob,
    RerankRequest,
    Score,
    SpeechRequest,
    TextPart,
    TimedText,
    Tool,
    ToolCall,
    ToolChoice,
    Transcript,
    TranscriptionRequest,
)


class Talk(ChatRequest, frozen=True):
    """A request with a parameter of its own."""

    top_k: int = 40


class Likely(CompletionRequest, frozen=True):
    """A completion whose tokens may be told how likely they were."""

    logprobs: int | None = None


class Calling(ChatRequest, frozen=True):
    """What a model takes that calls tools."""

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False


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
    def complete(self, batch: list[Likely]) -> list[TextPart]:
        return [self.completed(one) for one in batch]

    def completed(self, one: Likely) -> TextPart:
        words = [f"{one.prompt},", " and", " so", " on"]
        likely = [Logprob(word, -0.5, top=[Logprob("!", None)]) for word in words] if one.logprobs else None
        return TextPart("".join(words), tokens=4, prompt_tokens=len(one.prompt), logprobs=likely)


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


class Agent(forebay.Model):
    """Has each tool called with a town, and says what it was told."""

    max_batch_size = 1

    def predict(self, batch: list[Calling]) -> Iterator[list[str | TextPart]]:
        (request,) = batch
        last = request.messages[-1]
        if request.logprobs:
            for word in last.text.split(" "):
                yield [TextPart(f"{word} ", logprobs=[Logprob(f"{word} ", -0.25, top=[Logprob("or", -2.0)])])]
            return
        if last.role == "tool":
            asked = request.messages[-2].tool_calls or []
            yield [f"{asked[0].function.name} says {last.text} to {last.tool_call_id}"]
            return
        if request.tool_choice == "none":
            yield ["no"]
            return
        tools = [one.function.name for one in request.tools][: None if request.parallel_tool_calls else 1]
        for number, name in enumerate(tools):
            yield [TextPart(tool_calls=[ToolCall(function=FunctionCall(name), id="first" if not number else "")])]
            for piece in ('{"town": ', '"Oslo"}'):
                yield [TextPart(tool_calls=[ToolCall(function=FunctionCall(arguments=piece))])]


class Count:
    """Where a stream of `Paced` is."""

    def __init__(self, request: ChatRequest):
        self.path = Path(request.messages[-1].text)
        self.number = 0


class Paced(forebay.Model):
    """Counts for all at once, until each has its file, and notes who was finished."""

    max_batch_size = 64

    def start(self, sample: ChatRequest) -> Count:
        return Count(sample)

    def step(self, states: list[Count]) -> list[str | forebay.Last[str]]:
        time.sleep(0.001)
        for state in states:
            state.number += 1
        is_over = [state.path.exists() or state.number > 100_000 for state in states]
        return [
            forebay.Last("end") if over else f"{state.number} " for state, over in zip(states, is_over, strict=True)
        ]

    def finish(self, state: Count) -> None:
        if state.path.is_absolute():  # people who try this model say other things
            with state.path.with_suffix(".finished").open("a") as file:
                file.write("x")


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


class Ranks(forebay.Model):
    """How many words of a query are in a document."""

    max_batch_size = 8

    def predict(self, batch: list[RerankRequest]) -> list[Score]:
        words = [(set(one.query.split()), set(one.document.split())) for one in batch]
        return [Score(len(query & document) / len(query), len(query) + len(document)) for query, document in words]


class Spoken(SpeechRequest, frozen=True, kw_only=True):
    """What a model takes that has its own formats."""

    response_format: Literal["wav", "pcm"] = "wav"


class Speaker(forebay.Model):
    """Says a text as audio, which is its letters, a word a part."""

    max_batch_size = 1

    def predict(self, batch: list[Spoken]) -> Iterator[list[bytes]]:
        (request,) = batch
        if not request.input:
            return
        if request.input.startswith("hold "):
            for (part,) in hold(Path(request.input[5:])):
                yield [str(part).encode()]
            return
        if request.response_format == "wav":
            yield [b"RIFF"]
        for word in request.input.split(" "):
            if word == "fail":
                raise RuntimeError("no such word")
            yield [f"{word} ".encode() * round(request.speed)]


class Jingle(forebay.Model):
    """Says a text at once."""

    def predict(self, batch: list[SpeechRequest]) -> list[bytes]:
        return [f"{one.voice}: {one.input}".encode() for one in batch]


class Listener(forebay.Model):
    """Says how long a recording is, and what was asked with it."""

    max_batch_size = 1

    def predict(self, batch: list[TranscriptionRequest]) -> Iterator[list[str | Transcript | TextPart | None]]:
        (request,) = batch
        try:
            with request.file.open() as file, wave.open(file) as recording:
                seconds = recording.getnframes() / recording.getframerate()
        except (wave.Error, EOFError) as error:
            raise forebay.InvalidRequest(f"the file is not a WAV: {error}") from None
        prompt = request.prompt or ""
        if prompt.startswith("hold "):
            yield from hold(Path(prompt[5:]))
            return
        yield ["It takes"]
        if prompt == "fail":
            raise RuntimeError("not heard")
        if prompt == "text":
            yield [" a while"]
            return
        told = f" {seconds} seconds"
        kinds = request.timestamp_granularities
        segments = [TimedText(0.0, seconds / 2, "It takes"), TimedText(seconds / 2, seconds, told)]
        words = [TimedText(0.0, seconds, word) for word in told.split()] if "word" in kinds else []
        yield [Transcript(told, language=request.language, duration=seconds, segments=segments, words=words)]
