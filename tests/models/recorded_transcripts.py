# SPDX-License-Identifier: Apache-2.0
"""Models that hear what those heard whose answers were recorded; a recording is a word that says which."""

from collections.abc import Iterator

import forebay
from forebay.openai import TextPart, TimedText, Transcript, TranscriptionRequest

WILD = (
    "Imagine the wildest idea that you've ever had, and you're curious about how it might scale to something that's a "
    "100, a 1,000 times bigger. This is a place where you can get to do that."
)
BEACH = (
    "The beach was a popular spot on a hot summer day. People were swimming in the ocean, building sandcastles, and "
    "playing beach volleyball."
)
WORDS = [TimedText(0.0, 0.23999999463558197, "The"), TimedText(7.400000095367432, 7.900000095367432, "volleyball")]
SEGMENT = TimedText(0.0, 3.319999933242798, " The beach was a popular spot on a hot summer day.")
HEARD = {
    b"audio": Transcript("The transcribed text.", duration=0.5),
    b"silence": Transcript(),
    b"arrow": Transcript("R&D", segments=[TimedText(0.0, 1.0, " R&D <3 a --> b ")]),
    b"lamb": Transcript(
        "Mary had",
        segments=[TimedText(0.0, 11.54, " Mary had a little lamb "), TimedText(11.54, 17.66, "its fleece was white")],
    ),
    b"beach, words": Transcript(BEACH, language="english", duration=8.470000267028809, words=WORDS),
    b"beach, segments": Transcript(BEACH, language="english", duration=8.470000267028809, segments=[SEGMENT]),
}


class Wild(forebay.Model):
    """Answers with a whole text."""

    name = "gpt-4o-transcribe"

    def predict(self, batch: list[TranscriptionRequest]) -> list[TextPart]:
        return [TextPart(WILD, tokens=45, prompt_tokens=14) for _ in batch]


class Skies(forebay.Model):
    """Streams a text."""

    name = "gpt-4o-mini-transcribe"
    max_batch_size = 1

    def predict(self, batch: list[TranscriptionRequest]) -> Iterator[list[TextPart]]:
        del batch
        yield [TextPart("I", prompt_tokens=14)]
        yield [TextPart(" see", tokens=44)]


class Whisper(forebay.Model):
    """Tells times."""

    name = "whisper-1"

    def predict(self, batch: list[TranscriptionRequest]) -> list[Transcript]:
        return [HEARD[one.file.read()] for one in batch]


class Vllm(Whisper):
    """The same under another name."""

    name = "whisper-large-v3-turbo"
