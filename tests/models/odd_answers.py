# SPDX-License-Identifier: Apache-2.0
"""Models whose answers have heads and bodies that no answer can have, each by its number."""

from __future__ import annotations

import http
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from forebay import Answer, Media, Model
from forebay.openai import ChatRequest


class Failing:
    """Fails however it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("shown")


class FailingItems(UserDict[str, str]):
    """Headers that cannot be gone through."""

    def items(self) -> Any:
        raise RuntimeError("items")


class Triples(UserDict[str, str]):
    """Headers of three."""

    def items(self) -> Any:
        return [("a", "b", "c"), "ab", 5]


def deep(levels: int) -> Any:
    """Lists in lists."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


ROUND: list[Any] = []
ROUND.append(ROUND)
STATUSES = (
    *(200, 201, 299, 300, 404, 418, 503, 599, 600, 0, -1, 100, 204, 205, 304, 10**30, True, None, "200", 200.0),
    *(float("nan"), [], http.HTTPStatus.NOT_FOUND, np.int64(404), np.array([404, 404]), Failing(), object),
)
HEADERS = (
    *({}, None, [], [("a", "b")], "ab", 5, {"x-a": "b"}, {"": "a"}, {"a": ""}, {"x": "a\r\nevil: b"}),
    *({"x\r\nevil": "a"}, {f"x{number}": "" for number in range(40)}, {"x": "a" * 10_000}),
    *({"x": "a\0"}, {b"x": "a"}, {"x": b"a"}, {5: "a"}, {"x": None}, {"x": ["a"]}, {"x": "é"}, {"x": "\ud800"}),
    *({"Content-Length": "0"}, {"Transfer-Encoding": "chunked"}, {"x": np.str_("a")}, {np.str_("x"): "a"}),
    *({"x": " a"}, {"x y": "a"}, {"x:": "a"}, {"é": "a"}),
    *(FailingItems(), Triples(), Failing(), {"set-cookie": "a=b"}, {"connection": "close"}, {"Content-Type": "a/b"}),
)  # fmt: skip
BODIES = (
    *(None, 1, "a", float("nan"), {"a": float("inf")}, "\ud800", b"\xff", bytearray(b"a"), object(), Failing(), object),
    *(
        Media(b"<p>", "text/html"),
        Media(b"", "a/b"),
        Media(bytearray(b"a"), "b/c"),
        Media(np.bytes_(b"a"), np.str_("a/b")),
        np.bytes_(b"a"),
        np.str_("a"),
        Media(b"\xff" * 100_000, "a/b"),
    ),
    *(Answer(1), [Answer(1)], {"a": Answer(1)}, {1: 2}, {(1, 2): 3}, {"a": object()}, deep(5000), ROUND, iter([1])),
    *(ValueError("a"), 10**30, 1j, np.float64(1), np.array([1, 2]), {1, 2}, "a" * 100_000, [0] * 100_000, Ellipsis),
)
ANSWERS: list[Any] = [
    *(Answer(1, status) for status in STATUSES),  # type: ignore[arg-type]
    *(Answer(1, status, headers) for status in (200, 404) for headers in HEADERS),  # type: ignore[arg-type]
    *(Answer(body, status) for status in (200, 303, 404) for body in BODIES),
    *BODIES,
]
PLAIN = len(ANSWERS)
ANSWERS.append(7)


class Anything(Model):
    """Declares nothing of its answers."""

    def predict(self, batch: list[int]) -> list[Any]:
        return [ANSWERS[one] for one in batch]


class Declared(Model):
    """Declares what they hold."""

    def predict(self, batch: list[int]) -> list[int | Media | Answer]:
        return [ANSWERS[one] for one in batch]


class Raw(Model):
    """Answers with bytes."""

    def predict(self, batch: list[int]) -> list[bytes | Answer]:
        return [b"7" if one == PLAIN else ANSWERS[one] for one in batch]


class Film(Model):
    """Answers in parts, of which the first is odd."""

    def predict(self, batch: list[int]) -> Iterator[list[Any]]:
        yield [ANSWERS[one] for one in batch]
        yield [7 for _ in batch]


class Talker(Model):
    """Is asked by clients of OpenAI's protocol and Anthropic's."""

    def predict(self, batch: list[ChatRequest]) -> list[str | Answer]:
        numbers = [int(one.messages[-1].text) for one in batch]
        return ["7" if number == PLAIN else ANSWERS[number] for number in numbers]
