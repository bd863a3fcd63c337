# SPDX-License-Identifier: Apache-2.0
"""Audio that models say, and what they hear in audio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import asdict

from forebay.openai import TimedText
from forebay.protocols.native import event
from forebay.protocols.openai.answer_blocks import Block, BlockAnswer
from forebay.protocols.openai.request_reading import Asked, invalid
from forebay.protocols.openai.texts import Choice
from forebay.types.call import Media
from forebay.types.first_use import known

SPEECH: Final = "audio/speech"
TRANSCRIPTS: Final = "audio/transcriptions"
_BEGINS: Final = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg"}
_parts: Final = msgspec.msgpack.Decoder(known(list[tuple[str, memoryview, str | None, str, int]]))
"""Reads forms as `FormPart` writes them; files are not copied."""


def form_body(form: bytes) -> bytes:
    """Return what the server itself must know of a form, as the body of a chat says it; the worker checks the rest."""
    fields = [(name, content) for name, content, filename, *_ in _parts.decode(form) if filename is None]
    read = {"model", "stream", "response_format"}
    said = {name: str(content, "utf-8", "replace") for name, content in fields if name in read}
    is_stream = said.get("stream", "").lower() in {"true", "1", "yes", "on"}
    return msgspec.json.encode({**said, "stream": is_stream})


def audio_of(asked: Asked, audio: bytes) -> Media:
    """Return audio with its type: the one that was asked for; where none was, the model may have another than mp3."""
    kind = _format(asked) or _BEGINS.get(audio[:4], "mp3")
    return Media(audio, "audio/mpeg" if kind == "mp3" else f"audio/{kind if kind.encode().isalnum() else '*'}")


def _format(asked: Asked) -> str:
    return bytes(asked.response_format)[:40].decode("latin-1").strip('"').replace("null", "")


class TranscriptAnswer(BlockAnswer):
    """A transcript as clients of `/v1/audio/transcriptions` read it."""

    def whole(self, choices: Sequence[Choice]) -> bytes | Media:
        """Write the answer as one body."""
        kind, (choice,) = _format(self.asked), choices
        if kind not in {"text", "srt", "vtt"}:
            return super().whole(choices)
        text = "".join(choice.texts)
        if kind != "text":
            segments = [one for part in choice.heard for one in part.segments]
            if text and not segments:
                raise invalid("response_format", f"is '{kind}', and this model tells no segments; ask for 'text'")
            text = _subtitles(segments, kind)
        return Media(text.encode(), "text/plain; charset=utf-8")

    def _answer(self, choice: Choice) -> dict[str, Any]:
        heard, text = choice.heard, self.blocks[-1].text
        duration = next((one.duration for one in heard if one.duration is not None), None)
        usage: dict[str, Any] = {"type": "duration", "seconds": math.ceil(duration or 0)}
        if duration is None:
            counts = {"input_tokens": choice.prompt_tokens, "output_tokens": choice.tokens}
            usage = {"type": "tokens", **counts, "total_tokens": sum(counts.values())}
        if _format(self.asked) != "verbose_json":
            return {"text": text, "usage": usage}
        language = next((one.language for one in heard if one.language), None)
        told = {"task": "transcribe", "language": language, "duration": duration, "text": text, "usage": usage}
        segments = [{"id": at, **asdict(one)} for at, one in enumerate(one for part in heard for one in part.segments)]
        words = [{"word": one.text, "start": one.start, "end": one.end} for part in heard for one in part.words]
        return told | {name: found for name, found in (("segments", segments), ("words", words)) if found}

    def _block_piece(self, number: int, block: Block, piece: str) -> bytes:
        return event(msgspec.json.encode({"type": "transcript.text.delta", "delta": piece}))

    def _closed(self, choice: Choice) -> Iterator[bytes]:
        yield event(msgspec.json.encode({"type": "transcript.text.done", **self._answer(choice)}))


def _subtitles(segments: Sequence[TimedText], kind: str) -> str:
    cues: list[str] = [] if kind == "srt" else ["WEBVTT\n"]
    for number, one in enumerate(segments, 1):
        times = " --> ".join(_clock(at, "," if kind == "srt" else ".") for at in (one.start, one.end))
        text = " ".join(one.text.split()).replace("-->", "->")  # no empty line and no arrow
        safe = text.replace("&", "&amp;").replace("<", "&lt;")
        cues.append(f"{number}\n{times}\n{text}\n" if kind == "srt" else f"{times}\n{safe}\n")
    return "\n".join(cues)


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"
