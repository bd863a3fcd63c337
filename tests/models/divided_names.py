# SPDX-License-Identifier: Apache-2.0
"""Models whose names have a slash."""

import forebay
from forebay.openai import ChatRequest


class Twice(forebay.Model):
    name = "org/twice"

    def predict(self, samples: list[int]) -> list[int]:
        return [2 * one for one in samples]

    @forebay.endpoint("/half")
    def half(self, samples: list[int]) -> list[int]:
        return [one // 2 for one in samples]


class Third(forebay.Model):
    """Its name looks like the path of a version of another model."""

    name = "org/versions"

    def predict(self, samples: list[int]) -> list[int]:
        return [one // 3 for one in samples]


class Talk(forebay.Model):
    name = "org/talk"

    def predict(self, batch: list[ChatRequest]) -> list[str]:
        return [one.messages[-1].text.upper() for one in batch]


@forebay.node
def more(number: int) -> int:
    return number + 1


@forebay.compose(name="org/both")
def both(number: int) -> int:
    return more(more(number))
