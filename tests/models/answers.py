# SPDX-License-Identifier: Apache-2.0
"""Models that decide on status and headers of their answers, or try to."""

from collections.abc import Iterator
from typing import Any

import msgspec

from forebay import Answer, Last, Media, Model, endpoint
from forebay.openai import ChatRequest


class Asked(msgspec.Struct):
    """What an answer is to be like."""

    body: Any = None
    status: Any = 200
    headers: dict[str, Any] = {}
    media: str = ""
    parts: int = 1


def made(asked: Asked) -> Any:
    """An answer of this kind; a plain result where nothing is asked."""
    if asked.body == "plain":
        return {"it": "plain"}
    body = Media(b"<p>", asked.media) if asked.media else asked.body
    if asked.body == "inside":
        return {"it": Answer(1)}
    if asked.body == "nested":
        return Answer(Answer(1))
    return Answer(body, asked.status, asked.headers)


class Teller(Model):
    """Declares what an answer of 2xx holds."""

    def predict(self, batch: list[Asked]) -> list[dict[str, Any] | Media | Answer]:
        return [made(asked) for asked in batch]

    @endpoint("/got", methods=["GET"])
    def got(self, batch: list[Asked]) -> list[Answer]:
        return [Answer("got", int(asked.status), {"location": "/models"}) for asked in batch]


class Rows(Model):
    """Takes arrays of samples, so that no sample has an answer of its own."""

    batchable = True

    def predict(self, batch: list[Asked]) -> list[Any]:
        return [made(asked) for asked in batch]


class Blob(Model):
    """Answers with bytes."""

    def predict(self, batch: list[Asked]) -> list[bytes | Answer]:
        return [Answer(b"\0raw" if asked.body is None else asked.body, asked.status) for asked in batch]


class Numbers(Model):
    """Is asked for numbers, over the protocols of tensors as well."""

    def predict(self, batch: list[int]) -> list[int | Answer]:
        return [Answer(one, 200, {"x-n": str(one)}) if one < 100 else Answer(f"no {one}", one) for one in batch]


class Film(Model):
    """Streams; the first part has the head, and a later one may try."""

    def predict(self, batch: list[Asked]) -> Iterator[list[Any]]:
        yield [made(asked) for asked in batch]
        for number in range(2, batch[0].parts + 1):
            yield [made(asked) if number == 3 else number for asked in batch]


class Steps(Model):
    """Streams in steps that are shared."""

    def start(self, sample: Asked) -> list[Any]:
        return [sample, 0]

    def step(self, states: list[list[Any]]) -> list[Any]:
        given: list[Any] = []
        for state in states:
            state[1] += 1
            part = made(state[0]) if state[1] == 1 else state[1]
            given.append(Last(part) if state[1] == state[0].parts else part)
        return given


class Talker(Model):
    """Is asked by clients of OpenAI's."""

    def predict(self, batch: list[ChatRequest]) -> list[str | Answer]:
        texts = [str(one.messages[-1].content) for one in batch]
        return [
            Answer(text, headers={"x-a": "b"}) if int(text) < 100 else Answer(f"no {text}", int(text)) for text in texts
        ]
